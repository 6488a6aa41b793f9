"""RMSNorm of q and k that waits for the rotation, which then computes both in one pass.

Attention normalises the heads of q and k and hands them to a function that rotates. Norms that are
known here return a tensor without values. A replaced rotation reads what the norm was given; all
else that touches the tensor, but a transposition, finds it normalised by the module as before, with
the same gradients. So what is not foreseen costs the fusion, never the result.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from . import _composed
from .torch import Norm

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Known:
    """What a module computes.

    Attributes:
        kind: its class, which may change (parametrisations).
        eps_name: its attribute that is ``norm.eps``, which may change as well.
        calls, rotated: how often it waited, and how often the rotation took it.
    """

    def __init__(self, kind: type, eps_name: str, norm: Norm) -> None:
        self.kind, self.eps_name, self.norm = kind, eps_name, norm
        self.calls = self.rotated = 0


_known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()
_originals: dict[type, tuple[Callable, Callable]] = {}


def recognised(module: nn.Module) -> Known | None:
    """What a norm computes, found by trying; None if it is none that the rotation computes too."""
    kind = type(module)
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or list(module.buffers()) or _is_watched(module):
        return None
    # A forward of its own, or a class that everything shares.
    if "forward" in vars(module) or kind.__module__.split(".")[0] == "torch":
        return None
    floats = [name for name, value in vars(module).items() if type(value) is float]
    eps_names = [name for name in floats if "eps" in name]
    if len(eps_names) != 1 or module.weight.dim() != 1:
        return None
    eps = getattr(module, eps_names[0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, len(module.weight), generator=generator)
    weight = torch.randn(len(module.weight), generator=generator)
    # Also where eps decides.
    x *= torch.tensor([[eps**0.5], [1.0], [100.0]])
    for unit_offset in (False, True):
        norm = Norm(eps, unit_offset)
        if all(_computes(module, norm, x.to(kind), weight.to(kind)) for kind in _DTYPES):
            return Known(kind, eps_names[0], norm)
    return None


def _computes(module: nn.Module, norm: Norm, x: Tensor, weight: Tensor) -> bool:
    expected = _composed._normed(x.float(), norm, weight.float())
    try:
        with torch.no_grad():
            found = functional_call(module, {"weight": weight}, (x,))
    except Exception:  # It is of another kind, and says so in its own way.
        return False
    if not isinstance(found, Tensor) or found.dtype != x.dtype or found.shape != x.shape:
        return False
    # The module may round in between.
    bound = 1e-5 if x.dtype == torch.float32 else 4 * torch.finfo(x.dtype).eps
    return bool(torch.allclose(found.float(), expected, rtol=bound, atol=bound * norm.eps))


def wait(module: nn.Module, known: Known) -> None:
    """From now on, the module leaves its work to the rotation."""
    kind = known.kind
    if kind not in _originals:
        original = kind.forward
        replaced = _waiting_forward(original)
        _originals[kind] = original, replaced
        kind.forward = replaced
    _known[module] = known


def forget(module: nn.Module) -> None:
    """The module works as before :func:`wait`; its class too, with the last one of it."""
    known = _known.pop(module, None)
    if known is None or any(other.kind is known.kind for other in _known.values()):
        return
    original, replaced = _originals.pop(known.kind)
    # Another library may have replaced ours.
    if known.kind.forward is replaced:
        known.kind.forward = original


def _is_watched(module: nn.Module) -> bool:
    hooks = any(getattr(module, name) for name in _HOOKS)
    return hooks or torch.nn.modules.module._has_any_global_hook()


def _waiting_forward(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Compilers join the norm and what surrounds it by themselves.
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
            return original(self, *args, **kwargs)
        known = _known.get(self)
        if known is None or not _can_wait(self, known, args[0]):
            return original(self, *args)
        known.calls += 1
        return _waiting(_Call(self, known, original, args[0]), ())

    return forward


def _can_wait(module: nn.Module, known: Known, x: Any) -> bool:
    """True where the values of this call can be made later as well as now."""
    weight, eps = module.weight, getattr(module, known.eps_name, None)
    # Fake, distributed or quantised ones.
    if type(x) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return False
    if x.dtype not in _DTYPES or weight.dtype != x.dtype or x.device != weight.device:
        return False
    if x.device.type not in ("cpu", "npu") or x.shape[-1:] != weight.shape:
        return False
    if type(module) is not known.kind or type(eps) is not float or eps != known.norm.eps:
        return False
    # Those of inference do not tell whether they were changed.
    if torch.is_inference_mode_enabled() or x.is_inference() or weight.is_inference():
        return False
    return not (_is_watched(module) or _composed.is_needed(x, weight))


class _Call:
    """A norm's call, and its result once something but the rotation has asked for that."""

    def __init__(self, module: nn.Module, known: Known, original: Callable, x: Tensor) -> None:
        self.module, self.known, self.original, self.x = module, known, original, x
        self.weight = module.weight
        self.versions = x._version, self.weight._version
        self.grad_enabled = torch.is_grad_enabled()
        self.autocast = self._autocast()
        self.result: Tensor | None = None
        self.rotated = False

    def _autocast(self) -> tuple[str, torch.dtype, bool]:
        device = self.x.device.type
        return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def check(self) -> None:
        """Raises if the norm's input or weight are no longer what they were when it was called."""
        now = self.x._version, self.weight._version
        if now != self.versions or self.module.weight is not self.weight:
            raise RuntimeError(
                f"{self.known.kind.__name__}: found its input or weight changed in place before "
                "its result was used, expected them as they were: use patch(model) without "
                "norms=True"
            )

    def made(self, x: Tensor) -> Tensor:
        """The module's own result."""
        self.check()
        device, dtype, enabled = self.autocast
        same = self.autocast == self._autocast()
        with contextlib.nullcontext() if same else torch.autocast(device, dtype, enabled):
            return self.original(self.module, x)

    def value(self) -> Tensor:
        """The result that all but the rotation share, with its gradient."""
        if self.result is None:
            with torch.set_grad_enabled(self.grad_enabled):
                self.result = self.made(self.x)
        return self.result


