"""The data sets there are, by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import DataError, UnknownName
from coterie.lazy import Registry
from coterie.options import resolve

if TYPE_CHECKING:
    from coterie.data.dataset import DataInfo, Dataset, Source
    from coterie.data.download import DataStatus

SOURCES: Registry[type[Source]] = Registry(
    {
        "digits": "coterie.data.digits:Digits",
        "synthetic": "coterie.data.synthetic:Synthetic",
        "mnist": "coterie.data.mnist:Mnist",
        "fashion_mnist": "coterie.data.mnist:FashionMnist",
        "emnist": "coterie.data.emnist:Emnist",
        "cifar10": "coterie.data.cifar:Cifar10",
        "cifar100": "coterie.data.cifar:Cifar100",
        "medical_mnist": "coterie.data.medical_mnist:MedicalMnist",
        "femnist": "coterie.data.femnist:Femnist",
        "folder": "coterie.data.folder:FolderSource",
        "npz": "coterie.data.npz:NpzSource",
        "table": "coterie.data.table:TableSource",
        "hf": "coterie.data.hub:HubSource",
        "import": "coterie.data.function:FunctionSource",
        "object": "coterie.data.objects:ObjectSource",
    }
)


def names() -> list[str]:
    """Name all data sets.

    Returns
    -------
    list[str]
        In the order in which they are described.
    """
    return list(SOURCES)


def describe() -> list[DataInfo]:
    """Say of each data set what there is to know before loading it.

    Returns
    -------
    list[DataInfo]
        One for each name.
    """
    return [source.describe() for source in SOURCES.values()]


def data_folder(data_dir: Path | None = None) -> Path:
    """Find the folder that holds the data sets.

    Parameters
    ----------
    data_dir
        Taken if given; else the environment's ``COTERIE_DATA``; else a cache folder of the user's.

    Returns
    -------
    Path
        The folder, which need not exist yet.
    """
    given = data_dir or os.environ.get("COTERIE_DATA")
    if given:
        return Path(given).expanduser()
    import pooch

    return Path(pooch.os_cache("coterie")).expanduser()


def load(name: str, *, data_dir: Path | None = None, seed: int = 0, **options: Any) -> Dataset:
    """Load a data set.

    Parameters
    ----------
    name
        ``name`` or ``name:key=value,key=value``, as listed by :func:`describe`.
    data_dir
        The data folder; see :func:`data_folder`.
    seed
        For data sets that are drawn.
    **options
        More options of the data set.

    Returns
    -------
    Dataset
        The samples, held once.

    Raises
    ------
    DataError
        If the operating system refuses to read them.

    Examples
    --------
    >>> load("digits").input_shape
    (1, 8, 8)
    """
    source = resolve("data set", name, SOURCES, options)
    try:
        return source.load(data_folder(data_dir), seed)
    except OSError as error:
        where = error.filename or f"data {name!r}"
        raise DataError(f"{where} cannot be read ({error.strerror or error})") from error


def is_drawn(name: str) -> bool:
    """Say whether a data set may differ from seed to seed: none that is read from a file does.

    Parameters
    ----------
    name
        ``name`` or ``name:key=value,key=value``.

    Returns
    -------
    bool
        Whether it may.
    """
    return resolve("data set", name, SOURCES).drawn


def file_bytes(name: str) -> int:
    """Say how large the file is that a data set is read from.

    Parameters
    ----------
    name
        ``name`` or ``name:key=value,key=value``.

    Returns
    -------
    int
        Its bytes; 0 for data sets that are in no file of the user's own, or in a folder.
    """
    path = getattr(resolve("data set", name, SOURCES), "path", None)
    return path.stat().st_size if isinstance(path, Path) and path.is_file() else 0


def fetch(name: str, data_dir: Path | None = None, progress: bool = True) -> Path:
    """Download a data set from its official address; what is there and whole is left alone.

    A download that broke off is taken up where it ended, checked against its published checksum, and only then put in
    its place.

    Parameters
    ----------
    name
        Its name.
    data_dir
        The data folder; see :func:`data_folder`.
    progress
        Whether to show a bar on standard error.

    Returns
    -------
    Path
        The folder that holds it.
    """
    source = _source(name)
    from coterie.data.download import fetch_source

    return fetch_source(source, data_folder(data_dir), progress)


def status(data_dir: Path | None = None, name: str | None = None) -> list[DataStatus]:
    """Say of each data set whether it is there and whole; files are read through and checked.

    Parameters
    ----------
    data_dir
        The data folder; see :func:`data_folder`.
    name
        Look at this one only.

    Returns
    -------
    list[DataStatus]
        One for each name.
    """
    sources = list(SOURCES.values()) if name is None else [_source(name)]
    from coterie.data.download import status_of

    return [status_of(source, data_folder(data_dir)) for source in sources]


def absent(name: str, data_dir: Path | None = None) -> str:
    """Look whether a data set is there, without reading it.

    Parameters
    ----------
    name
        ``name`` or ``name:key=value,key=value``.
    data_dir
        The data folder; see :func:`data_folder`.

    Returns
    -------
    str
        What is missing and how to come by it, one sentence; empty if nothing is.
    """
    source = resolve("data set", name, SOURCES)
    from coterie.data.archives import Archived

    return source.absent(data_folder(data_dir)) if isinstance(source, Archived) else ""


def _source(name: str) -> type[Source]:
    kind = name.partition(":")[0]
    if kind not in SOURCES:
        raise UnknownName("data set", kind, SOURCES)
    return SOURCES[kind]
