"""Saves one call of a rotation in PyTorch, with gradients, for mrope verify and gradcheck."""
import json

import torch
from safetensors.torch import save_file


def dump(path, rotate, q, k, position_ids, **metadata):
    """rotate(q, k) returns q_out, k_out, and rotate(q) returns q_out if k is None.

    Run it in f64, or in f32 if it computes its angles in f32. Metadata may be dicts and numbers."""
    real, X = (torch.float64, "f64") if q.dtype == torch.float64 else (torch.float32, "f32")
    # Rounded to bf16, the inputs are the same in every type.
    inputs = [x.detach().bfloat16().to(q.dtype).requires_grad_() for x in (q, k) if x is not None]
    outputs = rotate(*(x * 1 for x in inputs))  # x * 1: it may rotate in place
    outputs = [outputs] if torch.is_tensor(outputs) else outputs
    upstream = [torch.randn_like(x, dtype=torch.bfloat16).to(x.dtype) for x in outputs]
    loss = sum((x * g).sum() for x, g in zip(outputs, upstream))
    if loss.requires_grad:
        loss.backward()
    gradients = [x.grad for x in inputs]  # None for one that is lost
    made = {"{}": inputs, "{}_out": outputs, "g{}": upstream, "d{}": gradients}
    tensors = {"position_ids": position_ids.contiguous()}
    for name, values in made.items():
        for of, x in zip("qk", values):
            if x is not None:
                tensors[name.format(of) + "." + X] = x.detach().to(real).contiguous()
    text = {key: x if isinstance(x, str) else json.dumps(x) for key, x in metadata.items()}
    save_file(tensors, path, metadata=text)
