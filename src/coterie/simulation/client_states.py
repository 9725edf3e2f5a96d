"""The clients' state: taken and changed for some of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coterie.errors import AlgorithmError
from coterie.rows import ClientMatrix, Rows, look_at_rows, put_rows, take_rows


class _OnDemand(dict[str, Tensor]):
    """Rows that are gathered when they are looked at: of a state a personal model may need little."""

    def __init__(self, rows: Rows, clients: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(dict.fromkeys(rows))  # type: ignore[arg-type]
        self._rows, self._clients, self._take = rows, clients, take

    def __getitem__(self, name: str) -> Tensor:
        if super().__getitem__(name) is None:
            self[name] = self._take(self._rows[name], self._clients)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        return default

    def values(self) -> Any:
        return self._all().values()

    def items(self) -> Any:
        return self._all().items()

    def copy(self) -> Rows:
        return self._all()

    def __or__(self, other: Any) -> Any:
        return self._all() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._all()

    def _all(self) -> Rows:
        return {name: self[name] for name in self}


@dataclass
class ClientStates:
    """Every client's state.

    Parameters
    ----------
    rows
        The state, a row per client.
    """

    rows: Rows

    def gather(self, clients: Tensor) -> Rows:
        """Give copies of some clients' state."""
        return {name: take_rows(value, clients) for name, value in self.rows.items()}

    def on_demand(self, clients: Tensor, briefly: bool = False) -> Rows:
        """Give some clients' state, each name once it is looked at.

        ``briefly`` says that it is read before any state changes: then it need not be a copy, and must not be changed.
        """
        return _OnDemand(self.rows, clients, look_at_rows if briefly else take_rows)

    def scatter(self, clients: Tensor, changes: Rows) -> None:
        """Change some clients' state; the rows that were there before are left as they are."""
        new = dict(self.rows)
        for name, value in changes.items():
            if name not in self.rows or value.shape[1:] != _shape(self.rows[name])[1:]:
                have = {key: tuple(rows.shape[1:]) for key, rows in self.rows.items()}
                raise AlgorithmError(
                    f"finish changes {name!r} of shape {tuple(value.shape[1:])} for each client, but the clients' "
                    f"state has {', '.join(f'{key!r} of shape {shape}' for key, shape in have.items()) or 'no tensors'}"
                )
            new[name] = put_rows(self.rows[name], clients, value)
        self.rows = new


def _shape(rows: Tensor) -> tuple[int, ...]:
    """Give a shape; a client matrix, which answers slowly what is asked of it as a tensor, is not asked as one."""
    return rows.backend.shape if isinstance(rows, ClientMatrix) else tuple(rows.shape)


def part_rows(*states: Rows) -> None:
    """Give matrices that lie in one place a place each: a state may hold a matrix as it was and as it is."""
    seen: list[object] = []
    for state in states:
        for name, value in state.items():
            if isinstance(value, ClientMatrix):
                if any(value.backend is backend for backend in seen):
                    state[name] = value.clone()
                else:
                    seen.append(value.backend)


def commit_rows(state: Rows) -> None:
    """Write the changed rows of a state to their places."""
    for value in state.values():
        if isinstance(value, ClientMatrix):
            value.commit()
