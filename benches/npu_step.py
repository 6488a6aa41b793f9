"""Counts the operators, launches, bytes and FLOPs of a decoder layer in a training step on an NPU.

    python3 benches/npu_step.py target/debug/mrope            # features ascend-sim; adapters, then whole layers

Runs `mrope finetune` on the simulator with small models of two and of four layers, for one step and for two. The
difference of the differences is a layer in a step: forward, recomputed forward, backward, sums and update. Each size of
the small model occurs once, so its operands are read as those of Qwen3-VL-8B's shapes at 8,192 tokens. Counted:
operators and launches. Calculated: bytes (each operand once, those changed in place twice), FLOPs, and the time on
Atlas A2, in which each takes the longer of bytes / 1.3 TB/s and FLOPs / (0.75 x 300 TFLOP/s in 16 bits, 75 in f32).

Layers of GLM-4.1V and of Qwen3.5's gated delta rule are counted alone: a size of the small model does not stand for one
of theirs. Their conversations are text of less than 192 tokens.
"""
import collections
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/shapes")
TOKENS, RANK = 8192, 8
# Sizes of the small model and of the large one: hidden, intermediate, k and v, adapters of one, two and three layers
# in two parts each, of one in one part, channels of a head, heads.
SIZES = {80: 4096, 176: 12288, 40: 1024, 14: 16, 28: 32, 42: 48, 7: 8, 20: 128, 4: 32}
KV_HEADS = {2: 8}
TEXT = {
    "vocab_size": 384, "hidden_size": 80, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 20, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 3, 3]},
}
VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 80, "in_channels": 3,
    "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
}
FAMILIES = {
    "qwen2_5_vl": {"hidden_act": "silu", "tokens_per_second": 2, "window_size": 56, "fullatt_block_indexes": [0]},
    "qwen3_vl": {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 36, "deepstack_visual_indexes": []},
}
# Families that are counted alone, by what differs from TEXT.
COUNTED = {
    "glm4v": {
        "hidden_size": 128, "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
                            "partial_rotary_factor": 0.5},
    },
    "qwen3_5": {
        "head_dim": 32, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_value_head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1],
                            "mrope_interleaved": True, "partial_rotary_factor": 0.25},
    },
}
# Its turns begin with these, and nothing ends them.
GLM_TOKENS = {"<|im_start|>": "<|user|>", "<|im_end|>": "<|assistant|>", "<|quad_start|>": "<|system|>",
              "<|quad_end|>": "<|observation|>", "<|image_pad|>": "<|image|>", "<|video_pad|>": "<|video|>",
              "<|vision_start|>": "<|begin_of_image|>", "<|vision_end|>": "<|end_of_image|>",
              "<|box_start|>": "<|begin_of_video|>", "<|box_end|>": "<|end_of_video|>"}
GLM_TEMPLATE = "{% for turn in messages %}{{ '<|' + turn.role + '|>\n' + turn.content }}{% endfor %}" \
               "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
TENSOR = re.compile(r"(f32|bf16|i32|i64|bool)\[([\d,]*)\]")
BYTES = {"f32": 4, "bf16": 2, "i32": 4, "i64": 8, "bool": 1}


