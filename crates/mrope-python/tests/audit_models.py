"""``python tests/audit_models.py [--time | NAME ...]``: audits small models with random weights.

Prints a row for each decoder family of transformers, model that sees, and transformer of diffusers,
and counts them: a fault in any of them is a false alarm, for they train. Exits with 1 if there is
one. ``test_audit.py`` runs some of them. ``--time`` compares an audit with a training step instead.
"""

import contextlib
import io
import logging
import sys
import time
import warnings

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mrope import _audit, audit
from test_models import MODELS, inputs

# Sizes by the names that configurations have for them.
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "ffn_dim": 48,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # Few tokens pass its routers' threshold else.
    "router_jitter_noise": 0.5,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "embedding_size": 32,
    "is_decoder": True,
}
MOST = 2_000_000


def decoder(kind):
    """A small model of a family of transformers, and its batch."""
    defaults = hf.AutoConfig.for_model(kind)
    config = hf.AutoConfig.for_model(
        kind, **{n: v for n, v in SMALL.items() if hasattr(defaults, n)}
    )
    with torch.device("meta"):
        size = sum(p.numel() for p in hf.AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"{size} parameters with the sizes above")
    model = hf.AutoModelForCausalLM.from_config(config).float().train()
    ids = torch.randint(3, 50, (2, 12))
    return model, {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def normal(*shape):
    return torch.randn(shape)


TIME = torch.tensor([3.0])
# A class of diffusers, its sizes, and its batch.
DIFFUSERS = {
    "FluxTransformer2DModel": (
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 4, 8],
        },
        lambda: {
            "hidden_states": normal(1, 6, 4),
            "encoder_hidden_states": normal(1, 5, 32),
            "pooled_projections": normal(1, 32),
            "timestep": TIME,
            "img_ids": torch.tensor([[0.0, i, j] for i in range(2) for j in range(3)]),
            "txt_ids": torch.zeros(5, 3),
        },
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 8,
        },
        lambda: {
            "hidden_states": normal(1, 4, 8, 8),
            "encoder_hidden_states": normal(1, 5, 32),
            "pooled_projections": normal(1, 32),
            "timestep": TIME,
        },
    ),
    "HunyuanVideoTransformer3DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 2,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "guidance_embeds": False,
            "rope_axes_dim": (2, 4, 4),
        },
        lambda: {
            "hidden_states": normal(1, 4, 2, 8, 6),
            "timestep": TIME.long(),
            "encoder_hidden_states": normal(1, 5, 16),
            "encoder_attention_mask": torch.ones(1, 5),
            "pooled_projections": normal(1, 8),
        },
    ),
    "WanTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "cross_attn_norm": True,
        },
        lambda: {
            "hidden_states": normal(1, 4, 2, 8, 6),
            "timestep": TIME.long(),
            "encoder_hidden_states": normal(1, 5, 16),
        },
    ),
    "CogVideoXTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "num_layers": 2,
            "sample_width": 6,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 5,
            "use_rotary_positional_embeddings": True,
        },
        lambda: {
            "hidden_states": normal(1, 2, 4, 8, 6),
            "encoder_hidden_states": normal(1, 5, 8),
            "timestep": TIME.long(),
            "image_rotary_emb": cogvideox_table(),
        },
    ),
    "LTXVideoTransformer3DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": 16,
        },
        lambda: {
            "hidden_states": normal(1, 24, 4),
            "encoder_hidden_states": normal(1, 5, 16),
            "encoder_attention_mask": torch.ones(1, 5).bool(),
            "timestep": TIME,
            "num_frames": 2,
            "height": 4,
            "width": 3,
        },
    ),
    "MochiTransformer3DModel": (
        {
            "patch_size": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 3,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 5,
        },
        lambda: {
            "hidden_states": normal(1, 4, 2, 8, 6),
            "encoder_hidden_states": normal(1, 5, 16),
            "timestep": TIME,
            "encoder_attention_mask": torch.ones(1, 5).bool(),
        },
    ),
    "QwenImageTransformer2DModel": (
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (4, 6, 6),
        },
        lambda: {
            "hidden_states": normal(1, 12, 16),
            "encoder_hidden_states": normal(1, 5, 16),
            "encoder_hidden_states_mask": torch.ones(1, 5).long(),
            "timestep": TIME,
            "img_shapes": [(1, 4, 3)],
        },
    ),
    "Lumina2Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (32, 16, 16),
            "cap_feat_dim": 16,
        },
        lambda: {
            "hidden_states": normal(1, 4, 8, 6),
            "encoder_hidden_states": normal(1, 5, 16),
            "encoder_attention_mask": torch.ones(1, 5).bool(),
            "timestep": TIME,
        },
    ),
    "HiDreamImageTransformer2DModel": (
        {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_channels": [16, 16],
            "text_emb_dim": 16,
            "num_routed_experts": 2,
            "num_activated_experts": 2,
            "axes_dims_rope": (4, 2, 2),
            "max_resolution": (8, 8),
            "llama_layers": (0, 1),
        },
        lambda: {
            "hidden_states": normal(1, 4, 8, 8),
            "encoder_hidden_states_t5": normal(1, 5, 16),
            "encoder_hidden_states_llama3": normal(2, 1, 5, 16),
            "pooled_embeds": normal(1, 16),
            "timesteps": TIME,
        },
    ),
    "AllegroTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 48,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 2,
            "caption_channels": 16,
        },
        lambda: {
            "hidden_states": normal(1, 4, 2, 8, 8),
            "encoder_hidden_states": normal(1, 5, 16),
            "timestep": TIME.long(),
            "attention_mask": torch.ones(1, 2, 8, 8),
            "encoder_attention_mask": torch.ones(1, 5),
            "image_rotary_emb": allegro_table(),
        },
    ),
    "CogView4Transformer2DModel": (
        {
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "out_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "condition_dim": 4,
        },
        lambda: {
            "hidden_states": normal(1, 4, 8, 6),
            "encoder_hidden_states": normal(1, 5, 16),
            "timestep": TIME,
            "original_size": torch.tensor([[8.0, 6.0]]),
            "target_size": torch.tensor([[8.0, 6.0]]),
            "crop_coords": torch.tensor([[0.0, 0.0]]),
        },
    ),
}


