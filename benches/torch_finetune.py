"""Times a step of low-rank adapters beside Qwen2-VL-2B's shapes in PyTorch and PEFT on the CPU.

    python3 benches/torch_finetune.py make FOLDER   # a folder without weights, a picture and a record
    target/release/mrope finetune FOLDER --random-weights --precision bf16 --data FOLDER/data.jsonl \\
        --steps 2 --batch 1 --micro-tokens 1024 --out FOLDER/out      # the same step
    python3 benches/torch_finetune.py run FOLDER    # seconds of two steps, and the process's peak

1,024 tokens, 990 of them of one picture of 840 x 924 pixels; random weights in bf16, adapters of rank 8 in f32 on all
linear layers of the decoder, gradient checkpointing, AdamW.
"""
import json
import os
import resource
import shutil
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, "../examples/shapes/model")
GRID = [1, 60, 66]
TOKENS = 1024
CONFIG = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "dtype": "bfloat16",
    "image_token_id": 382, "video_token_id": 383, "vision_start_token_id": 379, "vision_end_token_id": 380,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen2_vl_text", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "model_type": "qwen2_vl", "depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "num_heads": 16,
        "in_channels": 3, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "hidden_act": "quick_gelu",
    },
}


def make(folder):
    from PIL import Image

    os.makedirs(folder, exist_ok=True)
    for name in ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"]:
        shutil.copy(os.path.join(EXAMPLE, name), folder)
    path = os.path.join(folder, "preprocessor_config.json")
    with open(path, encoding="utf-8") as file:
        pictures = json.load(file)
    pictures["max_pixels"] = 1 << 20
    for name, content in [("preprocessor_config.json", pictures), ("config.json", CONFIG)]:
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    size = (14 * GRID[2], 14 * GRID[1])
    Image.linear_gradient("L").resize(size).convert("RGB").save(os.path.join(folder, "picture.png"))
    record = {"messages": [{"role": "user", "content": "<image>What colour is the figure? Say it in a word"},
                           {"role": "assistant", "content": "yellow"}], "images": ["picture.png"]}
    with open(os.path.join(folder, "data.jsonl"), "w", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def run(folder):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, Qwen2VLForConditionalGeneration

    torch.set_default_dtype(torch.bfloat16)
    model = Qwen2VLForConditionalGeneration._from_config(AutoConfig.from_pretrained(folder))
    targets = r".*language_model\.layers\..*_proj"
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.train()
    patches = torch.randn(GRID[1] * GRID[2], 3 * 2 * 14 * 14)
    picture = [CONFIG["image_token_id"]] * (GRID[1] * GRID[2] // 4)
    start, end = CONFIG["vision_start_token_id"], CONFIG["vision_end_token_id"]
    text = torch.randint(1, 300, (TOKENS - len(picture) - 2,)).tolist()
    ids = torch.tensor([[start, *picture, end, *text]])
    labels = ids.clone()
    labels[:, :-3] = -100
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    kinds = (ids == CONFIG["image_token_id"]).int()
    for step in range(2):
        begun = time.perf_counter()
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=patches, mm_token_type_ids=kinds,
                     image_grid_thw=torch.tensor([GRID]), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        print(f"step {step + 1}: {time.perf_counter() - begun:.1f} s, loss {loss.item():.3f}, peak {peak:.2f} GiB")


if __name__ == "__main__":
    {"make": make, "run": run}[sys.argv[1]](sys.argv[2])