def record(program, family, layers, steps, options, folder):
    """The operators and launches of a run, with their numbers."""
    model = os.path.join(folder, f"{family}-{layers}")
    if not os.path.isdir(model):
        shutil.copytree(os.path.join(EXAMPLE, "model"), model)
        path = os.path.join(model, "config.json")
        config = json.load(open(path))
        config["model_type"] = family
        text = {"model_type": family + "_text", "num_hidden_layers": layers, **TEXT, **COUNTED.get(family, {})}
        if family in FAMILIES:
            text["rope_parameters"] = dict(TEXT["rope_parameters"], mrope_interleaved=family == "qwen3_vl")
        if family == "qwen3_5":
            text["layer_types"] = ["linear_attention"] * layers
        vision = FAMILIES.get(family) or {"hidden_act": "silu", "num_position_embeddings": 36, "image_size": 84}
        config["text_config"] = text
        config["vision_config"] = {"model_type": family, **VISION, "out_hidden_size": text["hidden_size"], **vision}
        json.dump(config, open(path, "w"))
        if family == "glm4v":
            for name in ("tokenizer.json", "tokenizer_config.json"):
                path = os.path.join(model, name)
                words = open(path).read()
                for old, new in GLM_TOKENS.items():
                    words = words.replace(old, new)
                open(path, "w").write(words)
            open(os.path.join(model, "chat_template.jinja"), "w").write(GLM_TEMPLATE)
        if family != "qwen2_5_vl":
            path = os.path.join(model, "preprocessor_config.json")
            pictures = json.load(open(path))
            least, most = pictures.pop("min_pixels"), pictures.pop("max_pixels")
            json.dump({**pictures, "size": {"shortest_edge": least, "longest_edge": most}}, open(path, "w"))
    files = [os.path.join(folder, f"{family}-{layers}-{steps}.{kind}") for kind in ("operators", "launches", "out")]
    environment = dict(
        os.environ, ASCEND_SIM_OPERATORS=files[0], ASCEND_SIM_LAUNCHES=files[1],
        # Each call has a first phase, which is what is recorded.
        ASCEND_SIM_LACKS="aclSetAclOpExecutorRepeatable")
    data = os.path.join(EXAMPLE, "train.jsonl")
    if family in COUNTED:
        data = os.path.join(folder, "text.jsonl")
        words = "how many sides has a square "
        with open(data, "w") as file:
            for count in (1, 2, 3, 2):
                turns = [{"role": "user", "content": words * count}, {"role": "assistant", "content": "four"}]
                file.write(json.dumps({"messages": turns}) + "\n")
    command = [program, "finetune", model, "--random-weights", "--data", data,
               "--device", "ascend-sim", "--precision", "bf16", "--batch", "2", "--steps", str(steps), "--quiet",
               "--out", files[2], *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    operators = [line.split(" ", 1)[1].strip() for line in open(files[0])]
    launches = [line.split(" ", 1)[1].strip() for line in open(files[1]) if " rope_" in line]
    # The hash of what a launch wrote differs between runs.
    launches = [re.sub(r":[0-9a-f]{16}", "", line) for line in launches]
    return collections.Counter(operators + launches)


def minus(left, right):
    left = collections.Counter(left)
    left.subtract(right)
    return left


def tokens_of(lines):
    """The tokens of the micro-batch: rows of the products with the decoder's width."""
    rows = collections.Counter(int(m.group(1)) for line in lines for m in re.finditer(r"bf16\[(\d+),176\]", line))
    return rows.most_common(1)[0][0]


def cost(line, tokens):
    """Bytes and FLOPs of a line, and its peak in FLOP/s."""
    name, *rest = line.split(" ")
    large = {**SIZES, tokens: TOKENS, **(KV_HEADS if "Attention" in name else {})}
    if name.startswith("rope_"):
        written = [int(text) // 2 for text in rest if text.isdigit()][1:]
        widths = {tokens * small: TOKENS * size for small, size in SIZES.items()}
        elements = [widths.get(count, 0) for count in written]
        if "low_rank" in name:
            columns = elements[0] // TOKENS
            # A product and a sum of 64 numbers take 4 cycles on one of 40 vector cores.
            cycles = RANK * elements[0] * 4 / 64
            return 4 * elements[0] + (8 + 2) * RANK * TOKENS + 4 * RANK * columns, cycles, 40 * 1.85e9 / 0.75
        # Of the gate's backward, the output again is written over its gradient.
        of_gate = (3 + len(elements)) / len(elements)
        passes = {"rope_swiglu_bf": 3, "rope_swiglu_grad": of_gate, "rope_norm_grad": 3}
        by = next((by for start, by in passes.items() if name.startswith(start)), 2)
        return by * 2 * sum(elements), 0, 1
    shapes = [(t, [large.get(int(d), int(d)) for d in dims.split(",") if d]) for t, dims in TENSOR.findall(line)]
    sizes = [BYTES[t] * math.prod(dims) for t, dims in shapes]
    moved = sum(sizes) + (sizes[0] if "Inplace" in name else 0)
    if name in ("aclnnMm", "aclnnAddmm", "aclnnBatchMatMul"):
        x, out = shapes[-3][1], shapes[-1][1]
        kind = 300e12 if shapes[-3][0] == "bf16" else 75e12
        return moved, 2 * math.prod(out) * x[-1], kind
    if "Attention" in name:
        # Half of the scores are masked; the gradient recomputes them.
        forward = 4 * TOKENS * TOKENS / 2 * 4096
        return moved, forward * (2.5 if "Grad" in name else 1), 300e12
    return moved, 0, 1


def detail(family, trained, names):
    listed = ", ".join(f"{n:g} {name}" for name, n in names.most_common() if n)
    return f"{family}, {trained}: {listed}"


def main():
    program = os.path.abspath(sys.argv[1])
    print("| family | trained | operators and launches | GB | ms, modelled | products and attention | of these |")
    print("|---|---|---:|---:|---:|---:|---:|")
    details = []
    for family in (*FAMILIES, *COUNTED):
        for trained, options in (("adapters", ["--rank", "7"]), ("whole", ["--full"])):
            with tempfile.TemporaryDirectory() as folder:
                runs = {n: [record(program, family, n, s, options, folder) for s in (1, 2)] for n in (2, 4)}
            steps = {n: minus(two, one) for n, (one, two) in runs.items()}
            layer = minus(steps[4], steps[2])
            if family in COUNTED:
                names = collections.Counter()
                for line, times in layer.items():
                    names[line.split(" ")[0].removeprefix("aclnn")] += times / 2
                print(f"| {family} | {trained} | {sum(names.values()):.0f} | | | | |")
                details.append(detail(family, trained, names))
                continue
            tokens = tokens_of(line for line, count in steps[2].items() if count > 0)
            count, moved, time, floor = 0, 0, 0, 0
            names = collections.Counter()
            for line, times in layer.items():
                each, flops, peak = cost(line, tokens)
                count += times / 2
                moved += times / 2 * each
                computed = flops / (0.75 * peak)
                time += times / 2 * max(each / 1.3e12, computed)
                floor += times / 2 * (computed if flops > 1e9 * 100 else 0)
                names[line.split(" ")[0].removeprefix("aclnn")] += times / 2
            if trained == "whole":
                # The small model's matrices are joined for the update, which those of more than a million elements are
                # not: each has its sum of squares, and its update with the rounding of its master.
                weights = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
                per_element = {"rope_square_sums_f32": 4, "rope_adamw_bf16": 30}
                count += 7 * len(per_element)
                moved += weights * sum(per_element.values())
                time += weights * sum(per_element.values()) / 1.3e12
                names.update({name: 7 for name in per_element})
            print(f"| {family} | {trained} | {count:.0f} | {moved / 1e9:.1f} | {time * 1e3:.1f} | {floor * 1e3:.1f} | "
                  f"{time / floor:.2f} |")
            details.append(detail(family, trained, names))
    print("\n" + "\n".join(details))


main()