def cogvideox_table():
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    return get_3d_rotary_pos_embed(16, ((0, 0), (4, 3)), (4, 3), 2)


def allegro_table():
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    *freqs, t, h, w = get_3d_rotary_pos_embed_allegro(24, ((0, 0), (4, 4)), (4, 4), 2)
    ids = torch.cartesian_prod(t.long(), h.long(), w.long())
    return tuple(freqs), tuple(ids.T.reshape(3, 1, -1))


def diffuser(name):
    """A small model of a class of diffusers, and its batch."""
    import diffusers

    sizes, batch = DIFFUSERS[name]
    model = getattr(diffusers, name)(**sizes).train()
    # It starts with last layers of zeros.
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.1) if p.dim() > 1 else p.add_(0.1)
    return model, batch()


def seeing(make):
    model = make()
    return model, inputs(model)


CASES = {
    **{kind: lambda kind=kind: decoder(kind) for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)},
    **{make.__name__: lambda make=make: seeing(make) for make in MODELS if "vl" in make.__name__},
    "glm4v": lambda: next(seeing(make) for make in MODELS if make.__name__ == "glm4v"),
    **{name: lambda name=name: diffuser(name) for name in DIFFUSERS},
}


def timed():
    """Rows of a model, the seconds of a step and of an audit, the least of five, and their ratio."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "head_dim": 64}
    sizes = {**SMALL, **sizes, "num_attention_heads": 8, "max_position_embeddings": 512}

    def decoder_of(kind):
        defaults = hf.AutoConfig.for_model(kind)
        given = {n: v for n, v in sizes.items() if hasattr(defaults, n)}
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **given))
        ids = torch.randint(3, 50, (2, 256))
        return model.float().train(), {"input_ids": ids, "labels": ids.clone()}

    def flux():
        given = {**DIFFUSERS["FluxTransformer2DModel"][0], "num_layers": 2, "num_single_layers": 2}
        given |= {
            "num_attention_heads": 8,
            "attention_head_dim": 64,
            "axes_dims_rope": [16, 24, 24],
        }
        import diffusers

        batch = DIFFUSERS["FluxTransformer2DModel"][1]()
        batch["hidden_states"] = normal(1, 256, 4)
        batch["img_ids"] = torch.tensor([[0.0, i, j] for i in range(16) for j in range(16)])
        return diffusers.FluxTransformer2DModel(**given).train(), batch

    cases = {"llama": lambda: decoder_of("llama"), "qwen3_moe": lambda: decoder_of("qwen3_moe")}
    for name, make in {**cases, "FluxTransformer2DModel": flux}.items():
        model, batch = make()
        loss_of = _audit._default_loss

        def step(model=model, batch=batch):
            model.zero_grad()
            loss_of(model(**batch)).backward()

        def seconds(run):
            run()
            found = []
            for _ in range(5):
                start = time.perf_counter()
                run()
                found.append(time.perf_counter() - start)
            return min(found)

        once, audited = seconds(step), seconds(lambda m=model, b=batch: audit(m, b))
        print(f"{name:34} step {once:.3f} s, audit {audited:.3f} s, {audited / once:.2f} times")


def main(names):
    if names == ["--time"]:
        return timed()
    hf.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    counts = {"clean": 0, "noted": 0, "false alarms": 0, "left out": 0}
    for name in names or CASES:
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                model, batch = CASES[name]()
                model(**batch)
        except (
            Exception,
            SystemExit,
        ) as error:  # Its configuration wants more than the sizes above.
            counts["left out"] += 1
            print(
                f"{name:34} left out: {type(error).__name__}: {str(error).splitlines()[:1]}"[:150],
                flush=True,
            )
            continue
        report = audit(model, batch)
        notes = len(report.findings) - len(report.faults)
        kind = "false alarms" if report.faults else "noted" if notes else "clean"
        counts[kind] += 1
        seconds = time.perf_counter() - start
        print(
            f"{name:34} {report.parameters:4} parameters, {len(report.rotations)} rotations, "
            f"{notes} notes, {len(report.faults)} faults, {seconds:.1f} s",
            flush=True,
        )
        for rotation in report.rotations:
            print(f"    {rotation}")
        for found in report.findings:
            print(f"    {found.severity}: {found.kind}: {found.what} at {found.where or '-'}")
            print(f"        {found.detail}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["false alarms"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
