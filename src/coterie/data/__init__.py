"""Data sets: official archives, embedded and synthetic sets, and the user's own, as two tensors and what is known."""

from __future__ import annotations

from coterie.data.dataset import DataInfo, Dataset
from coterie.data.download import DataStatus
from coterie.data.registry import absent, data_folder, describe, fetch, load, names, status
from coterie.options import Parameter

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
