"""Medical MNIST: a folder of JPEG files for each of six classes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field

from coterie.data._images import image_files, read_images
from coterie.data.archives import Archived
from coterie.data.dataset import Dataset
from coterie.errors import DataError


class MedicalMnist(Archived):
    """X-ray, CT and MRI images of six kinds, 64x64 grey pixels shown to the model as three channels."""

    name: ClassVar[str] = "medical_mnist"
    how_many: ClassVar[str] = "58,954"
    shape: ClassVar[str] = "3x64x64"
    class_count: ClassVar[str] = "6"
    obtained: ClassVar[str] = "by hand"
    citation: ClassVar[str] = "Lozano, Medical MNIST classification, 2017"
    folder: ClassVar[str] = "MedicalMNIST"
    checksums: ClassVar[dict[str, str]] = {}
    by_hand: ClassVar[str] = (
        "it has no address to download it from without an account, so get 'Medical MNIST' from Kaggle and unpack "
        "its six folders of JPEG files to MedicalMNIST in the data folder"
    )
    counts: ClassVar[dict[str, int]] = {
        "AbdomenCT": 10_000,
        "BreastMRI": 8_954,
        "CXR": 10_000,
        "ChestCT": 10_000,
        "Hand": 10_000,
        "HeadCT": 10_000,
    }
    side: ClassVar[int] = 64

    norm: Literal["flame", "unit"] = Field("flame", description="flame: mean and deviation 0.3; unit: pixels in [0, 1]")

    @classmethod
    def faults(cls, data: Path) -> tuple[list[str], list[str]]:
        """Look for missing folders, and folders with another number of images than they should have."""
        missing, damaged = [], []
        for name, wanted in cls.counts.items():
            folder = data / cls.folder / name
            if not folder.is_dir():
                missing.append(str(Path(cls.folder, name)))
            elif len(image_files(folder)) != wanted:
                damaged.append(f"the folder {folder} holds {len(image_files(folder))} images, not {wanted}")
        return missing, damaged

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the images, class by class."""
        missing, damaged = self.faults(folder)
        if missing:
            raise DataError(f"the data set {self.name!r} needs the folder {folder / missing[0]}: {self.how()}")
        if damaged:
            raise DataError(damaged[0])
        paths = [path for name in self.counts for path in image_files(folder / self.folder / name)]
        grey = torch.from_numpy(read_images(paths, None, 1))
        if grey.shape[2:] != (self.side, self.side):
            raise DataError(f"the images of {folder / self.folder} are not {self.side}x{self.side}")
        y = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(list(self.counts.values())))
        mean, std = {"flame": (0.3, 0.3), "unit": (0.0, 1.0)}[self.norm]
        return Dataset(
            name=self.text(),
            x=grey.expand(-1, 3, -1, -1),
            y=y,
            train_count=len(y),
            task="multiclass",
            classes=tuple(self.counts),
            mean=(mean,),
            std=(std,),
        )
