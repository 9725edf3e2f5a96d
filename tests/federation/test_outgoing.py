"""A message is packed when it is sent, and its size counted once."""

from __future__ import annotations

import pytest

from coterie.federation.outgoing import PackedWhenSent


def test_each_block_is_made_when_it_is_asked_for_and_held_by_nobody() -> None:
    made: list[int] = []

    def packer(node: int) -> bytes:
        made.append(node)
        return b"x" * node

    blocks = PackedWhenSent({node: lambda node=node: packer(node) for node in (3, 5)})  # type: ignore[misc]
    assert list(blocks) == [3, 5] and len(blocks) == 2 and 3 in blocks and made == []
    assert blocks[3] == b"xxx" and blocks.sizes == {3: 3}
    del made[:]
    assert blocks[5] == b"xxxxx" and blocks[5] is not blocks[5] and made == [5] * 3
    assert blocks.sizes == {3: 3, 5: 5}  # sent three times, counted once
    with pytest.raises(KeyError):
        blocks[4]
