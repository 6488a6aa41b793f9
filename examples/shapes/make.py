"""Writes train.jsonl, test.jsonl, pictures/ and the tokenizer of model/: questions about drawn figures. colour.jsonl and
colour_test.jsonl ask for colours alone, which a model of the 64 samples of train.jsonl has not learned: for an adapter.
prefer.jsonl and prefer_test.jsonl are pairs of answers to the questions of colour.jsonl and colour_test.jsonl.

    pip install pillow==13.0.0 tokenizers==0.23.3
    python make.py                                   # this folder, the same bytes each time
    python make.py --samples 10000 --out big         # more of the same: big/train.jsonl

`model` is a Qwen2.5-VL of 0.2 million parameters without weights; its configuration, limits of pictures and chat
template are written by hand. The tokenizer is a byte-level BPE, trained on the sentences below.
"""

import argparse
import json
import os
import random

from PIL import Image, ImageDraw

HERE = os.path.dirname(os.path.abspath(__file__))
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 70), "blue": (40, 80, 210), "yellow": (240, 200, 30)}
SHAPES = ["circle", "square", "triangle"]
NUMBERS = ["one", "two", "three", "four"]
# Where a figure moves to in a frame of a clip, in parts of the side.
WAYS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
COLOUR = "What colour is the figure?"
SHAPE = "What shape is it?"
COUNT = "How many figures are there?"
SAME = "Are both figures of the same colour?"
WAY = "Where does the figure move?"


