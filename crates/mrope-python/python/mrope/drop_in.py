"""Functions of torch_npu, MindSpeed and Megatron with their own signatures, and with a gradient.

They take what the originals document, on the CPU too, without the limits on sections, widths,
batches and heads, and they differentiate: with respect to q and k, and to cos and sin where those
ask for it. 16-bit tensors are computed in float32.

>>> import mrope.drop_in as torch_npu  # then torch_npu.npu_mrope(...) trains
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._cache import once_a_step
from ._spec import RotarySpec
from .torch import Angles, angles_from_cos_sin, rotary

__all__ = [
    "apply_rotary_pos_emb_absolute",
    "npu_interleave_rope",
    "npu_mrope",
    "npu_rotary_mul",
    "npu_rotary_position_embedding",
]

_MODES = ("half", "interleave", "quarter", "interleave-half")
_PAIRINGS = ("half", "adjacent", "quarter", "interleave_half")
_CACHE_MODES = {"default": "contiguous", "interleave": "striped"}


def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """``torch_npu.npu_mrope`` with a gradient, and with any sections.

    Args:
        positions: int64 ``[tokens]``, or ``[axes, tokens]`` with a section for each axis.
        query, key: ``[tokens, heads * head_size]``.
        cos_sin_cache: ``[positions, rotary_dim]``, cosines then sines; any of q's types or float32.
        head_size: channels of a head; those past rotary_dim pass unchanged.
        mrope_section: pairs of each axis, which sum to rotary_dim / 2; None or zeros for one axis.
        rotary_mode: ``"half"`` or ``"interleave"``.
        cache_mode: ``"default"`` for sections one after another, ``"interleave"`` for striped ones
            (Qwen3-VL).

    Raises ``ValueError`` for sections, shapes and modes that do not fit, and for positions that the
    cache has no row for.
    """
    for name, x in (("query", query), ("cos_sin_cache", cos_sin_cache)):
        _ops.check_local(name, x)
    pairing = _pairing(rotary_mode or "half", 2)
    sections = [section for section in mrope_section or () if section]
    if not sections:
        axes: str | dict[str, list[int]] = "single"
        positions = positions.reshape(1, -1)
    else:
        kind = _CACHE_MODES.get(cache_mode or "default")
        if kind is None:
            raise ValueError(
                f"cache_mode: found {cache_mode!r}, expected one of {list(_CACHE_MODES)}"
            )
        axes = {kind: list(mrope_section)}
    rotary_dim = cos_sin_cache.shape[-1]
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 2 or head_size <= 0 or x.shape[-1] % head_size:
            raise ValueError(
                f"{name}: found shape {list(x.shape)}, expected [tokens, heads * {head_size}]"
            )
    geometry, axis_count, axis_of_lane = _lanes(head_size, rotary_dim, pairing, axes)
    if positions.dim() != 2 or positions.shape[0] != axis_count:
        raise ValueError(
            f"positions: found shape {list(positions.shape)}, expected [{axis_count}, tokens] for "
            f"sections {list(mrope_section or [])}"
        )
    _check_positions(positions, cos_sin_cache.shape[0])
    lanes = torch.arange(rotary_dim // 2, device=positions.device)
    of_lane = positions[axis_of_lane].T
    halves = [cos_sin_cache[of_lane, lanes + start] for start in (0, rotary_dim // 2)]
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    angles = Angles(torch.cat(halves, -1).to(kind), geometry)
    q, k = (x.unflatten(-1, (-1, head_size)) for x in (query, key))
    q, k = rotary(q, k, angles, "tnd")
    return q.flatten(-2), k.flatten(-2)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """``torch_npu.npu_rotary_mul``: ``input * r1 + rotate(input) * r2``.

    Args:
        input: ``[batch, heads, seq, head_dim]`` in any order of the first three, or
            ``[tokens, heads, head_dim]``.
        r1, r2: cos and sin, of input's shape or with 1 for any of its dimensions but the last.
        rotary_mode: ``"half"``, ``"interleave"``, ``"quarter"`` or ``"interleave-half"``.

    Keeps r1 and r2 for the backward, and input only if they want a gradient.

    Raises ``ValueError`` for shapes and modes that do not fit.
    """
    return _rotary_mul(input, r1, r2, _pairing(rotary_mode, 4))


def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """MindSpeed's operator: :func:`npu_rotary_mul` with modes 0 to 3 in its order."""
    if mode not in range(len(_MODES)):
        raise ValueError(f"mode: found {mode!r}, expected 0 to {len(_MODES) - 1} for {_MODES}")
    return _rotary_mul(x, cos, sin, _PAIRINGS[mode])


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``torch_npu.npu_interleave_rope``: reads channels 2j and 2j + 1, writes j and j + D/2.

    Args:
        x: ``[batch, heads, seq, head_dim]``, of any width.
        cos, sin: ``[batch, 1, seq, head_dim]`` or ``[batch, 1, 1, head_dim]``, and as
            :func:`npu_rotary_mul` takes them.
    """
    return _rotary_mul(x, cos, sin, "interleave_half")


def apply_rotary_pos_emb_absolute(
    t: Tensor, freqs: Tensor, config: Any = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Megatron's rotation by an angle for each token, as Megatron Bridge calls it for Qwen3-VL.

    Args:
        t: ``[seq, batch, heads, head_dim]``; ``[tokens, heads, head_dim]`` for packed sequences.
        freqs: ``[seq, batch, 1, rotary_dim]``, angles in radians; batch is 1 for packed sequences,
            or where samples share their angles.
        config: the transformer's, of which ``rotary_interleaved`` is read; None stands for False.
        cu_seqlens: not needed: the angles say where sequences start.
    """
    pairing = "adjacent" if getattr(config, "rotary_interleaved", False) else "half"
    kind = torch.float64 if t.dtype == torch.float64 else torch.float32
    if freqs.dim() != 4 or freqs.shape[2] != 1:
        raise ValueError(
            f"freqs: found shape {list(freqs.shape)}, expected [seq, batch, 1, rotary_dim]"
        )

    def make() -> Angles:
        phases = freqs.squeeze(2).transpose(0, 1).to(kind)
        cos, sin = phases.cos(), phases.sin()
        return angles_from_cos_sin(cos, sin, head_dim=t.shape[-1], pairing=pairing)

    angles = once_a_step(make, freqs, freqs, "megatron", pairing, kind, t.shape[-1])
    return rotary(t, None, angles, "tnd" if t.dim() == 3 else "sbnd")[0]


