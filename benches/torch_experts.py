"""Times a layer's experts in transformers on the CPU, in turns with vlm-models.

    cargo build --release -p vlm-models --example experts
    python3 benches/torch_experts.py target/release/examples/experts [--json]

The block is Qwen3-VL-MoE's: router, experts and their weighted sum, with random weights. `forward` has no gradients,
`inputs` computes that of the input of frozen weights, `weights` those of all weights too. Each round times transformers'
grouped products, its default, and its loop over experts, then the example, on the cores that the process has. A row has
the shortest times of all rounds: other programs on the machine only add to them. The ratio is to the faster of
transformers' two.
"""
import argparse
import functools
import json
import os
import subprocess
import tempfile
import time

import torch
import transformers

FIXTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/fixtures/models/qwen3_vl_moe_tiny")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
PER_TOKEN = {8: 2, 128: 8}  # experts of a token, by the number of experts
SLOW = 4  # what takes longer, relative to transformers' default, takes one turn
WAYS = {"grouped_s": "grouped_mm", "loop_s": "eager"}


def make(folder, experts, channels, width):
    """Writes a checkpoint of one layer. Returns the model."""
    with open(os.path.join(FIXTURE, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config["text_config"].update(
        hidden_size=channels, moe_intermediate_size=width, num_local_experts=experts, num_hidden_layers=1,
        num_experts_per_tok=PER_TOKEN[experts],
    )
    config["vision_config"]["out_hidden_size"] = channels
    model_class = transformers.Qwen3VLMoeForConditionalGeneration
    model = model_class(transformers.Qwen3VLMoeConfig(**config))
    model.save_pretrained(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    return model


@functools.lru_cache(maxsize=4)
def sines(factor, tokens, channels, dtype):
    index = torch.arange(tokens * channels, dtype=torch.float64)
    return (factor * (0.1 * index**2).sin()).float().to(dtype).view(1, tokens, channels)


def run(block, way, run_pass, tokens):
    """Seconds of one run in PyTorch, and the size of its result."""
    block.experts.config._experts_implementation = WAYS[way]
    weight = block.gate.weight
    block.requires_grad_(run_pass == "weights").zero_grad(set_to_none=True)
    x = sines(1, tokens, weight.shape[1], weight.dtype).detach().requires_grad_(run_pass != "forward")
    gradient = sines(1e-3, tokens, weight.shape[1], weight.dtype)
    start = time.perf_counter()
    with torch.set_grad_enabled(run_pass != "forward"):
        out = block(x)
        if run_pass != "forward":
            out.backward(gradient)
    seconds = time.perf_counter() - start
    result = out if run_pass == "forward" else x.grad
    return seconds, result.float().square().mean().sqrt().item()


class Example:
    """The example `experts`, which answers each line that names a pass and tokens with a run's seconds and size."""

    def __init__(self, path, folder, dtype):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([path, folder, dtype], stdin=pipe, stdout=pipe, text=True)

    def run(self, run_pass, tokens):
        print(run_pass, tokens, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the example ended with status {self.process.wait()}")
        return map(float, line.split())

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("example", help="the compiled example, target/release/examples/experts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--experts", type=int, nargs="+", default=list(PER_TOKEN), choices=PER_TOKEN)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--passes", nargs="+", default=["forward", "inputs", "weights"])
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--width", type=int, default=256, help="channels within an expert")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows = []
    for experts in arguments.experts:
        with tempfile.TemporaryDirectory() as folder:
            model = make(folder, experts, arguments.channels, arguments.width)
            for dtype in arguments.dtypes:
                block = model.to(DTYPES[dtype]).model.language_model.layers[0].mlp
                example = Example(arguments.example, folder, dtype)
                for run_pass in arguments.passes:
                    for tokens in arguments.tokens:
                        rows.append(row(block, example, run_pass, tokens, arguments.rounds))
                        rows[-1] = {"experts": experts, "dtype": dtype, **rows[-1]}
                        if not arguments.json:
                            show(rows)
                example.end()
    if arguments.json:
        print(json.dumps(rows, indent=1))


def row(block, example, run_pass, tokens, rounds):
    times, found, expected = {"grouped_s": [], "loop_s": [], "own_s": []}, None, None
    for turn in range(rounds + 1):
        for way in times:
            if turn > 1 and times[way][0] > SLOW * times["grouped_s"][0]:
                continue
            if way == "own_s":
                seconds, found = example.run(run_pass, tokens)
            else:
                seconds, expected = run(block, way, run_pass, tokens)
            if turn > 0:  # the first fills caches
                times[way].append(seconds)
    if abs(found - expected) > 0.01 * expected:
        raise SystemExit(f"{run_pass} of {tokens} tokens: a result of size {found}, in transformers {expected}")
    best = {way: min(seconds) for way, seconds in times.items()}
    ratio = best["own_s"] / min(best["grouped_s"], best["loop_s"])
    return {"pass": run_pass, "tokens": tokens, **best, "ratio": ratio}


def show(rows):
    if len(rows) == 1:
        print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}, {torch.get_num_threads()} threads,", end=" ")
        print(f"{torch.backends.cpu.get_cpu_capability()}\n")
        print("| experts | type | pass | tokens | grouped, s | loop, s | vlm-models, s | ratio |")
        print("|---:|---|---|---:|---:|---:|---:|---:|")
    last = rows[-1]
    numbers = " | ".join(f"{last[way]:.4f}" for way in ("grouped_s", "loop_s", "own_s"))
    print(f"| {last['experts']} | {last['dtype']} | {last['pass']} | {last['tokens']:,} | {numbers} | {last['ratio']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
