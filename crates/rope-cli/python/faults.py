"""Dumps of one rotation done right, and with three faults: mrope verify and gradcheck name them."""
import json
import torch
from dump import dump

HEAD_DIM, TOKENS, THETA = 32, 24, 10000.0
position_ids = torch.arange(TOKENS)
inv_freq = THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
angles = position_ids[:, None] * inv_freq  # [tokens, pairs]


def halves(x):  # Llama's pairs: channel j and j + 16
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1), torch.cat((angles, angles), -1)


def adjacent(x):  # GPT-J's pairs: channel 2j and 2j + 1
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack((-x2, x1), -1).flatten(-2), angles.repeat_interleave(2, -1)


def rotate(x, pairs, detached=False):
    turned, phi = pairs(x.detach() if detached else x)
    return x * phi.cos() + turned * phi.sin()


rotation = {"head_dim": HEAD_DIM, "pairing": "half", "axis_layout": "single", "theta": THETA}
q, k = (torch.randn(2, heads, TOKENS, HEAD_DIM, dtype=torch.float64) for heads in (4, 2))
versions = {
    "right": lambda q, k: (rotate(q, halves), rotate(k, halves)),
    "wrong_pairing": lambda q, k: (rotate(q, adjacent), rotate(k, adjacent)),
    "lost_gradient": lambda q, k: (rotate(q, halves), rotate(k.detach(), halves)),
    "half_a_gradient": lambda q, k: (rotate(q, halves, detached=True), rotate(k, halves)),
}
for name, version in versions.items():
    metadata = {"rotation": json.dumps(rotation), "layout": "[B,H,S,D]"}
    dump(f"{name}.safetensors", version, q, k, position_ids, **metadata)
