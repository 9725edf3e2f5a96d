"""Image data sets packed small, for a machine that nothing can be downloaded to, and laid out there again.

    python benchmarks/carry_data.py pack cifar10 --data DATA --out PACKED --parts 2
    python benchmarks/carry_data.py unpack PACKED/*.npz --data DATA

Pixels of CIFAR-10 and CIFAR-100 are kept as what a guess from their left and upper neighbours leaves, compressed: 99
MB in place of 184. Medical MNIST's JPEG files are compressed together: 67 MB. Of each set there are as many files as
``--parts`` says, each of which can be unpacked by itself, with NumPy and Python alone. With all its parts a set lies as
its archive lays it out, byte for byte; what checks the files of a set does so when it is loaded.
"""

from __future__ import annotations

import argparse
import lzma
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

CIFAR = {
    "cifar10": ("cifar-10-batches-bin", [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"], 1),
    "cifar100": ("cifar-100-binary", ["train.bin", "test.bin"], 2),
}
"""Folder and files of each set, and how many bytes of an image say what it is."""

MEDICAL, SIDE, PIXELS = "MedicalMNIST", 32, 3 * 32 * 32
CODED = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0}]


def guess(plane: npt.NDArray[np.int16], i: int, j: int) -> Any:
    """Guess the pixels at one place of all images from those before it."""
    if not i or not j:
        return plane[i, j - 1] if j else (plane[i - 1, j] if i else 0)
    left, above = plane[i, j - 1], plane[i - 1, j]
    return np.clip(left + above - plane[i - 1, j - 1], np.minimum(left, above), np.maximum(left, above))


def coded(images: Bytes) -> bytes:
    """Compress images ``[images, 3, 32, 32]``: green, and what red and blue have beyond it."""
    x = images.astype(np.int16).transpose(1, 2, 3, 0)
    out = np.empty((3, SIDE, SIDE, len(images)), dtype=np.uint8)
    for channel, plane in enumerate((x[1], x[0] - x[1], x[2] - x[1])):
        for i, j in np.ndindex(SIDE, SIDE):
            left = ((plane[i, j] - guess(plane, i, j) + 128) & 255) - 128
            out[channel, i, j] = np.where(left < 0, -2 * left - 1, 2 * left)
    return lzma.compress(np.ascontiguousarray(out.transpose(0, 3, 1, 2)).tobytes(), lzma.FORMAT_XZ, filters=CODED)


def decoded(packed: bytes, count: int) -> Bytes:
    """Give the images back."""
    folded = np.frombuffer(lzma.decompress(packed), dtype=np.uint8).reshape(3, count, SIDE, SIDE)
    images, green = np.empty((count, 3, SIDE, SIDE), dtype=np.uint8), np.zeros((), dtype=np.int16)
    for channel, place in enumerate((1, 0, 2)):
        signed = np.ascontiguousarray(folded[channel].transpose(1, 2, 0)).astype(np.int16)
        left = np.where(signed & 1, -((signed + 1) >> 1), signed >> 1).astype(np.int16)
        plane = np.empty((SIDE, SIDE, count), dtype=np.int16)
        for i, j in np.ndindex(SIDE, SIDE):
            value = left[i, j] + guess(plane, i, j)
            plane[i, j] = ((value + green[i, j]) & 255) - green[i, j] if channel else value & 255
        green = green if channel else plane
        images[:, place] = (plane + green if channel else plane).transpose(2, 0, 1)
    return images


def kept(path: Path, **values: Any) -> Path:
    """Write a packed file, whole or not at all."""
    draft = path.with_suffix(".draft")
    with draft.open("wb") as opened:
        np.savez(opened, **values)
    return draft.replace(path)


def pack_cifar(name: str, data: Path, out: Path, part: int, parts: int) -> Path:
    """Pack one part of a set of records."""
    folder, files, labels = CIFAR[name]
    records = [np.fromfile(data / folder / file, dtype=np.uint8).reshape(-1, labels + PIXELS) for file in files]
    mine = np.array_split(np.concatenate(records), parts)[part]
    images = mine[:, labels:].reshape(-1, 3, SIDE, SIDE)
    return kept(
        out / f"{name}-{part}.npz",
        name=name,
        part=np.array([part, parts]),
        counts=np.array([len(each) for each in records]),
        labels=mine[:, :labels],
        images=np.frombuffer(coded(images), dtype=np.uint8),
    )


