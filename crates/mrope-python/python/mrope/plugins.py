"""Places for mrope inside trainers, through the doors that they have.

======================  =============================  ===========================================
trainer                 its door                       opened by
======================  =============================  ===========================================
VeOmni                  registry of kernels            ``install("veomni")`` before the model is built
ms-swift                table of patches for NPUs      ``install("ms-swift")``, as in a file given to
                                                       ``--external_plugins``
LLaMA-Factory, v1       registry of kernels            ``install("llamafactory")``, and ``mrope`` among
                                                       the kernels of the configuration
axolotl                 plugins                        ``plugins: [mrope.plugins.Axolotl]``
======================  =============================  ===========================================
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ._patch import _replacement, patch

__all__ = ["install", "rotate", "rotate_vision"]


def _refused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> None:
    raise ValueError(
        f"cos: found shape {list(cos.shape)} and unsqueeze_dim {unsqueeze_dim}, expected "
        "[batch, seq, rotary_dim] with heads in dimension 1 or 2"
    )


_of_tokens = _replacement(_refused, "half", False, "bnsd")
_of_patches = _replacement(_refused, "half", False, "tnd")


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | int | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k as transformers' ``apply_rotary_pos_emb`` does, in one pass.

    Args:
        q, k: ``[batch, heads, seq, head_dim]``, or ``[batch, seq, heads, head_dim]`` with 2 as
            ``unsqueeze_dim``.
        cos, sin: ``[batch, seq, rotary_dim]``, with any sections already in place; channels past
            rotary_dim pass unchanged.
        position_ids: not needed; a number is taken for ``unsqueeze_dim``, as ms-swift does.

    Raises ``ValueError`` for other shapes.
    """
    dim = position_ids if isinstance(position_ids, int) else unsqueeze_dim
    return _of_tokens(q, k, cos, sin, dim)


def rotate_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The same of a tower: q and k ``[tokens, heads, head_dim]``, cos and sin ``[tokens, D]``."""
    return _of_patches(q, k, cos, sin)


def install(trainer: str) -> None:
    """Puts mrope into a trainer, in this process.

    Args:
        trainer: ``"veomni"``, ``"ms-swift"`` or ``"llamafactory"``. axolotl asks by itself.

    Raises ``ValueError`` for others, ``ImportError`` where the trainer is not installed, and
    ``RuntimeError`` where its door is not there.
    """
    if trainer not in _DOORS:
        raise ValueError(f"trainer: found {trainer!r}, expected one of {list(_DOORS)}")
    _DOORS[trainer]()


# Operation and variant in VeOmni's registry.
_VEOMNI = {
    ("rotary_pos_emb", "full"): rotate,
    ("rotary_pos_emb", "partial"): rotate,
    ("rotary_pos_emb_vision", "full"): rotate_vision,
}


def _veomni() -> None:
    importlib.import_module("veomni.ops")
    registry = importlib.import_module("veomni.ops.kernel_registry")
    for (op, variant), function in _VEOMNI.items():
        # On an NPU its configuration allows no other name than "npu".
        for name, device in (("mrope", "any"), ("npu", "npu")):
            spec = registry.KernelSpec(
                name=name,
                op_name=op,
                variant=variant,
                factory=lambda function=function: function,
                hardware=registry.HardwareRequirement(device_type=device),
                description="mrope: one pass forward, one backward",
            )
            registry.KERNEL_REGISTRY.register(spec, force=True)


def _ms_swift() -> None:
    table = importlib.import_module("swift.model.npu_patch.model")
    rotate_in = {
        name: patches
        for name, patches in vars(table).items()
        if name.endswith("_PATCHES") and "apply_rotary_pos_emb" in patches
    }
    if not rotate_in:
        raise RuntimeError(
            f"{table.__name__}: found no table of patches with apply_rotary_pos_emb, expected those "
            "of ms-swift 4.6; use mrope.patch(model) instead"
        )
    for name, patches in rotate_in.items():
        patches["apply_rotary_pos_emb"] = rotate
        if table._APPLIED:
            family = name.removesuffix("_PATCHES").lower()
            file = f"transformers.models.{family}.modeling_{family}"
            importlib.import_module(file).apply_rotary_pos_emb = rotate


def _llamafactory() -> None:
    kernels = "llamafactory.v1.plugins.model_plugins.kernels"
    base = importlib.import_module(f"{kernels}.base")
    # First its own, which it finds by itself.
    importlib.import_module(f"{kernels}.interface")
    registry = importlib.import_module(f"{kernels}.registry")

    class Mrope(base.BaseKernel):
        """The rotation of all files of a model's modules, with norms of q and k where it can."""

        _kernel_id = "mrope"
        _device = [base.DeviceType.CPU, base.DeviceType.NPU]

        @classmethod
        def apply(cls, **given: Any) -> Any:
            patch(given["model"], norms=True)
            return given["model"]

    if registry.Registry.get("mrope") is None:
        registry.register_kernel(Mrope)


_DOORS: dict[str, Callable[[], None]] = {
    "veomni": _veomni,
    "ms-swift": _ms_swift,
    "llamafactory": _llamafactory,
}


def __getattr__(name: str) -> Any:
    if name != "Axolotl":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = importlib.import_module("axolotl.integrations.base")

    class Axolotl(base.BasePlugin):
        """Patches the model that axolotl has built, before its adapters are added."""

        def post_model_build(self, cfg: Any, model: Any) -> None:
            patch(model, norms=True)

    globals()[name] = Axolotl
    return Axolotl