def draw(path, size, figures, grey):
    """A picture of a few colours; `figures` are (shape, colour, box in pixels)."""
    image = Image.new("P", size, 0)
    image.putpalette([level for colour in [(grey,) * 3, *COLOURS.values()] for level in colour])
    pen = ImageDraw.Draw(image)
    for shape, colour, (x1, y1, x2, y2) in figures:
        ink = 1 + list(COLOURS).index(colour)
        if shape == "circle":
            pen.ellipse((x1, y1, x2, y2), fill=ink)
        elif shape == "square":
            pen.rectangle((x1, y1, x2, y2), fill=ink)
        else:
            pen.polygon([(x1, y2), (x2, y2), ((x1 + x2) // 2, y1)], fill=ink)
    image.save(path, optimize=True, bits=4)


class Maker:
    def __init__(self, out, seed):
        self.out, self.random, self.pictures = out, random.Random(seed), 0

    def path(self):
        self.pictures += 1
        return f"pictures/{self.name}_{self.pictures:02}.png"

    def picture(self, count=1, low=56, high=90):
        """Draws `count` figures, each in its own quarter if there are several."""
        pick = self.random
        width, height = pick.randint(low, high), pick.randint(low, high)
        quarters = pick.sample([(0, 0), (1, 0), (0, 1), (1, 1)], count)
        figures = []
        for column, row in quarters:
            wide, high = (side if count == 1 else side // 2 for side in (width, height))
            side = pick.randint(min(wide, high) * 5 // 10, min(wide, high) * 8 // 10)
            left = pick.randint(0, wide - side - 1) + (column * wide if count > 1 else 0)
            top = pick.randint(0, high - side - 1) + (row * high if count > 1 else 0)
            figures.append((pick.choice(SHAPES), pick.choice(list(COLOURS)), (left, top, left + side, top + side)))
        path = self.path()
        draw(os.path.join(self.out, path), (width, height), figures, pick.choice([255, 240, 225]))
        return path, figures

    def clip(self):
        """Four frames of a figure that moves."""
        pick, side = self.random, 56
        shape, colour, way = pick.choice(SHAPES), pick.choice(list(COLOURS)), pick.choice(list(WAYS))
        (dx, dy), frames = WAYS[way], []
        for step in [-3, -1, 1, 3]:
            x, y = (side // 2 + step * 5 * d for d in (dx, dy))
            frames.append(self.path())
            box = (x - 10, y - 10, x + 10, y + 10)
            draw(os.path.join(self.out, frames[-1]), (side, side), [(shape, colour, box)], 255)
        return frames, way

    def sample(self, kind):
        chat = lambda *texts: [
            {"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)
        ]
        if kind == "count":
            path, figures = self.picture(count=self.random.randint(1, 4))
            return {"messages": chat(f"<image>{COUNT}", NUMBERS[len(figures) - 1]), "images": [path]}
        if kind == "pair":
            (one, [(_, first, _)]), (two, [(_, second, _)]) = self.picture(), self.picture()
            answer = "yes" if first == second else "no"
            return {"messages": chat(f"<image><image>{SAME}", answer), "images": [one, two]}
        if kind == "clip":
            frames, way = self.clip()
            return {"messages": chat(f"<video>{WAY}", way), "videos": [{"frames": frames, "fps": 2}]}
        path, [(shape, colour, box)] = self.picture(high=120 if kind == "box" else 90)
        if kind == "box":
            name = f"{colour} {shape}"
            question, answer = "<image>Find the <ref-object>.", '{"bbox_2d": <bbox>, "label": "<ref-object>"}'
            objects = {"ref": [name, name], "bbox": [list(box)]}
            return {"messages": chat(question, answer), "images": [path], "objects": objects}
        texts = {
            "colour": [f"<image>{COLOUR}", colour],
            "shape": [f"<image>{SHAPE}", shape],
            "turns": [f"<image>{COLOUR}", colour, SHAPE, shape],
        }
        return {"messages": chat(*texts[kind]), "images": [path]}

    def write(self, name, kinds):
        self.name, self.pictures = name, 0
        os.makedirs(os.path.join(self.out, "pictures"), exist_ok=True)
        with open(os.path.join(self.out, f"{name}.jsonl"), "w", encoding="utf-8", newline="\n") as file:
            for kind in kinds:
                file.write(json.dumps(self.sample(kind)) + "\n")


def prefer(out, name, source, count):
    """Pairs over the first pictures of another file: red is preferred to any other colour."""
    pick = random.Random(42)
    with open(os.path.join(out, f"{source}.jsonl"), encoding="utf-8") as file:
        records = [json.loads(line) for line in file][:count]
    with open(os.path.join(out, f"{name}.jsonl"), "w", encoding="utf-8", newline="\n") as file:
        for record in records:
            answers = "red", pick.choice(["green", "blue", "yellow"])
            pair = {"prompt": record["messages"][:1]}
            for key, text in zip(["chosen", "rejected"], answers):
                pair[key] = [{"role": "assistant", "content": text}]
            file.write(json.dumps({**pair, "images": record["images"]}) + "\n")


def tokenizer(folder):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    special = [
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
        "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
        "<|image_pad|>", "<|video_pad|>",
    ]
    words = [*COLOURS, *SHAPES, *NUMBERS, *WAYS, "yes", "no", "user", "assistant", "system"]
    sentences = [COLOUR, SHAPE, COUNT, SAME, WAY] + [
        f'Find the {colour} {shape}.\n{{"bbox_2d": [1, 2], "label": "{colour} {shape}"}}'
        for colour in COLOURS
        for shape in SHAPES
    ]
    made = Tokenizer(models.BPE(vocab={}, merges=[], unk_token=None, byte_fallback=False))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=384 - len(special), initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(words * 60 + sentences * 3, trainer)
    for word in words:
        assert len(made.encode(word).ids) == 1, word
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    for key, token in [("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"),
                       ("vision_start_token_id", "<|vision_start|>"), ("vision_end_token_id", "<|vision_end|>")]:
        assert made.token_to_id(token) == config[key], (key, made.token_to_id(token))
    assert made.get_vocab_size() <= config["text_config"]["vocab_size"], made.get_vocab_size()
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8", newline="\n") as file:
        file.write(made.to_str() + "\n")
    added = {
        str(made.token_to_id(token)): {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
                                       "single_word": False, "special": True}
        for token in special
    }
    made_by = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>",
               "pad_token": "<|endoftext|>", "unk_token": None, "model_max_length": 4096}
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(made_by, indent=1) + "\n")


# Kinds of samples and how many of each, of 64.
KINDS = {"colour": 16, "shape": 14, "count": 14, "turns": 6, "box": 7, "pair": 6, "clip": 1}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--samples", type=int, help="write this many to train.jsonl of --out, and nothing else")
    arguments.add_argument("--out", default=HERE)
    arguments = arguments.parse_args()
    maker = Maker(arguments.out, 40)
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    if arguments.samples is not None:
        maker.write("train", maker.random.choices(kinds, k=arguments.samples))
        return
    maker.random.shuffle(kinds)
    maker.write("train", kinds)
    maker.write("test", ["colour", "shape", "count"] * 8)
    maker = Maker(arguments.out, 41)
    maker.write("colour", ["colour"] * 128)
    maker.write("colour_test", ["colour"] * 32)
    prefer(arguments.out, "prefer", "colour", 64)
    prefer(arguments.out, "prefer_test", "colour_test", 16)
    tokenizer(os.path.join(HERE, "model"))


if __name__ == "__main__":
    main()
