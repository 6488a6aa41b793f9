"""The operation in PyTorch's own operators, in the modes for which the kernels have no rule."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _ops

if TYPE_CHECKING:
    from .torch import Norm


def is_transformed() -> bool:
    """True within a transform of torch.func: grad, jvp, vmap and what is made of them."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_tangent(x: Tensor | None) -> bool:
    """True for a dual tensor of forward-mode differentiation."""
    return x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def is_needed(*tensors: Tensor | None) -> bool:
    """True where an operator would drop tangents, or refuse a transform."""
    if torch.compiler.is_compiling():
        return False
    return is_transformed() or any(has_tangent(x) for x in tensors)


def rotary(
    q: Tensor,
    k: Tensor | None,
    rows: Tensor,
    geometry: str,
    layout: str,
    norm: Norm | None,
    weights: list[Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """What ``mrope.torch.rotary`` returns; 16-bit tensors are computed in float32."""
    fields = json.loads(geometry)

    def turned(name: str, x: Tensor, weight: Tensor | None) -> Tensor:
        of_x = _in_place_of_tokens(name, x, rows, layout)
        y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        if norm is not None and not norm.after:
            y = _normed(y, norm, weight)
        y = _rotated(name, y, of_x, fields)
        if norm is not None and norm.after:
            y = _normed(y, norm, weight)
        return y.to(x.dtype)

    first = turned("q", q, weights[0])
    return first, None if k is None else turned("k", k, weights[1])


def _in_place_of_tokens(name: str, x: Tensor, rows: Tensor, layout: str) -> Tensor:
    """The rows of angles with x's axes; 1 in place of a batch or of heads that share them."""
    rows = rows if rows.dim() == 3 else rows.unsqueeze(1)
    axes = {"tnd": (0, 0), "bsnd": (0, 1), "bnsd": (0, 2), "sbnd": (1, 0)}.get(layout)
    if axes is None or x.dim() != (3 if layout == "tnd" else 4):
        raise ValueError(
            f"{name}: found {x.dim()} axes in layout {layout!r}, expected 4 in bsnd, bnsd or sbnd, "
            "or 3 in tnd"
        )
    batch, seq = (x.shape[axis] for axis in axes)
    tokens = {seq} if layout == "tnd" else {seq, batch * seq}
    if rows.shape[0] not in tokens:
        raise ValueError(
            f"the angles: found {rows.shape[0]} tokens, expected {' or '.join(map(str, tokens))} "
            f"for {name} of shape {list(x.shape)}"
        )
    if layout == "tnd":
        return rows
    rows = rows.unflatten(0, (-1, seq))
    return rows.transpose(1, 2) if layout == "bnsd" else rows.transpose(0, axes[0])


def _normed(x: Tensor, norm: Norm, weight: Tensor | None) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    return y if weight is None else y * (weight + 1 if norm.unit_offset else weight)


def _rotated(name: str, x: Tensor, rows: Tensor, fields: dict[str, Any]) -> Tensor:
    head_dim, rotary_dim, offset = (
        fields[key] for key in ("head_dim", "rotary_dim", "rotary_offset")
    )
    if x.shape[-1] != head_dim:
        raise ValueError(f"{name}: found {x.shape[-1]} channels, expected {head_dim}")
    pairing = fields["pairing"]
    before, part, after = x.split((offset, rotary_dim, head_dim - offset - rotary_dim), -1)
    read = "adjacent" if pairing == "interleave_half" else pairing
    a, b = _ops.members_apart(part, read).chunk(2, -1)
    cos, sin = rows.chunk(2, -1)
    (c1, c2), (s1, s2) = (t.chunk(2, -1) if fields["per_channel"] else (t, t) for t in (cos, sin))
    first, second = a * c1 - b * s1, b * c2 + a * s2
    if pairing == "adjacent":
        turned = torch.stack((first, second), -1).flatten(-2)
    elif pairing == "quarter":
        halves = (t for pair in zip(first.chunk(2, -1), second.chunk(2, -1)) for t in pair)
        turned = torch.cat(tuple(halves), -1)
    else:
        turned = torch.cat((first, second), -1)
    return torch.cat((before, turned, after), -1)
