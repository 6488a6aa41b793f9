"""The path of Ascend NPUs without a card and without torch_npu: on the simulator.

The test owns runtime, device, stream and memory through the simulator's C interface, as torch_npu
would, and hands raw pointers to the functions that `mrope._ops` calls. Needs a wheel with the
feature ascend-sim, and a C++ compiler.
"""

import ctypes
import pathlib

import pytest
import torch

from mrope import RotarySpec, _native, _ops, _verify
from mrope.torch import angles, rotary

if not hasattr(_native, "simulator_symbol"):
    pytest.skip("this wheel has no simulator", allow_module_level=True)

FIXTURES = pathlib.Path(__file__).parents[3] / "tests/fixtures"
Pointer, Size = ctypes.c_void_p, ctypes.c_size_t
SIGNATURES = {
    "aclInit": [Pointer],
    "aclrtSetDevice": [ctypes.c_int32],
    "aclrtGetDevice": [ctypes.POINTER(ctypes.c_int32)],
    "aclrtCreateStream": [ctypes.POINTER(Pointer)],
    "aclrtSynchronizeStream": [Pointer],
    "aclrtMalloc": [ctypes.POINTER(Pointer), Size, ctypes.c_int32],
    "aclrtFree": [Pointer],
    "aclrtMemcpy": [Pointer, Size, Pointer, Size, ctypes.c_int32],
}
TO_DEVICE, TO_HOST = 1, 2


class Owner:
    """What torch_npu is in a process of its users."""

    def __init__(self):
        self.call("aclInit", None)
        self.call("aclrtSetDevice", 0)
        stream = Pointer()
        self.call("aclrtCreateStream", ctypes.byref(stream))
        self.stream = stream.value
        self.pointers = []

    def call(self, name, *args):
        function = ctypes.CFUNCTYPE(ctypes.c_int32, *SIGNATURES[name])
        code = function(_native.simulator_symbol(name))(*args)
        assert code == 0, (name, code)

    def tensor(self, x):
        """A copy of a tensor in device memory, as the native functions take tensors."""
        pointer, bytes_ = Pointer(), max(1, x.numel() * x.element_size())
        self.call("aclrtMalloc", ctypes.byref(pointer), bytes_, 0)
        x = x.contiguous()
        if x.numel():
            self.call("aclrtMemcpy", pointer, bytes_, x.data_ptr(), bytes_, TO_DEVICE)
        self.pointers.append(pointer)
        return pointer.value, _ops._DTYPES[x.dtype], x.shape, x.stride(), None

    def read(self, tensor, dtype):
        x = torch.empty(tensor[2], dtype=dtype)
        bytes_ = x.numel() * x.element_size()
        self.call("aclrtSynchronizeStream", self.stream)
        self.call("aclrtMemcpy", x.data_ptr(), bytes_, tensor[0], bytes_, TO_HOST)
        return x

    def free_all(self):
        for pointer in self.pointers:
            self.call("aclrtFree", pointer)
        self.pointers.clear()


@pytest.fixture(scope="module")
def owner():
    return Owner()


@pytest.fixture(autouse=True)
def clean(owner):
    """Nothing that a test does is a violation, unless it took the violations."""
    _native.simulator_violations(False)
    yield
    assert _native.simulator_violations(False) == []
    owner.free_all()


def turn(owner, q, k, table, layout, adjoint=False, in_place=False):
    given = [owner.tensor(x) for x in (q, k)]
    results = given if in_place else [owner.tensor(torch.zeros_like(x)) for x in (q, k)]
    pairs = list(zip(given, results))
    rows = owner.tensor(table.rows)
    _native.npu_rotate(owner.stream, *pairs, rows, table.geometry, layout, adjoint)
    return [owner.read(y, x.dtype) for x, y in zip((q, k), results)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairing", ["half", "adjacent", "quarter", "interleave_half"])
def test_a_rotation_and_its_gradient_are_those_of_the_cpu(owner, pairing, dtype):
    spec = RotarySpec(64, pairing=pairing, axes={"contiguous": [8, 12, 12]})
    table = angles(spec, torch.randint(0, 99, (3, 2, 5)))
    for layout, shape in {"bsnd": (2, 5, 4, 64), "bnsd": (2, 4, 5, 64)}.items():
        q, k = (torch.randn(shape).to(dtype) for _ in range(2))
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        expected = rotary(*leaves, table, layout)
        backward = torch.autograd.grad(expected, leaves, (q, k))
        for in_place in (False, True):
            for found, right in zip(turn(owner, q, k, table, layout, False, in_place), expected):
                assert torch.equal(found, right)
            for found, right in zip(turn(owner, q, k, table, layout, True, in_place), backward):
                assert torch.equal(found, right)


GOLDEN = [
    "llama_rope_half",
    "qwen2_vl_mrope_16_24_24",
    "qwen3_vl_mrope_24_20_20_interleaved",
    "glm4v_mrope_8_12_12_partial_pairs",
    "ernie4_5_vl_mrope_22_22_20",
]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(owner, name):
    tensors, spec, layout, _ = _verify.read(FIXTURES / f"{name}.safetensors")
    table = angles(spec, _verify.positions_of(tensors, spec, layout))
    q, k, gq, gk = (tensors[f"{x}.bf16"].float() for x in ("q", "k", "gq", "gk"))
    found = [*turn(owner, q, k, table, layout), *turn(owner, gq, gk, table, layout, True)]
    for value, name in zip(found, ("q_out", "k_out", "dq", "dk")):
        assert torch.allclose(value.double(), tensors[f"{name}.f64"], atol=1e-5), name


def test_gradients_of_angles(owner):
    spec = RotarySpec(64)
    table = angles(spec, torch.arange(10))
    q, k = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 1, 64)
    rows = table.rows.clone().requires_grad_()
    y = rotary(q, k, type(table)(rows, table.geometry))
    (expected,) = torch.autograd.grad(y, rows, (q.cos(), k.cos()))
    pairs = [(owner.tensor(x), owner.tensor(x.cos())) for x in (q, k)]
    out = owner.tensor(torch.zeros_like(rows))
    _native.npu_angle_gradients(owner.stream, *pairs, out, table.geometry, "bsnd")
    assert torch.allclose(owner.read(out, torch.float32), expected, atol=1e-4)


