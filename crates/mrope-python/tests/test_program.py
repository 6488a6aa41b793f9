"""`python -m mrope`, and golden vectors of transformers on the CPU."""

import pathlib
import subprocess
import sys

from safetensors import safe_open
from safetensors.torch import save_file

FIXTURES = pathlib.Path(__file__).parents[3] / "tests/fixtures"
# Of those beside them, frequencies per head are burn's and Rust's for now.
GOLDEN = [
    "deepseek_v4_inverse",
    "dinov3_centres",
    "ernie4_5_vl_mrope_22_22_20",
    "ernie_image_per_channel",
    "flux2_four_axes",
    "gemma4_vision_quarter",
    "glm4v_mrope_8_12_12_partial_pairs",
    "hunyuan_vl_xdrope_16x4",
    "kimi_k25_vision_wh",
    "llama_rope_half_longpos",
    "qwen2_5_omni_fractional",
    "qwen2_vl_mrope_16_24_24",
    "qwen3_5_mrope_11_11_10_partial",
    "qwen3_vl_mrope_24_20_20_interleaved",
]


def mrope(*args):
    command = [sys.executable, "-m", "mrope", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_golden_vectors_are_verified():
    done = mrope("verify", *(FIXTURES / f"{name}.safetensors" for name in GOLDEN))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") >= 4 * len(GOLDEN)


def test_a_wrong_file_is_an_error():
    done = mrope("verify", __file__)
    assert done.returncode == 2 and "error:" in done.stderr


def test_a_wrong_value_is_found(tmp_path):
    with safe_open(FIXTURES / "dinov3_centres.safetensors", "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        said = opened.metadata()
    tensors["dq.f64"] = -tensors["dq.f64"]
    save_file(tensors, tmp_path / "wrong.safetensors", said)
    done = mrope("verify", tmp_path / "wrong.safetensors")
    assert done.returncode == 1 and "WRONG" in done.stdout


def test_doctor_says_what_there_is():
    done = mrope("doctor")
    assert done.returncode == 0, done.stderr
    assert "kernels for" in done.stdout and "torch_npu" in done.stdout


def test_gradcheck_passes():
    done = mrope("gradcheck")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 24
