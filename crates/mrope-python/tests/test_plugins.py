"""mrope inside trainers, through their own calls: equal values and gradients, fewer launches.

Each trainer is tested where it is installed: VeOmni 0.1.12 (with its transformers 5.16.1), ms-swift
4.6.0, LLaMA-Factory 0.9.5 (its v1), axolotl 0.19.0.
"""

import importlib
import importlib.util
import sys

import pytest
import torch
import transformers as hf
from torch.profiler import ProfilerActivity, profile

import torch_npu_stub
from mrope import _norms, plugins, unpatch
from test_models import IMAGE, TEXT, TOKENS, VISION, inputs, outcome, qwen2_5_vl, qwen3_vl, worst

# They launch nothing; "equal" is of the CPU alone, where cos could have changed without a trace.
QUIET = {
    *("to", "slice", "unsqueeze", "squeeze", "view", "transpose", "detach", "alias", "select"),
    *("promote_types", "result_type", "equal"),
}


def needs(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is missing")


@pytest.fixture
def npu():
    before = sys.modules.get("torch_npu")
    if importlib.util.find_spec("veomni"):
        # With torch_npu, it wants torch.npu as well.
        importlib.import_module("veomni")
    torch_npu_stub.install()
    yield
    sys.modules.pop("torch_npu")
    if before is not None:
        sys.modules["torch_npu"] = before


def qwen3():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT, head_dim=8))


