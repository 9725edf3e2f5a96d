"""FEMNIST: handwritten characters with their writers, as LEAF's preprocessing lays them out in JSON files.

Each file is one object with ``users``, ``num_samples`` and ``user_data``, which gives for every writer the images as
lists of 784 numbers in [0, 1] (bytes divided by 255) and the labels. Files are walked writer by writer, so that never
more than one writer's numbers exist as Python objects, and the bytes are restored.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from coterie.data._idx import SIDE
from coterie.data.archives import Archived, Bytes
from coterie.data.dataset import Dataset
from coterie.errors import DataError

Writer = tuple[str, Bytes, npt.NDArray[np.int64]]

_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()
PARTS = ("train", "test")


class _Cursor:
    """A place in a JSON text, moved along by reading."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def value(self) -> Any:
        self._skip()
        value, self.at = _DECODER.raw_decode(self.text, self.at)
        return value

    def members(self) -> Iterator[str]:
        """Walk an object; the caller must read the value of each key before asking for the next."""
        self._take("{")
        if self._next() == "}":
            self._take("}")
            return
        while True:
            key = self.value()
            self._take(":")
            yield key
            if self._next() == "}":
                self._take("}")
                return
            self._take(",")

    def end(self) -> None:
        self._skip()
        if self.at != len(self.text):
            raise ValueError(f"something follows at character {self.at}")

    def _skip(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too

    def _next(self) -> str:
        self._skip()
        return self.text[self.at : self.at + 1]

    def _take(self, mark: str) -> None:
        if self._next() != mark:
            raise ValueError(f"no {mark!r} at character {self.at}")
        self.at += 1


def read_leaf(path: Path) -> Iterator[Writer]:
    """Read a LEAF file writer by writer."""
    facts: dict[str, Any] = {}
    counts: dict[str, int] = {}
    try:
        cursor = _Cursor(path.read_text(encoding="utf-8"))
        for key in cursor.members():
            if key != "user_data":
                facts[key] = cursor.value()
                continue
            for user in cursor.members():
                writer = _writer(user, cursor.value())
                counts[user] = len(writer[2])
                yield writer
        cursor.end()
        _compare(dict(zip(facts["users"], facts["num_samples"], strict=True)), counts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the file {path} is not a whole LEAF file ({error}): make it again") from None


def _compare(said: dict[str, int], found: dict[str, int]) -> None:
    if said != found:
        raise ValueError("its users and num_samples are not those of its user_data")


def _writer(user: str, content: Any) -> Writer:
    values = np.asarray(content["x"], dtype=np.float64).reshape(-1, SIDE * SIDE)
    labels = np.asarray(content["y"], dtype=np.int64)
    pixels = np.rint(values * 255)
    if len(values) != len(labels):
        raise ValueError(f"writer {user} has {len(values)} images and {len(labels)} labels")
    if len(values) and (np.abs(pixels - values * 255).max() > 1e-3 or not 0 <= pixels.min() <= pixels.max() <= 255):
        raise ValueError(f"the pixels of writer {user} are not bytes divided by 255")
    return user, pixels.astype(np.uint8), labels


class Femnist(Archived):
    """Handwritten characters with their writers, from LEAF: use it with the partition natural."""

    name: ClassVar[str] = "femnist"
    how_many: ClassVar[str] = "382,705 (digits), 805,263 (all)"
    shape: ClassVar[str] = "1x28x28"
    class_count: ClassVar[str] = "10 (digits) or 62 (all)"
    obtained: ClassVar[str] = "by hand"
    citation: ClassVar[str] = "Caldas et al., LEAF: a benchmark for federated settings, arXiv:1812.01097, 2018"
    folder: ClassVar[str] = "FEMNIST"
    checksums: ClassVar[dict[str, str]] = {}
    by_hand: ClassVar[str] = (
        "LEAF makes it on your machine, so run data/femnist/preprocess.sh of the LEAF repository "
        "(-s niid --sf 1.0 -k 0 -t sample) and put its folders train and test into FEMNIST in the data folder"
    )

    labels: Literal["digits", "all"] = Field("digits", description="the ten digits, or all 62 characters")

    @classmethod
    def faults(cls, data: Path) -> tuple[list[str], list[str]]:
        """Look for folders without files."""
        return [str(Path(cls.folder, part)) for part in PARTS if not cls._files(data, part)], []

    @classmethod
    def _files(cls, data: Path, part: str) -> list[Path]:
        return sorted((data / cls.folder / part).glob("*.json"))

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read all files; the writers are numbered in the order of their names."""
        missing, _ = self.faults(folder)
        if missing:
            raise DataError(f"the data set {self.name!r} needs JSON files in {folder / missing[0]}: {self.how()}")
        classes = string.digits + ("" if self.labels == "digits" else string.ascii_uppercase + string.ascii_lowercase)
        images: list[Bytes] = []
        labels: list[npt.NDArray[np.int64]] = []
        users: list[str] = []
        train_count = 0
        for part in PARTS:
            for path in self._files(folder, part):
                for user, pixels, numbers in read_leaf(path):
                    keep = numbers < len(classes)
                    images.append(pixels[keep])
                    labels.append(numbers[keep])
                    users.extend([user] * int(keep.sum()))
            if part == "train":
                train_count = len(users)
        x = torch.from_numpy(np.concatenate(images)).reshape(-1, 1, SIDE, SIDE)
        owner = torch.from_numpy(np.unique(np.array(users), return_inverse=True)[1].astype(np.int64))
        y = torch.from_numpy(np.concatenate(labels))
        return Dataset(self.text(), x, y, train_count, "multiclass", tuple(classes), (0.0,), (1.0,), owner=owner)
