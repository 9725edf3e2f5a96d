"""One writer to a folder at a time, under a lock that the operating system releases when its holder ends, however."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from coterie.errors import RunFolderError

LOCK_FILE = ".lock"
"""The file that is locked; it stays when the lock is released."""


def lock_folder(folder: Path) -> int:
    """Lock a folder and give the open lock file, which releases the lock when it is closed.

    A folder that another process has locked is a ``RunFolderError``.
    """
    with contextlib.ExitStack() as on_failure:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        on_failure.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode(errors="replace").strip()
            raise RunFolderError(
                f"{folder} is in use by another process{f' ({holder})' if holder else ''}: wait until it ends, or stop "
                "it"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()}\n".encode(), 0)
        on_failure.pop_all()
    return handle
