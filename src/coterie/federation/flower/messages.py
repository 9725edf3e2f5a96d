"""Blocks of bytes as the content of Flower's messages."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from coterie.federation.transport import Failure

_RECORD, _ITEM, _STYPE = "coterie", "block", "coterie.block"


_SMALL = 2**20  # bytes; Flower sends an array in five parts, each of which is a call or two, a configuration in three


def content_of(block: bytes) -> RecordDict:
    """Make a message's content of a block: one record with one array of bytes, or with the bytes if they are few."""
    if len(block) <= _SMALL:
        return RecordDict({_RECORD: ConfigRecord({_ITEM: block})})
    return RecordDict({_RECORD: ArrayRecord({_ITEM: Array("uint8", (len(block),), _STYPE, block)})})


def take_block(message: Message) -> bytes | Failure:
    """Take the block out of a message, which then has none; one that has none before is not Coterie's."""
    found = _block_of(message)
    empty(message)
    return found


def empty(message: Message) -> None:
    """Take everything out of a message that nobody needs any more.

    Its records know each other in a circle: it would hold its block until Python looks for such circles.
    """
    if message.has_content():
        for record in message.content.values():
            record.clear()


def _block_of(message: Message) -> bytes | Failure:
    few = message.content.config_records.get(_RECORD)
    if few is not None and isinstance(block := few.get(_ITEM), bytes):
        return block
    record = message.content.array_records.get(_RECORD)
    item = record.get(_ITEM) if record is not None else None
    if item is None or item.stype != _STYPE:
        return Failure("its message is not one of Coterie's")
    return bytes(item.data)
