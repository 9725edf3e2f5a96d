"""Chooses where the rows of all clients lie (on the device, in the host's memory or on disk) and prefetches them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.memory import free_memory
from coterie.rows._transfers import Transfers
from coterie.rows.backends import Backend, DeviceBackend, DiskBackend, HostBackend, OffDeviceBackend, RowIndex
from coterie.rows.layout import Rows
from coterie.rows.matrix import ClientMatrix, repeat_row

Keep = Literal["auto", "device", "host", "disk"]
"""Where rows are kept; ``auto`` is the first of the others with room for them."""

Place = Literal["device", "host", "disk"]

PLACES: tuple[Place, ...] = ("device", "host", "disk")

_SMALL_ROW = 2**12  # bytes: shorter rows stay on the device
_DEVICE_SHARE, _HOST_SHARE = 0.5, 0.6  # of what is free that rows may fill; the rest is for computing


class Sharding:
    """Which rows of a matrix lie with this process: all of them. A sharded run gives a placement another."""

    processes_on_machine: int = 1
    """How many processes of the run share the memory of this machine."""

    def row_count(self, rows: int) -> int:
        """Say how many rows of a matrix with so many lie with one process, at most."""
        return rows

    def row_index(self, clients: Tensor) -> RowIndex:
        """Say where the rows of those of some clients that are this process's lie on its backends."""
        return RowIndex(clients)

    def agree(self, place: Place) -> Place:
        """Choose one place for all processes, given the first that has room in this one."""
        return place

    def backend(self, old: Backend, make: Callable[[int], Backend], of_server: bool) -> Backend:
        """Make the backend of a matrix that lies on ``old``; ``make`` makes one for so many rows in this process."""
        return make(old.shape[0])


