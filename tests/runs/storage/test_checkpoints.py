from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from coterie.errors import CheckpointError
from coterie.runs.storage import Checkpoints, as_restored
from coterie.version import __version__

RUN = "0123456789abcdef"


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def states() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    wide = torch.arange(24, dtype=torch.float32).view(4, 6)
    server = {
        "zeta": torch.tensor(3.5, dtype=torch.float64),
        "count": torch.tensor([2**62, -1], dtype=torch.int64),
        "alive": torch.tensor([True, False, True]),
        "odd": torch.tensor([math.nan, math.inf, -0.0]),
        "none": torch.empty(0, 5),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    }
    clients = {
        "rows": wide,
        "same rows": wide,
        "columns": wide[:, 2:4],
        "turned": wide.T,
        "one for all": torch.tensor([1.0, 2.0]).expand(4, 2),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
    }
    return server, clients


def test_gives_back_every_bit_in_order(tmp_path: Path) -> None:
    server, clients = states()
    before = {name: bits(value) for name, value in (*server.items(), *clients.items())}
    checkpoints = Checkpoints(tmp_path, RUN)
    extra = {"best": 0.1 + 0.2, "worst": math.nan, "far": -math.inf, "notes": [1, {"a": None}]}
    checkpoints.save(7, server, clients, extra)
    found = checkpoints.latest()
    assert found is not None
    assert found.round == 7
    assert list(found.server) == list(server) and list(found.clients) == list(clients)
    for wanted, got in ((server, found.server), (clients, found.clients)):
        for name, value in wanted.items():
            assert got[name].dtype == value.dtype and got[name].shape == value.shape
            assert bits(got[name]) == bits(value) == before[name]
    assert found.extra.pop("worst") != 0 and found.extra == {
        "best": 0.1 + 0.2,
        "far": -math.inf,
        "notes": [1, {"a": None}],
    }


