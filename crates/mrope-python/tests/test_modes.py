"""Each public function in each mode that PyTorch adds around a call: the right value, or a refusal.

``python tests/test_modes.py`` prints the table. Right values are those of a formula in PyTorch's own
operators, in the same mode.
"""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from mrope import RotarySpec, _norms, drop_in, plugins
from mrope.torch import Norm, angles, angles_from_cos_sin, learned_angles, rotary

SPEC = RotarySpec(8, axes={"contiguous": [2, 1, 1]}, theta=100.0)
FREQUENCIES = torch.tensor(SPEC.inv_freq(), dtype=torch.float64)
IDS = torch.arange(15).reshape(3, 5) % 7


def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def adjacent(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def quarter(x):
    a, b, c, d = x.chunk(4, -1)
    return torch.cat([-b, a, -d, c], -1)


def interleaved(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat([even, odd], -1) * cos + torch.cat([-odd, even], -1) * sin


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def by_ids(frequencies):
    """cos and sin of SPEC's tokens, for the channels of halves."""
    phases = IDS[[0, 0, 1, 2]].T.to(frequencies) * frequencies
    return torch.cat([phases.cos()] * 2, -1), torch.cat([phases.sin()] * 2, -1)


def partial(q, cos, sin):
    a, b, c = q.split([2, 8, 2], -1)
    return torch.cat([a, b * cos + adjacent(b) * sin, c], -1)


def cached(table):
    """npu_mrope's cosines and sines of SPEC's tokens."""
    halves = (table[IDS[[0, 0, 1, 2]].T, start + torch.arange(4)] for start in (0, 4))
    return (torch.cat([t] * 2, -1) for t in halves)


def of_spec(x, cos, sin):
    return x * cos[:, None] + half(x) * sin[:, None]


def of_rows(cos, sin, **how):
    return angles_from_cos_sin(cos, sin, **how)


class RMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x):
        return normed(x, self.weight)


class Heads(torch.nn.Module):
    """What attention of a patched model does to q and k."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = RMSNorm(), RMSNorm()

    def forward(self, q, k, cos, sin):
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        return torch.cat(plugins.rotate(q, k, cos, sin), 1)


HEADS = Heads()


@contextlib.contextmanager
def waiting():
    """Within it, norms of HEADS are the rotation's, as after ``patch(model, norms=True)``."""
    norms = [HEADS.q_norm, HEADS.k_norm]
    for norm in norms:
        _norms.wait(norm, _norms.recognised(norm))
    try:
        yield
    finally:
        for norm in norms:
            _norms.forget(norm)


def by_heads(q, k, q_weight, k_weight, cos, sin):
    weights = {"q_norm.weight": q_weight, "k_norm.weight": k_weight}
    return functional_call(HEADS, weights, (q, k, cos, sin))


# A function of tensors, its formula, and the tensors.
FUNCTIONS = {
    "rotary": (
        lambda q, k, c, s: torch.cat(rotary(q, k, of_rows(c, s)), 2),
        lambda q, k, c, s: torch.cat([x * c[:, None] + half(x) * s[:, None] for x in (q, k)], 2),
        lambda: (random(2, 5, 3, 8), random(2, 5, 1, 8), random(5, 8), random(5, 8)),
    ),
    "rotary, a part, bnsd": (
        lambda q, c, s: rotary(
            q, None, of_rows(c, s, head_dim=12, rotary_offset=2, pairing="adjacent"), "bnsd"
        )[0],
        lambda q, c, s: partial(q, c[:, None], s[:, None]),
        lambda: (random(2, 3, 5, 12), random(2, 5, 8), random(2, 5, 8)),
    ),
    "rotary, per head": (
        lambda q, c, s: rotary(q, None, of_rows(c, s, pairing="quarter", per_head=True), "tnd")[0],
        lambda q, c, s: q * c + quarter(q) * s,
        lambda: (random(5, 3, 8), random(5, 3, 8), random(5, 3, 8)),
    ),
    "rotary, in place": (
        lambda q, c, s: rotary(
            q * 1,
            None,
            of_rows(c.detach(), s.detach(), pairing="interleave_half"),
            "sbnd",
            in_place=True,
        )[0],
        lambda q, c, s: interleaved(q, c.detach()[:, None, None], s.detach()[:, None, None]),
        lambda: (random(5, 2, 3, 8), random(5, 8), random(5, 8)),
    ),
    "rotary, norm before": (
        lambda q, w, c, s: rotary(q, None, of_rows(c, s), norm=Norm(1e-6), q_weight=w)[0],
        lambda q, w, c, s: normed(q, w) * c[:, None] + half(normed(q, w)) * s[:, None],
        lambda: (random(2, 5, 3, 8), random(8), random(5, 8), random(5, 8)),
    ),
    "rotary, norm after": (
        lambda q, w, c, s: rotary(
            q, None, of_rows(c, s), norm=Norm(1e-6, unit_offset=True, after=True), q_weight=w
        )[0],
        lambda q, w, c, s: normed(q * c[:, None] + half(q) * s[:, None], 1 + w),
        lambda: (random(2, 5, 3, 8), random(8), random(5, 8), random(5, 8)),
    ),
    "angles": (
        lambda q: rotary(q, None, angles(SPEC, IDS.to(q.device), dtype=q.dtype), "tnd")[0],
        lambda q: of_spec(q, *by_ids(FREQUENCIES.to(q.device))),
        lambda: (random(5, 3, 8),),
    ),
    "learned_angles": (
        lambda q, f: rotary(q, None, learned_angles(SPEC, IDS.to(f.device), f), "tnd")[0],
        lambda q, f: of_spec(q, *by_ids(f)),
        lambda: (random(5, 3, 8), random(4)),
    ),
    "npu_mrope": (
        lambda q, k, t: torch.cat(drop_in.npu_mrope(IDS, q, k, t, 8, mrope_section=[2, 1, 1]), -1),
        lambda q, k, t: torch.cat(
            [of_spec(x.unflatten(-1, (-1, 8)), *cached(t)).flatten(1) for x in (q, k)], -1
        ),
        lambda: (random(5, 24), random(5, 8), random(7, 8)),
    ),
    "npu_rotary_mul": (
        lambda x, c, s: drop_in.npu_rotary_mul(x, c, s, "half"),
        lambda x, c, s: x * c + half(x) * s,
        lambda: (random(2, 3, 5, 8), random(1, 1, 5, 8), random(1, 1, 5, 8)),
    ),
    "npu_rotary_position_embedding": (
        lambda x, c, s: drop_in.npu_rotary_position_embedding(x, c, s, 1),
        lambda x, c, s: x * c + adjacent(x) * s,
        lambda: (random(2, 3, 5, 8), random(2, 1, 5, 8), random(2, 1, 5, 8)),
    ),
    "npu_interleave_rope": (
        drop_in.npu_interleave_rope,
        interleaved,
        lambda: (random(2, 3, 5, 8), random(2, 1, 5, 8), random(2, 1, 5, 8)),
    ),
    "apply_rotary_pos_emb_absolute": (
        drop_in.apply_rotary_pos_emb_absolute,
        lambda x, f: x * f.cos() + half(x) * f.sin(),
        lambda: (random(5, 2, 3, 8), random(5, 1, 1, 8)),
    ),
    "plugins.rotate": (
        lambda q, k, c, s: torch.cat(plugins.rotate(q, k, c, s), 1),
        lambda q, k, c, s: torch.cat([x * c[:, None] + half(x) * s[:, None] for x in (q, k)], 1),
        lambda: (random(2, 3, 5, 8), random(2, 1, 5, 8), random(2, 5, 8), random(2, 5, 8)),
    ),
    "plugins.rotate_vision": (
        lambda q, k, c, s: torch.cat(plugins.rotate_vision(q, k, c, s), 1),
        lambda q, k, c, s: torch.cat([x * c[:, None] + half(x) * s[:, None] for x in (q, k)], 1),
        lambda: (random(5, 3, 8), random(5, 3, 8), random(5, 8), random(5, 8)),
    ),
    # In float32: norms of others are made as before.
    "patch, norms": (
        by_heads,
        lambda q, k, w, v, c, s: torch.cat(
            [
                (x * c[:, :, None] + half(x) * s[:, :, None]).transpose(1, 2)
                for x in (normed(q, w), normed(k, v))
            ],
            1,
        ),
        lambda: tuple(
            random(*shape).float()
            for shape in ((2, 5, 3, 8), (2, 5, 1, 8), (8,), (8,), (2, 5, 8), (2, 5, 8))
        ),
    ),
}


def weighted(f):
    def loss(*tensors):
        y = f(*tensors)
        return (y * torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).sin()).sum()

    return loss


