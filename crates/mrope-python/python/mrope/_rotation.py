"""What a function that rotates computes: its pairs, axes, angles and gradient, by trying it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Call", "Rotation", "probe"]

# Tokens that angles are read at.
_MOST = 1024
# Ids of text, time, height and width; more are angles that coincide by turning around.
_MOST_AXES = 4
# A table of one id has the same bits at all its tokens, but for the tails of vectors.
_SAME = 2.5e-7
_SAME_16 = 2e-2


@dataclass(frozen=True)
class Rotation:
    """A function that rotates, as its results on random numbers say.

    Attributes:
        function: its name, with its module's.
        gradient: "the adjoint"; "none", or "another" where it is something else.
        pairing: "half" (channel c with c + width / 2), "adjacent" (2 j with 2 j + 1),
            "interleave_half" (reads as adjacent, writes as half), or which channels the first one
            reaches.
        head_dim: channels of a head.
        first, width: the rotated channels.
        order: of the axes over the pairs: "one" axis, "sections" one after another, or
            "interleaved"; empty where the angles do not tell.
        axes: the id axis of each pair, numbered as in ``ids``, or as they appear.
        ids: the position ids that the angles follow; empty if the batch has none like them.
        frequencies: the highest and lowest, in radians a step; empty where angles are of no steps.
        theta: of frequencies ``theta ** (-j / pairs)``; None for others, as of scaled rotations.
        per_axis: each axis has all frequencies from 1 down, rather than a part of one list.
        scale: what lengths are multiplied by.
    """

    function: str
    gradient: str = "the adjoint"
    pairing: str = ""
    head_dim: int = 0
    first: int = 0
    width: int = 0
    order: str = ""
    axes: list[int] = field(default_factory=list)
    ids: str = ""
    frequencies: list[float] = field(default_factory=list)
    theta: float | None = None
    per_axis: bool = False
    scale: float = 1.0

    def __str__(self) -> str:
        channels = f"channels {self.first} to {self.first + self.width - 1} of {self.head_dim}"
        words = [
            self.pairing,
            channels * bool(self.width),
            self._axes(),
            self._angles(),
        ]
        words += [f"scale {self.scale:.4g}", f"gradient {self.gradient}"]
        return f"{self.function}: {', '.join(word for word in words if word)}"

    def _axes(self) -> str:
        if len(set(self.axes)) < 2:
            return "one axis" * bool(self.axes)
        pairs = [self.axes.count(axis) for axis in sorted(set(self.axes))]
        if self.order == "sections":
            pairs = [len(list(run)) for _, run in groupby(self.axes)]
        return f"{len(pairs)} axes, {self.order} {pairs}" + f" of {self.ids}" * bool(self.ids)

    def _angles(self) -> str:
        if not self.frequencies:
            return "angles of no steps" * bool(self.width)
        if self.theta is not None:
            return f"theta {self.theta:.6g}" + " of each axis" * self.per_axis
        high, low = self.frequencies
        if high == low:
            return f"frequency {high:.3g}"
        return f"frequencies {high:.3g} to {low:.3g}, not by one theta"


class Call:
    """The arguments that a function was called with, to call it again with others.

    Args:
        code: of the function.
        names: what it is called by: module and name.
        scope: its globals.
        given: its arguments.
        moved: those that are rotated.
    """

    def __init__(
        self,
        code: CodeType,
        name: str,
        scope: dict[str, Any],
        given: dict[str, Any],
        moved: list[str],
    ) -> None:
        self.name = name
        self.moved = moved
        self._given = given
        self._names = code.co_varnames[: code.co_argcount]
        self._function = FunctionType(code, scope)

    def doubled(self) -> Call:
        """With float64 in place of shorter types, so that differences are the function's."""
        other = object.__new__(Call)
        other.__dict__.update(self.__dict__)
        other._given = {name: tree_map(_doubled, value) for name, value in self._given.items()}
        return other

    def random(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Other values to be rotated."""
        return {name: _random(self._given[name], generator) for name in self.moved}

    def is_coarse(self) -> bool:
        """Whether its angles have 16 bits."""
        leaves = tree_leaves([v for name, v in self._given.items() if name not in self.moved])
        return any(isinstance(x, Tensor) and x.element_size() == 2 for x in leaves)

    def __call__(self, x: Mapping[str, Tensor]) -> list[Tensor]:
        given = {**self._given, **{name: value.clone() for name, value in x.items()}}
        ordered = [given.pop(name) for name in self._names]
        made = self._function(*ordered, **given)
        return [t for t in tree_leaves(made) if isinstance(t, Tensor) and t.is_floating_point()]


def probe(call: Call, ids: Mapping[str, Tensor]) -> tuple[Rotation, str] | None:
    """What a function computes, and what is wrong about its gradient; None if it does not rotate.

    A rotation is linear, and its gradient is its adjoint. Tried in float64, then in the types of
    the call.
    """
    wide = call.doubled()
    tried = _linear(wide)
    if tried is None:
        wide = call
        tried = _linear(call)
    if tried is None:
        return None
    x, y, directions = tried
    found = replace(_described(wide, x, y, ids, call.is_coarse()), function=call.name)
    gradient, detail = _gradient(wide, x, y, directions)
    return replace(found, gradient=gradient), detail


def _linear(call: Call) -> tuple[dict, list[Tensor], list] | None:
    """Random numbers and results, of a call that is linear and keeps shapes; else None."""
    generator = torch.Generator().manual_seed(2)
    try:
        x = call.random(generator)
        with torch.no_grad():
            y, twice = call(x), call({name: 2 * value for name, value in x.items()})
            if not x or [t.shape for t in y] != [t.shape for t in x.values()]:
                return None
            if not all(torch.allclose(2 * a, b, rtol=1e-3, atol=1e-3) for a, b in zip(y, twice)):
                return None
            directions = [(z, call(z)) for z in (call.random(generator) for _ in range(2))]
    except Exception:  # It is called otherwise than by these arguments alone.
        return None
    return x, y, directions


def _gradient(call: Call, x: dict, y: list[Tensor], directions: list) -> tuple[str, str]:
    """Whether the gradient is the adjoint, and what it is where it is not."""
    generator = torch.Generator().manual_seed(3)
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    # Not the leaves themselves: in place, they could not be written.
    results = call({name: value * 1 for name, value in leaves.items()})
    weights = [_random(t, generator) for t in y]
    total = sum((w * t).sum() for w, t in zip(weights, results))
    gradients: list[Tensor | None] = [None] * len(x)
    if total.requires_grad:
        gradients = list(torch.autograd.grad(total, list(leaves.values()), allow_unused=True))
    for name, gradient, w, along in zip(x, gradients, weights, range(len(y))):
        if gradient is None or not gradient.any():
            return (
                "none",
                f"{name} gets no gradient: expected the rotation back of its result's",
            )
        # Of a linear function, <w, f(z)> = <gradient, z>, whatever z is.
        allowed = 0.1 if gradient.element_size() == 2 else 1e-4
        for z, results in directions:
            result = results[along].double()
            expected = float((w.double() * result).sum())
            found = float((gradient.double() * z[name].double()).sum())
            scale = float(w.double().norm() * result.norm())
            if not abs(found - expected) <= allowed * scale / max(1, result.numel()) ** 0.5:
                return (
                    "another",
                    f"{name}: <gradient, z> = {found:.6g}, <w, f(z)> = {expected:.6g}",
                )
    return "the adjoint", ""


def _described(
    call: Call, x: dict, y: list[Tensor], ids: Mapping[str, Tensor], is_coarse: bool
) -> Rotation:
    """All but the function's name and gradient."""
    name = call.moved[0]
    given, turned = x[name].double(), y[0].double()
    head_dim = given.shape[-1]

    def run(channels: list[int]) -> Tensor:
        ones = {key: torch.zeros_like(value) for key, value in x.items()}
        ones[name][..., channels] = 1
        with torch.no_grad():
            return call(ones)[0].double()

    def reached(channel: int) -> list[int]:
        return run([channel]).reshape(-1, head_dim).abs().amax(0).nonzero().flatten().tolist()

    differs = (turned - given).abs() > 1e-6 * given.abs()
    changed = differs.reshape(-1, head_dim).any(0).nonzero().flatten().tolist()
    if not changed:
        return Rotation("", head_dim=head_dim)
    first = changed[0]
    reach = reached(first)
    apart = reach[1] - first if len(reach) == 2 and reach[0] == first else 0
    if not apart or first + 1 == head_dim:
        pairing = f"channel {first} with {[c for c in reach if c != first]}"
        return Rotation("", pairing=pairing, head_dim=head_dim, first=first)
    pairs = (changed[-1] + 2 - first) // 2 if apart == 1 else apart
    ways = {
        # Members that are read, and those that are written.
        "half": ((0, 1, apart), (0, 1, apart)),
        "adjacent": ((0, 2, 1), (0, 2, 1)),
        "interleave_half": ((0, 2, 1), (0, 1, apart)),
    }
    for pairing, (read, written) in ways.items():
        (a, b), (left, right) = (
            [[first + start + j * step for j in range(pairs)] for start in (begin, begin + gap)]
            for begin, step, gap in (read, written)
        )
        if max(a[-1], b[-1], left[-1], right[-1]) >= head_dim:
            continue
        ones = run(a)
        cos, sin = ones[..., left], ones[..., right]
        expected = (
            given[..., a] * cos - given[..., b] * sin,
            given[..., a] * sin + given[..., b] * cos,
        )
        found = turned[..., left], turned[..., right]
        if all(torch.allclose(t, u, rtol=1e-3, atol=1e-3) for t, u in zip(found, expected)):
            rotation = Rotation(
                "",
                pairing=pairing,
                head_dim=head_dim,
                first=first,
                width=2 * pairs,
                scale=float(torch.hypot(cos, sin).median()),
            )
            return _with_angles(rotation, torch.atan2(sin, cos), ids, is_coarse)
    pairing = f"channel {first} with {[c for c in reach if c != first]}"
    return Rotation("", pairing=pairing, head_dim=head_dim, first=first)


def _with_angles(
    rotation: Rotation, phases: Tensor, ids: Mapping[str, Tensor], is_coarse: bool
) -> Rotation:
    """Adds the axes and frequencies: pairs of one axis tell the same tokens apart."""
    for dim in reversed(range(phases.dim() - 1)):
        # Heads, and samples that share their angles.
        if (phases == phases.narrow(dim, 0, 1)).all():
            phases = phases.select(dim, 0)
    shape = phases.shape[:-1]
    phases = phases.reshape(-1, phases.shape[-1])[:_MOST]
    if len(phases) < 2:
        return rotation
    same = _SAME_16 if is_coarse else _SAME
    groups: list[Tensor] = []
    of_pair = []
    for column in phases.T:
        classes = _classes(column, same)
        near = [i for i, other in enumerate(groups) if int((other != classes).sum()) <= 2]
        if not near:
            groups.append(classes)
        of_pair.append(near[0] if near else len(groups) - 1)
    if len(groups) > _MOST_AXES:
        return rotation
    name, steps, axes = _ids_of(groups, ids, shape)
    frequencies = [_frequency(p, steps[g]) for p, g in zip(phases.T, of_pair)]
    runs = [axis for axis, _ in groupby(of_pair)]
    order = "one" if len(groups) == 1 else "sections"
    if len(runs) > len(groups):
        order = "interleaved"
    if any(f is None for f in frequencies):
        return rotation
    known = [abs(f) for f in frequencies]
    rotation = replace(rotation, order=order, axes=[axes[g] for g in of_pair], ids=name)
    rotation = replace(rotation, frequencies=[max(known), min(known)])
    theta = _theta(known)
    if theta is None and len(groups) > 1:
        parts = [[f for f, g in zip(known, of_pair) if g == i] for i in range(len(groups))]
        # A single frequency of 1 says nothing.
        each = [_theta(part) for part in parts if abs(part[0] - 1) > 1e-3 or len(part) > 1]
        if each and None not in each and max(each) - min(each) <= 0.01 * max(each):
            return replace(rotation, theta=each[0], per_axis=True)
    return replace(rotation, theta=theta)


def _classes(values: Tensor, same: float) -> Tensor:
    """For each token, the first one whose value is the same."""
    ordered, order = values.sort()
    apart = ordered.diff() > same * ordered.abs()[1:].maximum(ordered.abs()[:-1])
    label = torch.cat([apart.new_zeros(1), apart]).cumsum(0)
    first = torch.full_like(label, len(values)).scatter_reduce(0, label, order, "amin")
    return torch.empty_like(label).scatter(0, order, first[label])


def _ids_of(
    groups: list[Tensor], ids: Mapping[str, Tensor], shape: torch.Size
) -> tuple[str, list[Tensor], list[int]]:
    """The name of the ids that tell tokens apart as groups do, the steps, and the axis of each."""
    for name, given in ids.items():
        rows = given.double().reshape(-1, *given.shape[-2:]) if given.dim() == 3 else given[None]
        if rows.shape[1:] != shape and rows.dim() > 2 and rows.shape[2:] == shape:
            rows = rows[:, 0]
        rows = rows.double().flatten(1)[:, :_MOST]
        if rows.shape[1] != len(groups[0]):
            continue
        classes = [_classes(row, 0.0) for row in rows]
        found = []
        for group in groups:
            fits = [i for i, c in enumerate(classes) if int((c != group).sum()) <= 2]
            # Qwen's ids have those of the text in front.
            free = [i for i in fits if i not in found]
            found += free[-1:] if len(rows) == 4 and len(groups) == 1 else free[:1]
        if len(found) == len(groups):
            return name, [rows[axis] for axis in found], found
    # In the order that they appear in.
    steps = [torch.unique(group, return_inverse=True)[1].double() for group in groups]
    return "", steps, list(range(len(groups)))


def _frequency(phases: Tensor, steps: Tensor) -> float | None:
    """Radians a step, if all angles are by whole steps; else None."""
    distance = (steps - steps[0]).abs()
    distance[distance == 0] = math.inf
    near = int(distance.argmin())
    if not math.isfinite(float(distance[near])):
        return None
    step = float(steps[near] - steps[0])
    frequency = float(_wrapped(phases[near] - phases[0])) / step
    error = _wrapped(phases - phases[0] - frequency * (steps - steps[0])).abs().max()
    return frequency if float(error) < 1e-2 else None


def _wrapped(phases: Tensor) -> Tensor:
    return torch.remainder(phases + math.pi, 2 * math.pi) - math.pi


def _theta(frequencies: list[float]) -> float | None:
    """Of frequencies theta ** (-j / pairs), j = 0, 1, ...; None for others."""
    pairs = len(frequencies)
    if pairs < 2 or min(frequencies) <= 0 or abs(frequencies[0] - 1) > 1e-3:
        return None
    ratio = (frequencies[-1] / frequencies[0]) ** (1 / (pairs - 1))
    expected = [ratio**j for j in range(pairs)]
    if any(abs(f - e) > 2e-3 * e for f, e in zip(frequencies, expected)):
        return None
    return ratio**-pairs if ratio < 1 else None


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def _doubled(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value
