"""The operators ``torch.ops.mrope.*``: definitions, shapes, kernels and derivatives.

``mrope.torch`` is their door. ``geometry`` and ``layout`` are text because operators take no other
objects; the native half checks them, as it checks shapes and strides.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _composed, _native

_SCHEMAS = {
    "rotate": "(Tensor q, Tensor? k, Tensor angles, str geometry, str layout, bool adjoint)"
    " -> (Tensor, Tensor)",
    "angle_gradients": "(Tensor q, Tensor dq, Tensor? k, Tensor? dk, SymInt[] shape,"
    " str geometry, str layout) -> Tensor",
    "norm_rotate": "(Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor angles,"
    " float eps, bool unit_offset, bool after, str geometry, str layout) -> (Tensor, Tensor)",
    "norm_rotate_backward": "(Tensor dq, Tensor? dk, Tensor q, Tensor? k, Tensor? q_weight,"
    " Tensor? k_weight, Tensor angles, float eps, bool unit_offset, bool after, str geometry,"
    " str layout) -> (Tensor, Tensor, Tensor, Tensor)",
    "token_angles": "(Tensor positions, str spec, int? seq_len, bool double) -> Tensor",
}
# Where compilers may choose strides, they keep those at hand: channels stay together.
_TAGS = [
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "needs_exact_strides")
    if hasattr(torch.Tag, name)
]
_library = torch.library.Library("mrope", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=_TAGS)

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
}
_Native = tuple[int, str, tuple[int, ...], tuple[int, ...], Tensor]


def geometry(
    head_dim: int, rotary_dim: int, rotary_offset: int, pairing: str, per_channel: bool
) -> str:
    """A geometry as the native half reads it; it is checked there."""
    return (
        f'{{"head_dim":{head_dim},"rotary_dim":{rotary_dim},"rotary_offset":{rotary_offset},'
        f'"pairing":"{pairing}","per_channel":{str(per_channel).lower()}}}'
    )


def _parts(geometry: str) -> tuple[int, int, int]:
    """head_dim, rotary_dim and offset."""
    fields = json.loads(geometry)
    return fields["head_dim"], fields["rotary_dim"], fields["rotary_offset"]


def members_apart(values: Tensor, pairing: str) -> Tensor:
    """Values of the result's channels in the order of lanes: first members, then second ones."""
    parts = 4 if pairing == "quarter" else 2
    if values.shape[-1] % parts:
        raise ValueError(
            f"cos and sin: found {values.shape[-1]} channels, expected a multiple of {parts} for "
            f"pairing {pairing}"
        )
    if pairing == "adjacent":
        return values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    if pairing == "quarter":
        return values.unflatten(-1, (2, 2, -1)).transpose(-2, -3).flatten(-3)
    return values


def halves_agree(lanes: list[Tensor]) -> bool:
    """True if both members of each pair are known to have one angle: half as much to read.

    Not asked where the answer would stop a graph, keep gradients apart or wait for a device.
    """
    if torch.compiler.is_compiling() or any(t.requires_grad or not t.is_cpu for t in lanes):
        return False
    if any(type(t) is not Tensor for t in lanes) or _composed.is_needed(*lanes):
        return False
    pairs = lanes[0].shape[-1] // 2
    return all(torch.equal(t[..., :pairs], t[..., pairs:]) for t in lanes)


