"""Blocks of bytes as the content of Flower's messages."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Message, RecordDict

from coterie.federation.transport import Failure

_RECORD, _ITEM, _STYPE = "coterie", "block", "coterie.block"


def content_of(block: bytes) -> RecordDict:
    """Make a message's content of a block: one record with one array of bytes."""
    return RecordDict({_RECORD: ArrayRecord({_ITEM: Array("uint8", (len(block),), _STYPE, block)})})


def block_of(message: Message) -> bytes | Failure:
    """Take the block out of a message; one that has none is not Coterie's."""
    record = message.content.array_records.get(_RECORD)
    item = record.get(_ITEM) if record is not None else None
    if item is None or item.stype != _STYPE:
        return Failure("its message is not one of Coterie's")
    return bytes(item.data)
