"""Compares vlm-data with the image processors of transformers, in pictures a second.

    pip install torch==2.15.0 torchvision==0.29.2 transformers==5.24.0 pillow==13.0.0
    cargo build --release -p vlm-data --example pictures
    python benches/pictures.py target/release/examples/pictures

Both take turns on the same JPEG files, with two threads. Patches are made of pixels in a buffer that is used again
(vlm-data alone has this), of pixels, and of a file. Each figure is the median of rounds, and a round that of half a
second's calls.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor, Qwen2VLImageProcessorPil
from transformers.image_utils import load_image

ROUNDS = 5
SECONDS = 0.5
THREADS = 2
SIZES = [(640, 480), (1280, 960), (2048, 1365), (4000, 3000)]
PROCESSORS = {"torchvision": Qwen2VLImageProcessor, "PIL": Qwen2VLImageProcessorPil}
# Qwen2-VL's published values, and those with which vlm-data is asked for that family.
CONFIG = {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}


def photo(width, height):
    """A picture with the detail of a photo: smooth noise of several scales."""
    random = np.random.default_rng(0)
    total = np.zeros((height, width, 3))
    for cells in (4, 16, 64, 256):
        noise = random.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        total += np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC), dtype=float)
    return Image.fromarray((total / 4).astype(np.uint8))


def median(call):
    call()
    start, times = time.perf_counter(), []
    while not times or time.perf_counter() - start < SECONDS:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def main():
    torch.set_num_threads(THREADS)
    environment = {**os.environ, "RAYON_NUM_THREADS": str(THREADS)}
    made = {name: cls(**CONFIG) for name, cls in PROCESSORS.items()}
    print("| JPEG, pixels | patches from | vlm-data, 1/s | torchvision, 1/s | times | PIL, 1/s | times |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for width, height in SIZES:
            path = f"{folder}/{width}.jpg"
            photo(width, height).save(path, quality=90)
            pixels = load_image(path)
            rounds = []
            for _ in range(ROUNDS):
                command = [sys.argv[1], "qwen2_vl", str(SECONDS), path]
                out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                one = {("vlm-data", key): value for key, value in json.loads(out).items()}
                for name, processor in made.items():
                    one[name, "patches"] = median(lambda: processor(images=pixels, return_tensors="pt"))
                    one[name, "file"] = median(lambda: processor(images=load_image(path), return_tensors="pt"))
                rounds.append(one)
            times = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            print(f"| {width} x {height} | pixels, reused buffer | {1 / times['vlm-data', 'kept']:.1f} | | | | |")
            for start, words in [("patches", "pixels"), ("file", "the file")]:
                own = times["vlm-data", start]
                others = "".join(f" {1 / times[name, start]:.1f} | {times[name, start] / own:.1f} x |" for name in made)
                print(f"| | {words} | {1 / own:.1f} |{others}", flush=True)



main()
