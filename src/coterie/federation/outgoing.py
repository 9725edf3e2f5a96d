"""Messages that are packed when they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping


class PackedWhenSent(Mapping[int, bytes]):
    """Blocks by the transport's number of the node, each made anew whenever it is asked for.

    Each is as large as a model: a server that held one for every member beside their replies would need twice as much
    memory.

    Parameters
    ----------
    packers
        For each node what makes its block.

    Attributes
    ----------
    sizes
        The bytes of the blocks that have been asked for.
    """

    def __init__(self, packers: Mapping[int, Callable[[], bytes]]) -> None:
        self._packers = packers
        self.sizes: dict[int, int] = {}

    def __getitem__(self, node: int) -> bytes:
        block = self._packers[node]()
        self.sizes[node] = len(block)
        return block

    def __contains__(self, node: object) -> bool:
        return node in self._packers

    def __iter__(self) -> Iterator[int]:
        return iter(self._packers)

    def __len__(self) -> int:
        return len(self._packers)
