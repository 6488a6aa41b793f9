"""``python -m mrope``: what the installed library can do here, and whether it computes right."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import pathlib
import sys

import torch

from . import RotarySpec, __version__, _native, audit
from ._verify import differences
from .torch import Angles, Norm, angles, rotary


def doctor() -> bool:
    """Prints versions, kernels and devices, and what is missing of CANN with what to do."""
    print(f"mrope {__version__}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}")
    threads = torch.get_num_threads()
    print(f"CPU: kernels for {_native.instruction_set()}, {threads} threads")
    rows = _native.diagnosis()
    try:
        import torch_npu
    except ImportError:
        rows.append(("torch_npu", False, "not installed: tensors stay on the CPU"))
    else:
        rows.append(("torch_npu", True, torch_npu.__version__))
    width = max(len(name) for name, *_ in rows)
    for name, is_ready, text in rows:
        print(f"{name:{width}}  {'ready' if is_ready else 'missing':7}  {text}")
    # A machine without an NPU is in order too.
    return True


def verify(files: list[str]) -> bool:
    """Recomputes q_out, k_out, dq and dk of golden vectors, and prints the largest differences."""
    passed = True
    for file in files:
        for name, difference, allowed in differences(file):
            right = difference <= allowed
            passed &= right
            verdict = "right" if right else "WRONG"
            print(f"{verdict}  {file}  {name}: differs by {difference:.1e}, allowed {allowed:.1e}")
    return passed


def gradcheck() -> bool:
    """Compares gradients with finite differences, by PyTorch, in float64."""
    passed = True
    layouts = {"bsnd": (2, 3, 2, 12), "bnsd": (2, 2, 3, 12), "sbnd": (3, 2, 2, 12)}
    pairings = ["half", "adjacent", "quarter", "interleave_half"]
    for pairing, layout, norm in itertools.product(pairings, layouts, [None, Norm(1e-6)]):
        spec = RotarySpec(
            12, rotary_dim=8, rotary_offset=2, pairing=pairing, axes={"contiguous": [1, 2, 1]}
        )
        table = angles(spec, torch.randint(0, 50, (3, 2, 3)), dtype=torch.float64)
        q, k = (torch.randn(layouts[layout], dtype=torch.float64) for _ in range(2))
        inputs = [x.requires_grad_() for x in (q, k, table.rows)]

        def turn(q, k, rows, table=table, layout=layout, norm=norm):
            return rotary(q, k, Angles(rows, table.geometry), layout, norm=norm)

        right = torch.autograd.gradcheck(turn, inputs, raise_exception=False)
        if right and norm is None:
            right = torch.autograd.gradgradcheck(turn, inputs, raise_exception=False)
        passed &= right
        with_norm = ", with norm" if norm else ""
        print(f"{'right' if right else 'WRONG'}  {pairing}, {layout}{with_norm}")
    return passed


def audit_script(where: str, as_json: bool) -> bool:
    """Looks for cut and spoiled gradients in a model: one step, watched.

    ``SCRIPT.py:FUNCTION`` names a function that returns a model and a batch, as ``audit`` takes
    them.
    """
    file, _, name = where.rpartition(":")
    if not file:
        raise ValueError(f"found {where!r}, expected SCRIPT.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem, file)
    if spec is None or spec.loader is None or not pathlib.Path(file).is_file():
        raise ValueError(f"found no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    report = audit(*getattr(module, name)())
    print(report.json() if as_json else report)
    return report.ok


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mrope", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help=doctor.__doc__)
    verifying = commands.add_parser("verify", help=verify.__doc__)
    verifying.add_argument("files", nargs="+", help="safetensors, as docs/dump-format.md says")
    commands.add_parser("gradcheck", help=gradcheck.__doc__)
    auditing = commands.add_parser("audit", help="looks for cut and spoiled gradients in a model")
    auditing.add_argument("where", help="SCRIPT.py:FUNCTION, which returns a model and a batch")
    auditing.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args()
    if arguments.command in ("verify", "audit"):
        try:
            if arguments.command == "verify":
                passed = verify(arguments.files)
            else:
                passed = audit_script(arguments.where, arguments.json)
        except Exception as error:  # safetensors and scripts have exceptions of their own
            print(f"error: {error}", file=sys.stderr)
            return 2
    else:
        passed = {"doctor": doctor, "gradcheck": gradcheck}[arguments.command]()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
