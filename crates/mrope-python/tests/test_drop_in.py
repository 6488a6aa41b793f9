"""Operators with torch_npu's signatures, against their documented formulas in PyTorch."""

import itertools

import pytest
import torch

from mrope import drop_in


def rotated_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rotated_pairs(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def rotated_quarters(x):
    a, b, c, d = x.chunk(4, -1)
    return torch.cat([-b, a, -d, c], -1)


def by_formula(x, cos, sin, mode):
    if mode == 3:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat([even, odd], -1) * cos + torch.cat([-odd, even], -1) * sin
    rotated = (rotated_half, rotated_pairs, rotated_quarters)[mode]
    return x * cos + rotated(x) * sin


def check(function, formula, tensors):
    """Results and all gradients."""
    y, expected = function(*tensors), formula(*tensors)
    y, expected = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (y, expected))
    gradients = [torch.randn_like(t) for t in y]
    y += torch.autograd.grad(y, tensors, gradients)
    expected += torch.autograd.grad(expected, tensors, gradients)
    for a, b in zip(y, expected, strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, atol=1e-13)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 1)])
def test_rotary_mul_with_every_broadcast(shape, mode):
    for ones in itertools.product([False, True], repeat=3):
        angles = [1 if one else n for one, n in zip(ones, shape)]
        tensors = [random(*shape, 8), random(*angles, 8), random(*angles, 8)]
        check(
            lambda x, c, s: drop_in.npu_rotary_position_embedding(x, c, s, mode),
            lambda x, c, s: by_formula(x, c, s, mode),
            tensors,
        )
        # Without gradients of cos and sin, angles are made once for all calls.
        x, cos, sin = (t.detach() for t in tensors)
        name = drop_in._MODES[mode]
        for _ in range(2):
            found = drop_in.npu_rotary_mul(x, cos, sin, name)
            assert torch.allclose(found, by_formula(x, cos, sin, mode), atol=1e-13)


def test_packed_sequences():
    tensors = [random(5, 3, 8), random(5, 1, 8), random(5, 1, 8)]
    check(drop_in.npu_rotary_mul, lambda x, c, s: by_formula(x, c, s, 0), tensors)


def test_interleave_rope():
    tensors = [random(2, 3, 5, 64), random(2, 1, 5, 64), random(2, 1, 5, 64)]
    check(drop_in.npu_interleave_rope, lambda x, c, s: by_formula(x, c, s, 3), tensors)


def test_cos_and_sin_that_were_overwritten_are_read_again():
    x, cos, sin = (t.detach() for t in (random(1, 4, 2, 8), random(1, 4, 1, 8), random(1, 4, 1, 8)))
    drop_in.npu_rotary_mul(x, cos, sin)
    cos.zero_()
    found = drop_in.npu_rotary_mul(x, cos, sin)
    assert torch.allclose(found, by_formula(x, cos, sin, 0))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_megatron_s_angles_for_each_token(batch, interleaved):
    class Config:
        rotary_interleaved = interleaved

    freqs = random(5, batch, 1, 8)

    def formula(t, freqs):
        turned = by_formula(t[..., :8], freqs.cos(), freqs.sin(), int(interleaved))
        return torch.cat([turned, t[..., 8:]], -1)

    def ours(t, freqs):
        return drop_in.apply_rotary_pos_emb_absolute(t, freqs, Config)

    check(ours, formula, [random(5, 3, 2, 12), freqs])
    if batch == 1:
        check(ours, lambda t, f: formula(t[:, None], f).squeeze(1), [random(5, 2, 12), freqs])


MROPE = {
    # sections, rotary_mode, cache_mode, rotary_dim
    "qwen2-vl": ([2, 3, 3], "half", "default", 16),
    "qwen3-vl": ([3, 3, 2], "half", "interleave", 16),
    "adjacent, partial": ([2, 1, 1], "interleave", "default", 8),
    "four axes": ([2, 2, 2, 2], "half", "default", 16),
    "text": (None, "half", None, 16),
    "text as vLLM passes it": ([0, 0, 0], "half", "default", 8),
}


@pytest.mark.parametrize("case", MROPE)
def test_mrope(case):
    sections, rotary_mode, cache_mode, rotary_dim = MROPE[case]
    tokens, head_size = 7, 16
    axes = len(sections) if sections and any(sections) else 1
    positions = torch.randint(0, 50, (axes, tokens) if axes > 1 else (tokens,))

    def axis_by_axis(t):
        if axes == 1:
            return t
        if cache_mode == "interleave":
            mixed = t[0].clone()
            for axis in (1, 2):
                lanes = slice(axis, sections[axis] * 3, 3)
                mixed[:, lanes] = t[axis][:, lanes]
            return mixed
        return torch.cat([part[axis] for axis, part in enumerate(t.split(sections, -1))], -1)

    def formula(query, key, cache):
        cos, sin = (axis_by_axis(t) for t in cache[positions].chunk(2, -1))
        if rotary_mode == "half":
            cos, sin = (torch.cat([t, t], -1)[:, None] for t in (cos, sin))
        else:
            cos, sin = (t.repeat_interleave(2, -1)[:, None] for t in (cos, sin))

        def turn(x):
            x = x.view(tokens, -1, head_size)
            mode = 0 if rotary_mode == "half" else 1
            turned = by_formula(x[..., :rotary_dim], cos, sin, mode)
            return torch.cat([turned, x[..., rotary_dim:]], -1).view(tokens, -1)

        return turn(query), turn(key)

    def ours(query, key, cache):
        return drop_in.npu_mrope(
            positions,
            query,
            key,
            cache,
            head_size,
            mrope_section=sections,
            rotary_mode=rotary_mode,
            cache_mode=cache_mode,
        )

    check(ours, formula, [random(tokens, 48), random(tokens, 16), random(50, rotary_dim)])


def test_compiled_without_graph_breaks():
    positions = torch.randint(0, 50, (3, 7))
    tensors = [random(7, 48), random(7, 16), random(50, 16)]

    def layer(query, key, cache):
        q, k = drop_in.npu_mrope(positions, query, key, cache, 16, mrope_section=[2, 3, 3])
        x = q.unflatten(-1, (1, 3, 16))
        return drop_in.npu_rotary_mul(x, x[:, :, :1].cos(), x[:, :, :1].sin()), k

    check(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, tensors)
