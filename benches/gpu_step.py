"""Counts the launches of a decoder layer in a training step on a GPU.

    cargo build --features wgpu,fusion
    python3 benches/gpu_step.py target/debug/mrope            # on a GPU, or Mesa's software driver

Runs `mrope finetune` with small models of two and of four layers, for one step and for two, and reads CubeCL's log of
executions. The difference of the differences is a layer in a step: forward, recomputed forward, backward, norm, clipping
and update. Counted, on no device in particular.
"""
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/shapes")
# The first that a kernel's name matches is its kind.
KINDS = [("products of matrices", "Matmul"), ("adapters' terms", "LowRank"), ("rotations", "Rotate"), ("updates", "^Update"),
         ("sums of squares", "^Squares"), ("norms", "^Normalise|^GradientOfRows|^SumsOfColumns|^AddParts"),
         ("gates", "^Forward|^Backward"), ("fused elementwise", "Fuse"), ("sums", "Reduce"),
         ("copies", "Copy|Assign|^Slice|Contiguous")]


def launches(program, layers, steps, options, folder):
    model = os.path.join(folder, f"m{layers}")
    if not os.path.isdir(model):
        shutil.copytree(os.path.join(EXAMPLE, "model"), model)
        path = os.path.join(model, "config.json")
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        config["text_config"]["num_hidden_layers"] = layers
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)
    log = os.path.join(folder, "log")
    if os.path.exists(log):
        os.remove(log)
    with open(os.path.join(folder, "cubecl.toml"), "w", encoding="utf-8") as file:
        file.write(f'[profiling]\nlogger = {{ level = "minimal", file = "{log}" }}\n')
    command = [program, "finetune", model, "--random-weights", "--data", os.path.join(EXAMPLE, "train.jsonl"), "--device", "gpu",
               "--precision", "f32", "--batch", "2", "--steps", str(steps), "--quiet", "--out", os.path.join(folder, "out"),
               *options]
    shutil.rmtree(os.path.join(folder, "out"), ignore_errors=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    with open(log, encoding="utf-8") as file:
        names = re.findall(r"Executing (.*)", file.read())
    return collections.Counter(re.sub(r"[0-9]+", "", name.split("<")[0].split("(")[0].strip()) for name in names)


def main():
    program = os.path.abspath(sys.argv[1])
    print("| trained | launches |" + "".join(f" {kind} |" for kind, _ in KINDS) + " others |")
    print("|---|---:|" + "---:|" * (len(KINDS) + 1))
    details = []
    for trained, options in (("adapters", []), ("whole", ["--full"])):
        with tempfile.TemporaryDirectory() as folder:
            runs = {n: [launches(program, n, s, options, folder) for s in (1, 2)] for n in (2, 4)}
        layer = collections.Counter(runs[4][1])
        for counter, sign in ((runs[4][0], -1), (runs[2][1], -1), (runs[2][0], 1)):
            for name, count in counter.items():
                layer[name] += sign * count
        layer = {name: count / 2 for name, count in layer.items() if count}
        left, counts = dict(layer), []
        for _, pattern in KINDS:
            own = [name for name in left if re.search(pattern, name)]
            counts.append(sum(left.pop(name) for name in own))
        counts.append(sum(left.values()))
        print(f"| {trained} | {sum(layer.values()):g} |" + "".join(f" {count:g} |" for count in counts), flush=True)
        listed = sorted(layer.items(), key=lambda item: -item[1])
        details.append(f"{trained}: " + ", ".join(f"{count:g} {name}" for name, count in listed))
    print("\n" + "\n".join(details))


main()
