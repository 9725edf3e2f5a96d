"""Official archives on disk: which files a data set needs, whether they are whole, and reading them piece by piece.

Files are read as arrays, never unpickled, and hashed while they are read: a file that is cut short, too long or
altered is refused with its name.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt

from coterie.data.dataset import Source
from coterie.errors import DataError

Bytes = npt.NDArray[np.uint8]

_CHUNK = 2**22


@dataclass(frozen=True)
class Download:
    """One file to download.

    Parameters
    ----------
    urls
        Addresses to try, in order.
    md5
        Checksum of what is downloaded.
    target
        Where it goes in the data folder; of a zip or tar archive, the folder its members go to.
    members
        Of an archive: the base names of the members to keep. Empty for a file that is kept as it is.
    """

    urls: tuple[str, ...]
    md5: str
    target: str
    members: tuple[str, ...] = ()


class Archived(Source):
    """A data set that lies in the data folder as its official files."""

    drawn: ClassVar[bool] = False
    folder: ClassVar[str]
    checksums: ClassVar[Mapping[str, str]]  # md5 of the uncompressed files in that folder, where known
    downloads: ClassVar[tuple[Download, ...]] = ()
    by_hand: ClassVar[str] = ""  # how to come by it when it cannot be downloaded

    @classmethod
    def files(cls) -> tuple[str, ...]:
        """Name the files it needs in its folder, without ``.gz``."""
        return tuple(cls.checksums)

    @classmethod
    def find(cls, data: Path, name: str) -> Path:
        """Find one of its files, compressed or not."""
        plain = data / cls.folder / name
        for path in (plain, plain.with_name(name + ".gz")):
            if path.is_file():
                return path
        raise DataError(f"the data set {cls.name!r} needs the file {plain} (or {name}.gz): {cls.how()}")

    @classmethod
    def how(cls) -> str:
        """Return how to obtain the files, as the end of a sentence."""
        return cls.by_hand or f"run `coterie data fetch {cls.name}`"

    @classmethod
    def faults(cls, data: Path) -> tuple[list[str], list[str]]:
        """Look for what is missing or damaged."""
        missing: list[str] = []
        damaged: list[str] = []
        for name in cls.files():
            try:
                path = cls.find(data, name)
            except DataError:
                missing.append(str(Path(cls.folder, name)))
                continue
            try:
                cls.verify(path, name)
            except DataError as error:
                damaged.append(str(error))
        return missing, damaged

    def absent(self, data: Path) -> str:
        """Look whether its files are there, without reading them."""
        names = self.needed()
        try:
            for name in names:
                self.find(data, name)
        except DataError as error:
            return str(error)
        missing = [] if names else self.faults(data)[0]
        return f"the data set {self.name!r} needs {data / missing[0]}: {self.how()}" if missing else ""

    def needed(self) -> tuple[str, ...]:
        """Name the files that are read with these options."""
        return self.files()

    @classmethod
    def verify(cls, path: Path, name: str) -> None:
        """Read one file through and refuse it if it is not whole."""
        with ArchiveReader(path, cls.checksums.get(name)) as reader:
            reader.skip_rest()


class ArchiveReader:
    """Read a file, gzipped or not, in order and in exact amounts, and check its md5 at the end.

    Parameters
    ----------
    path
        The file.
    md5
        Checksum of the uncompressed content, where it is known.
    """

    def __init__(self, path: Path, md5: str | None = None) -> None:
        self.path, self._md5 = path, md5
        self._digest = hashlib.md5(usedforsecurity=False)
        opened = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115  closed on exit
        self._file = cast(BinaryIO, opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, count: int) -> Bytes:
        """Read exactly so many bytes."""
        with self._damage():
            content = self._file.read(count)
        if len(content) < count:
            raise DataError(f"the file {self.path} is cut short: download it again")
        self._digest.update(content)
        return np.frombuffer(content, dtype=np.uint8)

    def records(self, count: int, size: int) -> Iterator[tuple[slice, Bytes]]:
        """Read records piece by piece, so that the file is never in memory as a whole."""
        step = max(1, _CHUNK // size)
        for first in range(0, count, step):
            last = min(first + step, count)
            yield slice(first, last), self.read((last - first) * size).reshape(last - first, size)

    def skip_rest(self) -> None:
        """Read to the end, whatever there is, and check."""
        with self._damage():
            while content := self._file.read(_CHUNK):
                self._digest.update(content)
        self._compare()

    def finish(self) -> None:
        """Check that the end is reached and the content is the official one."""
        with self._damage():
            if self._file.read(1):
                raise DataError(f"the file {self.path} is longer than it should be: download it again")
        self._compare()

    def _compare(self) -> None:
        if self._md5 is not None and self._digest.hexdigest() != self._md5:
            raise DataError(
                f"the file {self.path} is not the official one (md5 {self._digest.hexdigest()}, not {self._md5}): "
                "download it again"
            )

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"the file {self.path} cannot be read ({error}): download it again") from None