class _Link(torch.autograd.Function):
    """The norm's gradient behind a tensor that waits.

    Used by what takes the tensor past ``__torch_function__``: functions with a backward of their
    own, and extensions. Keeps nothing by ``save_for_backward``, whose hooks would move it to other
    memory.
    """

    @staticmethod
    def forward(ctx, x, weight, call, swaps):
        ctx.call, ctx.swaps = call, swaps
        return _without_values(call, swaps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        call = ctx.call
        for swap in reversed(ctx.swaps):
            dy = dy.transpose(*swap)
        with torch.enable_grad():
            x = call.x.detach().requires_grad_()
            y = call.made(x)
            inputs = [t for t, needed in zip((x, call.weight), ctx.needs_input_grad) if needed]
            found = iter(torch.autograd.grad(y, inputs, dy))
        gradients = [next(found) if needed else None for needed in ctx.needs_input_grad[:2]]
        return *gradients, None, None


def _waiting(call: _Call, swaps: tuple[tuple[int, int], ...]) -> Waiting:
    if call.grad_enabled and (call.x.requires_grad or call.weight.requires_grad):
        return _Link.apply(call.x, call.weight, call, swaps)
    return _without_values(call, swaps)


def _without_values(call: _Call, swaps: tuple[tuple[int, int], ...]) -> Waiting:
    shape = list(call.x.shape)
    for a, b in swaps:
        shape[a], shape[b] = shape[b], shape[a]
    x = call.x
    made = Tensor._make_wrapper_subclass(Waiting, shape, dtype=x.dtype, device=x.device)
    made.call, made.swaps = call, swaps
    return made


def _value(x: Any) -> Any:
    """Of a tensor that waits, what it stands for; else x."""
    if not isinstance(x, Waiting):
        return x
    return _swapped(x.call.value(), x.swaps)


def _bare_value(x: Any) -> Any:
    """The same where autograd sees nothing: :class:`_Link` has the gradient."""
    if not isinstance(x, Waiting):
        return x
    return _swapped(x.call.made(x.call.x.detach()), x.swaps).detach()


def _is_rotated(x: Any) -> bool:
    return isinstance(x, Waiting) and x.call.rotated


def _swapped(x: Tensor, swaps: tuple[tuple[int, int], ...]) -> Tensor:
    for swap in swaps:
        x = x.transpose(*swap)
    return x


_TRANSPOSE = {Tensor.transpose, torch.transpose}
_METADATA = {
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point),
    *(getattr(Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim", "requires_grad")),
}
# They want the gradient of a result that the rotation, once it has run, does not go through.
_WANT_GRADIENT = {
    *(Tensor.register_hook, Tensor.retain_grad, Tensor.grad_fn.__get__),
    torch.autograd.grad,
}


class Waiting(Tensor):
    """The result of a norm, without values yet.

    Attributes:
        call: the norm's call.
        swaps: transpositions since.
    """

    call: _Call
    swaps: tuple[tuple[int, int], ...]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _WANT_GRADIENT and any(map(_is_rotated, tree_leaves((args, kwargs)))):
            raise RuntimeError(
                f"{func.__name__}: found a norm's result that was rotated in one pass with the "
                "norm, expected it before the rotation: call it earlier, or use patch(model) "
                "without norms=True"
            )
        first = args[0] if args else None
        if isinstance(first, Waiting):
            if func in _METADATA and first.call.result is None:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _TRANSPOSE and first._may_be_transposed(*args[1:], **kwargs):
                axes = first.call.x.dim()
                return _waiting(first.call, (*first.swaps, tuple(i % axes for i in args[1:])))
        return func(*tree_map(_value, args), **tree_map(_value, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func}: found the result of a norm that waits for the rotation, expected a "
                "tensor to overwrite: use patch(model) without norms=True"
            )
        return func(*tree_map(_bare_value, args), **tree_map(_bare_value, kwargs or {}))

    def _may_be_transposed(self, *axes: Any, **named: Any) -> bool:
        """True where the norm, of the last axis, commutes; not where gradients begin or end."""
        count, call = self.call.x.dim(), self.call
        if call.result is not None or torch.is_grad_enabled() != call.grad_enabled:
            return False
        if named or len(axes) != 2:
            return False
        return all(type(i) is int and -count <= i < count and i % count != count - 1 for i in axes)


class Normed(NamedTuple):
    """q and k before their norms, and the rest of what ``mrope.torch.rotary`` takes for both."""

    q: Tensor
    k: Tensor
    norm: dict[str, Any]


def taken(q: Tensor, k: Tensor, dtype: torch.dtype) -> Normed | None:
    """What the norms of q and k were given, if the rotation can compute them with its own result.

    dtype is the rotation's.
    """
    if type(q) is not Waiting or type(k) is not Waiting:
        return None
    calls = q.call, k.call
    if any(call.result is not None or call.x.dtype != dtype for call in calls):
        return None
    if any(call.grad_enabled != torch.is_grad_enabled() for call in calls):
        return None
    if q.call.known.norm != k.call.known.norm:
        return None
    for call in calls:
        call.check()
    for call in calls:
        call.rotated = True
        call.known.rotated += 1
    x, y = (_swapped(t.call.x, t.swaps) for t in (q, k))
    weights = {"q_weight": calls[0].weight, "k_weight": calls[1].weight}
    return Normed(x, y, {"norm": calls[0].known.norm, **weights})
