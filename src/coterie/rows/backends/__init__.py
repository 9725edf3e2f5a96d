"""Where the rows of one matrix lie: on the device that computes, in the host's memory, or on disk."""

from __future__ import annotations

from coterie.rows.backends.base import Backend, RowIndex
from coterie.rows.backends.device import DeviceBackend
from coterie.rows.backends.disk import DiskBackend
from coterie.rows.backends.host import HostBackend
from coterie.rows.backends.initial import InitialBackend
from coterie.rows.backends.off_device import OffDeviceBackend

__all__ = [
    "Backend",
    "DeviceBackend",
    "DiskBackend",
    "HostBackend",
    "InitialBackend",
    "OffDeviceBackend",
    "RowIndex",
]
