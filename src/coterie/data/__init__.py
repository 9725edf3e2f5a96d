"""Data sets: official archives, embedded and synthetic sets, and the user's own, as two tensors and what is known."""

from __future__ import annotations

from coterie.data.base import DataInfo, Dataset
from coterie.data.catalogue import absent, data_folder, describe, fetch, load, names, status
from coterie.data.fetch import DataStatus
from coterie.spec import Parameter

__all__ = [
    "DataInfo",
    "DataStatus",
    "Dataset",
    "Parameter",
    "absent",
    "data_folder",
    "describe",
    "fetch",
    "load",
    "names",
    "status",
]
