"""The operation against PyTorch's own: derivatives, operators, compilers, layouts, types."""

import doctest
import itertools

import pytest
import torch

import mrope.torch
from mrope import RotarySpec
from mrope.torch import Angles, Norm, angles, angles_from_cos_sin, learned_angles, rotary

PAIRINGS = ["half", "adjacent", "quarter", "interleave_half"]
LAYOUTS = {"bsnd": (0, 1, 2, 3), "bnsd": (0, 2, 1, 3), "sbnd": (1, 0, 2, 3)}
# Axes of 8 rotated channels, 4 pairs.
AXES = {
    "single": "single",
    "contiguous": {"contiguous": [1, 2, 1]},
    "striped": {"striped": [2, 1, 1]},
    "ernie": {"ernie": [1, 1, 2]},
    "balanced": {"balanced": [2, 2]},
    "per_axis": {"per_axis": [2, 2]},
    "per_axis_striped": {"per_axis_striped": [2, 2]},
    "per_channel": {"per_channel": [1, 1, 1, 1]},
}
BATCH, SEQ = 2, 3


def spec_of(pairing="half", axes="single", **kwargs):
    return RotarySpec(12, rotary_dim=8, rotary_offset=2, pairing=pairing, axes=AXES[axes], **kwargs)


def angles_of(spec, dtype=torch.float64):
    positions = torch.randint(0, 50, (spec.axis_count, BATCH, SEQ))
    return angles(spec, positions, dtype=dtype)


def tensors(layout="bsnd", dtype=torch.float64, heads=(2, 1)):
    def tensor(heads):
        shape = (BATCH, SEQ, heads, 12)
        x = torch.randn([shape[d] for d in LAYOUTS[layout]], dtype=dtype)
        return x.requires_grad_()

    return [tensor(n) for n in heads]


