"""Times the rotation of q and k in PyTorch, beside a copy of the same bytes.

    python3 benches/torch_rope.py [--device cuda] [--shape NAME] [--tokens N] [--json]

Half-split pairing, [batch, heads, tokens, channels] with a token's heads together in memory, as
projections leave them; the shapes of `mrope bench speed --device gpu`. What Hugging Face
transformers computes, eager and compiled, and the kernels of mrope (CPUs) and Liger (GPUs) where
they are installed. Each result is compared with f64 before anything is timed.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

import torch

# Heads of q and of k, tokens, channels.
SHAPES = {
    "qwen3-vl-8b": (32, 8, 8192, 128),
    "qwen3-vl-8b, long": (32, 8, 131072, 128),
    "flux": (24, 24, 28800, 128),
    "qwen3-vl-8b, one token": (32, 8, 1, 128),
}
SAMPLES, SHORTEST_SAMPLE_S = 11, 0.02


def rotate(q, k, cos, sin):
    def one(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return one(q), one(k)


def implementations():
    # For the shapes of each case alone.
    torch.compiler.reset()
    found = {"eager": rotate, "compiled": torch.compile(rotate, dynamic=False)}
    try:
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        # In place, where a token's heads are neighbours in memory.
        found["liger"] = liger_rotary_pos_emb
    except ImportError as error:
        print(f"skipped: Liger ({error})", file=sys.stderr)
    try:
        from mrope.torch import angles_from_cos_sin, rotary

        # Once a step, for all layers.
        tables = {}

        def fused(q, k, cos, sin):
            if id(cos) not in tables:
                tables[id(cos)] = angles_from_cos_sin(cos, sin)
            return rotary(q, k, tables[id(cos)], "bnsd")

        found["mrope"] = fused
    except ImportError as error:
        print(f"skipped: mrope ({error})", file=sys.stderr)
    return found


def kept_bytes(run):
    """Of tensors that a forward keeps for its backward, each memory once."""
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(kept.values())


def machine_of(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "a CPU")
    return f"{model}, {torch.get_num_threads()} threads"


def seconds(run, device):
    """Of one run: many launches, one wait."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    run()
    wait()
    runs = 1
    while True:
        start = time.perf_counter()
        for _ in range(runs):
            run()
        wait()
        taken = time.perf_counter() - start
        if taken >= SHORTEST_SAMPLE_S:
            return taken / runs
        runs = max(2 * runs, int(runs * SHORTEST_SAMPLE_S / max(taken, 1e-9)))


def time_case(name, dtype, device, tokens):
    q_heads, k_heads, own_tokens, channels = SHAPES[name]
    tokens = tokens or own_tokens
    generator = torch.Generator(device).manual_seed(1)
    random = lambda n: torch.randn(1, tokens, n, channels, device=device, generator=generator)
    leaves = [random(n).to(dtype).transpose(1, 2) for n in (q_heads, k_heads)]
    leaves = [x.requires_grad_() for x in leaves]
    inputs = [x.detach() for x in leaves]
    pairs = torch.arange(channels // 2, device=device, dtype=torch.float64)
    angles = torch.arange(tokens, device=device, dtype=torch.float64)[:, None]
    angles = angles * 1e6 ** (-2 * pairs / channels)
    cos, sin = (torch.cat((f(angles),) * 2, -1)[None] for f in (torch.cos, torch.sin))
    some = torch.tensor(sorted({0, tokens // 2, tokens - 1}), device=device)
    expected = rotate(*(x[:, :, some].double() for x in inputs), cos[:, some], sin[:, some])
    cos, sin = cos.to(dtype), sin.to(dtype)

    runs, kept = {}, {}
    for label, apply in implementations().items():
        try:
            rotated = apply(*(x.clone() for x in inputs), cos, sin)
            for found, exact in zip(rotated, expected):
                allowed = 16 * torch.finfo(dtype).eps
                torch.testing.assert_close(
                    found[:, :, some].double(), exact, rtol=allowed, atol=allowed
                )
        except Exception as error:  # a compiler that is missing, a kernel without this device
            reason = str(error).strip().splitlines()[0]
            print(f"skipped: {label} of {name} ({reason})", file=sys.stderr)
            continue
        runs[label, "forward"] = lambda apply=apply: apply(*inputs, cos, sin)

        def both(apply=apply):
            torch.autograd.grad(apply(*leaves, cos, sin), leaves, inputs)

        runs[label, "both"] = both
        kept[label] = kept_bytes(lambda apply=apply: apply(*leaves, cos, sin))
    one = inputs[0].flatten()[:1]
    copy = (lambda: one * 1) if tokens == 1 else lambda: [x.clone() for x in inputs]
    samples = {key: [] for key in [("copy", ""), *runs]}
    with_copy = {("copy", ""): copy, **runs}
    for _ in range(SAMPLES):
        for key, run in with_copy.items():
            samples[key].append(seconds(run, device))
    medians = {key: statistics.median(values) for key, values in samples.items()}
    baseline = medians.pop(("copy", ""))
    return [
        {
            "shape": name,
            "tokens": tokens,
            "dtype": str(dtype).removeprefix("torch."),
            "implementation": label,
            "direction": direction,
            "time_us": 1e6 * median,
            # A forward and a backward are two passes.
            "ratio": median / baseline / (2 if direction == "both" else 1),
            "kept_bytes": kept[label],
        }
        for (label, direction), median in medians.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", choices=SHAPES, help="this one alone")
    parser.add_argument("--tokens", type=int, help="for every shape, to see that it runs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU; expected one, or --device cpu to see that it runs")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name in [arguments.shape] if arguments.shape else SHAPES:
            rows += time_case(name, dtype, device, arguments.tokens)
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"PyTorch {torch.__version__} on {machine_of(device)}\n")
    print("| shape | tokens | type | implementation | direction | us | over a copy | kept bytes |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        *words, us, ratio, kept = row.values()
        print("|", " | ".join(map(str, words)), f"| {us:.1f} | {ratio:.2f} | {kept} |")


if __name__ == "__main__":
    main()