@pytest.mark.parametrize("after", [False, True])
def test_the_norm_and_its_backward(owner, after):
    spec = RotarySpec(64)
    table = angles(spec, torch.arange(10))
    q, k = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 1, 64)
    w = torch.randn(64)
    norm, rest = (1e-6, False, after), (table.geometry, "bsnd")
    operators = torch.ops.mrope
    y = operators.norm_rotate(q, k, w, w, table.rows, *norm, *rest)
    dy = (q.cos(), k.cos())
    expected = operators.norm_rotate_backward(*dy, q, k, w, w, table.rows, *norm, *rest)

    weight, rows = owner.tensor(w), owner.tensor(table.rows)
    given = [owner.tensor(x) for x in (q, k)]
    results = [owner.tensor(torch.zeros_like(x)) for x in (q, k)]
    forward = [(x, r, weight) for x, r in zip(given, results)]
    _native.npu_norm_rotate(owner.stream, *forward, rows, norm, *rest)
    for result, right in zip(results, y):
        assert torch.allclose(owner.read(result, torch.float32), right, atol=1e-5)

    most = _native.npu_weight_sums(owner.stream, given[0], *rest)
    sums = owner.tensor(torch.zeros(most, 2, 64))
    gradients = [owner.tensor(g) for g in dy]
    backward = [(x, g, g, weight, None) for x, g in zip(given, gradients)]
    written = _native.npu_norm_rotate_backward(owner.stream, *backward, sums, rows, norm, *rest)
    found = [owner.read(g, torch.float32) for g in gradients]
    found += list(owner.read(sums, torch.float32)[:written].sum(0))
    for value, right in zip(found, expected, strict=True):
        assert torch.allclose(value, right, atol=1e-4)


def test_device_and_stream_stay_the_owner_s(owner):
    table = angles(RotarySpec(64), torch.arange(5))
    q = torch.randn(1, 5, 2, 64)
    turn(owner, q, q, table, "bsnd")
    _native.simulator_calls()
    turn(owner, q, q, table, "bsnd")
    ours = set(_native.simulator_calls())
    forbidden = {"aclrtSetDevice", "aclrtResetDevice", "aclrtCreateStream", "aclrtDestroyStream"}
    assert not ours & forbidden
    device = ctypes.c_int32(-1)
    owner.call("aclrtGetDevice", ctypes.byref(device))
    assert device.value == 0


def test_memory_that_is_freed_while_work_is_queued_is_noticed(owner):
    table = angles(RotarySpec(64), torch.arange(5))
    q = torch.randn(1, 5, 2, 64)
    turn(owner, q, q, table, "bsnd")
    x, rows = owner.tensor(q), owner.tensor(table.rows)
    _native.simulator_violations(True)
    _native.npu_rotate(owner.stream, (x, x), None, rows, table.geometry, "bsnd", False)
    owner.call("aclrtFree", owner.pointers.pop(-2))
    _native.simulator_violations(False)
    try:
        owner.call("aclrtSynchronizeStream", owner.stream)
    except AssertionError:
        pass
    assert _native.simulator_violations(False) != []


WRONG = {
    "double": (torch.float64, (1, 5, 2, 64), TypeError, "expected f32, f16 or bf16"),
    "tokens": (torch.float32, (1, 4, 2, 64), ValueError, "one for each token"),
    "width": (torch.float32, (1, 5, 2, 32), ValueError, "head_dim"),
    "empty": (torch.float32, (1, 5, 0, 64), ValueError, "at least one"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_are_exceptions(owner, what):
    dtype, shape, exception, message = WRONG[what]
    table = angles(RotarySpec(64), torch.arange(5))
    x, rows = owner.tensor(torch.zeros(shape, dtype=dtype)), owner.tensor(table.rows)
    with pytest.raises(exception, match=message):
        _native.npu_rotate(owner.stream, (x, x), None, rows, table.geometry, "bsnd", False)
