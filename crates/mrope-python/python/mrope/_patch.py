"""Putting the operation into models of transformers."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import _norms, _ops
from ._cache import once_a_step
from .torch import Angles, Norm, angles_from_cos_sin, rotary

__all__ = ["Replaced", "patch", "unpatch"]

# Functions of modelling files that rotate q and k, and the layout that they take them in.
_NAMES = {
    "apply_rotary_pos_emb": "bnsd",
    "apply_rotary_pos_emb_vision": "tnd",
}


class Replaced(NamedTuple):
    """A function that :func:`patch` has found.

    Attributes:
        function: its module and name.
        layers: modules of the model whose file has it.
        pairing: which channels it pairs; None where it is none of those that mrope knows, and was
            left as it is.
        norms: of these layers, those that normalise q and k in the same pass.
    """

    function: str
    layers: int
    pairing: str | None
    norms: int = 0


class _Patch:
    """A replaced function, and the models that it was replaced for."""

    def __init__(self, original: Callable, pairing: str) -> None:
        self.original = original
        self.pairing = pairing
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_patches: dict[tuple[str, str], _Patch] = {}


def patch(model: nn.Module, *, norms: bool = False) -> list[Replaced]:
    """Replaces the rotation of a transformers model, decoder and vision tower, by mrope's.

    Tried with Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V and Llama; works for any model whose file
    rotates by ``apply_rotary_pos_emb(q, k, cos, sin)`` or ``apply_rotary_pos_emb_vision``. Each
    function is first run on small random tensors: one that does not compute what mrope would put
    into its place is left.

    The functions belong to the model's file, so other models of the same file are patched too,
    until :func:`unpatch` was called for each that was patched.

    Args:
        model: it stays as it is but for the functions.
        norms: also fuse RMSNorm of q and k into the rotation, where attention normalises heads
            right before it (Qwen3, Qwen3-VL, Qwen3.5, Gemma 3). Each class of attention is first
            run on random numbers with and without. A call whose norm has hooks or adapters, whose
            weight has another type than q, or whose result is read by anything but the rotation,
            normalises as before; so do compiled models. The second derivative is refused.

    Returns what was found.

    Raises ``ValueError`` if nothing could be replaced.
    """
    report = []
    for (module, name), layers in _rotations(model).items():
        key = (module.__name__, name)
        if key not in _patches:
            original = getattr(module, name)
            known = _recognised(original, _NAMES[name])
            if known is None:
                report.append(Replaced(".".join(key), len(layers), None))
                continue
            _patches[key] = _Patch(original, known[0])
            setattr(module, name, _replacement(original, *known, _NAMES[name]))
        _patches[key].models.add(model)
        fused = _fuse_norms(layers, module, name) if norms else 0
        report.append(Replaced(".".join(key), len(layers), _patches[key].pairing, fused))
    if not any(found.pairing for found in report):
        left = [found.function for found in report] or "no function of that name"
        raise ValueError(
            f"{type(model).__name__}: nothing to replace, expected one of {list(_NAMES)} in the "
            f"files of its modules that pairs channels as mrope does, found {left}"
        )
    return report


def unpatch(model: nn.Module) -> None:
    """Undoes :func:`patch`, where no other patched model uses the same file.

    Raises ``ValueError`` if the model was not patched.
    """
    keys = [key for key, patch in _patches.items() if model in patch.models]
    if not keys:
        name = type(model).__name__
        raise ValueError(f"{name}: found no patch, expected a model given to patch()")
    for module in model.modules():
        _norms.forget(module)
    for key in keys:
        patch = _patches[key]
        patch.models.discard(model)
        if not patch.models:
            setattr(sys.modules[key[0]], key[1], patch.original)
            del _patches[key]


def _rotations(model: nn.Module) -> dict[tuple[ModuleType, str], list[nn.Module]]:
    """Functions that rotate, and the attention layers that have one in their file."""
    found: dict[tuple[ModuleType, str], list[nn.Module]] = {}
    for layer in model.modules():
        # Its file is where it finds the function; the class may be a subclass in another one.
        forward = inspect.unwrap(type(layer).forward)
        module = sys.modules.get(getattr(forward, "__module__", None))
        code = getattr(forward, "__code__", None)
        for name in _NAMES:
            if module is not None and hasattr(module, name) and code and name in code.co_names:
                found.setdefault((module, name), []).append(layer)
    return found


def _fuse_norms(layers: list[nn.Module], module: ModuleType, name: str) -> int:
    """Leaves norms to the rotation in those layers whose class computes the same then."""
    fused = 0
    proven: dict[tuple, bool] = {}
    for layer in layers:
        known = {n: _norms.recognised(child) for n, child in layer.named_children()}
        known = {n: norm for n, norm in known.items() if norm is not None}
        # Of a layer with a forward of its own, its class tells nothing.
        if len(known) != 2 or "forward" in vars(layer):
            continue
        kind = (type(layer), *((n, norm.kind, norm.norm) for n, norm in known.items()))
        if kind not in proven:
            proven[kind] = _is_proven(layer, known, module, name)
        if proven[kind]:
            fused += 1
            for child, norm in known.items():
                _norms.wait(getattr(layer, child), norm)
    return fused


def _is_proven(
    layer: nn.Module, known: dict[str, _norms.Known], module: ModuleType, name: str
) -> bool:
    """True if a small layer of the class computes with waiting norms what it did without mrope.

    Compared are results and all gradients, with all channels rotated and with half of them, where
    the class can do that.
    """
    with torch.random.fork_rng([]), torch.device("cpu"):
        torch.manual_seed(0)
        try:
            small = _small(layer)
            found = {small.get_submodule(child): norm.norm for child, norm in known.items()}
        except Exception:  # A class that is made in another way.
            return False
        return _computes_the_same(small, found, module, name)


def _computes_the_same(
    layer: nn.Module, expected: dict[nn.Module, Norm], module: ModuleType, name: str
) -> bool:
    original, replaced = _patches[module.__name__, name].original, getattr(module, name)
    found = {norm: _norms.recognised(norm) for norm in expected}
    if any(what is None or what.norm != expected[norm] for norm, what in found.items()):
        return False
    tried = 0
    for share in (1, 2):
        try:
            setattr(module, name, original)
            before = _step(layer, share)
        except Exception:  # It is called in another way, or rotates all channels.
            continue
        finally:
            setattr(module, name, replaced)
        try:
            for norm, what in found.items():
                _norms.wait(norm, what)
            after = _step(layer, share)
        except Exception:  # It wants what a waiting norm refuses.
            return False
        finally:
            for norm in found:
                _norms.forget(norm)
        tried += 1
        # Each norm's only call was the rotation's.
        if any((what.calls, what.rotated) != (tried, tried) for what in found.values()):
            return False
        if any(not torch.allclose(a, b, 1e-5, 1e-5) for a, b in zip(before, after, strict=True)):
            return False
    return tried > 0


_SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_dropout": 0.0,
}


def _small(layer: nn.Module) -> nn.Module:
    """A layer of the same class in float32, with random weights, norms' included."""
    config = copy.deepcopy(layer.config)
    for name, value in _SMALL.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config._attn_implementation = "eager"
    small = type(layer)(config, getattr(layer, "layer_idx", 0)).float().train(layer.training)
    for parameter in small.parameters():
        nn.init.normal_(parameter, std=0.5)
    return small


