"""CIFAR-10 and CIFAR-100 in their binary versions: label bytes, then 3x32x32 pixels, record after record."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from coterie.data.archives import Archived, ArchiveReader, Bytes, Download
from coterie.data.dataset import Dataset

_CITATION = "Krizhevsky, Learning multiple layers of features from tiny images, University of Toronto, 2009"
_PIXELS = 3 * 32 * 32
_NORMS = {
    "flame": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "fedpg": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
_NORM_WORDS = "flame: mean and deviation 0.5; fedpg: those of CIFAR-10's channels; unit: pixels in [0, 1]"


def _read(
    source: Archived, data: Path, counts: dict[str, int], label_bytes: int
) -> tuple[Bytes, npt.NDArray[np.int64]]:
    total = sum(counts.values())
    x = np.empty((total, 3, 32, 32), dtype=np.uint8)
    y = np.empty((total, label_bytes), dtype=np.int64)
    first = 0
    for name, count in counts.items():
        with ArchiveReader(source.find(data, name), source.checksums.get(name)) as reader:
            for part, content in reader.records(count, label_bytes + _PIXELS):
                y[first : first + count][part] = content[:, :label_bytes]
                x[first : first + count][part] = content[:, label_bytes:].reshape(-1, 3, 32, 32)
            reader.finish()
        first += count
    return x, y


class Cifar10(Archived):
    """Photographs of ten kinds of things, 32x32 colour pixels."""

    name: ClassVar[str] = "cifar10"
    how_many: ClassVar[str] = "50,000 + 10,000"
    shape: ClassVar[str] = "3x32x32"
    class_count: ClassVar[str] = "10"
    obtained: ClassVar[str] = "downloaded"
    citation: ClassVar[str] = _CITATION
    folder: ClassVar[str] = "cifar-10-batches-bin"
    checksums: ClassVar[dict[str, str]] = {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    }
    downloads: ClassVar[tuple[Download, ...]] = (
        Download(
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            "c32a1d4ab5d03f1284b67883e8d87530",
            folder,
            tuple(checksums),
        ),
    )
    counts: ClassVar[dict[str, int]] = dict.fromkeys(checksums, 10_000)
    class_names: ClassVar[tuple[str, ...]] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip

    norm: Literal["flame", "fedpg", "unit"] = Field("flame", description=_NORM_WORDS)

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the six batches."""
        x, y = _read(self, folder, self.counts, 1)
        train = len(x) - self.counts["test_batch.bin"]
        labels = torch.from_numpy(y[:, 0])
        return Dataset(
            self.text(), torch.from_numpy(x), labels, train, "multiclass", self.class_names, *_NORMS[self.norm]
        )


class Cifar100(Archived):
    """Photographs of a hundred kinds of things in twenty super-classes, 32x32 colour pixels."""

    name: ClassVar[str] = "cifar100"
    how_many: ClassVar[str] = "50,000 + 10,000"
    shape: ClassVar[str] = "3x32x32"
    class_count: ClassVar[str] = "100 (fine) or 20 (coarse)"
    obtained: ClassVar[str] = "downloaded"
    citation: ClassVar[str] = _CITATION
    folder: ClassVar[str] = "cifar-100-binary"
    checksums: ClassVar[dict[str, str]] = {
        "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
        "test.bin": "4499cfba6c016c1be1438163640a0898",
    }
    downloads: ClassVar[tuple[Download, ...]] = (
        Download(
            ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
            "03b5dce01913d631647c71ecec9e9cb8",
            folder,
            tuple(checksums),
        ),
    )
    counts: ClassVar[dict[str, int]] = {"train.bin": 50_000, "test.bin": 10_000}
    # The fine classes of each coarse one; fine labels number the fine names in alphabetical order.
    families: ClassVar[dict[str, tuple[str, ...]]] = {
        "aquatic_mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
        "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
        "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
        "food_containers": ("bottle", "bowl", "can", "cup", "plate"),
        "fruit_and_vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
        "household_electrical_devices": ("clock", "keyboard", "lamp", "telephone", "television"),
        "household_furniture": ("bed", "chair", "couch", "table", "wardrobe"),
        "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
        "large_carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
        "large_man-made_outdoor_things": ("bridge", "castle", "house", "road", "skyscraper"),
        "large_natural_outdoor_scenes": ("cloud", "forest", "mountain", "plain", "sea"),
        "large_omnivores_and_herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
        "medium_mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
        "non-insect_invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
        "people": ("baby", "boy", "girl", "man", "woman"),
        "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
        "small_mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
        "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
        "vehicles_1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
        "vehicles_2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
    }

    labels: Literal["fine", "coarse"] = Field("fine", description="100 classes, or 20 super-classes")
    norm: Literal["flame", "fedpg", "unit"] = Field("fedpg", description=_NORM_WORDS)

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the two files."""
        x, y = _read(self, folder, self.counts, 2)
        family = {fine: number for number, members in enumerate(self.families.values()) for fine in members}
        names = tuple(sorted(family)) if self.labels == "fine" else tuple(self.families)
        labels = torch.from_numpy(np.ascontiguousarray(y[:, 1 if self.labels == "fine" else 0]))
        return Dataset(
            self.text(),
            torch.from_numpy(x),
            labels,
            self.counts["train.bin"],
            "multiclass",
            names,
            *_NORMS[self.norm],
            superclasses=tuple(family[name] for name in names) if self.labels == "fine" else (),
        )