def every(tensors):
    return tuple(range(len(tensors)))


def gradients(f, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    weighted(f)(*leaves).backward()
    return [leaf.grad for leaf in leaves]


def second(f, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    first = torch.autograd.grad(weighted(f)(*leaves), leaves, create_graph=True, allow_unused=True)
    total = sum(
        (t.square().sum() for t in first if t is not None and t.requires_grad), leaves[0].sum()
    )
    return torch.autograd.grad(total, leaves, allow_unused=True)


def dual(f, tensors):
    with forward_ad.dual_level():
        given = [forward_ad.make_dual(t, torch.ones_like(t).cumsum(-1)) for t in tensors]
        return forward_ad.unpack_dual(f(*given)).tangent


def within(context):
    def mode(f, tensors):
        with context():
            return f(*(t * 1 for t in tensors))

    return mode


def checkpointed(reentrant):
    return lambda f, tensors: gradients(
        lambda *t: checkpoint(f, *t, use_reentrant=reentrant), tensors
    )


def compiled(f, tensors):
    torch.compiler.reset()
    return gradients(torch.compile(f, backend="aot_eager", fullgraph=True), tensors)


def exported(f, tensors):
    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return f(*tensors)

    return torch.export.export(Module(), tensors).module()(*tensors)


class Plain(torch.Tensor):
    """A subclass without a behaviour of its own."""


def of_subclass(f, tensors):
    return f(*(t.as_subclass(Plain) for t in tensors)).as_subclass(torch.Tensor)


def shapes(f, tensors):
    """On a device without values; ids are made elsewhere."""
    return torch.zeros(f(*(t.to("meta") for t in tensors)).shape)


def faked(f, tensors):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return torch.Size(f(*(mode.from_tensor(t) for t in tensors)).shape)


def distributed(f, tensors):
    from torch.distributed.tensor import DTensor, Replicate

    with one_process() as mesh:
        given = [DTensor.from_local(t, mesh, [Replicate()]) for t in tensors]
        return f(*given).to_local()


def local(f, tensors):
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.experimental import local_map

    with one_process() as mesh:
        given = [DTensor.from_local(t, mesh, [Replicate()]) for t in tensors]
        whole = [Replicate()]
        mapped = local_map(f, out_placements=whole, in_placements=(whole,) * len(given))
        return mapped(*given).to_local()


def fully_sharded(f, tensors):
    from torch.distributed.fsdp import fully_shard

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own = torch.nn.ParameterList(torch.nn.Parameter(t.clone()) for t in tensors)

        def forward(self):
            return f(*self.own)

    with one_process() as mesh:
        module = Module()
        fully_shard(module, mesh=mesh)
        weighted(lambda: module())().backward()
        return [None if p.grad is None else p.grad.full_tensor() for p in module.own]


@contextlib.contextmanager
def one_process():
    from torch.distributed import destroy_process_group, init_device_mesh, init_process_group

    store = torch.distributed.HashStore()
    init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        destroy_process_group()


# What a mode makes of a function and tensors, for ours and for the formula alike.
MODES = {
    "grad": gradients,
    "second derivative": second,
    "no_grad": within(torch.no_grad),
    "inference_mode": within(torch.inference_mode),
    "autocast": within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "forward_ad": dual,
    "func.jvp": lambda f, t: torch.func.jvp(f, t, tuple(x.cumsum(-1) for x in t))[1],
    "func.grad": lambda f, t: torch.func.grad(weighted(f), every(t))(*t),
    "func.vmap": lambda f, t: torch.func.vmap(f)(*(torch.stack([x, 2 * x, x.cos()]) for x in t)),
    "func.jacrev": lambda f, t: torch.func.jacrev(f, every(t))(*t),
    "func.hessian": lambda f, t: torch.func.hessian(weighted(f))(*t),
    "checkpoint": checkpointed(False),
    "checkpoint, reentrant": checkpointed(True),
    "compile": compiled,
    "export": exported,
    "subclass": of_subclass,
    "meta": shapes,
    "fake": faked,
    "DTensor": distributed,
    "DTensor, local_map": local,
    "FSDP2": fully_sharded,
}
NORM = {"rotary, norm before", "rotary, norm after", "patch, norms"}
# What is refused, in our words.
REFUSED = {
    **{(name, "second derivative"): "second derivative of the fused norm" for name in NORM},
    **{(name, "DTensor"): "DTensor" for name in FUNCTIONS},
}


def agree(found, expected):
    if isinstance(expected, (tuple, list)) and not isinstance(expected, torch.Size):
        return len(found) == len(expected) and all(map(agree, found, expected))
    if expected is None or found is None:
        # A gradient that is not made stands for zero.
        other = found if expected is None else expected
        return other is None or not other.any()
    if not isinstance(expected, torch.Tensor):
        return found == expected
    bounds = (1e-4, 1e-5) if expected.dtype == torch.float32 else (1e-9, 1e-11)
    return found.shape == expected.shape and torch.allclose(found, expected, *bounds)


@pytest.fixture(autouse=True)
def norms_wait():
    with waiting():
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_right_value_or_a_refusal_of_our_own(name, mode):
    ours, formula, make = FUNCTIONS[name]
    tensors = make()
    if words := REFUSED.get((name, mode)):
        with pytest.raises(NotImplementedError, match=words):
            MODES[mode](ours, tensors)
        return
    found, expected = MODES[mode](ours, tensors), MODES[mode](formula, tensors)
    assert agree(found, expected), (found, expected)


def test_positions_that_are_not_exact_or_want_a_derivative_are_refused():
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(TypeError, match="does not hold all whole numbers"):
            angles(SPEC, IDS.to(dtype))
        with pytest.raises(TypeError, match="does not hold all whole numbers"):
            learned_angles(SPEC, IDS.to(dtype), torch.ones(4))
    real = IDS.to(torch.float64)
    with pytest.raises(NotImplementedError, match="no derivative with respect to positions"):
        angles(SPEC, real.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match="no derivative with respect to positions"):
        torch.func.jvp(lambda p: angles(SPEC, p).rows, (real,), (real,))
    with pytest.raises(NotImplementedError, match="no derivative with respect to positions"):
        with forward_ad.dual_level():
            angles(SPEC, forward_ad.make_dual(real, real))


def test_no_tokens_are_no_rows():
    table = angles(SPEC, IDS[:, :0])
    assert table.rows.shape == (0, 8)
    q, _ = rotary(torch.zeros(0, 3, 8), None, table, "tnd")
    assert q.shape == (0, 3, 8)


def test_angles_follow_values_that_change_unseen():
    x, cos, sin = random(1, 2, 5, 8), random(1, 1, 5, 8), random(1, 1, 5, 8)
    drop_in.npu_rotary_mul(x, cos, sin)
    cos.data.mul_(2)
    y = drop_in.npu_rotary_mul(x, cos, sin)
    assert torch.allclose(y, x * cos + half(x) * sin)


def test_tensors_of_inference_mode_are_not_taken_for_unchanged():
    with torch.inference_mode():
        x, cos, sin = random(1, 2, 5, 8), random(1, 1, 5, 8), random(1, 1, 5, 8)
        drop_in.npu_rotary_mul(x, cos, sin)
        cos.mul_(2)
        y = drop_in.npu_rotary_mul(x, cos, sin)
        assert torch.allclose(y, x * cos + half(x) * sin)


def main():
    print("|", " | ".join(["", *MODES]), "|")
    print("|---" * (len(MODES) + 1) + "|")
    for name, (ours, formula, make) in FUNCTIONS.items():
        row = []
        for mode, run in MODES.items():
            tensors = make()
            try:
                found = run(ours, tensors)
                row.append("value" if agree(found, run(formula, tensors)) else "WRONG")
            except NotImplementedError:
                row.append("refused")
            except Exception as error:
                row.append(f"{type(error).__name__}: {str(error).splitlines()[0][:150]}")
        print("|", " | ".join([name, *row]), "|", flush=True)


if __name__ == "__main__":
    with waiting():
        main()
