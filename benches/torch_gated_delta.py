"""Times the gated delta rule's forward and backward in transformers on the CPU, in turns with burn-attention.

    cargo build --release -p burn-attention --example gated_delta
    python3 benches/torch_gated_delta.py target/release/examples/gated_delta [--json]

A quarter of the heads of Qwen3.5-9B, 4 of q and k and 8 of v with 128 channels, one sample, f32,
`out.sum().backward()`, on the cores that the process has. transformers' code is its own for machines
without the kernels of flash-linear-attention. Each round times it, then the example's chunks, then
up to 1,024 tokens the recurrence token by token, whose graph keeps all states. A row has the
shortest times of all rounds: other programs on the machine only add to them.
"""
import argparse
import json
import os
import statistics
import subprocess
import time

import torch
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5

KEY_HEADS, HEADS, CHANNELS = 4, 8, 128
TOKENS = [512, 1024, 2048, 4096, 8192]
RECURRENCE = 1024


def seconds(rule, tokens):
    """Of one forward and backward in PyTorch."""
    leaf = lambda *shape: torch.rand(1, tokens, *shape).requires_grad_()
    q, k, v = leaf(KEY_HEADS, CHANNELS), leaf(KEY_HEADS, CHANNELS), leaf(HEADS, CHANNELS)
    beta = leaf(HEADS)
    g = (-torch.rand(1, tokens, HEADS)).requires_grad_()
    start = time.perf_counter()
    rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0].sum().backward()
    return time.perf_counter() - start


class Example:
    """The example `gated_delta`, which answers each line that names a way and tokens with seconds."""

    def __init__(self, path):
        command = [path, *map(str, (KEY_HEADS, HEADS, CHANNELS))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def seconds(self, way, tokens):
        print(way, tokens, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the example ended with status {self.process.wait()}")
        return float(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("example", help="the compiled example, target/release/examples/gated_delta")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    example = Example(arguments.example)
    rows = []
    for tokens in arguments.tokens:
        rounds = []
        for _ in range(arguments.rounds + 1):
            times = {"transformers_s": seconds(rule, tokens), "chunks_s": example.seconds("chunks", tokens)}
            if tokens <= RECURRENCE:
                times["recurrence_s"] = example.seconds("recurrence", tokens)
            rounds.append(times)
        rounds = rounds[1:]  # without the round that fills caches
        row = {name: min(times[name] for times in rounds) for name in rounds[0]}
        row["ratio"] = row["chunks_s"] / row["transformers_s"]
        rows.append({"tokens": tokens, **row})
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}, {torch.get_num_threads()} threads,", end=" ")
    print(f"{torch.backends.cpu.get_cpu_capability()}\n")
    print("| tokens | transformers, s | chunks, s | ratio | recurrence, s |")
    print("|---|---|---|---|---|")
    for row in rows:
        recurrence = f"{row['recurrence_s']:.3f}" if "recurrence_s" in row else ""
        print(f"| {row['tokens']} | {row['transformers_s']:.3f} | {row['chunks_s']:.3f} | {row['ratio']:.2f} | {recurrence} |")


if __name__ == "__main__":
    main()