def by_formula(x, rows, spec_axes, pairing):
    """y = R x by a matrix for each token, [batch, seq, heads, 12]."""
    per_channel = spec_axes == "per_channel"
    lanes = 8 if per_channel else 4
    cos, sin = rows[:, :lanes], rows[:, lanes:]
    matrix = torch.eye(12, dtype=x.dtype).repeat(len(rows), 1, 1)
    matrix[:, range(2, 10), range(2, 10)] = 0
    for j in range(4):
        if pairing == "half":
            read = write = (j, j + 4)
        elif pairing == "quarter":
            first = j if j < 2 else j + 2
            read = write = (first, first + 2)
        else:
            read = (2 * j, 2 * j + 1)
            write = read if pairing == "adjacent" else (j, j + 4)
        second = j + 4 if per_channel else j
        a, b, c, d = (2 + i for i in (*read, *write))
        matrix[:, c, a], matrix[:, c, b] = cos[:, j], -sin[:, j]
        matrix[:, d, a], matrix[:, d, b] = sin[:, second], cos[:, second]
    matrix = matrix.view(BATCH, SEQ, 1, 12, 12)
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_result_is_the_formula_s(pairing, axes):
    table = angles_of(spec_of(pairing, axes))
    q, k = tensors()
    for x, y in zip((q, k), rotary(q, k, table)):
        assert torch.allclose(y, by_formula(x, table.rows, axes, pairing), atol=1e-14)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_first_and_second_derivatives(pairing, axes, layout):
    table = angles_of(spec_of(pairing, axes))
    inputs = [*tensors(layout), table.rows.requires_grad_()]

    def turn(q, k, rows):
        return rotary(q, k, Angles(rows, table.geometry), layout)

    assert torch.autograd.gradcheck(turn, inputs)
    assert torch.autograd.gradgradcheck(turn, inputs)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_derivatives_of_the_norm(pairing, layout, unit_offset, after):
    table = angles_of(spec_of(pairing, "contiguous"))
    weights = [torch.randn(12, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inputs = [*tensors(layout), table.rows.requires_grad_(), *weights]
    norm = Norm(1e-6, unit_offset, after)

    def turn(q, k, rows, q_weight, k_weight):
        made = Angles(rows, table.geometry)
        return rotary(q, k, made, layout, norm=norm, q_weight=q_weight, k_weight=k_weight)

    assert torch.autograd.gradcheck(turn, inputs)


def test_the_norm_is_pytorch_s():
    table = angles_of(spec_of())
    q, _ = tensors()
    weight = torch.randn(12, dtype=torch.float64)
    normal = torch.nn.functional.rms_norm(q, (12,), weight, 1e-6)
    expected, _ = rotary(normal, None, table)
    found, _ = rotary(q, None, table, norm=Norm(1e-6), q_weight=weight)
    assert torch.allclose(expected, found, atol=1e-14)


def test_a_second_derivative_of_the_norm_is_refused():
    q, _ = tensors()
    y, _ = rotary(q, None, angles_of(spec_of()), norm=Norm(1e-6))
    (dq,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of the fused norm"):
        dq.sum().backward()


def test_angles_of_each_head():
    q, k = tensors(heads=(2, 2))
    rows = torch.randn(BATCH * SEQ, 2, 8, dtype=torch.float64, requires_grad=True)
    geometry = spec_of().geometry

    def turn(q, k, rows):
        return rotary(q, k, Angles(rows, geometry))

    assert torch.autograd.gradcheck(turn, [q, k, rows])
    assert torch.autograd.gradgradcheck(turn, [q, k, rows])


def test_frequencies_learn():
    spec = spec_of(axes="contiguous")
    positions = torch.randint(0, 9, (3, BATCH, SEQ))
    frequencies = torch.tensor(spec.inv_freq(), dtype=torch.float64, requires_grad=True)
    q, k = tensors()
    made = learned_angles(spec, positions, frequencies)
    assert torch.allclose(made.rows, angles(spec, positions, dtype=torch.float64).rows)

    def turn(q, k, frequencies):
        return rotary(q, k, learned_angles(spec, positions, frequencies))

    assert torch.autograd.gradcheck(turn, [q, k, frequencies])


def test_a_packed_sequence_and_angles_that_the_batch_shares():
    table = angles(spec_of(), torch.arange(SEQ), dtype=torch.float64)
    q, k = tensors()
    y, z = rotary(q, k, table)
    for sample in range(BATCH):
        packed = rotary(q[sample], k[sample], table, "tnd")
        assert torch.equal(packed[0], y[sample]) and torch.equal(packed[1], z[sample])


@pytest.mark.parametrize("with_k", [True, False])
def test_in_place_is_the_same(with_k):
    table = angles_of(spec_of())
    q, k = tensors()
    k = k if with_k else None
    gradients = [torch.randn_like(x) for x in (q, k) if x is not None]

    def run(in_place):
        given = [x.clone() if x is not None else None for x in (q, k)]
        results = [x for x in rotary(*given, table, in_place=in_place) if x is not None]
        if in_place:
            assert results[0].data_ptr() == given[0].data_ptr()
        leaves = [x for x in (q, k) if x is not None]
        return [*results, *torch.autograd.grad(results, leaves, gradients, create_graph=True)]

    for expected, found in zip(run(False), run(True), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_in_place_in_one_packed_buffer(requires_grad):
    table = angles_of(spec_of())
    leaf = torch.randn(BATCH, SEQ, 4, 12, dtype=torch.float64, requires_grad=requires_grad)
    packed = leaf.clone()
    # Views of several results at once, as split makes them, autograd does not let be overwritten.
    q, k, v = packed[:, :, :2], packed[:, :, 2:3], packed[:, :, 3:]
    expected = [x.detach().clone() for x in (*rotary(q, k, table), v)]
    rotary(q, k, table, in_place=True)
    assert torch.equal(packed.detach(), torch.cat(expected, 2))
    if requires_grad:
        gradient = torch.randn_like(packed)
        packed.backward(gradient)
        copy = leaf.detach().requires_grad_()
        torch.cat([*rotary(copy[:, :, :2], copy[:, :, 2:3], table), copy[:, :, 3:]], 2).backward(
            gradient
        )
        assert torch.equal(leaf.grad, copy.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_smaller_types_round_once(dtype):
    table = angles_of(spec_of(), torch.float32)
    exact = Angles(table.rows.double(), table.geometry)
    q, k = tensors(dtype=dtype)
    for x, y in zip((q, k), rotary(q, k, table)):
        assert y.dtype == dtype
        truth, _ = rotary(x.double(), None, exact)
        assert torch.allclose(y.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_autocast_leaves_types_alone():
    table = angles_of(spec_of(), torch.float32)
    q, k = tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(y.dtype == torch.float32 for y in rotary(q, k, table))
        half = [x.bfloat16() for x in (q, k)]
        results = rotary(*half, table)
    assert all(y.dtype == torch.bfloat16 for y in results)
    assert all(torch.equal(a, b) for a, b in zip(results, rotary(*half, table)))


def test_nothing_is_kept_but_the_angles():
    table = angles_of(spec_of())
    q, k = tensors()
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with hooks:
        rotary(q, k, table)
    assert [x.data_ptr() for x in kept] == [table.rows.data_ptr()]


def test_examples_of_the_documentation():
    for module in (mrope.torch, mrope._spec):
        found = doctest.testmod(module, extraglobs={"RotarySpec": RotarySpec})
        assert found.attempted and not found.failed


OPS = torch.ops.mrope


def operator_samples():
    spec = spec_of(axes="contiguous")
    rows = angles_of(spec, torch.float32).rows
    learned = rows.clone().requires_grad_()
    q, k = tensors(dtype=torch.float32)
    weights = [torch.randn(12, requires_grad=True) for _ in range(2)]
    rest = (spec.geometry, "bsnd")
    yield OPS.rotate, (q, k, rows, *rest, False)
    yield OPS.rotate, (q, None, learned, *rest, True)
    yield OPS.angle_gradients, (q, q.detach().clone(), k, k.detach().clone(), rows.shape, *rest)
    for after in (False, True):
        norm = (1e-6, False, after, *rest)
        yield OPS.norm_rotate, (q, k, *weights, learned, *norm)
        yield OPS.norm_rotate, (q, None, None, None, rows, *norm)
    yield OPS.token_angles, (torch.randint(0, 9, (3, 6)), spec.json, None, False)


@pytest.mark.parametrize("index", range(8))
def test_operators_are_registered_as_pytorch_asks(index):
    op, args = list(operator_samples())[index]
    torch.library.opcheck(op.default, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_eager(dynamic):
    spec = spec_of(axes="contiguous")
    positions = torch.randint(0, 50, (3, BATCH, SEQ))
    weight = torch.randn(12, requires_grad=True)

    def layer(q, k, weight, positions):
        table = angles(spec, positions)
        q, k = rotary(q, k, table, norm=Norm(1e-6), q_weight=weight)
        q, k = rotary(q * 1, k * 1, table, in_place=True)
        return q.transpose(1, 2) @ k.permute(0, 2, 3, 1)

    q, k = tensors(dtype=torch.float32, heads=(2, 2))
    outcomes = []
    for function in (layer, torch.compile(layer, fullgraph=True, dynamic=dynamic)):
        y = function(q, k, weight, positions)
        outcomes.append([y, *torch.autograd.grad(y.sin().sum(), (q, k, weight))])
    for expected, found in zip(*outcomes, strict=True):
        assert torch.allclose(expected, found, atol=1e-6)


def test_other_libraries_cos_and_sin():
    cos, sin = (torch.randn(BATCH, SEQ, 12, dtype=torch.float64) for _ in range(2))
    q, _ = tensors()
    found, _ = rotary(q, None, angles_from_cos_sin(cos, sin))
    turned = torch.cat([-q[..., 6:], q[..., :6]], -1)
    expected = q * cos.unsqueeze(2) + turned * sin.unsqueeze(2)
    assert torch.allclose(found, expected)


def test_a_worker_of_a_data_loader_rotates():
    """Threads of the parent do not exist in a forked child, which must not wait for them."""
    spec = RotarySpec(64)
    q = torch.randn(1, 4096, 16, 64)
    expected, _ = rotary(q, None, angles(spec, torch.arange(4096)))

    class Turned(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, _):
            # PyTorch's own operators would wait for the parent's threads here; loaders set 1.
            torch.set_num_threads(2)
            turned, _ = rotary(q, None, angles(spec, torch.arange(4096)))
            torch.set_num_threads(1)
            return turned[0, ::512].clone()

    loader = torch.utils.data.DataLoader(Turned(), num_workers=1, timeout=60)
    (found,) = loader
    assert torch.equal(found, expected[:, ::512])


@pytest.mark.parametrize("permutation", list(itertools.permutations(range(3))))
def test_any_order_in_memory_gives_the_same_bits(permutation):
    table = angles_of(spec_of(), torch.float32)
    q, k = tensors(dtype=torch.float32)
    expected = rotary(q, k, table)
    back = [permutation.index(d) for d in range(3)]
    stored = [x.permute(*permutation, 3).contiguous().permute(*back, 3) for x in (q, k)]
    for a, b in zip(expected, rotary(*stored, table)):
        assert torch.equal(a, b)
