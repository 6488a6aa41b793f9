"""Measures the processor time of a training step's host on an NPU, by thread and operator.

    cargo build --release --features ascend-sim
    python3 benches/npu_host.py target/release/mrope [--steps 200] [--profile FILE]

Runs `mrope finetune` with a small model of four layers on the simulator, of which all calls that launch, and those that
set addresses of kept plans, are told to do nothing (ASCEND_SIM_IGNORE): what is left are burn's graph, its client and
server, the backend and its memory pool. Two runs before it, of one step and of two, count a step's operators and
launches.
The time is that of each thread between the first quarter of the steps and the end, from /proc; that of the simulated
stream is left out. Threads that wait for another spin first (CubeCL's channel, whose budgets are constants), so the
client's time has a part that is no work: --profile FILE keeps what `perf record` finds in the measured steps.
"""
import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/shapes")
QUIET = [
    "aclrtLaunchKernelWithArgsArray", "aclrtLaunchKernelWithConfig", "aclrtLaunchKernelWithHostArgs", "aclSetTensorAddr",
    "aclSetInputTensorAddr", "aclSetOutputTensorAddr", "aclSetDynamicInputTensorAddr", "aclSetDynamicOutputTensorAddr",
]
STREAM = "ascend-sim-stre"
THREADS = {
    "burn-remote-ses": "session: the backend", "DSD-254-0": "client: its queue", "burn-served": "server: socket and decoding",
    "tokio-rt-worker": "client: encoding and socket", "mrope": "main: graph, tensors, data",
}


def command(program, model, steps, out):
    return [program, "finetune", model, "--random-weights", "--data", os.path.join(EXAMPLE, "train.jsonl"),
            "--device", "ascend-sim", "--precision", "bf16", "--batch", "2", "--steps", str(steps), "--quiet", "--out", out]


def count(program, model, folder):
    """The operators and launches of a step, and the names of the operators."""
    counts, names = [], set()
    for steps in (1, 2):
        files = [os.path.join(folder, f"{kind}-{steps}") for kind in ("operators", "launches", "out")]
        environment = dict(os.environ, ASCEND_SIM_OPERATORS=files[0], ASCEND_SIM_LAUNCHES=files[1],
                           ASCEND_SIM_LACKS="aclSetAclOpExecutorRepeatable")
        done = subprocess.run(command(program, model, steps, files[2]), env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{program} finetune --steps {steps} ends with {done.returncode}: {done.stderr.strip()}")
        operators = [line.split()[1] for line in open(files[0])]
        names.update(operators)
        counts.append(len(operators) + sum(" rope_" in line for line in open(files[1])))
    return counts[1] - counts[0], names


def times(process):
    """Nanoseconds of processor time by thread."""
    found = collections.Counter()
    folder = f"/proc/{process}/task"
    for thread in os.listdir(folder):
        try:
            name = open(f"{folder}/{thread}/comm").read().strip()
            found[name] += int(open(f"{folder}/{thread}/schedstat").read().split()[0])
        except OSError:
            pass  # it has ended
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", help="perf's data of the measured steps")
    options = parser.parse_args()
    program = os.path.abspath(options.program)
    if not os.access(program, os.X_OK):
        sys.exit(f"expected the program mrope, found no program at {program}: build it as --help says")
    with tempfile.TemporaryDirectory() as folder:
        model = os.path.join(folder, "model")
        shutil.copytree(os.path.join(EXAMPLE, "model"), model)
        path = os.path.join(model, "config.json")
        config = json.load(open(path))
        config.get("text_config", config)["num_hidden_layers"] = 4
        json.dump(config, open(path, "w"))
        operators, names = count(program, model, folder)
        out = os.path.join(folder, "out")
        environment = dict(os.environ, ASCEND_SIM_IGNORE=",".join([*names, *QUIET]), ROPE_ASCEND_POOL="segments")
        run = subprocess.Popen(command(program, model, options.steps, out), env=environment,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        log, first, last, perf = os.path.join(out, "log.jsonl"), None, None, None
        while run.poll() is None:
            done = sum(1 for _ in open(log)) if os.path.exists(log) else 0
            if first is None and done >= options.steps // 4:
                first = done, times(run.pid), time.monotonic()
                if options.profile:
                    perf = subprocess.Popen(["perf", "record", "-q", "-F", "999", "-e", "cpu-clock", "-g", "-p", str(run.pid),
                                             "-o", options.profile], stderr=subprocess.DEVNULL)
            elif first and done < options.steps:
                last = done, times(run.pid), time.monotonic()
            time.sleep(0.02)
        if perf:
            perf.wait()
    if last is None or last[0] == first[0]:
        sys.exit(f"expected at least two steps after the first {options.steps // 4}, found none: take more --steps")
    steps = last[0] - first[0]
    total = operators * steps
    print(f"{operators} operators and launches a step, {steps} steps, {(last[2] - first[2]) / total * 1e6:.1f} us of the clock each")
    print("| thread | us of processor time per operator |\n|---|---:|")
    used = {name: (last[1][name] - ns) / total / 1e3 for name, ns in first[1].items() if name != STREAM}
    for name, each in sorted(used.items(), key=lambda item: -item[1]):
        if each >= 0.05:
            print(f"| {THREADS.get(name, name)} | {each:.1f} |")
    print(f"| all | {sum(used.values()):.1f} |")


if __name__ == "__main__":
    main()
