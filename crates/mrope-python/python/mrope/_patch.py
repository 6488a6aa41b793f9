"""Putting the operation into models of transformers."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import _ops
from ._cache import once_a_step
from .torch import Angles, angles_from_cos_sin, rotary

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
    """

    function: str
    layers: int
    pairing: str | None


class _Patch:
    """A replaced function, and the models that it was replaced for."""

    def __init__(self, original: Callable, pairing: str) -> None:
        self.original = original
        self.pairing = pairing
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_patches: dict[tuple[str, str], _Patch] = {}


def patch(model: nn.Module) -> list[Replaced]:
    """Replaces the rotation of a transformers model, decoder and vision tower, by mrope's.

    Tried with Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V and Llama; works for any model whose file
    rotates by ``apply_rotary_pos_emb(q, k, cos, sin)`` or ``apply_rotary_pos_emb_vision``. Each
    function is first run on small random tensors: one that does not compute what mrope would put
    into its place is left.

    The functions belong to the model's file, so other models of the same file are patched too,
    until :func:`unpatch` was called for each that was patched.

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
                report.append(Replaced(".".join(key), layers, None))
                continue
            _patches[key] = _Patch(original, known[0])
            setattr(module, name, _replacement(original, *known, _NAMES[name]))
        _patches[key].models.add(model)
        report.append(Replaced(".".join(key), layers, _patches[key].pairing))
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
    for key in keys:
        patch = _patches[key]
        patch.models.discard(model)
        if not patch.models:
            setattr(sys.modules[key[0]], key[1], patch.original)
            del _patches[key]


def _rotations(model: nn.Module) -> Counter[tuple[ModuleType, str]]:
    """Functions that rotate, and how many attention layers have one in their file."""
    found: Counter[tuple[ModuleType, str]] = Counter()
    for layer in model.modules():
        module = sys.modules.get(type(layer).__module__)
        forward = getattr(type(layer).forward, "__wrapped__", type(layer).forward)
        code = getattr(forward, "__code__", None)
        for name in _NAMES:
            if module is not None and hasattr(module, name) and code and name in code.co_names:
                found[module, name] += 1
    return found


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
            q, k = q.to(kind), k.to(kind)
        order = "bsnd" if layout == "bnsd" and dim == 2 else layout
        return rotary(_ops.readable(q), _ops.readable(k), angles_of(q, cos, sin), order)

    apply_rotary_pos_emb.__doc__ = original.__doc__
    return apply_rotary_pos_emb
