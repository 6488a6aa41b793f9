"""The rotation of q and k as one differentiable operation on PyTorch tensors.

>>> import torch
>>> from mrope import RotarySpec
>>> from mrope.torch import angles, rotary
>>> spec = RotarySpec(64, axes={"contiguous": [8, 12, 12]}, theta=1e6)
>>> position_ids = torch.arange(10).expand(3, 2, 10)     # [axes, batch, seq]
>>> table = angles(spec, position_ids)                   # once per step, for all layers
>>> q, k = torch.randn(2, 10, 8, 64), torch.randn(2, 10, 2, 64)
>>> q, k = rotary(q, k, table)                           # in each layer

The backward is the same kernel, rotating back. It keeps the angles and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _composed, _ops
from ._spec import RotarySpec

__all__ = ["Angles", "Norm", "angles", "angles_from_cos_sin", "learned_angles", "rotary"]


@dataclass(frozen=True, eq=False)
class Angles:
    """cos and sin of a step's tokens, shared by all layers.

    Attributes:
        rows: ``[tokens, 2 * lanes]``, of each token its cosines, then its sines; or
            ``[tokens, heads, 2 * lanes]`` where each head has its own. Tokens are those of the
            batch one sample after another, or those of one sample that all samples share. float32;
            float64 for q and k in float64. A lane is a pair of channels, or a channel.
        geometry: which channels are rotated, and how they pair; see :attr:`RotarySpec.geometry`.
    """

    rows: Tensor
    geometry: str

    def to(self, *args: Any, **kwargs: Any) -> Angles:
        """The same on another device, or as another type: see :meth:`torch.Tensor.to`."""
        return replace(self, rows=self.rows.to(*args, **kwargs))


class Norm(NamedTuple):
    """RMSNorm of each head: ``x / sqrt(mean(x ** 2) + eps) * weight``.

    Attributes:
        eps: what is added to the mean of the squares.
        unit_offset: multiply by 1 + weight (Gemma, Qwen3.5).
        after: the norm follows the rotation (Hunyuan, Llama 4) instead of preceding it (Qwen3).
    """

    eps: float
    unit_offset: bool = False
    after: bool = False


def angles(
    spec: RotarySpec,
    positions: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    seq_len: int | None = None,
) -> Angles:
    """cos and sin for the tokens of a step, computed in float64 and rounded once.

    Args:
        spec: the model's rotation.
        positions: ids or real numbers: ``[axes, batch, seq]`` or ``[axes, tokens]``, and for a
            specification with one axis also ``[batch, seq]`` or ``[tokens]``.
        dtype: float32, or float64 for q and k in float64.
        seq_len: for scalings that depend on the length (dynamic, longrope).

    Raises ``ValueError`` for other axes, and positions that are negative ids or not finite,
    ``TypeError`` for positions in 16 bits, which are not exact, and ``NotImplementedError`` for
    positions that want a derivative: see :func:`learned_angles`.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"angles are float32, or float64 for float64 q and k, found {dtype}")
    _ops.check_positions(positions)
    axes = spec.axis_count
    if axes == 1 and not (positions.dim() > 1 and positions.shape[0] == 1):
        positions = positions.unsqueeze(0)
    if positions.dim() < 2:
        raise ValueError(
            f"positions: found shape {list(positions.shape)}, expected [axes, batch, seq] or "
            f"[axes, tokens] with {axes} axes"
        )
    kind = torch.float64 if positions.is_floating_point() else torch.int64
    rows = torch.ops.mrope.token_angles(
        positions.flatten(1).to(kind), spec.json, seq_len, dtype == torch.float64
    )
    return Angles(rows, spec.geometry)


def learned_angles(spec: RotarySpec, positions: Tensor, frequencies: Tensor) -> Angles:
    """cos and sin by frequencies that are trained: gradients reach ``frequencies``.

    Args:
        spec: geometry, axes and attention scaling; its own frequencies are not used.
        positions: as :func:`angles` takes them.
        frequencies: radians per token, as many as :meth:`RotarySpec.inv_freq` has. float64 keeps
            angles of long sequences exact.
    """
    _ops.check_width(positions)
    _ops.check_local("frequencies", frequencies)
    geometry, axes, scaling, axis_of_lane, frequency_of_lane, inv_freq = spec._parts
    if frequencies.shape != (len(inv_freq),):
        raise ValueError(
            f"frequencies: found shape {list(frequencies.shape)}, expected [{len(inv_freq)}]"
        )
    if axes == 1 and not (positions.dim() > 1 and positions.shape[0] == 1):
        positions = positions.unsqueeze(0)
    if positions.shape[0] != axes:
        raise ValueError(f"positions: found {positions.shape[0]} axes, expected {axes}")
    of_axis = positions.flatten(1).to(frequencies.dtype)[axis_of_lane]
    phases = of_axis.T * frequencies[frequency_of_lane]
    rows = torch.cat([phases.cos(), phases.sin()], -1) * scaling
    kind = torch.float64 if frequencies.dtype == torch.float64 else torch.float32
    return Angles(rows.to(kind), geometry)


