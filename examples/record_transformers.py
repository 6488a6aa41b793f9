"""Records a step of a transformers model for `mrope compare`, over the inputs of a record of `mrope finetune --record-step`.

    python record_transformers.py MODEL RECORD OUT [ADAPTER]

The samples of RECORD pass through MODEL, with PEFT's ADAPTER beside it, one at a time: the loss is the sum over the labelled
tokens of all samples divided by their number. Hooks read activations; the model is not changed.
"""

import json
import re
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText,
)
from transformers.masking_utils import eager_mask
from transformers.models.qwen2_vl.modeling_qwen2_vl import eager_attention_forward

LOGITS = 16  # tokens of a sample whose logits are kept
LAYER = r"model\.layers\.(\d+)"
# The ends of modules' names, and what their outputs are called. Of a projection and its norm, the norm's output is kept.
OUTPUTS = {
    r"visual\.patch_embed": "vision.patch_embed",
    r"visual\.blocks\.(\d+)": "vision.block.{}.out",
    LAYER + r"\.input_layernorm": "norm.{}.attn",
    LAYER + r"\.post_attention_layernorm": "norm.{}.mlp",
    LAYER + r"\.self_attn\.q_(?:proj|norm)": "q_pre.{}",
    LAYER + r"\.self_attn\.k_(?:proj|norm)": "k_pre.{}",
    LAYER + r"\.(?:self|linear)_attn": "attn.{}.out",
    LAYER: "hidden.{}.out",
    r"model\.norm": "hidden.final_norm",
    r"lm_head": "logits",
}
# What a model reads of a sample, by the names of a record.
VISION = {
    "image_grids": "image_grid_thw",
    "image_patches": "pixel_values",
    "video_grids": "video_grid_thw",
    "video_patches": "pixel_values_videos",
    "video_seconds": "second_per_grid_ts",
}


def places(elements, count):
    """One element in each of `count` equal parts."""
    count = min(elements, count)
    index = torch.arange(count)
    part = elements // max(count, 1)
    return index * elements // max(count, 1) + ((index * 2654435761 % 2**32 * part) >> 32)