def _step(layer: nn.Module, share: int) -> list[Tensor]:
    """Results of a layer and its gradients; of the channels, one in share is rotated."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 6, _SMALL["hidden_size"], generator=generator).requires_grad_()
    phases = torch.rand(2, 6, _SMALL["head_dim"] // share // 2, generator=generator).repeat(1, 1, 2)
    given = {"position_embeddings": (phases.cos(), phases.sin()), "attention_mask": None}
    with torch.enable_grad():
        y = layer(hidden_states=hidden, **given)[0]
        weights = torch.randn(y.shape, generator=generator)
        parameters = list(layer.parameters())
        return [y.detach(), *torch.autograd.grad((y * weights).sum(), [hidden, *parameters])]


def _recognised(function: Callable, layout: str) -> tuple[str, bool] | None:
    """The pairing that a function computes, and whether it reads half of cos and sin only.

    Found by trying: with values of their own for each channel, no two answers agree.
    """
    parameters = list(inspect.signature(function).parameters.values())
    given, rest = parameters[:4], [p.name for p in parameters[4:]]
    if [p.name for p in given] != ["q", "k", "cos", "sin"] or rest not in ([], ["unsqueeze_dim"]):
        return None
    if any(p.default is not p.empty for p in given):
        return None
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 5, 8), (2, 1, 5, 8)] if layout == "bnsd" else [(5, 3, 8), (5, 3, 8)]
    angles_shape = (2, 5, 8) if layout == "bnsd" else (5, 8)
    q, k, cos, sin = (
        torch.rand(shape, generator=generator, dtype=torch.float64)
        for shape in (*shapes, angles_shape, angles_shape)
    )
    for first_half in (False, True):
        for pairing in ("half", "adjacent", "interleave_half"):
            ours = _replacement(function, pairing, first_half, layout)
            try:
                pairs = zip(function(q, k, cos, sin), ours(q, k, cos, sin), strict=True)
            except Exception:  # It is of another kind, and says so in its own way.
                return None
            if all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in pairs):
                return pairing, first_half
    return None


def _replacement(original: Callable, pairing: str, first_half: bool, layout: str) -> Callable:
    def angles_of(q: Tensor, cos: Tensor, sin: Tensor) -> Angles:
        head_dim, rotary_dim = q.shape[-1], cos.shape[-1]
        kind = torch.float64 if q.dtype == torch.float64 else torch.float32

        def make() -> Angles:
            if not first_half:
                made = angles_from_cos_sin(cos, sin, head_dim=head_dim, pairing=pairing)
                return made.to(kind)
            rows = torch.cat([t[..., : rotary_dim // 2] for t in (cos, sin)], -1).flatten(0, -2)
            return Angles(rows.to(kind), _ops.geometry(head_dim, rotary_dim, 0, pairing, False))

        return once_a_step(make, cos, sin, head_dim, pairing, first_half, kind)

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if layout == "bnsd":
            dim = unsqueeze_dim % (cos.dim() + 1)
            if cos.dim() != 3 or dim not in (1, 2):
                # Heads are elsewhere.
                return original(q, k, cos, sin, unsqueeze_dim)
            # As products of the types would be.
            kind = torch.promote_types(q.dtype, cos.dtype)
            normed = _norms.taken(q, k, kind)
            if normed is None:
                q, k = q.to(kind), k.to(kind)
        else:
            normed = _norms.taken(q, k, q.dtype)
        order = "bsnd" if layout == "bnsd" and dim == 2 else layout
        if normed is None:
            return rotary(_ops.readable(q), _ops.readable(k), angles_of(q, cos, sin), order)
        q, k = _ops.readable(normed.q), _ops.readable(normed.k)
        return rotary(q, k, angles_of(q, cos, sin), order, **normed.norm)

    apply_rotary_pos_emb.__doc__ = original.__doc__
    return apply_rotary_pos_emb
