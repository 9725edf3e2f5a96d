"""A folder of many images, and how much memory a run on it takes.

python benchmarks/many_images.py make IMAGES --count 100000
python benchmarks/many_images.py train IMAGES --out RUN

Images are 64x64 in three colours, of ten classes: each class has a colour of its own under noise. A run is a process of
its own; what is told is the most memory that it had at any time, files that it had mapped included.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

SIDE, CLASSES = 64, 10


def make(folder: Path, count: int) -> None:
    """Write the images, those of a class in a folder of its own."""
    colours = np.random.default_rng(1).integers(60, 200, (CLASSES, 3))
    for label in range(CLASSES):
        (folder / f"class-{label}").mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for number in range(count):
        label = number % CLASSES
        noise = np.random.default_rng(number).integers(-50, 50, (SIDE, SIDE, 3), dtype=np.int16)
        pixels = (colours[label] + noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"class-{label}" / f"{number:06}.jpg", quality=80)
    print(json.dumps({"images": count, "seconds": round(time.perf_counter() - began, 1)}))


def train(folder: Path, out: Path, settings: list[str]) -> None:
    """Train on the images in a process of its own, and say how much memory it took."""
    words = ["run", "fedavg", "--data", f"folder:{folder},norm=own", "--partition", "iid", "--clients", "100"]
    words += [
        "--rounds",
        "2",
        "--participation",
        "0.1",
        "--model",
        "mlp:hidden=64",
        "--lr",
        "0.001",
        "--quiet",
        "--out",
        str(out),
    ]
    began = time.perf_counter()
    child = os.posix_spawn(sys.executable, [sys.executable, "-m", "coterie", *words, *settings], os.environ)
    _, status, usage = os.wait4(child, 0)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gb": round(peak / 1e9, 3),
    }
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["make", "train"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("runs/many-images"))
    given, settings = parser.parse_known_args()
    make(given.folder, given.count) if given.what == "make" else train(given.folder, given.out, settings)


if __name__ == "__main__":
    main()