def record(model, inputs, samples=1024):
    """Items, shapes and loss of a step over `{line: {name: tensor}}`."""
    items, shapes, handles, line = {}, {}, [], ""
    base = model.get_base_model() if hasattr(model, "peft_config") else model

    def keep(name, x, count=samples):
        flat = x.detach().reshape(-1)
        shapes[name], items[name] = list(x.shape), flat[places(flat.numel(), count)].float().clone()

    def attention(module, q, k, v, attention_mask=None, **kwargs):
        out = eager_attention_forward(module, q, k, v, attention_mask, **kwargs)
        if hasattr(module, "layer_idx"):  # not the tower's
            for name, x in {"q_post": q, "k_post": k, "v": v}.items():
                keep(f"forward/{line}/{name}.{module.layer_idx}", x[0].transpose(0, 1))
            keep(f"forward/{line}/mixed.{module.layer_idx}", out[0][0].flatten(1))
        return out

    def watch(module, name, head_dim):
        def read(args, named):
            keep(f"forward/{line}/{name[:-3]}in", (args[0] if args else named["hidden_states"])[0])

        def write(module, args, out):
            out = out[0] if isinstance(out, tuple) else out
            x = out if name.startswith("vision") else out[0]  # the tower has no dimension of the batch
            if "_pre." in name and x.dim() == 2:
                x = x.unflatten(-1, (-1, head_dim))
            keep(f"forward/{line}/{name}", x[places(len(x), LOGITS)] if name == "logits" else x)
            if re.fullmatch(r"hidden\.\d+\.out", name) and out.requires_grad:
                out.register_hook(lambda gradient, key=f"backward/{line}/{name}": keep(key, gradient[0]))

        if re.fullmatch(r"hidden\.\d+\.out", name):
            handles.append(module.register_forward_pre_hook(lambda _, args, named: read(args, named), with_kwargs=True))
        handles.append(module.register_forward_hook(write))

    def ids(module, args, named):
        key = f"input/{line}/position_ids"
        if key not in items:
            given = args[1] if len(args) > 1 else named["position_ids"]
            # Of a model of text alone, those of all axes.
            model.last_ids = given[-3:] if given.dim() > 2 else given.expand(3, 1, -1)
            keep(key, model.last_ids[:, 0], model.last_ids.numel())

    AttentionInterface.register("record", attention)
    AttentionMaskInterface.register("record", eager_mask)
    model.set_attn_implementation("record")
    decoder = getattr(base.model, "language_model", base.model)
    handles.append(decoder.rotary_emb.register_forward_pre_hook(ids, with_kwargs=True))
    heads = {name: module.head_dim for name, module in base.named_modules() if hasattr(module, "head_dim")}
    for name, module in base.named_modules():
        for pattern, called in OUTPUTS.items():
            if match := re.fullmatch(r"(?:.*[._])?" + pattern, name):
                watch(module, called.format(*match.groups()), heads.get(name.rpartition(".")[0]))
    named = {
        name.replace("lora_A.default", "lora_A").replace("lora_B.default", "lora_B")
        if ".lora_" in name
        else name.removeprefix("base_model.model.").replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
    }
    for name, parameter in named.items():
        keep(f"weight/{name}", parameter)
    labelled = sum((x["labels"][1:] != -100).sum().item() for x in inputs.values())
    model.zero_grad()
    total = 0.0
    for line, x in inputs.items():
        for name, value in x.items():
            keep(f"input/{line}/{name}", value, value.numel())
        given = {called: x[name] for name, called in VISION.items() if name in x and x[name].numel()}
        if base.config.model_type != "qwen2_5_vl":
            given.pop("second_per_grid_ts", None)
        seen = sum(grids.prod(-1).sum().item() for name, grids in given.items() if name.endswith("grid_thw"))
        tower = getattr(base.config, "vision_config", None)
        if tower and seen != (x["kinds"] > 0).sum().item() * tower.spatial_merge_size**2:
            sys.exit(f"line {line} has placeholders without pixels: the record is of a release that kept no videos; record the step again")
        tokens = x["input_ids"][None]
        given |= {"mm_token_type_ids": x["kinds"][None]} if tower else {}
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **given).logits
        loss = cross_entropy(logits[0, :-1].float(), x["labels"][1:], ignore_index=-100, reduction="sum") / labelled
        loss.backward()
        total += loss.item()
    for name, parameter in named.items():
        if parameter.grad is not None:
            keep(f"backward/{name}", parameter.grad)
    for handle in handles:
        handle.remove()
    return items, shapes, total


def read(path):
    """The header of a record, and its samples."""
    inputs = {}
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["mrope_record"])
        for key in file.keys():
            if re.fullmatch("part/[^/]+/tokens", key):
                sys.exit(f"{path} has one rank's tokens; record the step again on one device")
            if key.startswith("input/") and not key.endswith("position_ids"):
                _, line, name = key.split("/")
                x = file.get_tensor(key).reshape(header["shapes"][key])
                inputs.setdefault(line, {})[name] = x if name.endswith(("patches", "seconds")) else x.long()
    return header, inputs


def write(path, items, shapes, loss, header, settings={}):
    kept = {key: header[key] for key in ("precision", "samples", "step")}
    text = json.dumps(dict(version=1, source="transformers", loss=loss, settings=settings, shapes=shapes, **kept))
    save_file(items, path, metadata={"mrope_record": text, "format": "pt"})


if __name__ == "__main__":
    header, inputs = read(sys.argv[2])
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[header["precision"]]
    sees = hasattr(AutoConfig.from_pretrained(sys.argv[1]), "vision_config")
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_pretrained(sys.argv[1], dtype=dtype).eval()
    if len(sys.argv) > 4:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, sys.argv[4], is_trainable=True)
    write(sys.argv[3], *record(model, inputs, header["samples"]), header)
