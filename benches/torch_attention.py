"""Times attention's forward and backward in PyTorch on the CPU, in turns with burn-attention.

    cargo build --release -p burn-attention --example speed
    python3 benches/torch_attention.py target/release/examples/speed [--tokens N] [--json]

16 heads of 128 channels, one sample, `out.sum().backward()`, on the cores that the process has.
Each round times PyTorch's scaled_dot_product_attention and then the example, which waits meanwhile.
"""
import argparse
import json
import os
import statistics
import subprocess
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

HEADS, CHANNELS = 16, 128
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def seconds(dtype, causal, tokens):
    """Of one forward and backward in PyTorch."""
    shape = (1, HEADS, tokens, CHANNELS)
    leaves = [torch.randn(shape).to(TYPES[dtype]).requires_grad_() for _ in range(3)]
    start = time.perf_counter()
    scaled_dot_product_attention(*leaves, is_causal=causal).sum().backward()
    return time.perf_counter() - start


class Example:
    """The example `speed`, which answers each line that names a case with its seconds."""

    def __init__(self, path, tokens):
        command = [path, "--turns", str(tokens), str(HEADS), str(CHANNELS)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def seconds(self, dtype, causal):
        mask = "causal" if causal else "all"
        print(dtype, mask, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the example ended with status {self.process.wait()}")
        return float(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("example", help="the compiled example, target/release/examples/speed")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    example = Example(arguments.example, arguments.tokens)
    rows = []
    for dtype in TYPES:
        for causal in (False, True):
            pairs = [
                (seconds(dtype, causal, arguments.tokens), example.seconds(dtype, causal))
                for _ in range(arguments.rounds + 1)
            ][1:]  # without the round that fills caches
            theirs, ours = (statistics.median(times) for times in zip(*pairs))
            ratio = statistics.median(ours / theirs for theirs, ours in pairs)
            rows.append(
                {"type": dtype, "causal": causal, "torch_s": theirs, "ours_s": ours, "ratio": ratio}
            )
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads,", end=" ")
    print(f"{torch.backends.cpu.get_cpu_capability()}, {arguments.tokens} tokens\n")
    print("| type | mask | PyTorch, s | burn-attention, s | ratio |")
    print("|---|---|---|---|---|")
    for row in rows:
        mask = "causal" if row["causal"] else "all keys"
        times = f"{row['torch_s']:.3f} | {row['ours_s']:.3f} | {row['ratio']:.2f}"
        print(f"| {row['type']} | {mask} | {times} |")


if __name__ == "__main__":
    main()
