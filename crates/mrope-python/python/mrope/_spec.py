"""What a model's configuration says about rotation."""

from __future__ import annotations

import json
from typing import Any

from . import _native

__all__ = ["RotarySpec"]


class RotarySpec:
    """Which channels pair, which position axis turns which pair, and how fast.

    Checked once, when it is made; a wrong value raises ``ValueError`` that says what was expected.

    Args:
        head_dim: channels of a head.
        rotary_dim: channels that are rotated, all by default; the others pass unchanged.
        rotary_offset: the first rotated channel.
        pairing: ``"half"`` (channel j with j + R/2: Llama, Qwen), ``"adjacent"`` (2j with 2j + 1:
            GPT-J, GLM), ``"quarter"`` or ``"interleave_half"`` (CANN's modes 2 and 3).
        axes: ``"single"`` for text, or one entry of a dictionary: ``{"contiguous": [16, 24, 24]}``
            (Qwen2-VL), ``{"striped": [24, 20, 20]}`` (Qwen3-VL), ``"ernie"``, ``"balanced"``,
            ``"per_axis"``, ``"per_axis_striped"``, ``"per_channel"``. Sections count pairs and sum
            to rotary_dim / 2.
        theta: the base of the frequencies, 10000 by default.
        frequencies: scaled or listed frequencies, as :meth:`json` writes them; instead of theta.
        attention_scaling: the factor on cos and sin, where the frequencies do not imply it.

    >>> RotarySpec(128, axes={"contiguous": [16, 24, 24]}, theta=1e6).axis_count
    3
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        rotary_offset: int = 0,
        pairing: str = "half",
        axes: str | dict[str, list[int]] = "single",
        theta: float | None = None,
        frequencies: dict[str, Any] | None = None,
        attention_scaling: float | None = None,
    ) -> None:
        fields = {
            "head_dim": head_dim,
            "rotary_dim": rotary_dim,
            "rotary_offset": rotary_offset,
            "pairing": pairing,
            "axis_layout": axes,
            "theta": theta,
            "frequencies": frequencies,
            "attention_scaling": attention_scaling,
        }
        self._read(_native.spec_checked(json.dumps(fields)))

    def _read(self, text: str) -> None:
        # Read here and not when asked: torch.compile traces what is asked, and not this.
        self._json = text
        self._parts = _native.spec_parts(text)

    @classmethod
    def from_json(cls, text: str) -> RotarySpec:
        """The specification that :meth:`json` has written.

        Raises ``ValueError`` if it is none.
        """
        spec = cls.__new__(cls)
        spec._read(_native.spec_checked(text))
        return spec

    @classmethod
    def from_hf_config(cls, config: Any, *, vision: bool = False) -> RotarySpec:
        """The rotation of a Hugging Face model: of its language decoder, or of its vision tower.

        Args:
            config: the text of a ``config.json``, the dictionary in it, or a ``PretrainedConfig``.
            vision: the vision tower's.

        Raises ``ValueError`` if the configuration is incomplete, contradicts itself or is of an
        unknown model, or if its layers rotate differently.
        """
        if hasattr(config, "to_dict"):
            config = config.to_dict()
        if not isinstance(config, str):
            config = json.dumps(config, default=str)
        spec = cls.__new__(cls)
        spec._read(_native.spec_from_hf_config(config, vision))
        return spec

    @property
    def json(self) -> str:
        """All of it as text, the same for equal specifications."""
        return self._json

    @property
    def axis_count(self) -> int:
        """Position axes: 1 for text, 3 for (T, H, W)."""
        return self._parts[1]

    @property
    def geometry(self) -> str:
        """What the kernels take: which channels are rotated, and how they pair; as JSON."""
        return self._parts[0]

    @property
    def axis_of_lane(self) -> list[int]:
        """The axis that turns each lane: a pair, or a channel (first members, then second)."""
        return self._parts[3]

    def inv_freq(self, seq_len: int | None = None) -> list[float]:
        """Frequencies in radians per token; ``seq_len`` for scalings that depend on it."""
        return _native.spec_parts(self._json, seq_len)[5]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RotarySpec) and self._json == other._json

    def __hash__(self) -> int:
        return hash(self._json)

    def __repr__(self) -> str:
        return f"RotarySpec.from_json({self._json!r})"
