"""Records a step of a transformers model for `mrope compare`, over the inputs of a record of `mrope finetune --record-step`.

    python record_transformers.py MODEL RECORD OUT [ADAPTER]

The samples of RECORD pass through MODEL, with PEFT's ADAPTER beside it, one at a time: the loss is the sum over the labelled
tokens of all samples divided by their number. Hooks read activations; the model is not changed.
"""

import json
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForImageTextToText
from transformers.masking_utils import eager_mask
from transformers.models.qwen2_vl.modeling_qwen2_vl import eager_attention_forward

LOGITS = 16  # tokens of a sample whose logits are kept


def places(elements, count):
    """One element in each of `count` equal parts."""
    count = min(elements, count)
    index = torch.arange(count)
    part = elements // max(count, 1)
    return index * elements // max(count, 1) + ((index * 2654435761 % 2**32 * part) >> 32)


class Recorder:
    def __init__(self, samples):
        self.samples, self.items, self.shapes, self.line, self.handles = samples, {}, {}, "", []

    def keep(self, name, x):
        flat = x.detach().reshape(-1)
        self.shapes[name] = list(x.shape)
        self.items[name] = flat[places(flat.numel(), self.samples)].float().clone()

    def activation(self, name, x):
        self.keep(f"forward/{self.line}/{name}", x)

    def attention(self, module, q, k, v, attention_mask=None, **kwargs):
        out = eager_attention_forward(module, q, k, v, attention_mask, **kwargs)
        if hasattr(module, "layer_idx"):  # not the tower's
            for name, x in {"q_post": q, "k_post": k, "v": v}.items():
                self.activation(f"{name}.{module.layer_idx}", x[0].transpose(0, 1))
            self.activation(f"mixed.{module.layer_idx}", out[0][0].flatten(1))
        return out

    def hook(self, module, name, of=lambda x: x[0]):
        """Keeps a module's output; of the decoder's without the dimension of the batch."""
        first = lambda out: out[0] if isinstance(out, tuple) else out
        keep = lambda module, args, out: self.activation(name, of(first(out)))
        self.handles.append(module.register_forward_hook(keep))

    def hook_layer(self, index, layer):
        attention = layer.self_attn
        self.hook(layer.input_layernorm, f"norm.{index}.attn")
        self.hook(layer.post_attention_layernorm, f"norm.{index}.mlp")
        heads = lambda x: x[0] if x.dim() == 4 else x[0].unflatten(-1, (-1, attention.head_dim))
        for name in "qk":
            module = getattr(attention, f"{name}_norm", getattr(attention, f"{name}_proj"))
            self.hook(module, f"{name}_pre.{index}", heads)
        self.hook(attention, f"attn.{index}.out")
        self.hook(layer, f"hidden.{index}.out")
        read = lambda args, named: (args[0] if args else named["hidden_states"])[0]
        keep = lambda module, args, named: self.activation(f"hidden.{index}.in", read(args, named))
        self.handles.append(layer.register_forward_pre_hook(keep, with_kwargs=True))

        def backward(module, args, out):
            out, line = out[0] if isinstance(out, tuple) else out, self.line
            if out.requires_grad:
                out.register_hook(lambda gradient: self.keep(f"backward/{line}/hidden.{index}.out", gradient[0]))

        self.handles.append(layer.register_forward_hook(backward))

    def hook_model(self, base):
        text, vision = base.model.language_model, base.model.visual
        self.hook(vision.patch_embed, "vision.patch_embed", lambda x: x)
        for index, block in enumerate(vision.blocks):
            self.hook(block, f"vision.block.{index}.out", lambda x: x)
        for index, layer in enumerate(text.layers):
            self.hook_layer(index, layer)
        self.hook(text.norm, "hidden.final_norm")
        self.hook(base.lm_head, "logits", lambda x: x[0][places(x.shape[1], LOGITS)])


def parameters(model):
    """By the names that adapters and checkpoints in transformers have."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield name.replace("lora_A.default", "lora_A").replace("lora_B.default", "lora_B"), parameter
        else:
            yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), parameter


def arguments(base, x):
    """What a model reads of a sample."""
    given = dict(input_ids=x["input_ids"][None], mm_token_type_ids=x["kinds"][None], use_cache=False)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["position_ids"] = torch.arange(len(x["input_ids"])).expand(3, 1, -1)
    if x["image_grids"].numel():
        given.update(pixel_values=x["image_patches"], image_grid_thw=x["image_grids"])
        ids = base.model.get_rope_index(
            given["input_ids"], given["mm_token_type_ids"], x["image_grids"], attention_mask=given["attention_mask"]
        )
        given["position_ids"] = ids[0]
    return given


def record(model, inputs, samples=1024):
    """Items, shapes and loss of a step over `{line: {name: tensor}}`."""
    recorder = Recorder(samples)
    AttentionInterface.register("record", recorder.attention)
    AttentionMaskInterface.register("record", eager_mask)
    model.set_attn_implementation("record")
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    recorder.hook_model(base)
    for name, parameter in parameters(model):
        recorder.keep(f"weight/{name}", parameter)
    labelled = sum((x["labels"][1:] != -100).sum().item() for x in inputs.values())
    model.zero_grad()
    total = 0.0
    for recorder.line, x in inputs.items():
        given = arguments(base, x)
        model.last_ids = given["position_ids"]
        for name, value in {**x, "position_ids": given["position_ids"][:, 0]}.items():
            recorder.shapes[f"input/{recorder.line}/{name}"] = list(value.shape)
            recorder.items[f"input/{recorder.line}/{name}"] = value.reshape(-1).float().clone()
        logits = model(**given).logits[0, :-1].float()
        loss = cross_entropy(logits, x["labels"][1:], ignore_index=-100, reduction="sum") / labelled
        loss.backward()
        total += loss.item()
    for name, parameter in parameters(model):
        if parameter.grad is not None:
            recorder.keep(f"backward/{name}", parameter.grad)
    for handle in recorder.handles:
        handle.remove()
    return recorder.items, recorder.shapes, total


def read(path):
    """The header of a record, and its samples."""
    inputs = {}
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["mrope_record"])
        for key in file.keys():
            if key.startswith("input/") and not key.endswith("position_ids"):
                _, line, name = key.split("/")
                x = file.get_tensor(key).reshape(header["shapes"][key])
                inputs.setdefault(line, {})[name] = x if name == "image_patches" else x.long()
    return header, inputs


def write(path, items, shapes, loss, header, settings={}):
    kept = {key: header[key] for key in ("precision", "samples", "step")}
    text = json.dumps(dict(version=1, source="transformers", loss=loss, settings=settings, shapes=shapes, **kept))
    save_file(items, path, metadata={"mrope_record": text, "format": "pt"})


if __name__ == "__main__":
    header, inputs = read(sys.argv[2])
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[header["precision"]]
    model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], dtype=dtype).eval()
    if len(sys.argv) > 4:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, sys.argv[4], is_trainable=True)
    write(sys.argv[3], *record(model, inputs, header["samples"]), header)
