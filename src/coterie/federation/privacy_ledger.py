"""The replies of a node that promised privacy: clipped, made noisy, and counted on the node's own disk.

::

    privacy.key     a secret of the node's own, from which its noise is drawn
    privacy.json    for each run, how many replies were sent with how much noise

Both files belong to the node. The seed that all parties share is no secret, so noise cannot be drawn from it. Noise
depends on the secret, the message and the reply: a reply that is sent twice is the same both times and reveals nothing
new; any other reply gets noise of its own. A reply is counted before it is sent, even if the server does not use it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from coterie.errors import CheckpointError, RunFolderError
from coterie.federation.agreement import Promise
from coterie.federation.wire import Rejected
from coterie.randomness import secret_normal
from coterie.rows import Rows
from coterie.runs.storage.atomic_files import read_json, replacing, write_json
from coterie.runs.storage.format_versions import check_format, stamp
from coterie.simulation.privacy import protect, spent

KEY, FILE = "privacy.key", "privacy.json"
_BYTES = 32
_FORMAT = 1


class Ledger:
    """The replies of one node, over all runs.

    Parameters
    ----------
    folder
        The node's folder.
    promise
        What was promised.
    """

    def __init__(self, folder: Path, promise: Promise) -> None:
        self.promise = promise
        self._folder = folder
        self._read()  # a node whose count is lost does not start

    def release(
        self, reply: Rows, message: Rows, references: Mapping[str, str | None], run: str, digest: bytes
    ) -> Rows:
        """Clip a reply, add noise to it, and count it; :class:`Rejected` where the budget does not allow another.

        ``reply`` and ``message`` have one row. ``references`` are the task's: what each tensor is a changed copy of.
        ``digest`` is that of the whole block in which the message came.
        """
        counts = self._read()
        mine = counts.setdefault(run, Counter())
        mine[self.promise.noise] += 1
        budget, loss = self.promise.budget, self._loss(counts)
        if budget is not None and loss > budget:
            raise Rejected(f"the node's privacy budget of {budget:g} is spent: one more reply would make it {loss:.4g}")
        self._write(counts)
        hashed = hashlib.blake2b(digest, key=self._secret())
        for name, value in reply.items():
            hashed.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
            hashed.update(value.detach().contiguous().numpy().tobytes())
        key = hashed.digest()

        def draw(name: str, rows: slice, count: int) -> Tensor:
            return secret_normal(key + name.encode(), count).unsqueeze(0)

        return protect(reply, message, references, self.promise, draw)

    def epsilon(self, run: str | None = None) -> float:
        """Give the privacy loss ε of one run, or of all runs together; infinite without noise."""
        counts = self._read()
        return self._loss(counts if run is None else {run: counts.get(run, Counter())})

    def _loss(self, counts: Mapping[str, Counter[float]]) -> float:
        return spent(sum(counts.values(), Counter()), self.promise.delta)

    def _read(self) -> dict[str, Counter[float]]:
        path = self._folder / FILE
        if not path.exists():
            if (self._folder / KEY).exists():  # it is made after the first count
                raise CheckpointError(
                    f"{path} is missing, but {KEY} is there, so replies were sent that would not be counted: put back "
                    f"a copy; to begin a new count, whatever was told before, remove {KEY} too"
                )
            return {}
        try:
            found = read_json(path)
            replies = found["replies"]
            check_format(f"the node's record {path} of its replies", found, _FORMAT, CheckpointError)
            return {
                run: Counter({float(noise): int(count) for noise, count in each.items()})
                for run, each in replies.items()
            }
        except (RunFolderError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"the node's record {path} of its replies is damaged: put back a copy") from error

    def _write(self, counts: Mapping[str, Counter[float]]) -> None:
        plain = {run: {repr(noise): count for noise, count in each.items()} for run, each in counts.items()}
        write_json(self._folder / FILE, {**stamp(_FORMAT), "replies": plain}, sealed=True)

    def _secret(self) -> bytes:
        path = self._folder / KEY
        if not path.exists():
            made = secrets.token_bytes(_BYTES)
            with replacing(path) as draft:
                draft.touch(0o600)
                draft.chmod(0o600)
                draft.write_bytes(made + _check(made))
            return made
        found = path.read_bytes()
        secret, check = found[:_BYTES], found[_BYTES:]
        # One of an earlier Coterie is without a check.
        if len(secret) != _BYTES or check not in (b"", _check(secret)):
            raise CheckpointError(f"the node's secret {path} is damaged: put back a copy")
        return secret


def _check(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=8, person=b"coterie key").digest()
