"""MNIST and Fashion-MNIST, which share files, format and sizes."""

from __future__ import annotations

import string
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from coterie.data._idx import FLAME, UNIT, read_idx
from coterie.data.archives import Archived, Download
from coterie.data.dataset import Dataset

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class Mnist(Archived):
    """Handwritten digits, 28x28 grey pixels."""

    name: ClassVar[str] = "mnist"
    how_many: ClassVar[str] = "60,000 + 10,000"
    shape: ClassVar[str] = "1x28x28"
    class_count: ClassVar[str] = "10"
    obtained: ClassVar[str] = "downloaded"
    citation: ClassVar[str] = (
        "LeCun, Bottou, Bengio, Haffner, Gradient-based learning applied to document recognition, Proc. IEEE 1998"
    )
    folder: ClassVar[str] = "MNIST/raw"
    checksums: ClassVar[dict[str, str]] = dict(
        zip(
            FILES,
            (
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
            ),
            strict=True,
        )
    )
    downloads: ClassVar[tuple[Download, ...]] = tuple(
        Download(
            (
                f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz",
                f"http://yann.lecun.com/exdb/mnist/{name}.gz",
            ),
            md5,
            f"MNIST/raw/{name}.gz",
        )
        for name, md5 in zip(
            FILES,
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
            strict=True,
        )
    )
    counts: ClassVar[tuple[int, int]] = (60_000, 10_000)
    class_names: ClassVar[tuple[str, ...]] = tuple(string.digits)

    norm: Literal["flame", "unit"] = Field(
        "flame", description="flame: mean 0.1307, deviation 0.3081; unit: pixels in [0, 1]"
    )

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the four files."""
        return _load(self, folder, {"flame": FLAME, "unit": UNIT}[self.norm])


class FashionMnist(Archived):
    """Articles of clothing, 28x28 grey pixels, in MNIST's format."""

    name: ClassVar[str] = "fashion_mnist"
    how_many: ClassVar[str] = "60,000 + 10,000"
    shape: ClassVar[str] = "1x28x28"
    class_count: ClassVar[str] = "10"
    obtained: ClassVar[str] = "downloaded"
    citation: ClassVar[str] = (
        "Xiao, Rasul, Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms, "
        "arXiv:1708.07747, 2017"
    )
    folder: ClassVar[str] = "FashionMNIST/raw"
    checksums: ClassVar[dict[str, str]] = dict(
        zip(
            FILES,
            (
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "9018921c3c673c538a1fc5bad174d6f9",
                "8181f5470baa50b63fa0f6fddb340f0a",
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
            strict=True,
        )
    )
    downloads: ClassVar[tuple[Download, ...]] = tuple(
        Download(
            (f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}.gz",),
            md5,
            f"FashionMNIST/raw/{name}.gz",
        )
        for name, md5 in zip(
            FILES,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            strict=True,
        )
    )
    counts: ClassVar[tuple[int, int]] = (60_000, 10_000)
    class_names: ClassVar[tuple[str, ...]] = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )

    norm: Literal["flame", "fedpg", "own", "unit"] = Field(
        "flame",
        description="flame: mean 0.1307, deviation 0.3081; own: 0.286, 0.353 as the images have; "
        "fedpg and unit: pixels in [0, 1]",
    )

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the four files."""
        norms = {"flame": FLAME, "fedpg": UNIT, "own": (0.286, 0.353), "unit": UNIT}
        return _load(self, folder, norms[self.norm])


def _load(source: Mnist | FashionMnist, folder: Path, norm: tuple[float, float]) -> Dataset:
    train_x, train_y, test_x, test_y = (source.find(folder, name) for name in FILES)
    train, test = source.counts
    x, y = read_idx([(train_x, train_y, train), (test_x, test_y, test)], source.checksums)
    return Dataset(source.text(), x, y, train, "multiclass", source.class_names, norm[:1], norm[1:])
