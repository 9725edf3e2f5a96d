"""A block of bytes in a message of Flower's, and back."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Message, RecordDict

from coterie.federation.transport import Failure

_RECORD, _ITEM, _STYPE = "coterie", "block", "coterie.block"


def content_of(block: bytes) -> RecordDict:
    """Put a block into what a message of Flower's carries.

    Parameters
    ----------
    block
        The block.

    Returns
    -------
    RecordDict
        One record with one array of bytes.
    """
    return RecordDict({_RECORD: ArrayRecord({_ITEM: Array("uint8", (len(block),), _STYPE, block)})})


def block_of(message: Message) -> bytes | Failure:
    """Take the block out of a message of Flower's.

    Parameters
    ----------
    message
        The message.

    Returns
    -------
    bytes or Failure
        The block; a message that has none is not one of ours.
    """
    record = message.content.array_records.get(_RECORD)
    item = record.get(_ITEM) if record is not None else None
    if item is None or item.stype != _STYPE:
        return Failure("its message is not one of Coterie's")
    return bytes(item.data)
