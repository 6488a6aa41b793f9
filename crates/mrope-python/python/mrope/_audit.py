"""A search for gradients that are cut or spoiled, in any model of PyTorch: one step, watched."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ._rotation import Call, Rotation, probe

__all__ = ["Finding", "Report", "Rotation", "audit"]

_ROTATES = re.compile(r"rot(ary|ate)|rope", re.IGNORECASE)
# Functions whose results have their inputs' shape or type, and none of their values.
_SHAPE_ALONE = re.compile(r"new_|\w+_like$")
_ANGLES = re.compile(r"cos|sin|freq|angle|position|table|cache|emb")
_OURS = (os.path.dirname(torch.__file__), __file__)
_CHECKPOINT = inspect.unwrap(checkpoint).__code__
# The largest whole number up to which a type has all of them.
_EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}


@dataclass(frozen=True)
class Finding:
    """A fault, or a note.

    Attributes:
        kind: "no gradient", "zero gradient", "gradient is not finite", "rotation without gradient",
            "gradient of a rotation", "position ids", "recomputation" or "packing".
        what: the parameters, the function or the tensor.
        where: the function at which it happens, with file and line; empty if it is not known.
        detail: what was found, and what was expected.
        severity: "fault", or "note" for parameters that this batch does not need, in a model whose
            parameters are all trained.
    """

    kind: str
    what: str
    where: str
    detail: str
    severity: str = "fault"


@dataclass(frozen=True)
class Report:
    """What :func:`audit` found.

    Attributes:
        findings: the faults and notes.
        parameters: how many parameters ask for a gradient.
        rotations: the functions that rotate, each probed by random numbers.
    """

    findings: list[Finding]
    parameters: int
    rotations: list[Rotation]

    @property
    def ok(self) -> bool:
        """True without a fault."""
        return not self.faults

    @property
    def faults(self) -> list[Finding]:
        """The findings that are not notes."""
        return [found for found in self.findings if found.severity == "fault"]

    def json(self) -> str:
        """The report for programs."""
        return json.dumps({"ok": self.ok, **asdict(self)})

    def __str__(self) -> str:
        lines = [f"{self.parameters} parameters, {len(self.rotations)} rotations"]
        lines += [f"rotation  {rotation}" for rotation in self.rotations]
        for found in self.findings:
            at = f"\n    at {found.where}" if found.where else ""
            word = "FAULT" if found.severity == "fault" else "note "
            lines.append(f"{word}     {found.kind}: {found.what}{at}\n    {found.detail}")
        lines.append("no fault found" if self.ok else f"{len(self.faults)} faults")
        return "\n".join(lines)


def audit(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
) -> Report:
    """Runs one forward and backward of a model, and says where gradients are cut or spoiled.

    Checked: every parameter that asks for a gradient gets one that is finite and not zero; every
    rotation that a function computes has its adjoint as its gradient; position ids are exact in
    their type, and their axes differ where there are pictures; checkpointed layers compute the same
    again; samples of a pack do not meet. The model's parameters, gradients, buffers and modes, and
    PyTorch's random numbers, are as before afterwards.

    Args:
        model: in the mode that it trains in.
        batch: what ``model(**batch)`` takes.
        loss: of the model's output; its attribute ``loss`` by default, else a weighted sum of its
            first floating-point tensor.
    """
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    try:
        with (
            torch.random.fork_rng(),
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),
            _without_zeros(names.values()),
        ):
            return _Audit(model, batch, loss or _default_loss, names).report()
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def _without_zeros(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Small numbers in place of zeros: an adapter starts so, and its other half's gradient too."""
    generator = torch.Generator().manual_seed(1)
    filled = [p for p in parameters if not p.any()]
    with torch.no_grad():
        for p in filled:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for p in filled:
                p.zero_()


def _default_loss(output: Any) -> Tensor:
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    return found if found is not None else _weighted(output)


def _weighted(output: Any) -> Tensor:
    """A sum in which each number counts differently."""
    y = next(t for t in _tensors(output) if t.is_floating_point())
    weights = torch.arange(y.numel(), device=y.device).add(1).sin().reshape(y.shape)
    return (y.float() * weights).sum()


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if hasattr(tree, "to_tuple"):
        tree = tree.to_tuple()
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _place(frame: FrameType | None) -> str:
    """The innermost function outside PyTorch and this file, its line, and its two callers."""
    found = []
    while frame is not None and len(found) < 3:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            name = getattr(code, "co_qualname", code.co_name)
            file = "/".join(code.co_filename.split("/")[-2:])
            found.append(name if found else f"{name} ({file}:{frame.f_lineno})")
        frame = frame.f_back
    return " in ".join(found)