class Placement:
    """Finds a place for the rows of all clients, and has those of the next cohort fetched.

    Parameters
    ----------
    keep
        Where they are to lie; once they are placed, where they do.
    device
        The device that computes.
    scratch
        Folder for files; the system's own for such things by default.
    sharding
        Which rows lie with this process; all of them by default.
    """

    def __init__(
        self,
        keep: Keep,
        device: torch.device,
        scratch: str | os.PathLike[str] | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.keep: Keep = keep
        self._device, self._scratch = device, Path(tempfile.gettempdir() if scratch is None else scratch)
        self._sharding = sharding or Sharding()
        self._transfers: Transfers | None = None
        self._off_device: list[OffDeviceBackend] = []
        self._expected: RowIndex | None = None

    def place(self, server: Rows, clients: Rows, count: int) -> tuple[Rows, Rows]:
        """Put every matrix on a backend of its own.

        Of the server's state these are the matrices that :func:`~coterie.rows.repeat_row` made, of the clients' all
        that have a row for each of the ``count`` clients.
        """
        taken: set[Backend] = set()
        server = {
            name: _on_own_backend(value, taken) if isinstance(value, ClientMatrix) else value
            for name, value in server.items()
        }
        clients = {
            name: _on_own_backend(value, taken)
            if isinstance(value, ClientMatrix) or (value.dim() and len(value) == count)
            else value
            for name, value in clients.items()
        }
        matrices = [value for value in (*server.values(), *clients.values()) if isinstance(value, ClientMatrix)]
        sizes = [
            self._sharding.row_count(len(matrix)) * matrix.backend.row_bytes
            for matrix in matrices
            if matrix.backend.row_bytes >= _SMALL_ROW
        ]
        place: Place = self.choose(sum(sizes)) if self.keep == "auto" else self.keep
        self.keep = place
        for state, of_server in ((server, True), (clients, False)):
            for matrix in state.values():
                if isinstance(matrix, ClientMatrix):
                    matrix.move_to(self._new_backend(matrix.backend, place, of_server))
                    matrix.commit()
        return server, clients

    def choose(self, size: int) -> Place:
        """Choose the first place with room for so many bytes of this process."""
        return self._sharding.agree(self._first_with_room(size))

    def _first_with_room(self, size: int) -> Place:
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            if size <= _DEVICE_SHARE * free:
                return "device"
        if size <= _HOST_SHARE * free_memory() / self._sharding.processes_on_machine:
            return "device" if self._device_is_host() else "host"
        return "disk"

    def _device_is_host(self) -> bool:
        """Whether the device computes in the host's memory, so that rows that are kept there need no other backend."""
        return self._device.type == "cpu"

    def _new_backend(self, old: Backend, place: Place, of_server: bool) -> Backend:
        return self._sharding.backend(old, lambda count: self._local_backend(count, old.initial_row, place), of_server)

    def _local_backend(self, count: int, initial_row: Tensor, place: Place) -> Backend:
        on_device = place == "device" or (place == "host" and self._device_is_host())
        if on_device or initial_row.nbytes < _SMALL_ROW:
            return DeviceBackend(count, initial_row)
        self._transfers = self._transfers or Transfers(self._device)
        new: OffDeviceBackend
        if place == "host":
            new = HostBackend(count, initial_row, self._transfers)
        else:
            new = DiskBackend(count, initial_row, self._transfers, self._scratch_folder())
        self._off_device.append(new)
        return new

    def _scratch_folder(self) -> Path:
        if not self._scratch.is_dir():
            raise ConfigError(f"scratch is {str(self._scratch)!r}, but must be a folder that is there")
        return self._scratch

    # What the simulation says of its rounds, so that rows are there when they are asked for. A cohort is a function of
    # the seed and the round: the next one is known while this one trains.

    def expect(self, clients: Tensor | None) -> None:
        """Say whose rows will be asked for next, in increasing order; ``None`` if that is not known."""
        self._expected = None if clients is None or not self._off_device else self._sharding.row_index(clients)

    def begin(self, clients: Tensor | None = None) -> None:
        """Begin a round of these clients, or an evaluation; what was fetched for other cohorts is dropped."""
        cohort = None if clients is None or not self._off_device else self._sharding.row_index(clients)
        for backend in self._off_device:
            backend.gathered = False
            if cohort is not None:
                backend.drop_prefetched(keep=cohort)

    def end(self) -> None:
        """End a round: matrices that were asked for in it will be in the next."""
        for backend in self._off_device:
            backend.gathered_last_round = backend.gathered

    def prefetch(self, in_round: bool = False) -> None:
        """Have the rows of the clients that :meth:`expect` named fetched, once, if there is room for them.

        They come from the backends that were asked since :meth:`begin`; in a round, also from those that were asked in
        the last one, for the server's rows are asked for only after the clients have trained.
        """
        index, self._expected = self._expected, None
        if index is None:
            return
        wanted = [
            backend for backend in self._off_device if backend.gathered or (in_round and backend.gathered_last_round)
        ]
        if self._has_room(sum(len(index) * backend.row_bytes for backend in wanted)):
            for backend in wanted:
                backend.prefetch(index)

    def _has_room(self, size: int) -> bool:
        if self._device.type != "cuda":
            return size <= free_memory() / self._sharding.processes_on_machine / 4
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return size <= free / 4


def _on_own_backend(value: Tensor, taken: set[Backend]) -> ClientMatrix:
    """Give a matrix whose backend no other has taken, and take it."""
    if not isinstance(value, ClientMatrix):
        zeros = repeat_row(torch.zeros_like(value[0]), len(value))
        return zeros.patched(RowIndex(torch.arange(len(value), device=value.device)), value)
    if value.backend in taken:
        if value.patch is not None:
            return _on_own_backend(value.dense(), taken)
        return repeat_row(value.backend.initial_row, len(value))
    taken.add(value.backend)
    return value


def scratch_folder(given: str | None, run: Path | None) -> Path:
    """Give the folder for what is kept on disk: the one given, else one near a run that need not have its own yet."""
    if given is None and run is not None:
        return next(above for above in (run, *run.absolute().parents) if above.is_dir())
    return Path(tempfile.gettempdir() if given is None else given)
