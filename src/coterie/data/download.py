"""Downloading data sets, and saying which are there."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pooch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from coterie.data.archives import Archived, Download
from coterie.data.dataset import Source
from coterie.errors import ConfigError, DataError

Report = Callable[[int, int | None], None]  # bytes there are, bytes there will be if known

_CHUNK = 2**18
_TIMEOUT = 30.0
_ATTEMPTS = 3


@dataclass(frozen=True)
class DataStatus:
    """Whether a data set is there.

    Parameters
    ----------
    name
        Its name.
    state
        ``"built in"``, ``"your own"``, ``"whole"``, ``"missing"``, ``"incomplete"`` or ``"damaged"``.
    folder
        Where it lies or belongs.
    missing
        Files that are not there, from the data folder.
    damaged
        One sentence for each file that is not what it should be.
    hint
        How to come by it, if something is wrong.
    """

    name: str
    state: str
    folder: Path
    missing: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    hint: str = ""


def status_of(source: type[Source], data: Path) -> DataStatus:
    """Look whether a data set is there and whole."""
    if not issubclass(source, Archived):
        return DataStatus(source.name, source.obtained, data)
    missing, damaged = source.faults(data)
    folder = data / source.folder
    state = "damaged" if damaged else "whole"
    if missing and not damaged:
        state = "incomplete" if folder.is_dir() and any(folder.iterdir()) else "missing"
    hint = source.how() if state != "whole" else ""
    return DataStatus(source.name, state, folder, tuple(missing), tuple(damaged), hint)


def fetch_source(source: type[Source], data: Path, progress: bool) -> Path:
    """Download a data set; files that are there and whole are left alone."""
    if not issubclass(source, Archived):
        raise ConfigError(f"the data set {source.name!r} is {source.obtained}: there is nothing to fetch")
    missing, damaged = source.faults(data)
    if not missing and not damaged:
        return data / source.folder
    if not source.downloads:
        raise DataError(f"the data set {source.name!r} cannot be fetched: {source.by_hand}")
    for download in source.downloads:
        _fetch(source, download, data, progress)
    missing, damaged = source.faults(data)
    if missing or damaged:
        raise DataError(f"the data set {source.name!r} is still incomplete: {(*damaged, *missing)[0]}")
    return data / source.folder


def _fetch(source: type[Archived], download: Download, data: Path, progress: bool) -> None:
    target = data / download.target
    single = not download.members
    file = target if single else target.with_name(Path(download.urls[0]).name)
    if single and file.is_file() and pooch.file_hash(str(file), alg="md5") == download.md5:
        return
    reasons = []
    for url in download.urls:
        try:
            _retrieve(url, download.md5, file, f"{source.name}: {file.name}" if progress else None)
            break
        except DataError as error:
            reasons.append(str(error))
    else:
        what = str(file) if single else f"{', '.join(download.members[:4])}{' …' * (len(download.members) > 4)}"
        raise DataError(
            f"the data set {source.name!r} could not be downloaded ({reasons[0]}): get {download.urls[0]} yourself and "
            f"put {what}{'' if single else f' from it into {target}'}"
        )
    if not single:
        unpack(file, target, download.members)
        file.unlink()


def _retrieve(url: str, md5: str, file: Path, label: str | None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        with _bar(label) as report:

            def download(address: str, output: str, _: object) -> None:
                _resume(address, part, report)
                os.replace(part, output)

            pooch.retrieve(url, f"md5:{md5}", fname=file.name, path=file.parent, downloader=download)
    except ValueError as error:
        raise DataError(f"{url} did not give the official file: {error}") from None
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error}") from None
    finally:
        logger.setLevel(level)


def _resume(url: str, part: Path, report: Report) -> None:
    """Download to ``part``, going on where an earlier attempt ended if the server allows that."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _download(url, part, report)
            return
        except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
            if attempt == _ATTEMPTS:
                raise DataError(
                    f"the download of {url} broke off ({error}): try again, and it continues from there"
                ) from None
        except urllib.error.HTTPError as error:
            with error:
                raise DataError(f"{url} answers {error.code} {error.reason}") from None
        except urllib.error.URLError as error:
            raise DataError(f"{url} cannot be reached: {error.reason}") from None


def _download(url: str, part: Path, report: Report) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "coterie"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        # Nothing is left to send: the part is complete, or it is not of this file and the checksum will tell.
        error.close()
        return
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumed else "wb") as out:
            report(have, total)
            while content := response.read(_CHUNK):
                out.write(content)
                have += len(content)
                report(have, total)
    if total is not None and have < total:
        raise ConnectionError(f"after {have:,} of {total:,} bytes")


@contextlib.contextmanager
def _bar(label: str | None) -> Iterator[Report]:
    if label is None:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def unpack(archive: Path, folder: Path, members: tuple[str, ...]) -> None:
    """Take files out of a zip or tar archive, each written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = set(members)
    try:
        for name, content in _contents(archive, wanted):
            part = folder / (name + ".part")
            with content, part.open("wb") as out:
                shutil.copyfileobj(content, out, _CHUNK)
            os.replace(part, folder / name)
            wanted.discard(name)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"the archive {archive} cannot be unpacked: {error}") from None
    if wanted:
        raise DataError(f"the archive {archive} does not hold {min(wanted)}")


def _contents(archive: Path, wanted: set[str]) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                if Path(entry.filename).name in wanted and not entry.is_dir():
                    yield Path(entry.filename).name, packed.open(entry)
        return
    with tarfile.open(archive) as taped:
        for member in taped:
            content = taped.extractfile(member) if member.isfile() and Path(member.name).name in wanted else None
            if content is not None:
                yield Path(member.name).name, content