class _Node:
    """A tensor that a function returned: what it was made from, and whether a gradient passes."""

    __slots__ = ("cut", "gradient", "own", "parents", "parts", "passes", "place")

    def __init__(self, parents: tuple[_Node, ...], parts: int, passes: bool, cut: bool) -> None:
        self.parents = parents
        # A bit for each parameter that its values depend on.
        self.parts = parts
        self.passes = passes
        # A gradient would have come in, and none goes out.
        self.cut = cut
        # It came out of a function with its own backward.
        self.own = False
        self.place = ""
        # What came back, in the second pass: "none", "zero", "finite" or "not finite".
        self.gradient = "none"


class _Watch(TorchFunctionMode):
    """Notes which parameters' values each tensor depends on, and where gradients stop."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [(t, _node_of(t)) for t in _tensors((args, kwargs))]
        given = [(t, node) for t, node in given if node is not None]
        # Before the call, for it may write into its input.
        wants = any(t.requires_grad for t, _ in given)
        result = func(*args, **kwargs)
        if (
            not given
            or func is Tensor.requires_grad.__set__
            or _SHAPE_ALONE.match(getattr(func, "__name__", ""))
        ):
            return result
        for t, node in given:
            if t.requires_grad and not node.passes and not t.is_leaf:
                # The inside of an autograd.Function, whose result has a gradient after all.
                node.cut, node.passes, node.own = False, True, True
                t.register_hook(lambda g, node=node: _note(node, g))
        parents = tuple(dict.fromkeys(node for _, node in given))
        parts = 0
        for node in parents:
            parts |= node.parts
        for out in _tensors(result):
            if not out.is_floating_point() and not out.is_complex():
                continue
            cut = wants and not out.requires_grad
            node = _Node(parents, parts, out.requires_grad, cut)
            node.place = _place(sys._getframe(1))
            out._mrope_node = node
            if out.requires_grad and not out.is_leaf:
                out.register_hook(lambda g, node=node: _note(node, g))
        return result


def _note(node: _Node, gradient: Tensor) -> None:
    node.gradient = _kind_of(gradient)


def _kind_of(gradient: Tensor | None) -> str:
    if gradient is None:
        return "none"
    if not torch.isfinite(gradient).all():
        return "not finite"
    return "finite" if gradient.any() else "zero"


def _node_of(t: Tensor) -> _Node | None:
    return getattr(t, "_mrope_node", None)


class _Calls:
    """The first call of each function that may rotate, and whether layers are checkpointed."""

    def __init__(self) -> None:
        self.found: list[Call] = []
        self.checkpoints = False
        self._seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        if _in_kernel():
            return
        self._seen.add(code)
        if code.co_filename.startswith(_OURS):
            self.checkpoints |= code is _CHECKPOINT
            return
        count = code.co_argcount + code.co_kwonlyargcount
        names = code.co_varnames[:count]
        name = getattr(code, "co_qualname", code.co_name)
        # What has others' variables or any arguments cannot be called again by its code.
        if code.co_freevars or code.co_flags & CO_VARARGS:
            return
        if not _ROTATES.search(name) and not {"cos", "sin"} <= set(names):
            return
        if not any(_ANGLES.search(name) for name in names):
            return
        given = {name: _copy(frame.f_locals[name]) for name in names}
        if code.co_flags & CO_VARKEYWORDS:
            given |= frame.f_locals[code.co_varnames[count]]
        moved = [
            name
            for name, value in given.items()
            if isinstance(value, Tensor) and value.is_floating_point() and not _ANGLES.search(name)
        ]
        if moved:
            scope = frame.f_globals
            name = f"{scope.get('__name__')}.{name}"
            self.found.append(Call(code, name, scope, given, moved))


def _in_kernel() -> bool:
    """True inside an operator, whose gradient is its own and not that of what it calls."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    below = excluded.has(torch._C.DispatchKey.AutogradOther)
    return below and not torch.is_inference_mode_enabled()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class _Audit:
    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        loss: Callable,
        names: dict[str, Tensor],
    ) -> None:
        self.model = model
        self.batch = batch
        self.loss = loss
        self.names = names
        self.findings: list[Finding] = []
        self.rotations: list[Rotation] = []

    def report(self) -> Report:
        seed = torch.initial_seed()
        calls = _Calls()
        ids: dict[str, Tensor] = {}
        self._step(seed, calls, ids)
        kinds = {name: _kind_of(p.grad) for name, p in self.names.items()}
        if any(kind != "finite" for kind in kinds.values()):
            self._name_cuts(kinds, self._step(seed, None, {}))
        ids = {**_ids_of(self.batch), **ids}
        for call in calls.found:
            self._probe(call, ids)
        for name, positions in ids.items():
            self._check_ids(name, positions)
        self._check_pack()
        return Report(self.findings, len(self.names), self.rotations)

    def _step(self, seed: int, calls: _Calls | None, ids: dict[str, Tensor]) -> list[_Node]:
        """One forward and backward; the nodes of the loss.

        With ``calls``, of the functions, ids and recomputations; else of gradients.
        """
        torch.manual_seed(seed)
        for p in self.names.values():
            p.grad = None
        sums: dict[tuple[str, int], Tensor] = {}
        with contextlib.ExitStack() as stack:
            if calls is None:
                stack.enter_context(_nodes_of(self.names))
            count: dict[str, int] = {}
            is_backward = [False]
            if calls is not None:
                for name, module in self.model.named_modules():
                    hook = self._compare(name, sums, count, is_backward, calls)
                    stack.callback(module.register_forward_hook(hook).remove)
                    hook = _note_ids(name, ids)
                    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
            # Else it would end before the last module of a layer.
            stack.enter_context(set_checkpoint_early_stop(False))
            with _Watch() if calls is None else _profiled(calls):
                loss = self.loss(self.model(**self.batch))
            nodes = [node for node in [_node_of(loss)] if node is not None]
            if not loss.requires_grad:
                return nodes
            is_backward[0] = True
            count.clear()
            loss.backward()
        return nodes

    def _compare(
        self,
        name: str,
        sums: dict[tuple[str, int], Tensor],
        count: dict[str, int],
        is_backward: list[bool],
        calls: _Calls,
    ) -> Callable:
        """A hook that keeps a sum of each result, and compares it in the recomputation."""

        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if not calls.checkpoints:
                return
            made = [t for t in _tensors(output) if t.is_floating_point()]
            if not made:
                return
            with torch.no_grad(), torch._C.DisableTorchFunction():
                found = sum(t.detach().double().abs().sum() for t in made)
            at = (name, count.get(name, 0))
            count[name] = at[1] + 1
            if not is_backward[0]:
                sums[at] = found
                return
            known = any(finding.kind == "recomputation" for finding in self.findings)
            if at in sums and not torch.equal(sums[at], found) and not known:
                place = f"{type(module).__name__} {name}"
                detail = (
                    "the forward and its recomputation in the backward differ: expected the same "
                    "(a dropout without preserve_rng_state, or a state that the forward changed)"
                )
                self.findings.append(Finding("recomputation", place, "", detail))

        return hook

    def _name_cuts(self, kinds: dict[str, str], ends: list[_Node]) -> None:
        """Adds a fault for each place that spoils gradients, with the parameters behind it."""
        kind_of = {
            "none": "no gradient",
            "zero": "zero gradient",
            "not finite": "gradient is not finite",
        }
        places: dict[tuple[str, str, bool], list[str]] = {}
        for bit, (name, kind) in enumerate(kinds.items()):
            if kind != "finite":
                places.setdefault((kind, *_cut_of(1 << bit, ends)), []).append(name)
        # Where others are frozen, these were chosen to be trained.
        all_trained = all(p.requires_grad for p in self.model.parameters())
        for (kind, place, is_cut), names in places.items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
            detail = "its result has values of these parameters, and passes no such gradient back"
            if not place:
                detail = "no result that the loss depends on was computed from them"
            elif kind == "zero" and not is_cut:
                detail = "PyTorch's own gradient is zero here: this batch does not depend on them"
            is_note = all_trained and not is_cut and (kind == "zero" or not place)
            severity = "note" if is_note else "fault"
            self.findings.append(Finding(kind_of[kind], shown, place, detail, severity))

    def _probe(self, call: Call, ids: Mapping[str, Tensor]) -> None:
        """Adds a rotation, and a fault if its gradient is not its adjoint."""
        found = probe(call, ids)
        if found is None:
            return
        rotation, detail = found
        self.rotations.append(rotation)
        if detail:
            kind = "rotation without gradient"
            if rotation.gradient != "none":
                kind = "gradient of a rotation"
            self.findings.append(Finding(kind, call.name, call.name, detail))

    def _check_ids(self, name: str, positions: Tensor) -> None:
        exact = _EXACT.get(positions.dtype)
        if exact is not None and positions.numel() and not self._has("position ids"):
            highest = float(positions.abs().max())
            if exact <= 1 << 11 or highest > exact:
                detail = (
                    f"{positions.dtype}, which has whole numbers up to {exact} alone, the highest "
                    f"is {highest:.0f}: expected int64"
                )
                self.findings.append(Finding("position ids", name, "", detail))
        has_pictures = any(
            isinstance(value, Tensor) and value.numel() and key.startswith("pixel_values")
            for key, value in self.batch.items()
        )
        several = positions.dim() == 3 and positions.shape[0] in (3, 4)
        if has_pictures and several and not self._has("position ids"):
            axes = positions[-3:]
            if torch.equal(axes[0], axes[1]) and torch.equal(axes[1], axes[2]):
                detail = "time, height and width are equal, and the batch has pictures"
                self.findings.append(Finding("position ids", name, "", detail))

    def _has(self, kind: str) -> bool:
        return any(finding.kind == kind for finding in self.findings)

    def _check_pack(self) -> None:
        """Changes the first sample of a pack: the others' results must stay."""
        ids, positions = self.batch.get("input_ids"), self.batch.get("position_ids")
        if not isinstance(ids, Tensor) or not isinstance(positions, Tensor) or ids.dim() != 2:
            return
        rows = positions.reshape(-1, ids.shape[0], positions.shape[-1])
        starts = (rows[:, 0, 1:] < rows[:, 0, :-1]).all(0).nonzero().flatten() + 1
        if rows.shape[-1] != ids.shape[1] or not len(starts):
            return
        start = int(starts[0])
        other = ids.clone()
        other[0, 0] = ids[0, start:][ids[0, start:] != ids[0, 0]][:1].sum()
        self.model.eval()
        with torch.no_grad():
            found = [
                next(t for t in _tensors(_logits(self.model(**{**self.batch, "input_ids": x}))))
                for x in (ids, other)
            ]
        if found[0].dim() < 2 or found[0].shape[1] != ids.shape[1]:
            return
        difference = float((found[0][0, start:] - found[1][0, start:]).abs().max())
        if difference > 0:
            detail = (
                f"a change of the first token changes the sample that starts at token {start} by "
                f"{difference:.2e}: expected none, for the ids start again there"
            )
            self.findings.append(Finding("packing", "attention", "", detail))