def pack_medical(data: Path, out: Path, part: int, parts: int) -> Path:
    """Pack one part of a set of files."""
    paths = sorted((data / MEDICAL).glob("*/*.jp*g"))
    mine = [paths[number] for number in np.array_split(np.arange(len(paths)), parts)[part]]
    contents = [path.read_bytes() for path in mine]
    return kept(
        out / f"medical_mnist-{part}.npz",
        name="medical_mnist",
        part=np.array([part, parts]),
        files=np.array([each.relative_to(data).as_posix() for each in mine]),
        sizes=np.array([len(each) for each in contents]),
        images=np.frombuffer(lzma.compress(b"".join(contents)), dtype=np.uint8),
    )


def pack(name: str, data: Path, out: Path, part: int, parts: int) -> Path:
    """Pack one part of a set."""
    return pack_cifar(name, data, out, part, parts) if name in CIFAR else pack_medical(data, out, part, parts)


def unpack(path: Path, data: Path) -> str:
    """Lay one part out; files of which another part has a piece are whole when that is there, too."""
    with np.load(path) as found:
        name, (part, parts), images = str(found["name"]), found["part"].tolist(), found["images"].tobytes()
        if name not in CIFAR:
            ends = found["sizes"].cumsum().tolist()
            contents, begin = lzma.decompress(images), 0
            for file, end in zip(found["files"].tolist(), ends, strict=True):
                (data / file).parent.mkdir(parents=True, exist_ok=True)
                (data / file).write_bytes(contents[begin:end])
                begin = end
            return f"{name}: part {part + 1} of {parts}, {len(ends):,} files"
        folder, files, labels = CIFAR[name]
        counts, words = found["counts"].tolist(), found["labels"]
    records = np.concatenate([words, decoded(images, len(words)).reshape(-1, PIXELS)], 1)
    sizes = [len(each) for each in np.array_split(np.arange(sum(counts)), parts)]
    first, width = sum(sizes[:part]), labels + PIXELS
    (data / folder).mkdir(parents=True, exist_ok=True)
    begin = 0
    for file, count in zip(files, counts, strict=True):
        mine = records[max(0, begin - first) : max(0, begin + count - first)]
        if len(mine):
            place = data / folder / file
            place.touch()
            with place.open("r+b") as opened:
                opened.truncate(count * width)  # of what lay there before, nothing beyond the records
                opened.seek(max(0, first - begin) * width)
                opened.write(mine.tobytes())
        begin += count
    return f"{name}: part {part + 1} of {parts}, {len(records):,} images"


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack or unpack; Ctrl-C ends it at once."""
    try:
        return run(arguments)
    except KeyboardInterrupt:
        print("stopped; parts that were named are whole: the same command begins anew", file=sys.stderr, flush=True)
        os._exit(130)  # threads that compress would be waited for


def run(arguments: Sequence[str] | None) -> int:
    """Pack or unpack, several parts at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="make small files of a data set")
    packing.add_argument("name", choices=[*CIFAR, "medical_mnist"])
    packing.add_argument("--out", type=Path, required=True, help="folder for the packed files")
    packing.add_argument("--parts", type=int, default=1, help="how many files")
    unpacking = commands.add_parser("unpack", help="lay packed files out as a data set")
    unpacking.add_argument("files", type=Path, nargs="+")
    for each in (packing, unpacking):
        each.add_argument("--data", type=Path, required=True, help="the folder that COTERIE_DATA names")
    args = parser.parse_args(arguments)
    pool = ThreadPoolExecutor()  # not as a context, which would wait for its threads at Ctrl-C
    if args.command == "unpack":
        for path in args.files:
            if not path.is_file():
                parser.error(f"{path} is not there")
        for said in pool.map(unpack, args.files, [args.data] * len(args.files)):
            print(said, flush=True)
        return 0
    there = args.data / (CIFAR[args.name][0] if args.name in CIFAR else MEDICAL)
    if not there.is_dir():
        parser.error(f"{there} is not there: --data is the folder that holds it")
    if args.parts < 1:
        parser.error(f"--parts is {args.parts}, but must be 1 or more")
    args.out.mkdir(parents=True, exist_ok=True)
    made = [pool.submit(pack, args.name, args.data, args.out, part, args.parts) for part in range(args.parts)]
    for each in made:
        path = each.result()
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
