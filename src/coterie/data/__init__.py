"""Data sets: official archives, embedded and synthetic sets, and the user's own, as two tensors and what is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie import lazy
from coterie.options import Parameter

if TYPE_CHECKING:
    from coterie.data.dataset import DataInfo, Dataset
    from coterie.data.download import DataStatus
    from coterie.data.registry import absent, data_folder, describe, fetch, load, names, status
else:
    __getattr__ = lazy.exports(
        __name__,
        dataset="DataInfo Dataset",
        download="DataStatus",
        registry="absent data_folder describe fetch load names status",
    )

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