def check_door(q: Tensor, k: Tensor | None, rows: Tensor) -> None:
    """Refuses devices without kernels, and tensors of several devices."""
    for name, tensor in (("q", q), ("k", k), ("the angles", rows)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: found {type(tensor).__name__}, expected torch.Tensor")
        check_local(name, tensor)
        if tensor.device != q.device:
            raise ValueError(f"{name}: found on {tensor.device}, expected on {q.device} as q")
    if q.device.type not in ("cpu", "npu", "meta"):
        raise NotImplementedError(
            f"q: found on {q.device}, expected cpu or npu (Ascend), for which mrope has kernels"
        )


def check_local(name: str, tensor: Tensor) -> None:
    """Refuses tensors over several devices."""
    if type(tensor).__name__ == "DTensor":
        raise NotImplementedError(
            f"{name}: found a DTensor, expected the tensor of this rank: call it through "
            "torch.distributed.tensor.experimental.local_map, or pass to_local()"
        )


def check_width(positions: Tensor) -> None:
    """Refuses 16-bit positions: bfloat16 has the whole numbers up to 256 alone."""
    if positions.dtype in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"positions: found {positions.dtype}, which does not hold all whole numbers of a "
            "sequence, expected integers, float32 or float64"
        )


def check_positions(positions: Tensor) -> None:
    """Refuses positions that are not exact, and those that a derivative would be lost at."""
    check_width(positions)
    if not positions.is_floating_point() or torch.compiler.is_compiling():
        return
    wants = positions.requires_grad and torch.is_grad_enabled()
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(positions)
    if wants or wrapped or _composed.has_tangent(positions):
        raise NotImplementedError(
            "angles makes no derivative with respect to positions: detach them, or compute cos and "
            "sin and pass them to angles_from_cos_sin"
        )


def weights(q: Tensor, *given: Tensor | None) -> list[Tensor | None]:
    """Weights of a norm in the type that it is computed in."""
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [None if weight is None else weight.to(kind) for weight in given]


def _native_tensor(x: Tensor) -> _Native:
    # The tensor itself goes along: a temporary one, as a copy, would be freed before the call.
    return x.data_ptr(), _DTYPES.get(x.dtype, str(x.dtype)), x.shape, x.stride(), x


def _optional(x: Tensor | None) -> _Native | None:
    return None if x is None else _native_tensor(x)


