"""What trainers call of torch_npu, on the CPU: one operator where it launches one."""

import importlib.machinery
import sys
import types

import torch


@torch.library.custom_op("npu_stub::rotary_mul", mutates_args=())
def rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def back(ctx, dy):
    cos, sin = ctx.saved_tensors
    a, b = (dy * sin).chunk(2, -1)
    return dy * cos + torch.cat([b, -a], -1), None, None


rotary_mul.register_autograd(back, setup_context=keep)


def npu_rotary_mul(x, cos, sin, rotary_mode="half"):
    # It copies what is not contiguous, such as a slice of channels, by a launch before its own.
    return rotary_mul(x.contiguous(), cos, sin)


def install():
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    module.__version__ = "0"
    module.npu_rotary_mul = npu_rotary_mul
    sys.modules["torch_npu"] = module
