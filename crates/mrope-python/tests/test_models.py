"""Models of transformers with the rotation replaced: logits, gradients and training steps."""

import importlib
import pathlib

import pytest
import torch
import transformers as hf

import mrope
from mrope import _patch

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
IMAGE, VIDEO, START, END = 60, 61, 62, 63
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))


def qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    text = {**TEXT, "rope_parameters": QWEN_ROPE}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return hf.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl():
    vision = {**VISION, "window_size": 16, "fullatt_block_indexes": [1]}
    text = {**TEXT, "rope_parameters": QWEN_ROPE}
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl():
    vision = {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {**TEXT, "head_dim": 8, "rope_parameters": {**QWEN_ROPE, "mrope_interleaved": True}}
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]
    config = hf.Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return hf.Qwen3VLForConditionalGeneration(config)


def glm4v():
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "image_size": 16,
        "out_hidden_size": 32,
    }
    rope = {**QWEN_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    text = {**TEXT, "rope_parameters": rope, "pad_token_id": 0}
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "video_start_token_id": 58,
        "video_end_token_id": 59,
    }
    config = hf.Glm4vConfig(text_config=text, vision_config=vision, **tokens)
    return hf.Glm4vForConditionalGeneration(config)


# Functions that each has, and what they pair.
MODELS = {
    llama: {"apply_rotary_pos_emb": "half"},
    qwen2_vl: {"apply_rotary_pos_emb": "half", "apply_rotary_pos_emb_vision": "half"},
    qwen2_5_vl: {"apply_rotary_pos_emb": "half", "apply_rotary_pos_emb_vision": "half"},
    qwen3_vl: {"apply_rotary_pos_emb": "half", "apply_rotary_pos_emb_vision": "half"},
    glm4v: {"apply_rotary_pos_emb": "adjacent", "apply_rotary_pos_emb_vision": "half"},
}


def inputs(model):
    """Two prompts; with an image of 4 by 6 patches each where the model sees."""
    ids = torch.randint(1, 50, (2, 16))
    given = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    vision = getattr(model.config, "vision_config", None)
    if vision is not None:
        ids[:, 2], ids[:, 3:9], ids[:, 9] = START, IMAGE, END
        given["image_grid_thw"] = torch.tensor([[1, 4, 6]] * 2)
        given["mm_token_type_ids"] = (ids == IMAGE).int()
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        given["pixel_values"] = torch.randn(2 * 24, patch)
    return given


def outcome(model, given):
    model.zero_grad()
    result = model(**given)
    result.loss.backward()
    named = model.named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    return {"logits": result.logits.detach(), **gradients}


def worst(left, right):
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_logits_and_gradients_are_those_of_the_model_as_it_was(make):
    model = make()
    given = inputs(model)
    expected = outcome(model, given)
    report = mrope.patch(model)
    try:
        replaced = {r.function.rsplit(".", 1)[1]: r.pairing for r in report}
        assert replaced == MODELS[make]
        assert all(r.layers == 2 for r in report)
        found = outcome(model, given)
    finally:
        mrope.unpatch(model)
    assert worst(expected, found) < 1e-5
    assert worst(expected, outcome(model, given)) == 0


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_twenty_steps_train_alike(make):
    losses = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = make()
        given = inputs(model)
        if patched:
            mrope.patch(model)
        try:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses.append([])
            for _ in range(20):
                loss = model(**given).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[-1].append(float(loss))
        finally:
            if patched:
                mrope.unpatch(model)
    assert losses[0][-1] < losses[0][0]
    assert torch.allclose(*map(torch.tensor, losses), atol=1e-4), losses


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_bfloat16_is_no_farther_from_float64_than_the_model_as_it_was(make):
    model = make().double()
    given = inputs(model)
    given = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    truth = outcome(model, given)
    model = model.bfloat16()
    given = {n: x.bfloat16() if x.is_floating_point() else x for n, x in given.items()}

    def error():
        found = outcome(model, given)
        parts = ((truth[name] - found[name]).norm() / truth[name].norm() for name in truth)
        return float(torch.stack(list(parts)).nan_to_num().mean())

    eager = error()
    mrope.patch(model)
    try:
        ours = error()
    finally:
        mrope.unpatch(model)
    assert ours < 1.1 * eager, (ours, eager)


def test_a_patched_model_compiles_without_graph_breaks():
    model = llama()
    ids = torch.randint(1, 50, (2, 16))
    mrope.patch(model)
    try:
        expected = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = compiled(input_ids=ids, use_cache=False).logits
    finally:
        mrope.unpatch(model)
    assert torch.allclose(expected, found, atol=1e-6)


def test_layers_keep_one_table_of_angles():
    model = llama()
    given = inputs(model)
    kept = {}

    def pack(x):
        if x.dim() == 2 and x.shape == (16, 8):
            kept[x.data_ptr()] = x.shape
        return x

    mrope.patch(model)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(**given)
    finally:
        mrope.unpatch(model)
    assert len(kept) == 1


def test_rotations_of_transformers_are_recognised():
    """What docs/pytorch.md counts."""
    folder = pathlib.Path(hf.__file__).parent / "models"
    known, left = [], []
    for file in sorted(folder.glob("*/modeling_*.py")):
        text = file.read_text()
        for name, layout in _patch._NAMES.items():
            if f"def {name}(" in text:
                path = f"transformers.models.{file.parent.name}.{file.stem}"
                function = getattr(importlib.import_module(path), name)
                recognised = _patch._recognised(function, layout)
                (left if recognised is None else known).append(f"{path}.{name}")
    assert (len(known), len(left)) == (199, 18), left


def test_a_model_without_a_known_rotation_is_refused():
    with pytest.raises(ValueError, match="nothing to replace"):
        mrope.patch(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="found no patch"):
        mrope.unpatch(torch.nn.Linear(2, 2))


def test_layers_of_a_subclass_in_another_file_are_patched():
    from transformers.models.llama import modeling_llama as file

    class Mine(file.LlamaAttention):
        pass

    model = llama()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Mine
    (found,) = mrope.patch(model)
    mrope.unpatch(model)
    assert found == (f"{file.__name__}.apply_rotary_pos_emb", 2, "half", 0)


def test_models_of_one_file_share_the_patch():
    from transformers.models.llama import modeling_llama as file

    original = file.apply_rotary_pos_emb
    first, second = llama(), llama()
    mrope.patch(first)
    mrope.patch(second)
    mrope.unpatch(first)
    assert file.apply_rotary_pos_emb is not original
    mrope.unpatch(second)
    assert file.apply_rotary_pos_emb is original


@pytest.mark.parametrize("dim", [1, 2, -2, -3, 0, -4])
def test_a_patched_function_takes_heads_where_the_original_does(dim):
    from transformers.models.llama import modeling_llama

    model = llama()
    original = modeling_llama.apply_rotary_pos_emb
    mrope.patch(model)
    try:
        q, cos, sin = torch.randn(2, 2, 2, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
        found = modeling_llama.apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=dim)
    finally:
        mrope.unpatch(model)
    for a, b in zip(found, original(q, q, cos, sin, unsqueeze_dim=dim), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_patched_model_runs_in_inference_mode():
    model = llama().eval()
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        mrope.patch(model)
        try:
            found = model(ids).logits
        finally:
            mrope.unpatch(model)
    assert torch.allclose(found, expected, atol=1e-6)
