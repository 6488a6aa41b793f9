"""The audit of a model: faults that projects shipped, rebuilt small, and models without a fault."""

import importlib
import importlib.util
import inspect
import json
import pathlib
import subprocess
import sys

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

import audit_models
import mrope
from mrope import audit
from test_models import MODELS, inputs, qwen2_5_vl, qwen3_vl

CHANNELS, HEADS, TOKENS = 16, 2, 6


def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rotate(x, cos, sin):
    return x * cos + half(x) * sin


@torch.no_grad()
def rotate_without_graph(x, cos, sin):
    return rotate(x, cos, sin)


def rotate_data(x, cos, sin):
    return rotate(x.data, cos, sin)


def rotate_in_place_of_data(x, cos, sin):
    x.data.copy_(rotate(x.detach(), cos, sin))
    return x


class Rotation(torch.autograd.Function):
    """With a backward that a subclass spoils."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)


class Severed(Rotation):
    @staticmethod
    def backward(ctx, dy):
        return None, None, None


class Zeros(Rotation):
    @staticmethod
    def backward(ctx, dy):
        return torch.zeros_like(dy), None, None


class Forwards(Rotation):
    @staticmethod
    def backward(ctx, dy):
        return rotate(dy, *ctx.saved_tensors), None, None


class Padded(Rotation):
    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return (
            rotate(dy, cos, -sin) / (cos.square() + sin.square() - 1).round().clamp(0),
            None,
            None,
        )


def rotate_severed(x, cos, sin):
    return Severed.apply(x, cos, sin)


def rotate_zeros(x, cos, sin):
    return Zeros.apply(x, cos, sin)


def rotate_forwards(x, cos, sin):
    return Forwards.apply(x, cos, sin)


def rotate_padded(x, cos, sin):
    return Padded.apply(x, cos, sin)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, which may have been forgotten."""

    def __init__(self, used=True):
        super().__init__()
        self.base = nn.Linear(CHANNELS, CHANNELS).requires_grad_(False)
        self.down = nn.Linear(CHANNELS, 2, bias=False)
        self.up = nn.Linear(2, CHANNELS, bias=False)
        nn.init.zeros_(self.up.weight)
        self.used = used

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) if self.used else self.base(x)