def _like(x: Tensor) -> Tensor:
    """A tensor for a result: x's strides where they leave no gaps."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _missing(x: Tensor) -> Tensor:
    """Stands for a tensor that was not asked for: operators have no optional results."""
    return x.new_empty(0)


def _results(q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor]:
    return _like(q), _missing(q) if k is None else _like(k)


def readable(gradient: Tensor | None) -> Tensor | None:
    """With contiguous channels, as autograd does not promise: gradients may be broadcast."""
    if gradient is None or gradient.stride(-1) == 1:
        return gradient
    return gradient.contiguous()


# Kernels: in host memory on PyTorch's threads, and on an NPU on its current stream.

_TOKEN_DIMS = {"bsnd": (0, 1), "bnsd": (0, 2), "sbnd": (1, 0)}


def _run(name: str, q: Tensor, *args: Any) -> Any:
    """Calls a kernel where q is."""
    if q.device.type != "npu":
        return getattr(_native, name)(*args, torch.get_num_threads())
    # The device is set for the call and as it was afterwards; its stream stays PyTorch's.
    with torch.npu.device(q.device):
        stream = torch.npu.current_stream().npu_stream
        return getattr(_native, f"npu_{name}")(stream, *args)


def _rotate(
    q: Tensor, k: Tensor | None, angles: Tensor, geometry: str, layout: str, adjoint: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _results(q, k)
    _rotate_into(q, q_out, k, k_out, angles, geometry, layout, adjoint)
    return q_out, k_out


def _rotate_into(
    q: Tensor,
    q_out: Tensor,
    k: Tensor | None,
    k_out: Tensor | None,
    angles: Tensor,
    geometry: str,
    layout: str,
    adjoint: bool,
) -> None:
    _run(
        "rotate",
        q,
        (_native_tensor(q), _native_tensor(q_out)),
        None if k is None else (_native_tensor(k), _native_tensor(k_out)),
        _native_tensor(angles.contiguous()),
        geometry,
        layout,
        adjoint,
    )


def _angle_gradients(
    q: Tensor,
    dq: Tensor,
    k: Tensor | None,
    dk: Tensor | None,
    shape: list[int],
    geometry: str,
    layout: str,
) -> Tensor:
    whole = list(shape)
    if q.device.type == "npu" and layout in _TOKEN_DIMS:
        # Of all tokens; those that share angles are added up below.
        whole[0] = q.shape[_TOKEN_DIMS[layout][0]] * q.shape[_TOKEN_DIMS[layout][1]]
    out = _angles_like(q, whole)
    _run(
        "angle_gradients",
        q,
        (_native_tensor(q), _native_tensor(dq)),
        None if k is None else (_native_tensor(k), _native_tensor(dk)),
        _native_tensor(out),
        geometry,
        layout,
    )
    return out if out.shape[0] == shape[0] else out.unflatten(0, (-1, shape[0])).sum(0)


def _angles_like(q: Tensor, shape: list[int]) -> Tensor:
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(shape, dtype=kind)


def _norm_rotate(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    angles: Tensor,
    eps: float,
    unit_offset: bool,
    after: bool,
    geometry: str,
    layout: str,
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _results(q, k)
    q_weight, k_weight = _kernel_weights(q, q_weight, k_weight, unit_offset)
    _run(
        "norm_rotate",
        q,
        (_native_tensor(q), _native_tensor(q_out), _optional(q_weight)),
        None if k is None else (_native_tensor(k), _native_tensor(k_out), _optional(k_weight)),
        _native_tensor(angles.contiguous()),
        (eps, unit_offset, after),
        geometry,
        layout,
    )
    return q_out, k_out


def _kernel_weights(
    q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, unit_offset: bool
) -> list[Tensor | None]:
    """Those given, contiguous; on an NPU, whose kernels always read one, also what stands for 1."""
    given = [None if w is None else w.contiguous() for w in (q_weight, k_weight)]
    if q.device.type != "npu":
        return given
    one = torch.full((q.shape[-1],), 0.0 if unit_offset else 1.0, device=q.device)
    return [one if w is None else w for w in given]


def _norm_results(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_out, k_out = _results(q, k)
    of_weights = [_missing(q) if w is None else torch.empty_like(w) for w in (q_weight, k_weight)]
    return q_out, k_out, *of_weights


def _norm_rotate_backward(
    dq: Tensor,
    dk: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    angles: Tensor,
    eps: float,
    unit_offset: bool,
    after: bool,
    geometry: str,
    layout: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _norm_results(q, k, q_weight, k_weight)
    read = _kernel_weights(q, q_weight, k_weight, unit_offset)
    on_npu = q.device.type == "npu"

    def native(i: int, x: Tensor, dy: Tensor, weight: Tensor | None) -> Any:
        written = None if weight is None or on_npu else results[2 + i]
        tensors = (_native_tensor(x), _native_tensor(dy), _native_tensor(results[i]))
        return *tensors, _optional(read[i]), _optional(written)

    rest = (
        _native_tensor(angles.contiguous()),
        (eps, unit_offset, after),
        geometry,
        layout,
    )
    tensors = (
        native(0, q, dq, q_weight),
        None if k is None else native(1, k, dk, k_weight),
    )
    if not on_npu:
        _run("norm_rotate_backward", q, *tensors, *rest)
        return results
    # There, the kernel leaves sums of parts.
    rows = _run("weight_sums", q, _native_tensor(q), geometry, layout)
    sums = q.new_empty((rows, 1 if k is None else 2, q.shape[-1]), dtype=torch.float32)
    rows = _run("norm_rotate_backward", q, *tensors, _native_tensor(sums), *rest)
    # Written without gaps, whatever the number of rows.
    for i, weight in enumerate((q_weight, k_weight)):
        if weight is not None:
            results[2 + i].copy_(sums[:rows, i].sum(0))
    return results


def _token_angles(positions: Tensor, spec: str, seq_len: int | None, double: bool) -> Tensor:
    # In float64 on the host, whatever the device: once a step.
    host = positions.cpu().contiguous()
    rows = _rows_of(host, spec, double)
    if rows.shape[0] == 0 and host.shape[0] == _native.spec_parts(spec)[1]:
        return rows.to(positions.device)
    _native.token_angles(spec, _native_tensor(host), _native_tensor(rows), seq_len)
    return rows.to(positions.device)


def _rows_of(positions: Tensor, spec: str, double: bool) -> Tensor:
    lanes = len(_native.spec_parts(spec)[3])
    kind = torch.float64 if double else torch.float32
    return positions.new_empty([positions.shape[1], 2 * lanes], dtype=kind)


for _name, _kernel in {
    "rotate": _rotate,
    "angle_gradients": _angle_gradients,
    "norm_rotate": _norm_rotate,
    "norm_rotate_backward": _norm_rotate_backward,
    "token_angles": _token_angles,
}.items():
    _library.impl(_name, _kernel, "CPU")
    # torch_npu's devices.
    _library.impl(_name, _kernel, "PrivateUse1")

# Shapes, for compilers.


@torch.library.register_fake("mrope::rotate", lib=_library)
def _(q, k, angles, geometry, layout, adjoint):
    return _results(q, k)


@torch.library.register_fake("mrope::angle_gradients", lib=_library)
def _(q, dq, k, dk, shape, geometry, layout):
    return _angles_like(q, shape)


@torch.library.register_fake("mrope::norm_rotate", lib=_library)
def _(q, k, q_weight, k_weight, angles, eps, unit_offset, after, geometry, layout):
    return _results(q, k)


@torch.library.register_fake("mrope::norm_rotate_backward", lib=_library)
def _(dq, dk, q, k, q_weight, k_weight, angles, eps, unit_offset, after, geometry, layout):
    return _norm_results(q, k, q_weight, k_weight)


@torch.library.register_fake("mrope::token_angles", lib=_library)
def _(positions, spec, seq_len, double):
    return _rows_of(positions, spec, double)


# Derivatives.


def _of_present(first: Tensor | None, second: Tensor | None, turn: Any) -> list[Tensor | None]:
    """``turn(first, second)`` of those that are there; it takes a tensor and perhaps another."""
    if first is None:
        return [None, None if second is None else turn(second, None)[0]]
    turned, other = turn(first, second)
    return [turned, None if second is None else other]


def _turn(
    q: Tensor | None, k: Tensor | None, angles: Tensor, geometry: str, layout: str, adjoint: bool
) -> list[Tensor | None]:
    rotate = torch.ops.mrope.rotate
    return _of_present(
        readable(q), readable(k), lambda q, k: rotate(q, k, angles, geometry, layout, adjoint)
    )


def _gradient_of_angles(
    inputs: list[Tensor | None],
    gradients: list[Tensor | None],
    shape: list[int],
    geometry: str,
    layout: str,
) -> Tensor | None:
    """Of y = R x; the sum over those of q and k that have both."""
    pairs = [
        (readable(x), readable(g))
        for x, g in zip(inputs, gradients, strict=True)
        if x is not None and g is not None
    ]
    if not pairs:
        return None
    (q, dq), (k, dk) = (*pairs, (None, None))[:2]
    return torch.ops.mrope.angle_gradients(q, dq, k, dk, shape, geometry, layout)


def _rotate_setup(ctx, inputs, output):
    q, k, angles, ctx.geometry, ctx.layout, ctx.adjoint = inputs
    ctx.set_materialize_grads(False)
    ctx.with_k = k is not None
    # q and k are kept only for angles that learn.
    ctx.save_for_backward(angles, *((q, k) if ctx.needs_input_grad[2] else (None, None)))


def _rotate_backward(ctx, dq, dk):
    angles, q, k = ctx.saved_tensors
    dk = dk if ctx.with_k else None
    turned = _turn(dq, dk, angles, ctx.geometry, ctx.layout, not ctx.adjoint)
    dangles = None
    if ctx.needs_input_grad[2]:
        # <g, R' x> is <x, R g>.
        sides = [[q, k], [dq, dk]]
        inputs, gradients = reversed(sides) if ctx.adjoint else sides
        dangles = _gradient_of_angles(inputs, gradients, angles.shape, ctx.geometry, ctx.layout)
    return *turned, dangles, None, None, None


def _rotated_part(x: Tensor | None, geometry: str) -> Tensor | None:
    """Zero where channels are not rotated: those do not meet the angles."""
    if x is None:
        return None
    head_dim, rotary_dim, offset = _parts(geometry)
    if rotary_dim == head_dim:
        return x
    part = x.narrow(-1, offset, rotary_dim)
    return pad(part, (offset, head_dim - offset - rotary_dim))


def _angle_gradients_setup(ctx, inputs, output):
    *tensors, _, ctx.geometry, ctx.layout = inputs
    ctx.save_for_backward(*tensors)


def _angle_gradients_backward(ctx, gradient):
    # With angles v, <v, angle_gradients(x, g)> is <g, R x> over the rotated channels.
    q, dq, k, dk = (_rotated_part(x, ctx.geometry) for x in ctx.saved_tensors)
    q_gradient, k_gradient = _turn(dq, dk, gradient, ctx.geometry, ctx.layout, True)
    dq_gradient, dk_gradient = _turn(q, k, gradient, ctx.geometry, ctx.layout, False)
    found = (q_gradient, dq_gradient, k_gradient, dk_gradient)
    parts = (_rotated_part(x, ctx.geometry) for x in found)
    return *parts, None, None, None


def _norm_rotate_setup(ctx, inputs, output):
    q, k, q_weight, k_weight, angles, *ctx.norm, ctx.geometry, ctx.layout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, q_weight, k_weight, angles)


def _norm_rotate_backward_formula(ctx, dq, dk):
    q, k, q_weight, k_weight, angles = ctx.saved_tensors
    dk = None if k is None else dk
    if dq is None and dk is None:
        return (None,) * 10
    # A result that nothing came of: its gradient is zero.
    dq = torch.zeros_like(q) if dq is None else readable(dq)
    dk = torch.zeros_like(k) if k is not None and dk is None else readable(dk)
    rest = (*ctx.norm, ctx.geometry, ctx.layout)
    backward = torch.ops.mrope.norm_rotate_backward
    results = backward(dq, dk, q, k, q_weight, k_weight, angles, *rest)
    q_gradient, k_gradient, q_weight_gradient, k_weight_gradient = (
        result if given is not None else None
        for result, given in zip(results, (q, k, q_weight, k_weight), strict=True)
    )
    dangles = None
    if ctx.needs_input_grad[4]:
        dangles = _gradient_of_norm_angles(ctx, (q, k, q_weight, k_weight, angles), dq, dk)
    return q_gradient, k_gradient, q_weight_gradient, k_weight_gradient, dangles, *(None,) * 5


def _gradient_of_norm_angles(ctx, saved, dq, dk):
    """The rotation's own, between its input and the gradient of its result."""
    q, k, q_weight, k_weight, angles = saved
    head_dim, rotary_dim, offset = _parts(ctx.geometry)
    # The norm alone: a rotation by 0.
    alone = geometry(head_dim, rotary_dim, offset, "half", False)
    rows = angles.shape[0]
    still = angles.new_zeros(rows, rotary_dim)
    still[:, : rotary_dim // 2] = 1
    norm, layout = (*ctx.norm, alone, ctx.layout), ctx.layout
    if ctx.norm[2]:
        turned = torch.ops.mrope.rotate(q, k, angles, ctx.geometry, layout, False)
        k_turned = None if k is None else turned[1]
        backward = torch.ops.mrope.norm_rotate_backward
        dq, k_gradient, *_ = backward(dq, dk, turned[0], k_turned, q_weight, k_weight, still, *norm)
        dk = None if k is None else k_gradient
    else:
        q, normed = torch.ops.mrope.norm_rotate(q, k, q_weight, k_weight, still, *norm)
        k = None if k is None else normed
    return _gradient_of_angles([q, k], [dq, dk], angles.shape, ctx.geometry, layout)


def _refuse_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "the second derivative of the fused norm is not made: pass norm=None, and normalise q and "
        "k by torch.nn.functional.rms_norm"
    )


