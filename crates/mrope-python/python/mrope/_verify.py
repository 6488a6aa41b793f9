"""Golden vectors: rotations that others have computed, with their gradients, in one file each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._spec import RotarySpec
from .torch import angles, rotary

_LAYOUTS = {"B,H,S,D": "bnsd", "B,S,H,D": "bsnd", "S,B,H,D": "sbnd", "T,H,D": "tnd"}


def read(file: str) -> tuple[dict[str, Tensor], RotarySpec, str, dict[str, str]]:
    """The tensors of a file, its rotation, its layout and all that it says.

    Raises ``ValueError`` if it does not say which rotation it is of, or of one that mrope's Python
    half does not read: per-head frequencies, other operations.
    """
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError("golden vectors are safetensors files: pip install safetensors") from None
    with safe_open(file, "pt") as opened:
        said = opened.metadata() or {}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    if said.get("operation", "rotation") not in ("rotation", "inverse"):
        raise ValueError(f"{file}: operation {said['operation']!r}: expected rotation or inverse")
    if "rotation" in said:
        spec = RotarySpec.from_json(said["rotation"])
    elif "model_type" in said:
        parameters = said.get("rope_parameters", "{}")
        vision = said.get("component") == "vision"
        head_dim = int(said["head_dim"])
        spec = RotarySpec.from_json(
            _native.spec_from_rope_parameters(said["model_type"], vision, parameters, head_dim)
        )
    else:
        raise ValueError(f"{file}: expected rotation or model_type in its metadata, found {said}")
    order = said.get("layout", "[B,H,S,D]").rpartition("[")[2].rstrip("]").replace(" ", "")
    if order not in _LAYOUTS:
        raise ValueError(f"{file}: layout {said['layout']!r}: expected one of {list(_LAYOUTS)}")
    return tensors, spec, _LAYOUTS[order], said


def _of(tensors: dict[str, Tensor], name: str) -> Tensor | None:
    for suffix in ("f64", "f32", "bf16", "f16"):
        if f"{name}.{suffix}" in tensors:
            return tensors[f"{name}.{suffix}"]
    return None


def positions_of(tensors: dict[str, Tensor], spec: RotarySpec, layout: str) -> Tensor:
    """``[axes, tokens]``; vision files have ``[tokens, axes]``."""
    positions = next(t for name, t in tensors.items() if name.startswith("position"))
    if layout == "tnd" and positions.shape[-1] == spec.axis_count != 1:
        return positions.T
    return positions


def differences(file: str) -> Iterator[tuple[str, float, float]]:
    """Name, largest difference and what is allowed, of each result in a file.

    Computed in float64 from the file's q, k and gradients; the allowance is that of the widest type
    in which the file has the result.
    """
    tensors, spec, layout, said = read(file)
    table = angles(spec, positions_of(tensors, spec, layout), dtype=torch.float64)
    q, k, gq, gk = (_of(tensors, name) for name in ("q", "k", "gq", "gk"))
    if q is None or k is None:
        raise ValueError(f"{file}: expected q and k, found {sorted(tensors)}")
    if said.get("operation") == "inverse":
        # The inverse of a rotation is its adjoint: results and gradients change places.
        table = type(table)(_adjoint(table.rows), table.geometry)
    q, k = (x.double().requires_grad_() for x in (q, k))
    found: dict[str, Any] = dict(zip(("q_out", "k_out"), rotary(q, k, table, layout)))
    if gq is not None and gk is not None:
        results = (found["q_out"], found["k_out"])
        gradients = torch.autograd.grad(results, (q, k), (gq.double(), gk.double()))
        found.update(zip(("dq", "dk"), gradients))
    for name, value in found.items():
        expected = _of(tensors, name)
        if expected is not None:
            scale = max(1.0, float(expected.abs().max()))
            allowed = 16 * scale * max(torch.finfo(expected.dtype).eps, 1e-8)
            difference = (value.detach() - expected.double()).abs().max()
            yield name, float(difference), allowed


def _adjoint(rows: Tensor) -> Tensor:
    cos, sin = rows.chunk(2, -1)
    return torch.cat([cos, -sin], -1)
