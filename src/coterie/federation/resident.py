"""A node that stays: one process holds the data and the model, and answers blocks of bytes on a local socket.

Flower starts a new process for every message. That process only passes the block on, so that nothing is loaded twice;
this module is light to import for that reason. The socket lies in a folder that only its owner may enter.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_LENGTH = struct.Struct("<Q")
_MOST = 2**40


@contextlib.contextmanager
def resident(handle: Callable[[bytes], bytes]) -> Iterator[str]:
    """Answer blocks on a local socket while the context is open, one at a time.

    Parameters
    ----------
    handle
        From a message's block to the reply's.

    Yields
    ------
    str
        The socket's path, for :func:`ask`.
    """
    # Not in the node's own folder: a socket's path may have about a hundred bytes.
    folder = tempfile.mkdtemp(prefix="coterie-")
    path = str(Path(folder) / "node")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        threading.Thread(target=_answer, args=(listener, handle), daemon=True).start()
        try:
            yield path
        finally:
            shutil.rmtree(folder)


def ask(path: str, block: bytes) -> bytes:
    """Pass a block on to the node that stays.

    Parameters
    ----------
    path
        Its socket.
    block
        The message's block.

    Returns
    -------
    bytes
        The reply's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        _send(connection, block)
        return _receive(connection)


def _answer(listener: socket.socket, handle: Callable[[bytes], bytes]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the context was closed
            return
        with connection, contextlib.suppress(OSError):
            _send(connection, handle(_receive(connection)))


def _send(connection: socket.socket, block: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(block)))
    if block:  # sending nothing still fails where the other side is done already
        connection.sendall(block)


def _receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > _MOST:
        raise ConnectionError(f"a block of {length} bytes is announced, but may have {_MOST} at most")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    pieces, left = [], count
    while left:
        piece = connection.recv(min(left, 2**20))
        if not piece:
            raise ConnectionError("the other side hung up")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
