"""Checkpoints of matrices that are kept for all clients: block by block, and of the rows that ever changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from coterie.errors import CheckpointError
from coterie.rows import ClientMatrix, repeat_row
from coterie.rows.backends import RowIndex
from coterie.rows.placement import Placement
from coterie.runs.storage import Checkpoints, as_restored, checkpoints, tensor_file

RUN = "0123456789abcdef"
MEGABYTE = 2**20


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.rows.placement._SMALL_ROW", 0)
    monkeypatch.setattr("coterie.rows.placement.Placement._device_is_host", lambda self: False)
    monkeypatch.setattr(tensor_file, "BLOCK", 16)
    monkeypatch.setattr(checkpoints, "BLOCK", 16)


def states(keep: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    start = {"some": repeat_row(torch.tensor([0.5, -1.0]), 6), "none": repeat_row(torch.arange(3), 6)}
    rows = {"all": repeat_row(torch.ones(2, dtype=torch.float64), 6)}
    server, clients = Placement(keep, torch.device("cpu"), folder).place(dict(start), dict(rows), 6)  # type: ignore[arg-type]
    return {**server, "plain": torch.tensor([3.0])}, clients


def written(keep: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    server, clients = states(keep, folder)
    for name, state, index in (("some", server, [1, 4]), ("all", clients, list(range(6)))):
        rows = state[name]
        assert isinstance(rows, ClientMatrix)
        values = torch.arange(2 * len(index)).view(-1, 2).to(rows.dtype)
        state[name] = rows.patched(RowIndex(torch.tensor(index)), values)
        state[name].commit()  # type: ignore[attr-defined]
    return server, clients


@pytest.mark.parametrize("keep", ["device", "host", "disk"])
@pytest.mark.parametrize("into", ["device", "host", "disk", None])
def test_comes_back_in_every_place(keep: str, into: str | None, tmp_path: Path) -> None:
    server, clients = written(keep, tmp_path)
    assert all(as_restored(server)[name] is value for name, value in server.items() if isinstance(value, ClientMatrix))
    store = Checkpoints(tmp_path / "checkpoint", RUN)
    path = store.save(5, server, clients, {"a": 1})
    places = None
    if into is not None:
        other = written(into, tmp_path)  # what it holds is lost
        other[0]["some"] = other[0]["some"].patched(RowIndex(torch.tensor([0])), torch.ones(1, 2))  # type: ignore[attr-defined]
        other[0]["some"].commit()  # type: ignore[attr-defined]
        places = {"server": other[0], "clients": other[1]}
    found = store.latest("cpu", places)
    assert found is not None and found.extra == {"a": 1}
    for wanted, got, place in ((server, found.server, 0), (clients, found.clients, 1)):
        assert list(got) == list(wanted)
        for name, value in wanted.items():
            assert torch.equal(got[name], value) and got[name].dtype == value.dtype, name
            if places is not None and isinstance(value, ClientMatrix):
                assert got[name] is other[place][name]
                assert got[name].backend.changed().tolist() == value.backend.changed().tolist()  # type: ignore[attr-defined]
            else:
                assert not isinstance(got[name], ClientMatrix)
    # Two rows of six, none of six, and all of them: what never changed is in there once.
    sizes = {name: tuple(value.shape) for name, value in load_file(path / "state.safetensors").items()}
    assert sizes == {
        "server/some": (2, 2),
        "server/some (index)": (2,),
        "server/some (opening)": (2,),
        "server/none": (0, 3),
        "server/none (index)": (0,),
        "server/none (opening)": (3,),
        "server/plain": (1,),
        "clients/all": (6, 2),
    }
    assert json.loads((path / "checkpoint.json").read_text())["repeated"] == {"server/some": 6, "server/none": 6}


def test_a_matrix_of_another_shape_is_left_alone(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoint", RUN)
    store.save(1, *written("device", tmp_path))
    other = {"some": repeat_row(torch.zeros(3), 6)}
    found = store.latest("cpu", {"server": other})
    assert (
        found is not None
        and not isinstance(found.server["some"], ClientMatrix)
        and found.server["some"].shape == (6, 2)
    )
    assert torch.equal(other["some"], torch.zeros(6, 3))


def test_a_damaged_one_is_passed_over_and_its_rows_are_gone(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoint", RUN)
    server, clients = written("disk", tmp_path)
    store.save(1, server, clients)
    server["some"] = server["some"].patched(RowIndex(torch.tensor([3])), torch.ones(1, 2))  # type: ignore[attr-defined]
    server["some"].commit()  # type: ignore[attr-defined]
    newest = store.save(2, server, clients) / "state.safetensors"
    whole = newest.read_bytes()
    wanted = written("disk", tmp_path)[0]["some"]
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(begin, len(whole)):  # every byte that is not the header's: numbers of rows among them
        newest.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        again = states("disk", tmp_path)
        found = store.latest("cpu", {"server": again[0], "clients": again[1]})
        assert found is not None and found.round == 1 and found.server["some"] is again[0]["some"]
        assert torch.equal(found.server["some"], wanted)
    for path in (tmp_path / "checkpoint").iterdir():
        (path / "state.safetensors").write_bytes(whole[:-1] + b"?")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.latest("cpu", {"server": server, "clients": clients})


def test_large_states_are_written_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now)
    store = Checkpoints(tmp_path, RUN)
    assert store.affordable
    store.save(1, {"w": torch.zeros(4)}, {})
    assert store.affordable  # a small one always is
    monkeypatch.setattr(checkpoints, "_LARGE", 1)

    def slow(*args: object) -> None:
        nonlocal now
        now += 2.0

    monkeypatch.setattr(checkpoints.Checkpoints, "_prune", slow)
    store.save(2, {"w": torch.zeros(4)}, {})
    assert now == 102 and not store.affordable
    now = 119.9
    assert not store.affordable
    now = 120.1  # 2 seconds of 20: a tenth
    assert store.affordable


def test_by_default_checkpoints_take_a_fiftieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now)
    store = Checkpoints(tmp_path, RUN)
    assert not store.due  # there is nothing yet that is worth one
    now = 101.0
    assert store.due
    store.save(1, {"w": torch.zeros(4)}, {})
    now = 101.9
    assert not store.due
    now = 102.0  # a second after one that took no time
    assert store.due

    def slow(*args: object) -> None:
        nonlocal now
        now += 0.5

    monkeypatch.setattr(checkpoints.Checkpoints, "_prune", slow)
    store.save(2, {"w": torch.zeros(4)}, {})
    now = 126.9
    assert not store.due
    now = 127.1  # half a second of 25: a fiftieth
    assert store.due


def test_the_first_checkpoint_of_a_large_state_is_guessed_to_take_a_while(tmp_path: Path) -> None:
    now = 100.0
    store = Checkpoints(tmp_path, RUN)
    store.timed_by(lambda: now, 200_000_000)  # a fifth of a second, and so after 9.8
    now = 109.7
    assert not store.due
    assert store.affordable  # whoever asks for them after so many rounds gets them
    now = 109.9
    assert store.due
    store.save(1, {"w": torch.zeros(4)}, {})
    now = 111.0  # it took no time
    assert store.due


# As in tests/test_memory.py: the peak of a process of its own, here before and after a state of 128 MB is written and
# read, with rows on disk.
PROGRAM = """
import os
import sys
from pathlib import Path
import torch
from coterie.rows.placement import Placement
from coterie.rows import repeat_row
from coterie.rows.backends import RowIndex
from coterie.runs.storage import Checkpoints

def peak():
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("VmHWM")))

os.fsync = lambda handle: None
folder = Path(sys.argv[1])
server, _ = Placement("disk", torch.device("cpu"), folder).place({"w": repeat_row(torch.zeros(2**16), 512)}, {}, 512)
for begin in range(0, 512, 16):
    values = torch.full((16, 2**16), float(begin))
    server["w"] = server["w"].patched(RowIndex(torch.arange(begin, begin + 16)), values)
    server["w"].commit()
    server["w"].backend.changed()  # waits until they are written
before = peak()
store = Checkpoints(folder / "checkpoint", "run")
store.save(1, server, {})
found = store.latest("cpu", {"server": server})
assert found.server["w"] is server["w"] and server["w"][torch.tensor([0, 511])][:, 5].tolist() == [0, 496]
print(before, peak())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read where Linux keeps it")
def test_a_state_on_disk_is_written_and_read_in_little_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    before, after = (int(word) * 1024 for word in done.stdout.split())
    written = (tmp_path / "checkpoint").glob("*/state.safetensors")
    assert sum(path.stat().st_size for path in written) > 128 * MEGABYTE
    assert after - before < 48 * MEGABYTE  # a few blocks of 4 MB on their way