def test_restored_tensors_own_aligned_memory(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
    path = checkpoints.save(1, {"flag": torch.tensor([True])}, {"rows": torch.ones(3, 5), "more": torch.ones(7)})
    found = checkpoints.latest()
    assert found is not None
    shutil.rmtree(path)  # the file's memory is not referred to any more
    for value in (*found.server.values(), *found.clients.values()):
        assert value.data_ptr() % 64 == 0 and value.is_contiguous()
        assert value.untyped_storage().nbytes() == value.nbytes
        value.add_(1) if value.dtype != torch.bool else value.logical_not_()


def test_nothing_yet_is_not_an_error(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "checkpoint", RUN).latest() is None
    assert not (tmp_path / "checkpoint").exists()


def test_empty_states(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
    checkpoints.save(0, {}, {})
    found = checkpoints.latest()
    assert found is not None
    assert (found.round, found.server, found.clients, found.extra) == (0, {}, {}, {})


def test_keeps_the_last_two(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
    for number in (5, 10, 15, 20):
        checkpoints.save(number, {"at": torch.tensor(number)}, {})
    assert checkpoints.rounds() == [15, 20]
    assert len(os.listdir(tmp_path)) == 2


def change(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    **{
        f"{verb} {name}": (lambda folder, name=name, how=how: change(folder / name, how))
        for name in ("state.safetensors", "checkpoint.json")
        for verb, how in {
            "empty": lambda data: b"",
            "truncated": lambda data: data[: len(data) // 2],
            "zeroed": lambda data: bytes(len(data)),
        }.items()
    },
    "flipped bit": lambda folder: change(folder / "state.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "changed scalar": lambda folder: edit(folder / "checkpoint.json", extra={"best": 0.9}),
    "missing tensors": lambda folder: (folder / "state.safetensors").unlink(),
    "missing record": lambda folder: (folder / "checkpoint.json").unlink(),
    "a list for a record": lambda folder: (folder / "checkpoint.json").write_text("[]"),
    "a record without a checksum": lambda folder: (folder / "checkpoint.json").write_text("{}"),
    "nothing left": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_falls_back_when_the_newest_is_damaged(tmp_path: Path, kind: str) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
    checkpoints.save(1, {"at": torch.tensor(1)}, {"rows": torch.ones(2)})
    newest = checkpoints.save(2, {"at": torch.tensor(2)}, {"rows": torch.ones(2)})
    DAMAGE[kind](newest)
    found = checkpoints.latest()
    assert found is not None and found.round == 1
    # The round is redone: its checkpoint is written again, and neither whole one is lost to the damaged one.
    checkpoints.save(2, {"at": torch.tensor(2)}, {"rows": torch.ones(2)})
    again = checkpoints.latest()
    assert again is not None and again.round == 2
    assert not newest.exists()
    assert checkpoints.rounds() == [1, 2]


def test_all_damaged(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
    for number in (1, 2):
        (checkpoints.save(number, {"at": torch.tensor(1)}, {}) / "state.safetensors").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole \(.*state\.safetensors has 2 bytes"):
        checkpoints.latest()


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path, "another").save(1, {}, {})
    with pytest.raises(CheckpointError, match=f"belongs to another run .*another.*{RUN}"):
        Checkpoints(tmp_path, RUN).latest()


class Crash(BaseException):
    """Ends a call as nothing else would catch it."""


@pytest.mark.parametrize("function", ["open", "fsync", "replace", "mkdir", "unlink", "rmdir"])
def test_a_whole_checkpoint_at_every_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Let the k-th call of a function of the operating system fail, for every k, before and after it did its work."""
    real = getattr(os, function)
    calls = 0
    for after in (False, True):
        for k in range(1, 100):
            folder = tmp_path / f"{after}-{k}"
            checkpoints = Checkpoints(folder, RUN)
            for number in (1, 2):
                checkpoints.save(number, {"at": torch.tensor(number)}, {})
            calls = 0

            def failing(*arguments: Any, k: int = k, after: bool = after, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == k and not after:
                    raise Crash
                result = real(*arguments, **options)
                if calls == k:
                    raise Crash
                return result

            with monkeypatch.context() as patch:
                patch.setattr(os, function, failing)
                try:
                    checkpoints.save(3, {"at": torch.tensor(3)}, {})
                    crashed = False
                except Crash:
                    crashed = True
            found = checkpoints.latest()
            assert found is not None
            assert int(found.server["at"]) == found.round and found.round in (2, 3)
            checkpoints.save(4, {"at": torch.tensor(4)}, {})
            assert checkpoints.rounds()[-1] == 4 and len(checkpoints.rounds()) == 2
            if not crashed:
                assert k > 1  # the function was called at all, so this test could fail
                break


def test_a_reader_survives_a_writer_that_moves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
    checkpoints.save(1, {"at": torch.tensor(1)}, {})
    listed = Checkpoints._all
    moved_on = False

    def then_moves_on(self: Checkpoints) -> list[Path]:
        nonlocal moved_on
        found = listed(self)
        if not moved_on:
            moved_on = True
            for number in (2, 3):
                Checkpoints(tmp_path, RUN).save(number, {"at": torch.tensor(number)}, {})
        return found

    monkeypatch.setattr(Checkpoints, "_all", then_moves_on)
    found = Checkpoints(tmp_path, RUN).latest()
    assert found is not None and found.round == 3


def test_the_record_says_what_the_checkpoint_is(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, RUN).save(3, {"at": torch.tensor(1)}, {"at": torch.zeros(2)}, {"best": 0.5})
    record = json.loads((path / "checkpoint.json").read_text())
    data = (path / "state.safetensors").read_bytes()
    checksum = record.pop("checksum")
    assert record == {
        "format": 1,
        "coterie": __version__,
        "run": RUN,
        "round": 3,
        "order": {"server": ["at"], "clients": ["at"]},
        "extra": {"best": 0.5},
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert checksum == hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    assert set(load_file(path / "state.safetensors")) == {"server/at", "clients/at"}


def test_settled_copies_only_what_must_be() -> None:
    whole, base = torch.ones(3, 4), torch.arange(12.0).view(3, 4)
    state = {"whole": whole, "part": base[1:2], "turned": base.T, "again": whole}
    out = as_restored(state)
    assert list(out) == list(state)
    assert out["whole"].data_ptr() == whole.data_ptr()
    assert len({value.untyped_storage().data_ptr() for value in out.values()}) == 4
    for name, value in out.items():
        assert value.is_contiguous() and value.storage_offset() == 0
        assert value.untyped_storage().nbytes() == value.nbytes
        assert torch.equal(value, state[name])


@given(shape=st.lists(st.integers(0, 4), max_size=3), order=st.randoms())
def test_settled_keeps_values_whatever_the_strides(shape: list[int], order: Any) -> None:
    size = math.prod(shape)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    value = torch.arange(size, dtype=torch.float64).view(shape).permute(axes)
    out = as_restored({"a": value, "b": value})
    assert torch.equal(out["a"], value) and torch.equal(out["b"], value)
    assert out["a"].is_contiguous() and out["b"].is_contiguous()
