"""Times steps of fine-tuning on the CPU beside PyTorch and PEFT, in turns.

    cargo build --release --features rayon
    python3 benches/torch_finetune.py target/release/mrope [--hidden 512] [--tune adapters] [--dtype bf16] [--json]
    python3 benches/torch_finetune.py target/release/mrope --hidden 1536-28 --dtype bf16 --tune adapters --rounds 1

Qwen2-VL's shapes with random weights, a sample of about 1,000 tokens, 400 of them of a picture, gradient checkpointing,
clipping and AdamW. "adapters" are of rank 8 in f32 on all linear layers of the decoder, "whole" is the decoder's weights
with AdamW's state in f32. Rounds alternate: three steps of one program, then of the other, each in a process of its own
with the cores that this one has. A row has the shortest step of all rounds but the first of each process, which also
allocates: other programs on the machine only add to them. Below 1, `mrope` is faster.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, "../examples/shapes/model")
PICTURE = 560  # pixels on a side
STEPS = 3
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
# hidden size, width of the feed-forward network, decoder layers, query heads, key heads, vocabulary, tower blocks, width
SHAPES = {
    "512": (512, 2048, 8, 8, 2, 8192, 2, 256),
    "1536": (1536, 8960, 6, 12, 2, 32768, 2, 1280),
    "1536-28": (1536, 8960, 28, 12, 2, 151936, 32, 1280),
}


def config(shape, dtype):
    hidden, width, layers, heads, key_heads, vocabulary, blocks, tower = SHAPES[shape]
    head = hidden // heads
    sections = [head // 8, head * 3 // 16, head * 3 // 16]
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "dtype": DTYPES[dtype],
        "image_token_id": 382, "video_token_id": 383, "vision_start_token_id": 379, "vision_end_token_id": 380,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen2_vl_text", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": width,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": key_heads,
            "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": sections},
        },
        "vision_config": {
            "model_type": "qwen2_vl", "depth": blocks, "embed_dim": tower, "hidden_size": hidden, "mlp_ratio": 4,
            "num_heads": tower // 80 if tower % 80 == 0 else tower // 64, "in_channels": 3, "patch_size": 14,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "hidden_act": "quick_gelu",
        },
    }


def make(folder, shape, dtype):
    """Writes a checkpoint folder without weights, and a record."""
    from PIL import Image

    os.makedirs(folder, exist_ok=True)
    for name in ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"]:
        shutil.copy(os.path.join(EXAMPLE, name), folder)
    path = os.path.join(folder, "preprocessor_config.json")
    with open(path, encoding="utf-8") as file:
        pictures = json.load(file)
    pictures["max_pixels"] = 1 << 20
    for name, content in [("preprocessor_config.json", pictures), ("config.json", config(shape, dtype))]:
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    Image.linear_gradient("L").resize((PICTURE, PICTURE)).convert("RGB").save(os.path.join(folder, "picture.png"))
    question = "<image>" + "What colour is the figure? Say it in a word. " * 26
    record = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "yellow"}],
              "images": ["picture.png"]}
    with open(os.path.join(folder, "data.jsonl"), "w", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def ours(program, folder, tune, dtype):
    """The seconds of each step, and the tokens."""
    out = os.path.join(folder, "out")
    shutil.rmtree(out, ignore_errors=True)
    command = [program, "finetune", folder, "--random-weights", "--precision", dtype, "--data",
               os.path.join(folder, "data.jsonl"), "--steps", str(STEPS), "--batch", "1", "--micro-tokens", "2048",
               "--out", out, *(["--full"] if tune == "whole" else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows = [row for row in rows if "tokens_per_second" in row]
    return [row["tokens"] / row["tokens_per_second"] for row in rows], rows[0]["tokens"]


def theirs(folder, tune, dtype, tokens):
    """The seconds of each step of this file's `run` in a process of its own."""
    command = [sys.executable, os.path.abspath(__file__), "run", folder, tune, dtype, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def run(folder, tune, dtype, tokens):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, Qwen2VLForConditionalGeneration

    torch.set_default_dtype(getattr(torch, DTYPES[dtype]))
    settings = AutoConfig.from_pretrained(folder)
    model = Qwen2VLForConditionalGeneration._from_config(settings, attn_implementation="sdpa")
    if tune == "adapters":
        targets = r".*language_model\.layers\..*_proj"
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        model.enable_input_require_grads()
    else:
        model.model.visual.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # AdamW's arithmetic is in f32 on both sides: bf16 weights have master weights.
    narrow = [parameter for parameter in trained if parameter.dtype != torch.float32]
    masters = {parameter: parameter.detach().float() for parameter in narrow}
    model.gradient_checkpointing_enable()
    model.train()
    side = PICTURE // 14
    patches = torch.randn(side * side, 3 * 2 * 14 * 14)
    picture = [settings.image_token_id] * (side * side // 4)
    start, end = settings.vision_start_token_id, settings.vision_end_token_id
    text = torch.randint(1, 300, (tokens - len(picture) - 2,)).tolist()
    ids = torch.tensor([[start, *picture, end, *text]])
    labels = ids.clone()
    labels[:, :-3] = -100
    optimizer = torch.optim.AdamW([masters.get(parameter, parameter) for parameter in trained], lr=1e-4)
    kinds = (ids == settings.image_token_id).int()
    seconds = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=patches, mm_token_type_ids=kinds,
                     image_grid_thw=torch.tensor([[1, side, side]]), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for parameter, master in masters.items():
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
        model.zero_grad()
        seconds.append(time.perf_counter() - begun)
    print(json.dumps(seconds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--hidden", nargs="+", default=["512", "1536"], choices=SHAPES)
    parser.add_argument("--tune", nargs="+", default=["adapters", "whole"], choices=["adapters", "whole"])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.json:
        print("| shape | trained | type | tokens | mrope | PyTorch | ratio |\n|---|---|---|---|---|---|---|")
    for shape in arguments.hidden:
        for tune in arguments.tune:
            for dtype in arguments.dtype:
                with tempfile.TemporaryDirectory() as folder:
                    make(folder, shape, dtype)
                    found = [[], []]
                    for _ in range(arguments.rounds):
                        seconds, tokens = ours(os.path.abspath(arguments.program), folder, tune, dtype)
                        found[0] += seconds[1:]
                        found[1] += theirs(folder, tune, dtype, tokens)[1:]
                    mrope, torch = min(found[0]), min(found[1])
                row = {"shape": shape, "trained": tune, "dtype": dtype, "tokens": tokens, "mrope_s": round(mrope, 3),
                       "torch_s": round(torch, 3), "ratio": round(mrope / torch, 3)}
                line = f"| {shape} | {tune} | {dtype} | {tokens} | {mrope:.2f} s | {torch:.2f} s | {mrope / torch:.2f} |"
                print(json.dumps(row) if arguments.json else line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:5], int(sys.argv[5]))
    else:
        main()
