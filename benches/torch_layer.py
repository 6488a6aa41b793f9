"""Times the operations of a layer in PyTorch, in the sizes of `mrope accept` and beside its times.

    python3 benches/torch_layer.py REPORT.json [--seconds 100]

REPORT.json is a report of `mrope accept`, whose part "times" gives the sizes. On the first CUDA device, else on the
CPU: eager, compiled, and the rotation by Liger's kernel where that is installed. A line per operation; the last column
is the time of mrope in units of the best of PyTorch.
"""
import argparse
import json
import re
import statistics
import sys
import time

import torch
import torch.nn.functional as F

SAMPLES, SHORTEST_SAMPLE_S = 5, 0.02
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def rotate(q, k, cos, sin):
    def one(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return one(q), one(k)


def norm(x, weight):
    return (F.rms_norm(x.float(), x.shape[-1:], eps=1e-6) * weight.float()).to(x.dtype)


def normed_and_rotated(q, k, weight, cos, sin):
    return rotate(norm(q, weight), norm(k, weight), cos, sin)


def attend(q, k):
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)


def swiglu(gate, up):
    return F.silu(gate) * up


def layer(x, weight, scale, of_head, cos, sin, keys):
    tokens, heads = x.shape[0], x.shape[1] // 128
    normed = norm(x, scale)
    q, k = ((normed @ weight).view(1, tokens, heads, 128) for _ in range(2))
    v = k[:, :, :keys]
    q, k = normed_and_rotated(q, v, of_head, cos, sin)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    hidden = x + mixed.transpose(1, 2).reshape(tokens, -1) @ weight
    return hidden + swiglu(hidden @ weight, hidden @ weight) @ weight


def operations(tokens, heads, dtype, device):
    """By the names of `mrope accept`: a function, its arguments, and the tensors whose gradients are wanted."""
    random = lambda *shape: torch.rand(shape, device=device, dtype=dtype) * 2 - 1
    keys, channels = max(heads // 4, 1), heads * 128
    q, k = (random(1, tokens, n, 128) for n in (heads, keys))
    x, weight = random(tokens, channels), random(channels, channels)
    angles = torch.arange(tokens, device=device)[:, None] * 1e4 ** (-torch.arange(64, device=device) / 64)
    cos, sin = (torch.cat((f(angles),) * 2, -1).to(dtype)[None, :, None] for f in (torch.cos, torch.sin))
    of_head, scale = torch.ones(128, device=device, dtype=dtype), random(channels)
    tracked = lambda *tensors: [tensor.detach().clone().requires_grad_() for tensor in tensors]
    attended, whole = tracked(q, k), tracked(x, weight)
    return {
        "copy of q and k": (lambda q, k: (q.clone(), k.clone()), (q, k), None),
        "product with a square weight": (torch.matmul, (x, weight), None),
        "rotation of q and k": (rotate, (q, k, cos, sin), None),
        "its gradient": (rotate, (q, k, cos, -sin), None),
        "norm of the heads with the rotation": (normed_and_rotated, (q, k, of_head, cos, sin), None),
        "SwiGLU": (swiglu, (x, x), None),
        "causal attention": (attend, (q, k), None),
        "causal attention and its gradients": (attend, attended, attended),
        "a layer of 6 products, forward and backward": (layer, (*whole, scale, of_head, cos, sin, keys), whole),
    }


def liger(q, k, cos, sin):
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos[:, :, 0], sin[:, :, 0])


def milliseconds(run, device):
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    run()
    wait()
    samples, runs = [], 1
    while len(samples) < SAMPLES:
        start = time.perf_counter()
        for _ in range(runs):
            run()
        wait()
        taken = time.perf_counter() - start
        if taken < SHORTEST_SAMPLE_S:
            runs *= 2
        else:
            samples.append(taken / runs)
    return 1e3 * statistics.median(samples)


def timed(function, arguments, wanted, device):
    if wanted is None:
        with torch.no_grad():
            return milliseconds(lambda: function(*arguments), device)

    def both():
        torch.autograd.grad(function(*arguments).sum(), wanted)

    return milliseconds(both, device)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", help="report.json of `mrope accept`")
    parser.add_argument("--seconds", type=float, default=100, help="leave out what would begin later [100]")
    options = parser.parse_args()
    with open(options.report) as file:
        report = json.load(file)
    rows = {row["name"]: row["detail"] for part in report["parts"] if part["name"] == "times" for row in part["rows"]}
    sizes = re.fullmatch(r"(\d+) tokens, (\d+) heads of 128, (\w+)", rows.pop("sizes", ""))
    if not sizes:
        sys.exit(f"error: {options.report} has no times: its part \"times\" failed or was skipped")
    own = {name: re.match(r"([\d.]+) ms", detail) for name, detail in rows.items()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    card = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    print(f"PyTorch {torch.__version__} on {card}; {sizes[0]}; milliseconds\n")
    print("| operation | mrope | eager | compiled | Liger | mrope / best |")
    print("|---|---:|---:|---:|---:|---:|")
    end = time.monotonic() + options.seconds
    for name, (function, *rest) in operations(int(sizes[1]), int(sizes[2]), DTYPES[sizes[3]], device).items():
        ways = {"eager": function, "compiled": torch.compile(function, dynamic=False)}
        if function is rotate:
            ways["liger"] = liger
        found = {}
        for way, run in ways.items():
            try:
                if time.monotonic() < end:
                    found[way] = timed(run, *rest, device)
            except Exception as error:  # a compiler or Liger is missing, or has no kernel for this device
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                print(f"left out: {name}, {way}: {reason}", file=sys.stderr)
        mine = float(own[name][1]) if own.get(name) else None
        shown = [mine, *(found.get(way) for way in ("eager", "compiled", "liger"))]
        times = mine / min(found.values()) if mine and found else None
        cells = ["-" if value is None else f"{value:.3f}" for value in shown]
        print(f"| {name} | {' | '.join(cells)} | {'-' if times is None else f'{times:.2f}'} |", flush=True)


main()
