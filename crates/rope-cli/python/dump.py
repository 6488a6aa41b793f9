"""Saves what a rotation in PyTorch makes, forward and gradients, for mrope verify and gradcheck."""
import torch
from safetensors.torch import save_file


def dump(path, rotate, q, k, position_ids, **metadata):
    """rotate(q, k) returns q_out, k_out; run it in f64, or in f32 if it makes its angles in f32."""
    real, X = (torch.float64, "f64") if q.dtype == torch.float64 else (torch.float32, "f32")
    # Rounded to bf16, the inputs are the same in every type.
    inputs = [x.detach().bfloat16().to(q.dtype).requires_grad_() for x in (q, k)]
    outputs = rotate(*(x * 1 for x in inputs))  # x * 1: it may rotate in place
    upstream = [torch.randn_like(x, dtype=torch.bfloat16).to(x.dtype) for x in outputs]
    loss = sum((x * g).sum() for x, g in zip(outputs, upstream))
    if loss.requires_grad:
        loss.backward()
    gradients = [x.grad for x in inputs]  # None for one that is lost
    names = ("q", "k", "q_out", "k_out", "gq", "gk", "dq", "dk")
    tensors = zip(names, [*inputs, *outputs, *upstream, *gradients])
    tensors = {f"{n}.{X}": x.detach().to(real).contiguous() for n, x in tensors if x is not None}
    save_file(tensors | {"position_ids": position_ids.contiguous()}, path, metadata=metadata)