def qwen3_5():
    """A quarter of the channels rotates, in sections; the tower's all do."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
    text = {**TEXT, "head_dim": 16, "rope_parameters": rope, "layer_types": ["full_attention"] * 2}
    vision = {**VISION, "num_position_embeddings": 16}
    return hf.Qwen3_5ForConditionalGeneration(
        hf.Qwen3_5Config(text_config=text, vision_config=vision, **TOKENS)
    )


# Dense, in sections, and partial.
MODELS = [qwen3, qwen2_5_vl, qwen3_vl, qwen3_5]
# Those of q and k, which the rotation makes.
NORMS = {qwen3: 4, qwen2_5_vl: 0, qwen3_vl: 4, qwen3_5: 4}


def launches(function, q, k, cos, sin):
    """Operators that a call of a layer other than the first starts on a device."""
    q, k = (x.clone().requires_grad_() for x in (q, k))
    function(q, k, cos, sin)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function(q, k, cos, sin)
    names = [event.name for event in found.events() if event.cpu_parent is None]
    return [name for name in names if name.removeprefix("aten::") not in QUIET]


def heads(rotary_dim):
    """q, k, cos and sin of Qwen3.5's shape, of which rotary_dim channels rotate."""
    phases = torch.rand(2, 5, rotary_dim // 2)
    phases = torch.cat([phases, phases], -1)
    return torch.randn(2, 5, 4, 64).transpose(1, 2), torch.randn(2, 2, 5, 64), *trig(phases)


def trig(phases):
    return phases.cos(), phases.sin()


def compare(theirs, ours, rotary_dim):
    """Values and gradients of two functions."""
    q, k, cos, sin = heads(rotary_dim)
    results = []
    for function in (theirs, ours):
        a, b = (x.clone().requires_grad_() for x in (q, k))
        y, z = function(a, b, cos, sin)
        (y.sin().sum() + z.cos().sum()).backward()
        results.append({"q": y.detach(), "k": z.detach(), "dq": a.grad, "dk": b.grad})
    assert worst(*results) < 1e-6


def close(expected, found):
    """Of a whole model: within 1e-6 of the largest number of each tensor."""
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        assert (x - found[name]).abs().max() <= 1e-6 * max(1, float(x.abs().max())), name


@pytest.mark.parametrize("rotary_dim, count", [(64, 2), (16, 6)], ids=["dense", "partial"])
@needs("swift")
def test_ms_swift(npu, rotary_dim, count):
    table = importlib.import_module("swift.model.npu_patch.model")
    from swift.model.npu_patch.utils import apply_patch_map

    name = "QWEN3_PATCHES" if rotary_dim == 64 else "QWEN3_5_PATCHES"
    file = importlib.import_module(
        "transformers.models.qwen3.modeling_qwen3"
        if rotary_dim == 64
        else "transformers.models.qwen3_5.modeling_qwen3_5"
    )
    original = file.apply_rotary_pos_emb
    patches = getattr(table, name)
    before = [(each, dict(each)) for n, each in vars(table).items() if n.endswith("_PATCHES")]
    try:
        row = {"apply_rotary_pos_emb": patches["apply_rotary_pos_emb"]}
        apply_patch_map(file, row)
        theirs = file.apply_rotary_pos_emb
        plugins.install("ms-swift")
        apply_patch_map(file, {"apply_rotary_pos_emb": patches["apply_rotary_pos_emb"]})
        assert file.apply_rotary_pos_emb is plugins.rotate
        compare(theirs, plugins.rotate, rotary_dim)
        given = heads(rotary_dim)
        assert len(launches(theirs, *given)) >= count, launches(theirs, *given)
        assert launches(plugins.rotate, *given) == ["mrope::rotate"]
        model = qwen3() if rotary_dim == 64 else qwen3_5()
        batch = inputs(model)
        found = outcome(model, batch)
        file.apply_rotary_pos_emb = theirs
        close(outcome(model, batch), found)
    finally:
        file.apply_rotary_pos_emb = original
        for each, rows in before:
            each.update(rows)


@needs("llamafactory")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_llamafactory(make):
    plugins.install("llamafactory")
    from llamafactory.v1.plugins.model_plugins.kernels import interface

    model = make()
    given = inputs(model)
    expected = outcome(model, given)
    assert "mrope" in interface.get_default_kernels()
    interface.apply_default_kernels(model, include_kernels="mrope")
    assert len(_norms._known) == NORMS[make]
    try:
        close(expected, outcome(model, given))
    finally:
        unpatch(model)


@needs("axolotl")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_axolotl(make):
    from axolotl.integrations.base import PluginManager

    model = make()
    given = inputs(model)
    expected = outcome(model, given)
    manager = PluginManager.get_instance()
    manager.register("mrope.plugins.Axolotl")
    assert "mrope.plugins.Axolotl" in manager.plugins
    manager.post_model_build({}, model)
    assert len(_norms._known) == NORMS[make]
    try:
        close(expected, outcome(model, given))
    finally:
        unpatch(model)


@pytest.mark.parametrize(
    "name, rotary_dim, count", [("qwen3_vl", 64, 2), ("qwen3_5", 16, 6)], ids=["dense", "partial"]
)
@needs("veomni")
def test_veomni(npu, name, rotary_dim, count):
    from veomni.models.auto import _bind_veomni_ops
    from veomni.ops.kernels.rotary import npu as theirs

    plugins.install("veomni")
    plugins.install("veomni")
    file = importlib.import_module(
        f"veomni.models.transformers.{name}.generated.patched_modeling_{name}_npu"
    )
    partial = rotary_dim < 64
    npu_function = (
        theirs.partial_apply_rotary_pos_emb_npu if partial else theirs.apply_rotary_pos_emb_npu
    )
    given = heads(rotary_dim)
    assert len(launches(npu_function, *given)) >= count, launches(npu_function, *given)

    class Chosen:
        """Of VeOmni's configuration, what its slots read; the rest is eager."""

        rotary_pos_emb_implementation = rotary_pos_emb_vision_implementation = "mrope"
        moe_implementation = "eager"

        def __getattr__(self, _):
            return "eager"

    eager = Chosen()
    eager.rotary_pos_emb_implementation = eager.rotary_pos_emb_vision_implementation = "eager"
    _bind_veomni_ops(file, eager)
    expected = file.apply_rotary_pos_emb
    compare(expected, npu_function, rotary_dim)
    model_of = {"qwen3_vl": qwen3_vl, "qwen3_5": qwen3_5}[name]()
    model = type(model_of).__name__
    model = getattr(file, model)(model_of.config)
    ids = torch.randint(1, 50, (1, 16))
    hidden = torch.randn(1, 16, 32)
    decoder = model.model.language_model

    def outcome():
        model.zero_grad()
        if partial:
            # The decoder asks for Triton as it starts: the layers' attention alone.
            table = decoder.rotary_emb(hidden, torch.arange(16).expand(3, 1, 16))
            logits = decoder.layers[0].self_attn(
                hidden_states=hidden, position_embeddings=table, attention_mask=None
            )[0]
        else:
            # Its tower takes what VeOmni's collator has prepared of pictures.
            logits = model(input_ids=ids, use_cache=False).logits
        logits.sin().sum().backward()
        named = model.named_parameters()
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        return {"logits": logits.detach(), **gradients}

    before = outcome()
    assert _bind_veomni_ops(file, Chosen())
    assert file.veomni_apply_rotary_pos_emb.use_non_eager_impl
    close(before, outcome())
    compare(npu_function, file.apply_rotary_pos_emb, rotary_dim)
    assert launches(file.apply_rotary_pos_emb, *given) == ["mrope::rotate"]


def test_an_unknown_trainer_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        plugins.install("other")


def test_heads_elsewhere_are_refused():
    q, k, cos, sin = heads(16)
    with pytest.raises(ValueError, match="unsqueeze_dim 3"):
        plugins.rotate(q, k, cos, sin, unsqueeze_dim=3)
    swapped = plugins.rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2)
    assert torch.equal(swapped[0].transpose(1, 2), plugins.rotate(q, k, cos, sin)[0])