def _pairing(mode: str, known: int) -> str:
    if mode not in _MODES[:known]:
        raise ValueError(f"rotary_mode: found {mode!r}, expected one of {list(_MODES[:known])}")
    return _PAIRINGS[_MODES.index(mode)]


@torch.compiler.assume_constant_result
def _lanes(
    head_size: int, rotary_dim: int, pairing: str, axes: str | dict[str, list[int]]
) -> tuple[str, int, list[int]]:
    """The geometry, the number of axes, and the axis of each lane."""
    spec = RotarySpec(head_size, rotary_dim=rotary_dim, pairing=pairing, axes=axes)
    return spec.geometry, spec.axis_count, spec.axis_of_lane


def _check_positions(positions: Tensor, rows: int) -> None:
    # Traced, the gather checks it.
    if _ops.is_traced(positions) or positions.numel() == 0:
        return
    low, high = (int(bound) for bound in positions.aminmax())
    if low < 0 or high >= rows:
        found = low if low < 0 else high
        raise ValueError(
            f"position {found} is not among the cos/sin cache's {rows} rows; make it longer"
        )


def _rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Finds which dimensions are tokens and which are heads by where cos has a 1."""
    if x.dim() == 3 and cos.dim() == 3 and sin.dim() == 3:
        return _rotary_mul(*(t.unsqueeze(0) for t in (x, cos, sin)), pairing).squeeze(0)
    fits = x.dim() == 4 == cos.dim() and cos.shape == sin.shape and cos.shape[-1] == x.shape[-1]
    if not fits or any(c not in (1, n) for c, n in zip(cos.shape, x.shape)):
        raise ValueError(
            f"cos and sin: found shapes {list(cos.shape)} and {list(sin.shape)}, expected that of "
            f"the input, {list(x.shape)}, or 1 in place of any but the last"
        )
    shared = [d for d in range(3) if cos.shape[d] == 1 and x.shape[d] != 1]
    own = [d for d in range(3) if d not in shared]
    per_head, whole = not shared, len(shared) == 3
    if whole:
        # One angle for all: the last but the channels are taken as tokens.
        shared, own = [0, 1], [2]
    # Heads are what shares angles, the innermost; batch and seq are the rest, in their order.
    heads = own[-1] if per_head else shared[-1]
    order = (*(d for d in range(3) if d != heads and d in shared), *own)[:2]
    order = (*order, heads, 3)
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32

    def make() -> Angles:
        sides = [cos, sin]
        if whole:
            sides = [t.expand(1, 1, x.shape[2], t.shape[-1]) for t in sides]
        sides = [t.permute(order) for t in sides]
        return angles_from_cos_sin(*sides, pairing=pairing, per_head=per_head).to(kind)

    angles = once_a_step(make, cos, sin, pairing, order, kind, x.shape[2] if whole else 0)
    turned, _ = rotary(x.permute(order), None, angles, "bsnd")
    return turned.permute([order.index(d) for d in range(4)])