def _nothing_kept(ctx, inputs, output):
    pass


for _name, _backward, _setup in (
    ("rotate", _rotate_backward, _rotate_setup),
    ("angle_gradients", _angle_gradients_backward, _angle_gradients_setup),
    ("norm_rotate", _norm_rotate_backward_formula, _norm_rotate_setup),
    ("norm_rotate_backward", _refuse_second_derivative, _nothing_kept),
):
    torch.library.register_autograd(
        f"mrope::{_name}", _backward, setup_context=_setup, lib=_library
    )


def _refuse_vmap(info, in_dims, *args):
    raise NotImplementedError(
        "vmap over mrope's operators is not made: put the mapped dimension into the batch"
    )


for _name in _SCHEMAS:
    torch.library.register_vmap(f"mrope::{_name}", _refuse_vmap, lib=_library)


class _InPlace(torch.autograd.Function):
    """The rotation over its own inputs; the backward needs the angles alone.

    q comes first: where it is a view, autograd puts the first input's gradient into its base's.
    """

    @staticmethod
    def forward(ctx, q, k, angles, geometry, layout):
        if angles.requires_grad:
            raise ValueError(
                "the gradient of the angles needs q and k as they were: pass in_place=False"
            )
        ctx.geometry, ctx.layout = geometry, layout
        ctx.set_materialize_grads(False)
        _rotate_into(q, q, k, k, angles, geometry, layout, False)
        ctx.save_for_backward(angles)
        if k is None:
            ctx.mark_dirty(q)
            return q
        ctx.mark_dirty(q, k)
        return q, k

    @staticmethod
    def backward(ctx, dq, dk=None):
        (angles,) = ctx.saved_tensors
        return *_turn(dq, dk, angles, ctx.geometry, ctx.layout, True), None, None, None


