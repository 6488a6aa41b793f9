"""Norms of q and k fused into the rotation: the same results, or not fused."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointError, checkpoint

import mrope.torch
from mrope import _norms, _patch
from test_models import inputs, llama, outcome, qwen3_vl
from test_plugins import QUIET, qwen3, qwen3_5

MODELS = [qwen3, qwen3_vl, qwen3_5]
# Their norms have a weight, which starts at 1, or 1 + weight, which starts at 0.
START = {qwen3: 1.0, qwen3_vl: 1.0, qwen3_5: 0.0}


def trained(make):
    """A model whose norms have weights of their own."""
    model = make()
    for name, parameter in model.named_parameters():
        if "_norm.weight" in name:
            nn.init.normal_(parameter, START[make], 0.3)
    return model


def close(expected, found, bound=2e-6):
    """Each tensor within bound of its own largest number."""
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        assert (x - found[name]).abs().max() <= bound * x.abs().max(), name


class Fused:
    """Within it, a model is patched with norms; how many calls of norms were rotated then."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.report = mrope.patch(self.model, norms=True)
        return self

    def __exit__(self, *_):
        mrope.unpatch(self.model)
        assert not _norms._known and not _norms._originals

    @property
    def rotated(self):
        return sum(known.rotated for known in _norms._known.values())


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_logits_and_gradients_are_those_of_the_model_as_it_was(make):
    model = trained(make)
    given = inputs(model)
    expected = outcome(model, given)
    forwards = {type(m): type(m).forward for m in model.modules()}
    with Fused(model) as fused:
        assert fused.report[-1].norms == 2
        found = outcome(model, given)
        assert fused.rotated == 4
    close(expected, found)
    assert max(float((x - found[n]).abs().max()) for n, x in expected.items()) <= 1e-6
    assert forwards == {type(m): type(m).forward for m in model.modules()}


def table_of(model, length):
    decoder = getattr(model.model, "language_model", model.model)
    ids = torch.arange(length)[None]
    ids = ids if decoder is model.model else ids.expand(3, 1, length)
    return decoder.rotary_emb(torch.randn(1, length, 32), ids)


@pytest.mark.parametrize(
    "make, before, patched", [(qwen3, 22, 13), (qwen3_vl, 22, 13), (qwen3_5, 26, 15)]
)
def test_norms_and_rotation_are_one_launch(make, before, patched):
    model = trained(make)
    layer = next(m for m in model.modules() if hasattr(m, "q_norm"))
    hidden, table = torch.randn(1, 6, 32), table_of(model, 6)

    def launches():
        layer(hidden, table, None)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            layer(hidden, table, None)
        top = [e.name.removeprefix("aten::") for e in found.events() if e.cpu_parent is None]
        top = top[: top.index("scaled_dot_product_attention")]
        rest = {*QUIET, "linear", "chunk", "reshape", "type_as", "_Link"}
        return [name for name in top if name not in rest]

    counts = [len(launches())]
    mrope.patch(model)
    counts.append(len(launches()))
    mrope.unpatch(model)
    assert counts == [before, patched]
    with Fused(model):
        assert launches() == ["mrope::norm_rotate"]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_bfloat16_is_no_farther_from_float64_than_the_model_as_it_was(make):
    model = trained(make).bfloat16()
    given = inputs(model)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    given = {n: x.bfloat16() if x.is_floating_point() else x for n, x in given.items()}
    truth = outcome(copy.deepcopy(model).double(), wide)

    def error():
        found = outcome(model, given)
        parts = ((truth[name] - found[name]).norm() / truth[name].norm() for name in truth)
        return float(torch.stack(list(parts)).nan_to_num().mean())

    eager = error()
    with Fused(model) as fused:
        ours = error()
        assert fused.rotated == 4
    assert ours < 1.1 * eager, (ours, eager)


# Ways in which trainers run a model: what each does to it, and the calls of norms that are rotated.


def of_checkpoints(reentrant):
    def run(model, given):
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
        return outcome(model.train(), given)

    return run


