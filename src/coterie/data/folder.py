"""The user's own images: one folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from PIL import Image, UnidentifiedImageError
from pydantic import Field

from coterie.data._images import image_files, read_images
from coterie.data._user_data import AsText, UserSource, channel_norm
from coterie.data.dataset import Dataset
from coterie.errors import DataError


class FolderSource(UserSource):
    """Your own images: a folder of images for each class, or such folders in train and test."""

    name: ClassVar[str] = "folder"
    shape: ClassVar[str] = "as the images"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the folder")
    size: Annotated[str, AsText] = Field("", pattern=r"^(\d+(x\d+)?)?$", description="bring images to HEIGHTxWIDTH")
    channels: Annotated[Literal["auto", "1", "3"], AsText] = Field(
        "auto", description="1 grey, 3 colour; auto: as the first image is"
    )
    task: Literal["multiclass", "binary"] = Field("multiclass", description="what is to be predicted")
    norm: Literal["unit", "own"] = Field("unit", description="unit: pixels in [0, 1]; own: mean 0, deviation 1")

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the images, class by class, training images first."""
        root = self.path.expanduser()
        if not root.is_dir():
            raise DataError(f"there is no folder {root}")
        parts = [root / "train", root / "test"]
        if not all(part.is_dir() for part in parts):
            parts = [root]
        classes = sorted(path.name for path in parts[0].iterdir() if path.is_dir() and not path.name.startswith("."))
        found = [self._find(part, classes) for part in parts]
        if len(classes) < 2:
            raise DataError(f"the folder {parts[0]} holds {len(classes)} folder(s) of images: give one for each class")
        paths = [path for part in found for files in part for path in files]
        height, _, width = self.size.partition("x")
        size = (int(height), int(width or height)) if height else None
        x = torch.from_numpy(read_images(paths, size, self._channels(paths[0])))
        y = torch.tensor([label for part in found for label, files in enumerate(part) for _ in files])
        train = sum(map(len, found[0]))
        mean, std = channel_norm(x[:train]) if self.norm == "own" else ((0.0,), (1.0,))
        return Dataset(self.text(), x, y, train, self.task, tuple(classes), mean, std)

    def _find(self, part: Path, classes: Sequence[str]) -> list[list[Path]]:
        stranger = {path.name for path in part.iterdir() if path.is_dir()} - set(classes)
        if any(image_files(part / name) for name in stranger):
            raise DataError(f"the folder {part} holds the class {min(stranger)!r}, which is not in the training set")
        found = [image_files(part / name) if (part / name).is_dir() else [] for name in classes]
        for name, files in zip(classes, found, strict=True):
            if not files and part.name != "test":
                raise DataError(f"the folder {part / name} holds no images")
        return found

    def _channels(self, first: Path) -> int:
        if self.channels != "auto":
            return int(self.channels)
        try:
            with Image.open(first) as image:
                return 1 if image.mode in ("1", "L", "LA") else 3
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"the image {first} cannot be read: {error}") from None