def _logits(output: Any) -> Any:
    return getattr(output, "logits", output)


def _cut_of(bit: int, ends: list[_Node]) -> tuple[str, bool]:
    """The place nearest to the loss at which a parameter's gradient is lost or spoiled.

    And whether a detached result or a function's own backward does it: of PyTorch's, a zero is
    right.
    """
    seen = set(ends)
    # Nodes, and the place of the function with its own backward that they are inside of.
    waiting = deque((node, "") for node in ends if node.parts & bit)
    suspected = ""
    while waiting:
        node, inside = waiting.popleft()
        parents = [parent for parent in node.parents if parent.parts & bit]
        if node.cut and not inside and any(parent.passes for parent in parents):
            return node.place, True
        if inside and node.passes and node.gradient != "finite":
            return inside, True
        good = node.passes and node.gradient == "finite"
        spoiled = [p for p in parents if p.passes and p.parents and p.gradient != "finite"]
        if good and (spoiled or any(not p.parents for p in parents)) and not suspected:
            # Near the parameter it is this function, if nothing before was.
            suspected = node.place
        if node.passes:
            inside = node.place if node.own else ""
        for parent in parents:
            if parent not in seen:
                seen.add(parent)
                waiting.append((parent, inside))
    return suspected, False


@contextlib.contextmanager
def _nodes_of(names: dict[str, Tensor]) -> Iterator[None]:
    """Gives each parameter a node with a bit of its own."""
    for bit, parameter in enumerate(names.values()):
        parameter._mrope_node = _Node((), 1 << bit, True, False)
    try:
        yield
    finally:
        for parameter in names.values():
            del parameter._mrope_node


@contextlib.contextmanager
def _profiled(calls: _Calls) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(calls)
    try:
        yield
    finally:
        sys.setprofile(before)


def _note_ids(module: str, ids: dict[str, Tensor]) -> Callable:
    def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and "position_ids" in name:
                ids.setdefault(f"{name} of {module}" if module else name, value.detach())

    return hook


def _ids_of(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if "position_ids" in name}
