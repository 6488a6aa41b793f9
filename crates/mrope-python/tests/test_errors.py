"""Wrong inputs: one clear exception each, and never a crash."""

import random

import pytest
import torch

from mrope import RotarySpec, drop_in
from mrope.torch import Angles, Norm, angles, angles_from_cos_sin, learned_angles, rotary

SPEC = RotarySpec(16, axes={"contiguous": [2, 3, 3]})
POSITIONS = torch.randint(0, 9, (3, 2, 5))
TABLE = angles(SPEC, POSITIONS)


def x(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


Q, K = x(2, 5, 4, 16), x(2, 5, 1, 16)
PACKED = x(2, 5, 5, 16)
CACHE = x(50, 16)

def overlapping_with_gradients():
    packed = PACKED.clone().requires_grad_() * 1
    rotary(packed[:, :, :4], packed[:, :, 3:], TABLE, in_place=True)


WRONG = {
    "type of elements": (lambda: rotary(Q.long(), None, TABLE), TypeError, "i64, expected f32"),
    "complex elements": (lambda: rotary(Q.cfloat(), None, TABLE), TypeError, "complex64, expected"),
    "q and k of two types": (lambda: rotary(Q, K.bfloat16(), TABLE), TypeError, "k: found .* bf16"),
    "type of angles": (lambda: rotary(Q.double(), None, TABLE), TypeError, "f32, expected f64"),
    "no memory": (
        lambda: rotary(Q, None, Angles(TABLE.rows.to("meta"), TABLE.geometry)),
        ValueError,
        "found on meta, expected on cpu",
    ),
    "no tensor": (lambda: rotary(Q.tolist(), None, TABLE), TypeError, "expected torch.Tensor"),
    "device": (
        lambda: rotary(*(t.to("meta") for t in (Q, K)), TABLE),
        ValueError,
        "found on cpu, expected on meta",
    ),
    "rank": (lambda: rotary(Q[0], None, TABLE), ValueError, "rank 4, its shape has 3"),
    "layout": (lambda: rotary(Q, K, TABLE, "bdns"), ValueError, "one of bsnd, bnsd, sbnd and tnd"),
    "lengths": (lambda: rotary(Q, K[:, :4], TABLE), ValueError, "q has seq 5, k has 4"),
    "batches": (lambda: rotary(Q, K[:1], TABLE), ValueError, "q has batch 2, k has 1"),
    "width": (lambda: rotary(x(2, 5, 4, 8), None, TABLE), ValueError, "head_dim 16, q has 8"),
    "other tokens": (lambda: rotary(Q[:, :4], None, TABLE), ValueError, "the angles: expected"),
    "channels apart": (
        lambda: rotary(Q.transpose(2, 3).contiguous().transpose(2, 3), None, TABLE),
        ValueError,
        "channels of a head must be contiguous",
    ),
    "q over k": (
        lambda: rotary(PACKED[:, :, :4], PACKED[:, :, 3:], TABLE, in_place=True),
        ValueError,
        "q and k: elements overlap",
    ),
    "q over k with gradients": (
        lambda: overlapping_with_gradients(),
        ValueError,
        "q and k: elements overlap",
    ),
    "broadcast in place": (
        lambda: rotary(Q[:1].expand(2, -1, -1, -1), None, TABLE, in_place=True),
        ValueError,
        "elements overlap in memory",
    ),
    "sections": (
        lambda: RotarySpec(16, axes={"contiguous": [2, 3, 4]}),
        ValueError,
        "sum to 9, expected rotary_dim/2 = 8",
    ),
    "axes": (lambda: angles(SPEC, POSITIONS[:2]), ValueError, "by 3 position axes.* have 2"),
    "one row of positions": (lambda: angles(SPEC, POSITIONS[0, 0]), ValueError, "with 3 axes"),
    "negative positions": (lambda: angles(SPEC, POSITIONS - 9), ValueError, "not negative"),
    "positions beyond the cache": (
        lambda: drop_in.npu_mrope(POSITIONS[:, 0] + 50, x(5, 32), x(5, 16), CACHE, 16,
                                  mrope_section=[2, 3, 3]),
        ValueError,
        "not among the cos/sin cache's 50 rows",
    ),
    "positions not a number": (
        lambda: angles(SPEC, POSITIONS * float("nan")),
        ValueError,
        "must be a finite number",
    ),
    "pairing": (lambda: RotarySpec(16, pairing="interleaved"), ValueError, "unknown variant"),
    "odd width": (lambda: RotarySpec(16, rotary_dim=7), ValueError, "must be even"),
    "theta": (lambda: RotarySpec(16, theta=-1.0), ValueError, "positive finite number"),
    "no configuration": (lambda: RotarySpec.from_hf_config("{"), ValueError, "JSON"),
    "unknown model": (
        lambda: RotarySpec.from_hf_config({"model_type": "mine", "head_dim": 16}),
        ValueError,
        "mine",
    ),
    "eps": (lambda: rotary(Q, K, TABLE, norm=Norm(-1.0)), ValueError, "eps of the norm"),
    "weight": (
        lambda: rotary(Q, K, TABLE, norm=Norm(1e-6), q_weight=x(8)),
        ValueError,
        "holds 8 values, expected head_dim = 16",
    ),
    "weight without a norm": (
        lambda: rotary(Q, K, TABLE, q_weight=x(16)),
        ValueError,
        "a weight without a norm",
    ),
    "norm in place": (
        lambda: rotary(Q, K, TABLE, norm=Norm(1e-6), in_place=True),
        ValueError,
        "needs q and k as they were",
    ),
    "learned angles in place": (
        lambda: rotary(Q, K, Angles(TABLE.rows.clone().requires_grad_(), TABLE.geometry),
                       in_place=True),
        ValueError,
        "needs q and k as they were",
    ),
    "a leaf in place": (
        lambda: rotary(Q.clone().requires_grad_(), None, TABLE, in_place=True),
        ValueError,
        "a leaf that requires a gradient",
    ),
    "a part of a split in place": (
        lambda: rotary(
            *(PACKED.clone().requires_grad_() * 1).split([4, 1], 2), TABLE, in_place=True
        ),
        ValueError,
        "several views that were made at once",
    ),
    "half angles": (lambda: angles(SPEC, POSITIONS, dtype=torch.half), TypeError, "float16"),
    "cos and sin": (
        lambda: angles_from_cos_sin(x(5, 16), x(5, 8)),
        ValueError,
        "expected two of",
    ),
    "frequencies": (
        lambda: learned_angles(SPEC, POSITIONS, x(7)),
        ValueError,
        r"found shape \[7\], expected \[8\]",
    ),
    "shape of cos": (
        lambda: drop_in.npu_rotary_mul(x(2, 5, 4, 16), x(2, 3, 1, 16), x(2, 3, 1, 16)),
        ValueError,
        "or 1 in place of any but the last",
    ),
    "rotary mode": (
        lambda: drop_in.npu_rotary_mul(Q, Q, Q, "interleaved"),
        ValueError,
        "expected one of",
    ),
    "head size": (
        lambda: drop_in.npu_mrope(POSITIONS[0, 0], x(5, 33), x(5, 16), CACHE, 16),
        ValueError,
        r"heads \* 16",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_input_is_one_clear_exception(what):
    call, exception, message = WRONG[what]
    with pytest.raises(exception, match=message):
        call()


def test_an_address_that_is_no_multiple_of_the_element():
    raw = torch.zeros(4 * Q.numel() + 4, dtype=torch.uint8)
    shifted = torch.frombuffer(raw.numpy(), dtype=torch.float32, count=Q.numel(), offset=2)
    with pytest.raises(ValueError, match="not a multiple of its elements"):
        rotary(shifted.view(Q.shape), None, TABLE)


def strided(rng, shape, dtype):
    """A random view of that shape: permuted, sliced, with gaps, or broadcast."""
    order = rng.sample(range(3), 3)
    gaps = [rng.choice([0, 0, 1, 3]) for _ in range(4)]
    stored = [shape[d] + gap for d, gap in zip(order, gaps)] + [shape[3] + gaps[3]]
    base = torch.randn(stored).to(dtype)
    view = base[tuple(slice(gap, None) for gap in gaps)]
    view = view.permute(*(order.index(d) for d in range(3)), 3)
    if rng.random() < 0.2 and shape[0]:
        view = view[:1].expand(shape)
    return view


@pytest.mark.parametrize("seed", range(4))
def test_any_shapes_and_strides_give_the_right_result_or_an_exception(seed):
    """Forward and backward against PyTorch; sizes from 0, views of every kind."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    refused = 0
    for _ in range(150):
        half = rng.choice([1, 2, 4, 8, 17, 32])
        width, extra = 2 * half, rng.choice([0, 0, 3])
        batch, seq, heads, k_heads = (rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(4))
        dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        spec = RotarySpec(width + extra, rotary_dim=width)
        tokens = rng.choice([(batch, seq), (seq,)])
        table = angles(spec, torch.randint(0, 99, tokens), dtype=exact)
        if rng.random() < 0.1:
            table = Angles(table.rows[1:], table.geometry)
        q = strided(rng, (batch, seq, heads, width + extra), dtype)
        k = rng.choice([None, strided(rng, (batch, seq, k_heads, width + extra), dtype)])
        given = [t.detach().requires_grad_() for t in (q, k) if t is not None]
        before = [t.detach().clone() for t in given]
        try:
            results = [y for y in rotary(*(given if k is not None else [given[0], None]), table)
                       if y is not None]
        except ValueError:
            refused += 1
            continue
        gradients = [strided(rng, y.shape, dtype) for y in results]
        found = torch.autograd.grad(results, given, gradients)
        rows = table.rows.double().view(-1, seq, 1, width) if seq else None
        for was, t, y, g, dt in zip(before, given, results, gradients, found, strict=True):
            assert torch.equal(was, t) and y.shape == t.shape and dt.shape == t.shape
            if t.numel():
                cos, sin = rows[..., :half], rows[..., half:]
                for a, b, sign in ((t, y, 1), (g, dt, -1)):
                    a = a.detach().double()
                    first, second, rest = a.split([half, half, extra], -1)
                    turned = [first * cos - sign * second * sin, second * cos + sign * first * sin]
                    error = (torch.cat([*turned, rest], -1) - b.double()).abs().max()
                    assert error <= 8 * torch.finfo(dtype).eps, (a.shape, a.stride(), error)
    assert refused < 60