def angles_from_cos_sin(
    cos: Tensor,
    sin: Tensor,
    *,
    head_dim: int | None = None,
    rotary_offset: int = 0,
    pairing: str = "half",
    per_head: bool = False,
) -> Angles:
    """Angles from cos and sin as other libraries hand them on; gradients reach both.

    Args:
        cos, sin: ``[..., rotary_dim]``, a value for each rotated channel in the order of the
            channels of the result. What precedes are the tokens, and their heads if ``per_head``.
        head_dim: channels of a head, rotary_dim by default.
        rotary_offset: the first rotated channel.
        pairing: as for :class:`RotarySpec`.
        per_head: each head has its own.
    """
    if cos.shape != sin.shape or cos.dim() < 2:
        raise ValueError(
            f"cos and sin: found shapes {list(cos.shape)} and {list(sin.shape)}, expected two of "
            "[..., rotary_dim]"
        )
    rotary_dim = cos.shape[-1]
    kind = torch.float64 if cos.dtype == torch.float64 else torch.float32
    lanes = [_ops.members_apart(t, pairing).to(kind) for t in (cos, sin)]
    per_channel = not _ops.halves_agree(lanes)
    if not per_channel:
        lanes = [t[..., : rotary_dim // 2] for t in lanes]
    rows = torch.cat(lanes, -1).flatten(0, -3 if per_head else -2)
    head_dim = head_dim or rotary_dim
    return Angles(rows, _ops.geometry(head_dim, rotary_dim, rotary_offset, pairing, per_channel))


def rotary(
    q: Tensor,
    k: Tensor | None,
    angles: Angles,
    layout: str = "bsnd",
    *,
    in_place: bool = False,
    norm: Norm | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotates q and k, forward and backward, in one pass each; normalises their heads if asked.

    Args:
        q, k: ``[batch, seq, heads, head_dim]`` in the order that ``layout`` says; k may have other
            heads than q, or be None. float32, bfloat16, float16 or float64; any strides, the
            channels of a head contiguous. On the CPU, or on an Ascend NPU.
        angles: for ``batch * seq`` tokens, or for ``seq`` tokens that the batch shares.
        layout: ``"bsnd"``, ``"bnsd"``, ``"sbnd"``, or ``"tnd"`` for packed sequences
            ``[tokens, heads, head_dim]``.
        in_place: overwrite q and k. Not with a norm, nor with angles that want a gradient.
        norm: RMSNorm of each head, in the same pass.
        q_weight, k_weight: ``[head_dim]``, the weights of the norm; ones by default.

    Returns q and k rotated, of the same shapes and types; None for a k that is None.

    Numerics: 16-bit tensors are computed in float32 and rounded once. The same bits with any
    strides and number of threads.

    Raises ``ValueError`` for shapes, strides and angles that do not fit, ``TypeError`` for element
    types, ``NotImplementedError`` for other devices, for ``DTensor``, and for the second derivative
    of the norm. Double backward of the rotation itself works. In forward mode and in the transforms
    of ``torch.func``, PyTorch's own operators compute the same.
    """
    _ops.check_door(q, k, angles.rows)
    if norm is None and (q_weight is not None or k_weight is not None):
        raise ValueError("a weight without a norm: pass norm=Norm(eps), or no weight")
    if norm is not None and in_place:
        raise ValueError("the norm's backward needs q and k as they were: pass in_place=False")
    if _composed.is_needed(q, k, angles.rows, q_weight, k_weight):
        weights = _ops.weights(q, q_weight, k_weight)
        turned = _composed.rotary(q, k, angles.rows, angles.geometry, layout, norm, weights)
        if not in_place:
            return turned
        return q.copy_(turned[0]), None if k is None else k.copy_(turned[1])
    if norm is not None:
        q_turned, k_turned = torch.ops.mrope.norm_rotate(
            q, k, *_ops.weights(q, q_weight, k_weight), angles.rows, *norm, angles.geometry, layout
        )
    elif in_place:
        return _ops.rotate_in_place(q, k, angles.rows, angles.geometry, layout)
    else:
        q_turned, k_turned = torch.ops.mrope.rotate(
            q, k, angles.rows, angles.geometry, layout, False
        )
    return q_turned, None if k is None else k_turned