def of_autocast(model, given):
    with torch.autocast("cpu", torch.bfloat16):
        return outcome(model, given)


def of_frozen_weights(model, given):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    return outcome(model, given)


def of_offloaded_activations(model, given):
    with torch.autograd.graph.save_on_cpu():
        return outcome(model, given)


def of_generation(model, given):
    result = model.eval().generate(
        given["input_ids"][:1], max_new_tokens=4, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )
    return {str(i): x for i, x in enumerate(result.logits)}


def of_inference_mode(model, given):
    with torch.inference_mode():
        return {"logits": model(given["input_ids"]).logits}


def of_default_device(model, given):
    with torch.device("cpu"):
        return outcome(model, given)


def of_compilation(model, given):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(input_ids=given["input_ids"], use_cache=False).logits.sin().sum()
    return {"loss": loss.detach()}


def of_functions(model, given):
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, kwargs=given).loss

    return torch.func.grad(loss)(weights)


def of_copies(model, given):
    return outcome(copy.deepcopy(model), given)


def of_pickles(model, given):
    return outcome(pickle.loads(pickle.dumps(model)), given)


@pytest.mark.parametrize(
    "run, rotated",
    [
        (of_checkpoints(False), 8),
        (of_checkpoints(True), 8),
        (of_frozen_weights, 4),
        (of_offloaded_activations, 4),
        (of_default_device, 4),
        (of_generation, 16),
        # Not fused.
        (of_autocast, 0),
        (of_inference_mode, 0),
        (of_compilation, 0),
        (of_functions, 0),
        (of_copies, 0),
        (of_pickles, 0),
    ],
)
def test_a_fused_model_runs_as_before(run, rotated):
    model = trained(qwen3)
    given = inputs(model)
    # Each changes its model.
    expected = run(copy.deepcopy(model), given)
    with Fused(model) as fused:
        found = run(model, given)
        assert fused.rotated == rotated
    close(expected, found, 2e-2 if run is of_autocast else 2e-6)


# What is done to the norms of a model before or after it is patched, all of which stays in force.


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def norms_of(model):
    return [m for n, m in model.named_modules() if n.endswith(("q_norm", "k_norm"))]


def double(module, given, result):
    return 2 * result


def each(change):
    def run(model):
        for norm in norms_of(model):
            change(norm)

    return run


def replace_weight(norm):
    norm.weight = nn.Parameter(norm.weight.detach().bfloat16())


def other_eps(model):
    for norm in norms_of(model)[::2]:
        norm.variance_epsilon = 0.5


def with_adapters(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["q_norm"], init_lora_weights=False
    )
    torch.manual_seed(1)
    peft.inject_adapter_in_model(config, model)


CHANGES = {
    "forward hook": each(lambda norm: norm.register_forward_hook(double)),
    "forward pre-hook": each(lambda norm: norm.register_forward_pre_hook(lambda m, x: x[0] + 1)),
    "backward hook": each(
        lambda norm: norm.register_full_backward_hook(lambda m, dx, dy: (2 * dx[0],))
    ),
    "hook of one norm": lambda model: norms_of(model)[0].register_forward_hook(double),
    "weight of another type": each(replace_weight),
    "parametrisation": each(
        lambda norm: parametrize.register_parametrization(norm, "weight", Doubled())
    ),
    "eps": each(lambda norm: setattr(norm, "variance_epsilon", 0.5)),
    "eps of q alone": other_eps,
    "eps as a tensor": each(lambda norm: setattr(norm, "variance_epsilon", torch.tensor(0.5))),
    "eps as a whole number": each(lambda norm: setattr(norm, "variance_epsilon", 1)),
    "a forward of its own": each(lambda norm: setattr(norm, "forward", lambda x: 2 * x)),
    "no norm": lambda model: [setattr(m, "q_norm", nn.Identity()) for m in layers_of(model)],
    "adapters": with_adapters,
    "values of weights": each(lambda norm: norm.weight.data.mul_(3)),
}


