"""EMNIST: MNIST extended to handwritten letters."""

from __future__ import annotations

import math
import string
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from coterie.data._idx import FLAME, SIDE, UNIT, open_idx, read_idx
from coterie.data.archives import Archived, ArchiveReader, Download
from coterie.data.dataset import Dataset

_BALANCED = string.digits + string.ascii_uppercase + "abdefghnqrt"  # other lower-case letters are merged with upper


class Emnist(Archived):
    """Handwritten letters and digits, 28x28 grey pixels, in four splits."""

    name: ClassVar[str] = "emnist"
    how_many: ClassVar[str] = "814,255 (byclass), 131,600 (balanced), 145,600 (letters), 280,000 (digits)"
    shape: ClassVar[str] = "1x28x28"
    class_count: ClassVar[str] = "62, 47, 26, 10"
    obtained: ClassVar[str] = "downloaded"
    citation: ClassVar[str] = (
        "Cohen, Afshar, Tapson, van Schaik, EMNIST: extending MNIST to handwritten letters, IJCNN 2017"
    )
    folder: ClassVar[str] = "EMNIST/raw"
    checksums: ClassVar[dict[str, str]] = {}
    splits: ClassVar[dict[str, tuple[int, int]]] = {
        "byclass": (697_932, 116_323),
        "balanced": (112_800, 18_800),
        "letters": (124_800, 20_800),
        "digits": (240_000, 40_000),
    }
    class_names: ClassVar[dict[str, str]] = {
        "byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
        "balanced": _BALANCED,
        "letters": string.ascii_lowercase,
        "digits": string.digits,
    }

    split: Literal["byclass", "balanced", "letters", "digits"] = Field("byclass", description="which of the splits")
    norm: Literal["flame", "unit"] = Field(
        "flame", description="flame: mean 0.1307, deviation 0.3081 as MNIST; unit: pixels in [0, 1]"
    )

    @classmethod
    def files_of(cls, split: str) -> tuple[str, str, str, str]:
        """Name the files of one split."""
        train, test = f"emnist-{split}-train", f"emnist-{split}-test"
        return (
            f"{train}-images-idx3-ubyte",
            f"{train}-labels-idx1-ubyte",
            f"{test}-images-idx3-ubyte",
            f"{test}-labels-idx1-ubyte",
        )

    @classmethod
    def files(cls) -> tuple[str, ...]:
        """Name the files of all splits."""
        return tuple(name for split in cls.splits for name in cls.files_of(split))

    def needed(self) -> tuple[str, ...]:
        """Name the files of this split."""
        return self.files_of(self.split)

    @classmethod
    def verify(cls, path: Path, name: str) -> None:
        """Read one file through; it has no published checksum, so its header must agree with its length."""
        split = name.split("-")[1]
        wanted = cls.splits[split]["-test-" in name]
        images = "-images-" in name
        shape = (SIDE, SIDE) if images else ()
        with ArchiveReader(path) as reader:
            for _ in open_idx(reader, wanted, *shape).records(wanted, math.prod(shape)):
                pass
            reader.finish()

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the four files of the split; its images are stored column by column."""
        train_x, train_y, test_x, test_y = (self.find(folder, name) for name in self.files_of(self.split))
        train, test = self.splits[self.split]
        x, y = read_idx([(train_x, train_y, train), (test_x, test_y, test)], self.checksums, transpose=True)
        classes = tuple(self.class_names[self.split])
        if self.split == "letters":
            y -= 1  # the letters alone are numbered from 1
        mean, std = {"flame": FLAME, "unit": UNIT}[self.norm]
        families = {"byclass": (0,) * 10 + (1,) * 26 + (2,) * 26}.get(self.split, ())
        return Dataset(self.text(), x, y, train, "multiclass", classes, (mean,), (std,), superclasses=families)


Emnist.downloads = (
    Download(
        (
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
        ),
        "58c8d27c78d21e728a6bc7b3cc06412e",
        "EMNIST/raw",
        tuple(f"{name}.gz" for name in Emnist.files()),
    ),
)
