"""Where the state of all clients is kept: on the device, in the host's memory or on disk, chosen by size."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.rows import Backend, ClientMatrix, DeviceBackend, RowIndex, Rows, repeated
from coterie.rows.off_device import DiskBackend, HostBackend, OffDeviceBackend
from coterie.rows.transfers import Transfers, free_memory

Keep = Literal["auto", "device", "host", "disk"]
"""Where rows are kept; ``auto`` is the first of the others with room for them."""

Place = Literal["device", "host", "disk"]

_SMALL = 2**12  # bytes: shorter rows stay on the device
_OF_DEVICE, _OF_MEMORY = 0.5, 0.6  # parts of what is free that may be filled; the rest is for computing


class Placement:
    """Finds a place for the rows of all clients, and has those of the next cohort brought.

    Parameters
    ----------
    keep
        Where they are to lie.
    device
        The device that computes.
    scratch
        Folder for files; the system's own for such things by default.
    """

    def __init__(self, keep: Keep, device: torch.device, scratch: str | os.PathLike[str] | None = None) -> None:
        self.keep: Keep = keep
        self._device, self._scratch = device, Path(tempfile.gettempdir() if scratch is None else scratch)
        self._transfers: Transfers | None = None
        self._away: list[OffDeviceBackend] = []
        self._next: RowIndex | None = None
        self._beside = 1  # processes of this run that share the machine's memory

    def place(self, server: Rows, clients: Rows, count: int) -> tuple[Rows, Rows]:
        """Give every matrix a place, where it lies alone.

        Parameters
        ----------
        server
            The server's state; only matrices made by :func:`coterie.rows.repeated` are placed.
        clients
            The clients' state; all that has a row for each is placed.
        count
            How many clients.

        Returns
        -------
        tuple of Rows
            Both states, in their places.
        """
        seen: set[int] = set()
        server = {
            name: _alone(value, seen) if isinstance(value, ClientMatrix) else value for name, value in server.items()
        }
        clients = {
            name: _alone(value, seen)
            if isinstance(value, ClientMatrix) or (value.dim() and len(value) == count)
            else value
            for name, value in clients.items()
        }
        kept = [value for value in (*server.values(), *clients.values()) if isinstance(value, ClientMatrix)]
        large = [
            self._rows(len(value)) * value.backend.row_bytes for value in kept if value.backend.row_bytes >= _SMALL
        ]
        place: Place = self.choose(sum(large)) if self.keep == "auto" else self.keep
        self.keep = place
        for state in (server, clients):
            for value in state.values():
                if isinstance(value, ClientMatrix):
                    value.move(self._backend(value.backend, place, state is server))
                    value.settle()
        return server, clients

    def _rows(self, count: int) -> int:
        """Say how many rows of a matrix lie with this process."""
        return count

    def _chosen(self, clients: Tensor) -> RowIndex:
        """Say where the rows of clients lie on the backends of this process."""
        return RowIndex(clients)

    def choose(self, size: int) -> Place:
        """Choose where to keep so many bytes.

        Parameters
        ----------
        size
            Bytes of all matrices together.

        Returns
        -------
        str
            The first place with room for them.
        """
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            if size <= _OF_DEVICE * free:
                return "device"
        if size <= _OF_MEMORY * free_memory() / self._beside:
            return "device" if self._on_host() else "host"
        return "disk"

    def _on_host(self) -> bool:
        """Whether the device computes in the host's memory, so that rows that are kept there need no other backend."""
        return self._device.type == "cpu"

    def _backend(self, old: Backend, place: Place, is_server: bool) -> Backend:
        """Make a backend for a matrix of the server's or of the clients' state."""
        return self._plain_backend(old.shape[0], old.opening, place)

    def _plain_backend(self, count: int, opening: Tensor, place: Place) -> Backend:
        if place == "device" or opening.nbytes < _SMALL or (place == "host" and self._on_host()):
            return DeviceBackend(count, opening)
        self._transfers = self._transfers or Transfers(self._device)
        new: OffDeviceBackend
        if place == "host":
            new = HostBackend(count, opening, self._transfers)
        else:
            new = DiskBackend(count, opening, self._transfers, self._folder())
        self._away.append(new)
        return new

    def _folder(self) -> Path:
        if not self._scratch.is_dir():
            raise ConfigError(f"scratch is {str(self._scratch)!r}, but must be a folder that is there")
        return self._scratch

    def expect(self, clients: Tensor | None) -> None:
        """Say whose rows will be asked for next.

        Parameters
        ----------
        clients
            The next cohort, in increasing order; ``None`` if it is not known.
        """
        self._next = None if clients is None or not self._away else self._chosen(clients)

    def begin(self, clients: Tensor | None = None) -> None:
        """Say that a round or an evaluation begins.

        Parameters
        ----------
        clients
            The cohort of a round; what was brought for others is dropped.
        """
        cohort = None if clients is None or not self._away else self._chosen(clients)
        for backend in self._away:
            backend.asked = False
            if cohort is not None:
                backend.forget(cohort)

    def end(self) -> None:
        """Say that a round ends: what was asked for in it will be in the next."""
        for backend in self._away:
            backend.useful = backend.asked

    def prefetch(self, in_round: bool = False) -> None:
        """Have rows brought for whom :meth:`expect` named, from the backends that were asked; then forget them.

        Parameters
        ----------
        in_round
            Also from those that were asked in the last round.
        """
        chosen, self._next = self._next, None
        if chosen is None:
            return
        wanted = [backend for backend in self._away if backend.asked or (in_round and backend.useful)]
        if self._has_room(sum(len(chosen) * backend.row_bytes for backend in wanted)):
            for backend in wanted:
                backend.prefetch(chosen)

    def _has_room(self, size: int) -> bool:
        if self._device.type != "cuda":
            return size <= free_memory() / self._beside / 4
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return size <= free / 4


def _alone(value: Tensor, seen: set[int]) -> ClientMatrix:
    """Give a matrix that shares its backend with none that was seen before."""
    if not isinstance(value, ClientMatrix):
        filled = repeated(torch.zeros_like(value[0]), len(value))
        index = torch.arange(len(value), device=value.device)
        return filled.patched(RowIndex(index), value)
    if id(value.backend) in seen:
        return _alone(value.dense(), seen) if value.patch is not None else repeated(value.backend.opening, len(value))
    seen.add(id(value.backend))
    return value


def near(path: Path | None) -> Path | None:
    """Give the folder nearest to a path that is there already.

    Parameters
    ----------
    path
        The path, ``None`` for none.

    Returns
    -------
    Path or None
        The path itself, or the first above it that is a folder.
    """
    return None if path is None else next(above for above in (path, *path.absolute().parents) if above.is_dir())