def layers_of(model):
    return [m for m in model.modules() if hasattr(m, "q_norm")]


# Those after which norms are fused: of the other layer, and with other values.
FUSED = {"hook of one norm": 2, "values of weights": 4}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_norms_stay_changed(change, late):
    model = trained(qwen3)
    other = copy.deepcopy(model)
    given = inputs(model)
    before = outcome(other, given)
    CHANGES[change](other)
    expected = outcome(other, given)
    if change != "adapters":
        assert any((x - expected[n]).abs().max() > 1e-3 * x.abs().max() for n, x in before.items())
    if not late:
        CHANGES[change](model)
    with Fused(model) as fused:
        if late:
            CHANGES[change](model)
        close(expected, outcome(model, given), 1e-5)
        assert fused.rotated == FUSED.get(change, 0)


def test_a_global_hook_is_called():
    model, seen = trained(qwen3), []
    given = inputs(model)
    with Fused(model) as fused:
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(module)
        )
        outcome(model, given)
        handle.remove()
        assert set(norms_of(model)) <= set(seen) and fused.rotated == 0


# Attention that does more with its normalised q and k.


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        a, b = part.chunk(2, -1)
        return torch.cat([part * cos + torch.cat([-b, a], -1) * sin, rest], -1)

    return turned(q), turned(k)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.head_dim = config, config.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)
        self.other = 0.0

    def forward(self, hidden_states, position_embeddings, attention_mask):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (f(hidden_states).view(shape) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.between(self.q_norm(q), self.k_norm(k), q, k)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        y = scaled_dot_product_attention(q, k, v.transpose(1, 2)).transpose(1, 2).flatten(2)
        return self.after(self.o_proj(y)), None

    def between(self, q, k, *given):
        return q.transpose(1, 2), k.transpose(-3, 2)

    def after(self, y):
        return y


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * dy + 0 * x


class AnotherUse(Attention):
    def between(self, q, k, *given):
        self.other = q.square().mean(-1).mean()
        return super().between(q, k)

    def after(self, y):
        return y + self.other


class LaterUse(Attention):
    def between(self, q, k, *given):
        self.q, self.k = q, k.transpose(1, 2)
        return q.transpose(1, 2), self.k

    def after(self, y):
        return y + self.q.sin().mean() + self.k.cos().mean()


class UseWithoutGradient(Attention):
    def between(self, q, k, *given):
        with torch.no_grad():
            self.largest = torch.maximum(q.abs().max(), k.abs().max())
        return super().between(q, k)


class TurnedWithoutGradient(Attention):
    def between(self, q, k, *given):
        with torch.no_grad():
            q = q.transpose(1, 2)
        return q, k.transpose(1, 2)


class NormWithoutGradient(Attention):
    def between(self, q, k, *given):
        with torch.no_grad():
            q = self.q_norm(given[0]).transpose(1, 2)
            k = self.k_norm(given[1]).transpose(1, 2)
        return q, k


class OtherEps(Attention):
    def __init__(self, *given):
        super().__init__(*given)
        self.q_norm.eps = 0.3


class InPlace(Attention):
    def between(self, q, k, *given):
        turned = q.transpose(1, 2)
        q.mul_(2)
        k += 1
        return turned, k.transpose(1, 2)


class InPlaceLater(Attention):
    def between(self, q, k, *given):
        self.q = q
        return super().between(q, k)

    def after(self, y):
        return y + self.q.mul_(2).mean()


class Function(Attention):
    def between(self, q, k, *given):
        return super().between(Double.apply(q), Double.apply(k))


class FunctionOfTurned(Attention):
    def between(self, q, k, *given):
        q, k = super().between(q, k)
        return Double.apply(q), k


class FunctionLater(Attention):
    def between(self, q, k, *given):
        self.q = q
        return super().between(q, k)

    def after(self, y):
        return y + Double.apply(self.q.transpose(1, 2)).sin().mean()


class Extension(Attention):
    """Does not ask the tensor's class."""

    def between(self, q, k, *given):
        turned = super().between(q, k)
        with torch._C.DisableTorchFunctionSubclass():
            self.other = q.sin().mean() + turned[1].cos().mean()
        return turned

    def after(self, y):
        return y + self.other


class Detached(Attention):
    def between(self, q, k, *given):
        return super().between(q, k.detach())


class Hooked(Attention):
    def between(self, q, k, *given):
        turned = q.transpose(1, 2)
        if q.requires_grad:
            q.register_hook(lambda dq: 2 * dq)
        return turned, k.transpose(1, 2)


class NodeHooked(Attention):
    def between(self, q, k, *given):
        if q.requires_grad:
            q.grad_fn.register_prehook(lambda dq: (2 * dq[0],))
        return super().between(q, k)


class Checkpointed(Attention):
    def between(self, q, k, *given):
        q = checkpoint(torch.sin, q, use_reentrant=True)
        return super().between(q, checkpoint(torch.sin, k, use_reentrant=False))


class Cached(Attention):
    def between(self, q, k, *given):
        self.cache = torch.cat([torch.zeros_like(k), k], 1)
        self.cache[:, : k.shape[1]].copy_(k)
        return super().between(q, self.cache[:, : k.shape[1]] + self.cache[:, k.shape[1] :])


class Swapped(Attention):
    def between(self, q, k, *given):
        q, k = super().between(q, k)
        return k, q


class OnlyQ(Attention):
    def between(self, q, k, *given):
        return super().between(q, given[1])


class ChannelsMoved(Attention):
    def between(self, q, k, *given):
        q = q.transpose(2, 3).transpose(2, 3)
        return super().between(q, k.transpose(-1, -2).transpose(-2, -1))


class Copied(Attention):
    def between(self, q, k, *given):
        with torch.no_grad():
            self.kept = [copy.deepcopy(q.detach()), pickle.loads(pickle.dumps(q.detach()))]
            self.numbers = q.tolist(), k.detach().numpy(), repr(q)
        return super().between(q, k)


# With the calls that are rotated in two steps, of 4; None: the class is left as it is.
USES = {
    Attention: 4,
    LaterUse: 4,
    FunctionLater: 4,
    InPlaceLater: 4,
    Extension: 4,
    Swapped: 4,
    AnotherUse: None,
    UseWithoutGradient: None,
    TurnedWithoutGradient: None,
    NormWithoutGradient: None,
    OtherEps: None,
    InPlace: None,
    Function: None,
    FunctionOfTurned: None,
    Detached: None,
    Hooked: None,
    NodeHooked: None,
    Checkpointed: None,
    Cached: None,
    OnlyQ: None,
    ChannelsMoved: None,
    Copied: None,
}


def attention(kind):
    config = SimpleNamespace(hidden_size=64, num_attention_heads=4, head_dim=16)
    layer = kind(config, 0)
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.normal_(norm.weight, 1, 0.3)
    return nn.Sequential(layer)


def two_steps(model):
    """Results and gradients; the second step's gradients are added to the first one's."""
    model.zero_grad()
    results = {}
    for i, length in enumerate((5, 7)):
        generator = torch.Generator().manual_seed(i)
        hidden = torch.randn(2, length, 64, generator=generator).requires_grad_()
        phases = torch.rand(2, length, 4, generator=generator).repeat(1, 1, 2)
        y = model[0](hidden, (phases.cos(), phases.sin()), None)[0]
        y.sin().sum().backward()
        results |= {f"y {i}": y.detach(), f"dx {i}": hidden.grad}
    return {**results, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("kind", USES, ids=lambda kind: kind.__name__)
def test_other_uses_of_normalised_heads_see_them_normalised(kind):
    """Once as patch() decides, and once with norms that wait whatever it found."""
    model = attention(kind)
    expected = two_steps(model)
    with Fused(model) as fused:
        assert fused.report[0].norms == (USES[kind] is not None)
        close(expected, two_steps(model))
        assert fused.rotated == (USES[kind] or 0)
    mrope.patch(model)
    for norm in (model[0].q_norm, model[0].k_norm):
        _norms.wait(norm, _norms.recognised(norm))
    try:
        if kind is Checkpointed:
            # What the recomputation finds was made in the forward.
            with pytest.raises(CheckpointError):
                two_steps(model)
            return
        close(expected, two_steps(model))
        close(expected, two_steps(model))
    finally:
        mrope.unpatch(model)


def test_angles_of_a_wider_type_make_wider_results():
    model = attention(Attention).bfloat16()
    q, phases = torch.randn(1, 5, 4, 16).bfloat16(), torch.rand(1, 5, 16)

    def turned():
        heads = (norm(q).transpose(1, 2) for norm in (model[0].q_norm, model[0].k_norm))
        return apply_rotary_pos_emb(*heads, phases.cos(), phases.sin())[0]

    expected = turned()
    with Fused(model) as fused:
        assert fused.report[0].norms == 1
        found = turned()
        assert fused.rotated == 0
    assert found.dtype == torch.float32 and torch.allclose(expected, found, atol=1e-6)


class InputInPlace(Attention):
    def between(self, q, k, *given):
        given[0].mul_(2)
        return super().between(q, k)


def test_a_norm_whose_input_is_overwritten_is_not_fused():
    model = attention(InputInPlace)
    hidden, phases = torch.randn(2, 5, 64), torch.rand(2, 5, 8)
    with torch.no_grad():
        expected = model[0](hidden, (phases, phases), None)[0]
        with Fused(model):
            assert torch.allclose(expected, model[0](hidden, (phases, phases), None)[0], atol=1e-6)
            _norms.wait(model[0].q_norm, _norms.recognised(model[0].q_norm))
            with pytest.raises(RuntimeError, match="changed in place"):
                model[0](hidden, (phases, phases), None)


def test_a_gradient_that_is_asked_for_too_late_is_refused():
    model = attention(LaterUse)
    with Fused(model):
        two_steps(model)
        with pytest.raises(RuntimeError, match="call it earlier"):
            torch.autograd.grad(model[0].k.sum(), model[0].q)
        with pytest.raises(RuntimeError, match="call it earlier"):
            model[0].q.register_hook(print)
        with pytest.raises(RuntimeError, match="call it earlier"):
            model[0].k.retain_grad()


def test_extensions_cannot_overwrite_what_waits():
    model = attention(LaterUse)
    with Fused(model):
        two_steps(model)
        expected = torch.sin(model[0].q)
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(model[0].q.sin(), expected)
            with pytest.raises(RuntimeError, match="overwrite"):
                model[0].q.zero_()


def test_a_class_made_in_another_way_is_left_as_it_is():
    class Other(Attention):
        def __init__(self, config, layer_idx, more):
            super().__init__(config, layer_idx)

    config = SimpleNamespace(hidden_size=64, num_attention_heads=4, head_dim=16)
    model = nn.Sequential(Other(config, 0, None))
    expected = two_steps(model)
    with Fused(model) as fused:
        assert fused.report[0].norms == 0
        close(expected, two_steps(model))


def test_a_class_that_computes_something_else_is_left_as_it_is(monkeypatch):
    def wrong(q, k, *given, norm=None, **weights):
        q, k = mrope.torch.rotary(q, k, *given, norm=norm, **weights)
        return (q, k) if norm is None else (q, 1.001 * k)

    monkeypatch.setattr(_patch, "rotary", wrong)
    with Fused(attention(Attention)) as fused:
        assert fused.report[0].norms == 0


def test_models_without_norms_are_patched_as_before():
    model = llama()
    with Fused(model) as fused:
        assert [found.norms for found in fused.report] == [0]


def test_one_model_is_unpatched_and_another_stays():
    first, second = trained(qwen3), trained(qwen3)
    given = inputs(second)
    expected = outcome(second, given)
    mrope.patch(first, norms=True)
    with Fused(second) as fused:
        mrope.unpatch(first)
        close(expected, outcome(second, given))
        assert fused.rotated == 4
