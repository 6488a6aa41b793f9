"""The compiled half. Tensors are given as (address, dtype, shape, strides, owner)."""

from typing import Any

Tensor = tuple[int, str, tuple[int, ...], tuple[int, ...], Any]
Pair = tuple[Tensor, Tensor]
Norm = tuple[float, bool, bool]
NormPair = tuple[Tensor, Tensor, Tensor | None]
NormGradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]

VERSION: str

def spec_from_hf_config(config: str, vision: bool) -> str: ...
def spec_from_rope_parameters(
    model_type: str, vision: bool, rope_parameters: str, head_dim: int
) -> str: ...
def spec_checked(json: str) -> str: ...
def spec_parts(
    json: str, seq_len: int | None = None
) -> tuple[str, int, float, list[int], list[int], list[float]]: ...
def token_angles(
    json: str, positions: Tensor, rows: Tensor, seq_len: int | None = None
) -> None: ...
def instruction_set() -> str: ...
def diagnosis() -> list[tuple[str, bool, str]]: ...
def check_apart(q: Tensor, k: Tensor, layout: str) -> None: ...
def rotate(
    q: Pair,
    k: Pair | None,
    angles: Tensor,
    geometry: str,
    layout: str,
    adjoint: bool,
    threads: int,
) -> None: ...
def angle_gradients(
    q: Pair, k: Pair | None, out: Tensor, geometry: str, layout: str, threads: int
) -> None: ...
def norm_rotate(
    q: NormPair,
    k: NormPair | None,
    angles: Tensor,
    norm: Norm,
    geometry: str,
    layout: str,
    threads: int,
) -> None: ...
def norm_rotate_backward(
    q: NormGradients,
    k: NormGradients | None,
    angles: Tensor,
    norm: Norm,
    geometry: str,
    layout: str,
    threads: int,
) -> None: ...
def npu_rotate(
    stream: int,
    q: Pair,
    k: Pair | None,
    angles: Tensor,
    geometry: str,
    layout: str,
    adjoint: bool,
) -> None: ...
def npu_angle_gradients(
    stream: int, q: Pair, k: Pair | None, out: Tensor, geometry: str, layout: str
) -> None: ...
def npu_norm_rotate(
    stream: int,
    q: NormPair,
    k: NormPair | None,
    angles: Tensor,
    norm: Norm,
    geometry: str,
    layout: str,
) -> None: ...
def npu_weight_sums(stream: int, q: Tensor, geometry: str, layout: str) -> int: ...
def npu_norm_rotate_backward(
    stream: int,
    q: NormGradients,
    k: NormGradients | None,
    sums: Tensor,
    angles: Tensor,
    norm: Norm,
    geometry: str,
    layout: str,
) -> int: ...