class Attention(nn.Module):
    def __init__(self, rotation, used=True):
        super().__init__()
        self.q, self.k, self.v = Adapted(used), Adapted(), Adapted()
        self.out = nn.Linear(CHANNELS, CHANNELS)
        self.rotation = rotation

    def forward(self, x, position_ids):
        rates = 0.5 ** torch.arange(CHANNELS // HEADS // 2, dtype=torch.float32)
        phases = position_ids.float()[..., None] * rates
        phases = torch.cat([phases, phases], -1)[:, None]
        cos, sin = phases.cos(), phases.sin()
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = self.rotation(q, cos, sin), self.rotation(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Tiny(nn.Module):
    """A tower, and a decoder's layer."""

    def __init__(self, rotation=rotate, used=True, frozen_tower=False):
        super().__init__()
        self.tower = Adapted()
        self.embedding = nn.Embedding(11, CHANNELS)
        self.layer = Attention(rotation, used)
        self.head = nn.Linear(CHANNELS, 11)
        self.frozen_tower = frozen_tower

    def encode(self, pixel_values):
        return self.tower(pixel_values)

    def forward(self, input_ids, pixel_values, position_ids):
        with torch.set_grad_enabled(not self.frozen_tower):
            pictures = self.encode(pixel_values)
        x = self.embedding(input_ids) + pictures
        return self.head(x + self.layer(x, position_ids=position_ids))


def batch(**changed):
    given = {
        "input_ids": torch.arange(2 * TOKENS).reshape(2, TOKENS) % 11,
        "pixel_values": torch.randn(2, TOKENS, CHANNELS),
        "position_ids": torch.arange(TOKENS).expand(2, TOKENS),
    }
    return {**given, **changed}


# The thread that a fault is from; a model and a batch with it; its kind, and the place or the name
# that the report must say.
FAULTS = {
    "candle 3568, mlx-vlm 1475: no graph": (
        lambda: (Tiny(rotate_without_graph), batch()),
        ("no gradient", "rotate_without_graph"),
    ),
    "LoongForge 106: by .data": (
        lambda: (Tiny(rotate_data), batch()),
        ("no gradient", "rotate_data"),
    ),
    "LongLive 61: severs q, k and their adapters": (
        lambda: (Tiny(rotate_severed), batch()),
        ("no gradient", "rotate_severed"),
    ),
    "the same, by zeros": (
        lambda: (Tiny(rotate_zeros), batch()),
        ("zero gradient", "rotate_zeros"),
    ),
    "in place of the data: not the adjoint": (
        lambda: (Tiny(rotate_in_place_of_data), batch()),
        ("gradient of a rotation", "rotate_in_place_of_data"),
    ),
    "the gradient is rotated forwards": (
        lambda: (Tiny(rotate_forwards), batch()),
        ("gradient of a rotation", "rotate_forwards"),
    ),
    "TransformerEngine: not a number where samples are padded": (
        lambda: (Tiny(rotate_padded), batch()),
        ("gradient is not finite", "rotate_padded"),
    ),
    "aprender 2092: the adapter of q is not trained": (
        lambda: (Tiny(used=False), batch()),
        ("no gradient", "layer.q.down.weight, layer.q.up.weight"),
    ),
    "unsloth 5039, 2U1 193: adapters of the tower": (
        lambda: (Tiny(frozen_tower=True), batch()),
        ("no gradient", "Adapted.forward"),
    ),
    "ms-swift 7176: ids in bfloat16": (
        lambda: (Tiny(), batch(position_ids=(300 + torch.arange(TOKENS)).expand(2, -1).bfloat16())),
        ("position ids", "whole numbers up to 256"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_function(name):
    make, (kind, words) = FAULTS[name]
    report = audit(*make())
    found = [str(finding) for finding in report.findings if finding.kind == kind]
    assert any(words in text for text in found), report
    assert not report.ok


@pytest.mark.parametrize(
    "rotation, severity", [(rotate_zeros, "fault"), (lambda x, *_: x * 0, "note")]
)
def test_zeros_are_a_note_where_pytorch_says_so(rotation, severity):
    report = audit(Tiny(rotation).requires_grad_(True), batch())
    found = [each for each in report.findings if "layer.q" in each.what]
    assert [each.severity for each in found] == [severity], report


def test_no_fault_is_found_and_nothing_changed():
    model, given = Tiny(), batch()
    model.tower.eval()
    torch.manual_seed(5)
    numbers = torch.get_rng_state()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    report = audit(model, given)
    assert report.ok and report.rotations, report
    words = "half, channels 0 to 7 of 8, one axis, theta 16, scale 1, gradient the adjoint"
    assert [str(found) for found in report.rotations] == [f"test_audit.rotate: {words}"]
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training and not model.tower.training
    assert torch.equal(torch.get_rng_state(), numbers)


def test_by_command(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.used, self.unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)\n"
        "    def forward(self, x):\n"
        "        return self.used(x)\n"
        "def fine():\n"
        "    model = Model()\n"
        "    return model, {'x': torch.ones(2, 3)}\n"
        "def faulty():\n"
        "    model = Model()\n"
        "    model.used.bias.requires_grad_(False)\n"
        "    return model, {'x': torch.ones(2, 3)}\n"
    )

    def run(*words):
        command = [sys.executable, "-m", "mrope", "audit", *words]
        return subprocess.run(command, capture_output=True, text=True)

    fine = run(f"{script}:fine")
    assert fine.returncode == 0 and "note      no gradient: unused.weight" in fine.stdout
    found = run(f"{script}:faulty", "--json")
    assert found.returncode == 1
    report = json.loads(found.stdout)
    assert report["findings"][0]["what"] == "unused.weight, unused.bias"
    assert run(f"{tmp_path}/none.py:fine").returncode == 2


class Forgetful(nn.Module):
    """A checkpointed layer whose dropout is another one in the backward."""

    def __init__(self, keeps):
        super().__init__()
        self.one, self.two = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.keeps = keeps

    def forward(self, x):
        def run(x):
            return self.two(F.dropout(self.one(x), 0.5))

        return torch.utils.checkpoint.checkpoint(
            run, x, use_reentrant=False, preserve_rng_state=self.keeps
        )


def test_a_recomputation_that_differs_is_found():
    given = {"x": torch.randn(3, CHANNELS, requires_grad=True)}
    report = audit(Forgetful(False), given)
    assert [found.kind for found in report.findings] == ["recomputation"], report
    assert audit(Forgetful(True), given).ok


def test_samples_of_a_pack_that_meet_are_found():
    packed = torch.cat([torch.arange(3), torch.arange(3)]).expand(2, -1)
    report = audit(Tiny(), batch(position_ids=packed))
    assert [found.kind for found in report.findings] == ["packing"], report


def test_equal_axes_with_pictures_are_found():
    model = qwen2_5_vl()
    given = inputs(model)
    assert audit(model, given).ok
    flat = torch.arange(given["input_ids"].shape[1]).expand(3, *given["input_ids"].shape)
    report = audit(model, {**given, "position_ids": flat})
    assert [found.kind for found in report.findings] == ["position ids"], report


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_models_of_transformers_have_no_fault(make):
    model = make()
    report = audit(model, inputs(model))
    assert report.ok and report.rotations, report


@torch.library.custom_op("mrope_tests::rotate", mutates_args=())
def rotate_by_operator(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate_data(x, cos, sin)


rotate_by_operator.register_autograd(
    lambda ctx, dy: (rotate(dy, ctx.cos, -ctx.sin), None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "cos", inputs[1])
    or setattr(ctx, "sin", inputs[2]),
)


def test_a_rotation_inside_an_operator_has_the_gradient_of_that():
    assert audit(Tiny(rotate_by_operator), batch()).ok


@pytest.mark.parametrize("norms", [False, True])
def test_patched_models_have_no_fault(norms):
    model = qwen3_vl()
    mrope.patch(model, norms=norms)
    try:
        report = audit(model, inputs(model))
    finally:
        mrope.unpatch(model)
    assert report.ok and "mrope.torch.rotary" in str(report), report


def test_adapters_of_peft_have_no_fault():
    peft = pytest.importorskip("peft")
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert audit(model, {"input_ids": torch.arange(10)[None]}).ok


# Each of its kind: dense, partial, experts, scaled, alternating, without a rotation, by a method;
# diffusers with one axis, two and three, per head, and with a last block that is not used whole.
SOME = ["gemma3_text", "glm4", "qwen3_moe", "apertus", "gpt2", "roformer", "deepseek_v4"]
SOME += ["FluxTransformer2DModel", "WanTransformer3DModel", "MochiTransformer3DModel"]


@pytest.mark.parametrize("name", SOME)
def test_families_raise_no_alarm(name):
    """All of them: ``python tests/audit_models.py``."""
    if name in audit_models.DIFFUSERS and importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is missing")
    report = audit(*audit_models.CASES[name]())
    assert report.ok, report
    assert bool(report.rotations) == (name != "gpt2"), report


class Turned(nn.Module):
    """A function of transformers between parameters and a loss."""

    def __init__(self, function, shapes, names):
        super().__init__()
        self.function = function
        self.turned = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.names = names

    def forward(self, **angles):
        moved = dict(zip(self.names, (p * 1 for p in self.turned)))
        made = self.function(**moved, **angles)
        return torch.cat([t.flatten() for t in (made if isinstance(made, tuple) else (made,))])


def test_the_rotations_of_transformers_raise_no_alarm():
    folder = pathlib.Path(hf.__file__).parent / "models"
    found, unseen = [], []
    for file in sorted(folder.glob("*/modeling_*.py")):
        for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"):
            if f"def {name}(" not in file.read_text():
                continue
            path = f"transformers.models.{file.parent.name}.{file.stem}"
            function = getattr(importlib.import_module(path), name)
            names = list(inspect.signature(function).parameters)
            moved = [key for key in names if key in ("q", "k", "v", "x", "tensor")]
            of_patches = name.endswith("vision")
            shape = (5, 3, 8) if of_patches else (2, 3, 5, 8)
            if moved == ["tensor"]:
                shape = (2, 5, 3, 8)
            ways = [(batch, width) for batch in ([], [2]) for width in (8, 4)]
            for batch, width in ways[:2] if of_patches or "v" in moved else reversed(ways):
                phases = torch.rand(*batch, 5, width // 2)
                if names[1:3] != ["sin", "cos"]:
                    phases = torch.cat([phases, phases], -1)
                given = {"cos": phases.cos(), "sin": phases.sin()}
                if "v" in moved:
                    given["position_ids"] = torch.arange(5).expand(2, 5)
                model = Turned(function, [shape] * len(moved), moved)
                try:
                    report = audit(model, given)
                except Exception:  # It wants cos and sin of other shapes.
                    continue
                assert report.ok, report
                if report.rotations:
                    found.append(path)
                    break
            else:
                unseen.append(f"{path}.{name}")
    assert (len(found), len(unseen)) == (217, 0), "\n".join(unseen)