def _made_with_others(x: Tensor) -> str | None:
    if torch.compiler.is_compiling() or not x._is_view():
        return None
    autograd = torch._C._autograd
    if autograd._get_creation_meta(x) == autograd.CreationMeta.DEFAULT:
        return None
    return "one of several views that were made at once (split, chunk, unbind)"


def is_traced(x: Tensor) -> bool:
    """True where memory must not be touched: there is none, or a mode or a subclass watches."""
    return (
        torch.compiler.is_compiling()
        or x.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python)
    )


def rotate_in_place(
    q: Tensor, k: Tensor | None, angles: Tensor, geometry: str, layout: str
) -> tuple[Tensor, Tensor | None]:
    """Overwrites q and k; traced, it is the operation and a copy, which compilers join."""
    for name, x in (("q", q), ("k", k)):
        # Autograd would refuse these too, when they are overwritten.
        if x is None or not (x.requires_grad and torch.is_grad_enabled()):
            continue
        found = "a leaf that requires a gradient" if x.is_leaf else _made_with_others(x)
        if found:
            raise ValueError(
                f"{name}: found {found}, which cannot be overwritten: pass in_place=False"
            )
    if is_traced(q) or (k is not None and is_traced(k)):
        q_turned, k_turned = torch.ops.mrope.rotate(q, k, angles, geometry, layout, False)
        return q.copy_(q_turned), None if k is None else k.copy_(k_turned)
    turn = (angles, geometry, layout)
    if k is None:
        return _InPlace.apply(q, None, *turn), None
    if (q._is_view() or k._is_view()) and (q.requires_grad or k.requires_grad):
        # Autograd takes one view at a time.
        _native.check_apart(_native_tensor(q), _native_tensor(k), layout)
        return _InPlace.apply(q, None, *turn), _InPlace.apply(k, None, *turn)
    return _InPlace.apply(q, k, *turn)
