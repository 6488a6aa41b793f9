"""Records a step of a transformers model, for `mrope compare`: python record_transformers.py MODEL RECORD OUT [ADAPTER]

RECORD is of `mrope finetune --record-step`; its samples pass through MODEL, with PEFT's ADAPTER, one at a time. Reading tools
of PyTorch are all it takes: forward hooks, an attention function of the script's own, and gradients.
"""
import json, math, sys
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForImageTextToText
from transformers.masking_utils import eager_mask
from transformers.models.qwen2_vl.modeling_qwen2_vl import eager_attention_forward

def sampled(flat, count):
    n = flat.numel(); count = min(n, count); i = torch.arange(count)
    return flat[i * n // count + ((i * 2654435761 % 2**32 * (n // count)) >> 32)].float().clone() if n else flat.float()

def record(model, inputs, samples=1024, optimizer=None):
    """Items, shapes and loss of a step over samples `{line: {name: tensor}}`."""
    items, shapes, handles, where = {}, {}, [], {}
    def keep(name, x, skip=1):  # without the dimension of the batch
        x = x.detach()[0] if skip else x.detach(); shapes[name] = list(x.shape); items[name] = sampled(x.reshape(-1), samples)
    def attention(module, q, k, v, attention_mask=None, **kwargs):
        out = eager_attention_forward(module, q, k, v, attention_mask, **kwargs)
        if hasattr(module, "layer_idx"):
            for name, x in [("q_post", q), ("k_post", k), ("v", v)]:
                keep(f"forward/{where['line']}/{name}.{module.layer_idx}", x.transpose(1, 2))
            keep(f"forward/{where['line']}/mixed.{module.layer_idx}", out[0].flatten(2))
        return out
    AttentionInterface.register("record", attention); AttentionMaskInterface.register("record", eager_mask)
    model.set_attn_implementation("record")
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    def hook(module, name, of=lambda out: out, skip=1):
        handles.append(module.register_forward_hook(lambda m, i, o: keep(f"forward/{where['line']}/{name}", of(o[0] if isinstance(o, tuple) else o), skip)))
    text, vision = base.model.language_model, base.model.visual
    hook(vision.patch_embed, "vision.patch_embed", skip=0); hook(text.norm, "hidden.final_norm")
    for i, block in enumerate(vision.blocks): hook(block, f"vision.block.{i}.out", skip=0)
    few = lambda x: x[:, [t * x.shape[1] // min(16, x.shape[1]) + (t * 2654435761 % 2**32 * (x.shape[1] // min(16, x.shape[1])) >> 32) for t in range(min(16, x.shape[1]))]]
    hook(base.lm_head, "logits", few)
    for i, layer in enumerate(text.layers):
        attn, heads = layer.self_attn, lambda x, d=layer.self_attn.head_dim: x.unflatten(-1, (-1, d)) if x.dim() == 3 else x
        hook(layer.input_layernorm, f"norm.{i}.attn"); hook(layer.post_attention_layernorm, f"norm.{i}.mlp")
        for n in "qk": hook(getattr(attn, f"{n}_norm", getattr(attn, f"{n}_proj")), f"{n}_pre.{i}", heads)
        hook(attn, f"attn.{i}.out"); hook(layer, f"hidden.{i}.out")
        handles.append(layer.register_forward_pre_hook(lambda m, a, k, i=i: keep(f"forward/{where['line']}/hidden.{i}.in", a[0] if a else k["hidden_states"]), with_kwargs=True))
        def backward(m, a, o, i=i):
            o = o[0] if isinstance(o, tuple) else o
            if o.requires_grad: o.register_hook(lambda g, line=where["line"]: keep(f"backward/{line}/hidden.{i}.out", g))
        handles.append(layer.register_forward_hook(backward))
    named = {n.replace("lora_A.default", "lora_A").replace("lora_B.default", "lora_B").replace(".base_layer.", ".").removeprefix("" if ".lora_" in n else "base_model.model."): p for n, p in model.named_parameters()}
    for name, p in named.items(): keep(f"weight/{name}", p, 0)
    labelled, total = sum((x["labels"][1:] != -100).sum().item() for x in inputs.values()), 0.0
    model.zero_grad()
    for line, x in inputs.items():
        where["line"] = line
        given = dict(input_ids=x["input_ids"][None], attention_mask=torch.ones_like(x["input_ids"])[None], mm_token_type_ids=x["kinds"][None], use_cache=False)
        if x["image_grids"].numel(): given.update(pixel_values=x["image_patches"], image_grid_thw=x["image_grids"])
        if x["image_grids"].numel():
            given["position_ids"] = base.model.get_rope_index(given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"], attention_mask=given["attention_mask"])[0]
        else:
            given["position_ids"] = torch.arange(len(x["input_ids"])).expand(3, 1, -1)
        model.last_ids = given["position_ids"]
        for name, value in {**x, "position_ids": given["position_ids"][:, 0]}.items():
            shapes[f"input/{line}/{name}"] = list(value.shape); items[f"input/{line}/{name}"] = value.reshape(-1).float().clone()
        loss = cross_entropy(model(**given).logits[0, :-1].float(), x["labels"][1:], ignore_index=-100, reduction="sum") / labelled
        loss.backward(); total += loss.item()
    for name, p in named.items():
        if p.grad is not None: keep(f"backward/{name}", p.grad, 0)
    if optimizer:
        before = {n: p.detach().clone() for n, p in named.items() if p.requires_grad}; optimizer.step()
        for name, old in before.items(): keep(f"update/{name}", named[name] - old, 0)
    for handle in handles: handle.remove()
    return items, shapes, total

def read(path):
    """The samples of a record."""
    with safe_open(path, "pt") as file:
        header, inputs = json.loads(file.metadata()["mrope_record"]), {}
        for key in file.keys():
            if key.startswith("input/"):
                _, line, name = key.split("/"); x = file.get_tensor(key).reshape(header["shapes"][key])
                inputs.setdefault(line, {})[name] = x if name == "image_patches" else x.long()
    return header, {line: {k: v for k, v in x.items() if k != "position_ids"} for line, x in inputs.items()}

def write(path, items, shapes, loss, header, settings={}):
    header = dict(version=1, source="transformers", precision=header["precision"], samples=header["samples"], step=header["step"], loss=loss, settings=settings, shapes=shapes)
    save_file(items, path, metadata={"mrope_record": json.dumps(header), "format": "pt"})

if __name__ == "__main__":
    header, inputs = read(sys.argv[2])
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[header["precision"]]
    model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], dtype=kind, attn_implementation="eager").eval()
    if len(sys.argv) > 4:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, sys.argv[4], is_trainable=True)
    write(sys.argv[3], *record(model, inputs, header["samples"]), header)
