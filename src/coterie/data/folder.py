"""The user's own images: one folder for each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import Field
from torch import Tensor

from coterie.data._images import image_files
from coterie.data._user_data import AsText, UserSource, encode_owner, with_statistics
from coterie.data.dataset import Dataset, Preparation
from coterie.data.image_cache import load_images
from coterie.errors import DataError

_Images = list[tuple[str, str, Path]]  # of each image: its class, its owner (empty if there are none), its file


class FolderSource(UserSource):
    """Your own images: a folder of images for each class, or such folders in train and test."""

    name: ClassVar[str] = "folder"
    shape: ClassVar[str] = "as the images"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the folder")
    client: Literal["", "outer", "inner"] | Path = Field(
        "", description="whose an image is: outer for CLIENT/CLASS folders, inner for CLASS/CLIENT, or a .csv of both"
    )
    size: Annotated[str, AsText] = Field("", pattern=r"^(\d+(x\d+)?)?$", description="bring images to HEIGHTxWIDTH")
    channels: Annotated[Literal["auto", "1", "3"], AsText] = Field(
        "auto", description="1 grey, 3 colour; auto: as the first image is"
    )
    task: Literal["multiclass", "binary"] = Field("multiclass", description="what is to be predicted")
    norm: Literal["unit", "own"] = Field("unit", description="unit: pixels in [0, 1]; own: mean 0, deviation 1")

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the images, class by class, training images first."""
        found = self._listed()
        classes = sorted({name for name, _, _ in found[0]})
        paths = [path for part in found for _, _, path in part]
        height, _, width = self.size.partition("x")
        size = (int(height), int(width or height)) if height else None
        x = load_images(paths, size, self._channels(paths[0]), self.path.expanduser(), folder)
        y = torch.tensor([classes.index(name) for part in found for name, _, _ in part])
        owner: Tensor | None = None
        names: tuple[str, ...] = ()
        if self.client:
            owner, names = encode_owner(np.array([whose for part in found for _, whose, _ in part]), str(self.path))
        train = len(found[0])
        preparation = Preparation((True,) * x.shape[1]) if self.norm == "own" else None
        known: dict[str, Any] = {"owner": owner, "owner_names": names, "preparation": preparation}
        return with_statistics(Dataset(self.text(), x, y, train, self.task, tuple(classes), (0.0,), (1.0,), **known))

    def owners(self) -> dict[str, int] | None:
        """List the images, without reading any."""
        if not self.client or not self.path.expanduser().exists():
            return None
        counted = Counter(whose for part in self._listed() for _, whose, _ in part)
        return {name: counted[name] for name in sorted(counted)}

    def _listed(self) -> list[_Images]:
        """List the images of the training set and, where there is one, of the test set."""
        root = self.path.expanduser()
        if not root.is_dir():
            raise DataError(f"there is no folder {root}")
        parts = [root / "train", root / "test"]
        if not all(part.is_dir() for part in parts):
            parts = [root]
        found = [self._find(part) for part in parts]
        classes = {name for name, _, _ in found[0]}
        if len(classes) < 2:
            raise DataError(f"the folder {parts[0]} holds {len(classes)} folder(s) of images: give one for each class")
        strangers = sorted({name for name, _, _ in found[-1]} - classes)
        if strangers:
            raise DataError(
                f"the folder {parts[-1]} holds the class {strangers[0]!r}, which is not in the training set"
            )
        return self._with_owners(found, root) if isinstance(self.client, Path) else found

    def _find(self, part: Path) -> _Images:
        if self.client not in ("outer", "inner"):
            return [(name, "", path) for name in _folders(part) for path in self._images(part / name, part)]
        levels = [(part / a / b, a, b) for a in _folders(part) for b in _folders(part / a)]
        if not levels:
            order = "CLIENT/CLASS" if self.client == "outer" else "CLASS/CLIENT"
            raise DataError(f"the folder {part} holds no folders {order}, which client={self.client} asks for")
        named = [(where, b, a) if self.client == "outer" else (where, a, b) for where, a, b in levels]
        named.sort(key=lambda each: each[1:])
        return [(name, whose, path) for where, name, whose in named for path in image_files(where)]

    def _images(self, where: Path, part: Path) -> list[Path]:
        files = image_files(where)
        if not files and part.name != "test":
            inside = (
                "; of folders CLIENT/CLASS say client=outer, of CLASS/CLIENT client=inner" if _folders(where) else ""
            )
            raise DataError(f"the folder {where} holds no images{inside}")
        return files

    def _with_owners(self, found: Sequence[_Images], root: Path) -> list[_Images]:
        import pandas as pd

        file = Path(self.client).expanduser()
        try:
            table = pd.read_csv(file, dtype=str)
        except FileNotFoundError:
            raise DataError(
                f"client is {str(self.client)!r}, but must be outer, inner or a .csv that is there"
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"the table {file} cannot be read: {error}") from None
        if not {"file", "client"} <= set(table.columns):
            raise DataError(f"the table {file} needs the columns file and client: it has {', '.join(table.columns)}")
        whose = dict(zip(table["file"], table["client"], strict=True))
        for part in found:
            for _, _, path in part:
                name = path.relative_to(root).as_posix()
                if not isinstance(whose.get(name), str):
                    raise DataError(f"the table {file} names no client for the image {name!r}")
        return [[(name, whose[path.relative_to(root).as_posix()], path) for name, _, path in part] for part in found]

    def _channels(self, first: Path) -> int:
        if self.channels != "auto":
            return int(self.channels)
        try:
            with Image.open(first) as image:
                return 1 if image.mode in ("1", "L", "LA") else 3
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"the image {first} cannot be read: {error}") from None


def _folders(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir() if path.is_dir() and not path.name.startswith("."))
