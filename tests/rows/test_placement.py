"""Wherever rows are kept, every method gives the same bits, and a round costs what its cohort does."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coterie import randomness
from coterie.algorithms.base import Replies
from coterie.errors import ConfigError, RunFolderError
from coterie.rows import ClientMatrix, _transfers, placement, repeat_row
from coterie.rows._transfers import Transfers
from coterie.rows.backends import Backend, DeviceBackend, DiskBackend, HostBackend, OffDeviceBackend, RowIndex
from coterie.rows.placement import Place, Placement, Sharding
from coterie.runs import launch
from coterie.simulation.exchange import Request
from coterie.simulation.simulation import Simulation
from tests.conformance_table import TABLE
from tests.small_runs import Killed, assert_same_end, config_of, finish, last_state, same, stop
from tests.support import DEVICE, classification, everyone, simulate, small_model
from tests.test_conformance import CLIENTS, cohort_of, lose_some

PLACES = ["device", "host", "disk"]


@pytest.fixture(autouse=True)
def small_rows_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the rows of small models away as well, and those in the host's memory apart from a CPU's own."""
    monkeypatch.setattr(placement, "_SMALL_ROW", 0)
    monkeypatch.setattr(Placement, "_device_is_host", lambda self: False)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    yield


def make(name: str, settings: dict[str, Any], keep: str, scratch: Path, lossy: bool = True) -> Simulation:
    plain = simulate(name, classification(CLIENTS), small_model(), task="multiclass", settings=settings)
    lost = lose_some if lossy else None
    return Simulation(plain.algorithm, plain.engine, lost=lost, keep=keep, scratch=scratch)  # type: ignore[arg-type]


def state(simulation: Simulation) -> dict[str, Tensor]:
    both = {"server": simulation.server, "clients": simulation.clients.rows}
    return {f"{owner} {name}": value.clone() for owner, rows in both.items() for name, value in rows.items()}


def interrupted(simulation: Simulation, number: int) -> None:
    """Begin a round, and let it be stopped when its first replies are there."""
    deliver = simulation.exchange.deliver

    def stops(request: Request) -> Replies:
        deliver(request)
        raise KeyboardInterrupt

    simulation.exchange.deliver = stops  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        simulation.play_round(cohort_of(number), number)
    simulation.exchange.deliver = deliver  # type: ignore[method-assign]


def played(simulation: Simulation) -> list[dict[str, Tensor]]:
    """All states of a few rounds, of which one is begun twice, with the personal models after each."""
    out = []
    for number in (1, 2, 3, 4):
        if number == 3:
            before = state(simulation)
            interrupted(simulation, number)
            assert same(before, state(simulation))
        simulation.expect(cohort_of(number + 1))
        simulation.play_round(cohort_of(number), number)
        out.append(state(simulation))
        out.append(dict(simulation.personal(everyone(simulation), number)))
        out.append(dict(simulation.algorithm.global_model(simulation.server) or {}))
    return out


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_method_gives_the_same_bits_wherever_rows_are_kept(name: str, tmp_path: Path) -> None:
    settings = TABLE[name].settings
    plain = make(name, settings, "device", tmp_path)
    # Plain tensors, of which `put_rows` makes whole new ones: nothing is patched.
    plain.server = {name: value.clone() for name, value in plain.server.items()}
    plain.clients.rows = {name: value.clone() for name, value in plain.clients.rows.items()}
    assert not any(isinstance(value, ClientMatrix) for value in (*plain.server.values(), *plain.clients.rows.values()))
    wanted = played(plain)
    for keep in PLACES:
        simulation = make(name, settings, keep, tmp_path)
        found = played(simulation)
        assert len(found) == len(wanted)
        for one, two in zip(wanted, found, strict=True):
            assert same(one, two), keep
    assert not list(tmp_path.iterdir())  # a file of rows has no name


@pytest.mark.parametrize("keep", PLACES)
def test_rows_lie_where_they_were_asked_to(keep: str, tmp_path: Path) -> None:
    simulation = make("flame", TABLE["flame"].settings, keep, tmp_path)
    kinds = {"device": DeviceBackend, "host": HostBackend, "disk": DiskBackend}
    for value in (simulation.server["u"], *simulation.clients.rows.values()):
        assert isinstance(value, ClientMatrix) and type(value.backend) is kinds[keep]
    assert len({id(value.backend) for value in simulation.clients.rows.values()}) == len(simulation.clients.rows)
    assert simulation.placement.keep == keep


def test_short_rows_stay_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_SMALL_ROW", 16)
    simulation = make("flame", TABLE["flame"].settings, "disk", tmp_path)
    kinds = {
        name: type(value.backend) for name, value in simulation.clients.rows.items() if isinstance(value, ClientMatrix)
    }
    assert kinds == {
        "theta": DiskBackend,
        "w": DiskBackend,
        "pi": DiskBackend,
        "alpha": DeviceBackend,
        "rho": DeviceBackend,
    }


def test_the_first_place_with_room_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_memory", lambda: 1000)
    chooser = Placement("auto", torch.device("cpu"))
    assert chooser.choose(600) == "host" and chooser.choose(601) == "disk"
    monkeypatch.setattr(Placement, "_device_is_host", lambda self: True)
    assert chooser.choose(600) == "device" and chooser.choose(601) == "disk"


def test_a_scratch_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scratch is .*nowhere.*, but must be a folder that is there"):
        make("local", TABLE["local"].settings, "disk", tmp_path / "nowhere")
    assert placement.scratch_folder(None, tmp_path / "a" / "b") == tmp_path
    assert placement.scratch_folder("there", tmp_path) == Path("there")
    assert placement.scratch_folder(None, None) == Path(tempfile.gettempdir())


class EveryOther(Sharding):
    """A process that has the rows of the even clients, on a machine that four such processes share."""

    processes_on_machine = 4

    def row_count(self, rows: int) -> int:
        return (rows + 1) // 2

    def row_index(self, clients: Tensor) -> RowIndex:
        return RowIndex(clients[clients % 2 == 0] // 2)

    def agree(self, place: Place) -> Place:
        return "disk" if place == "host" else place

    def backend(self, old: Backend, make: Callable[[int], Backend], of_server: bool) -> Backend:
        return make(self.row_count(old.shape[0]) if of_server else old.shape[0])


def test_a_placement_keeps_the_rows_that_its_sharding_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 48 bytes are 60 % of a quarter of 320; where there is room for them, this sharding still says otherwise.
    for free, first in ((320, "host"), (319, "disk")):
        monkeypatch.setattr(placement, "free_memory", lambda free=free: free)
        sharded = Placement("auto", torch.device("cpu"), tmp_path, EveryOther())
        assert sharded._first_with_room(48) == first and sharded.choose(48) == "disk"
    places = Placement("disk", torch.device("cpu"), tmp_path, EveryOther())
    monkeypatch.setattr(placement, "free_memory", lambda: 2**30)
    server, clients = places.place({"u": repeat_row(torch.zeros(2), 5)}, {"w": repeat_row(torch.zeros(2), 5)}, 5)
    halved, whole = (rows.backend for rows in (server["u"], clients["w"]))  # type: ignore[attr-defined]
    assert isinstance(halved, DiskBackend) and halved.shape == (3, 2) and whole.shape == (5, 2)
    places.begin()
    halved.gather(RowIndex(torch.tensor([0])))
    places.expect(torch.tensor([1, 2, 4]))
    places.prefetch()
    assert [each.index.on_host.tolist() for each in halved._prefetched] == [[1, 2]] and not whole._prefetched


# A round's cost


class Everybody(TorchDispatchMode):
    """Collects the operations that read or make a matrix with a row for every client."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self.clients, self.seen = clients, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in (*args, *(kwargs or {}).values(), out):
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == self.clients and value.shape[1] > 3:
                self.seen.add(str(func.overloadpacket))
        return out


@pytest.mark.parametrize("name", ["fedacs", "flame", "fedfomo", "fedpg", "scaffold", "pfedme", "fedadmm", "lp_proj"])
def test_a_round_touches_the_rows_of_its_cohort_alone(name: str) -> None:
    count = 97
    samples = classification(count, sizes=[6] * count)
    simulation = simulate(name, samples, small_model(), task="multiclass", settings=TABLE[name].settings)
    with Everybody(count) as watch:
        for number, begin in enumerate((3, 3, 5), 1):
            simulation.play_round(torch.arange(begin, count, 30, device=DEVICE), number)
    # Rows are taken, and written in place. (A model of 53 parameters has no other matrix of 97 rows.)
    assert {"aten.index_select", "aten.index_copy_"} <= watch.seen
    assert watch.seen <= {"aten.index_select", "aten.index_copy_"}
    with Everybody(count) as watch:
        simulation.server["u" if "u" in simulation.server else "w"].sum()
        simulation.clients.rows[next(iter(simulation.clients.rows))].sum()
    assert watch.seen  # so this test could fail


def test_the_next_cohort_is_fetched_while_this_one_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = make("flame", TABLE["flame"].settings, "disk", tmp_path, lossy=False)
    cohorts = [torch.tensor(cohort, device=DEVICE) for cohort in ([0, 1, 2], [1, 2, 4], [0, 3, 4])]
    events: list[str] = []
    run, fetch = simulation.engine.run, OffDeviceBackend._fetch

    def trains(*args: Any) -> Any:
        events.append("train")
        return run(*args)

    def fetches(self: OffDeviceBackend, index: RowIndex) -> Any:
        events.append(str(index.on_host.tolist()))
        return fetch(self, index)

    simulation.engine.run = trains  # type: ignore[method-assign]
    monkeypatch.setattr(OffDeviceBackend, "_fetch", fetches)
    for number, cohort in enumerate(cohorts, 1):
        simulation.expect(cohorts[number] if number < len(cohorts) else None)
        simulation.play_round(cohort, number)
    # Five client matrices and, from the second round on, the server's: u was not asked for before the first training.
    assert events == [
        *["[0, 1, 2]"] * 5,
        *["[1, 2, 4]"] * 5,
        "train",
        "[0, 1, 2]",
        *["[0, 3, 4]"] * 6,
        "train",
        "[1, 2, 4]",
        "train",
    ]


def test_rows_that_were_prefetched_show_what_was_written_since(tmp_path: Path) -> None:
    for kind in ("host", "disk"):
        rows = repeat_row(torch.zeros(3), 6)
        placement = Placement(kind, torch.device("cpu"), tmp_path)  # type: ignore[arg-type]
        placement.place({"w": rows}, {}, 6)
        backend = rows.backend
        assert isinstance(backend, OffDeviceBackend)
        backend.prefetch(RowIndex(torch.tensor([1, 2, 5])))
        rows = rows.patched(RowIndex(torch.tensor([0, 2])), torch.ones(2, 3))
        rows.commit()
        rows = rows.patched(RowIndex(torch.tensor([2, 5])), torch.full((2, 3), 2.0))
        rows.commit()
        assert rows.gather_rows(RowIndex(torch.tensor([2, 5])))[:, 0].tolist() == [2, 2]  # some of them, which stay
        assert rows.gather_rows(RowIndex(torch.tensor([1, 2, 5])))[:, 0].tolist() == [0, 2, 2]
        assert rows.gather_rows(RowIndex(torch.tensor([0, 1, 2, 5])))[:, 0].tolist() == [1, 0, 2, 2]
        assert rows.dense()[:, 0].tolist() == [1, 0, 2, 0, 0, 2]


# Whole runs

METHODS = ["fedacs", "flame", "fedamp", "fedpg", "fedfomo", "scaffold", "pfedme", "fedrep"]


@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_rows_on_disk_ends_as_one_on_the_device(name: str, tmp_path: Path) -> None:
    for keep in ("device", "disk"):
        finish(launch.begin(config_of(name, keep=keep), tmp_path / keep))
    cut = tmp_path / "cut"
    stop(launch.begin(config_of(name, keep="disk"), cut), "in a round", 2)
    stop(launch.resume(cut), "in evaluation", 4, Killed)
    again = launch.resume(cut)
    rows = again.simulation.clients.rows
    assert all(isinstance(value, ClientMatrix) and isinstance(value.backend, DiskBackend) for value in rows.values())
    stop(again, "before a checkpoint", 5)
    finish(launch.resume(cut))
    assert_same_end(tmp_path / "device", tmp_path / "disk")
    assert_same_end(tmp_path / "disk", cut)
    names = {path.name for path in (tmp_path / "device").iterdir()}
    assert {path.name for path in cut.iterdir()} == names  # nothing of the rows is left


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has room of its own")
def test_the_choice_is_kept_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_memory", lambda: 0)
    stop(launch.begin(config_of("fedacs"), tmp_path / "run"), "in a round", 3)
    monkeypatch.setattr(placement, "free_memory", lambda: 2**40)
    again = launch.resume(tmp_path / "run")
    assert again.folder.choices["keep"] == "disk" == again.simulation.placement.keep
    again.folder.close()


def test_newcomers_and_rounds_that_are_dropped(tmp_path: Path) -> None:
    for keep in ("device", "disk"):
        config = config_of("flame", keep=keep, hold_out=0.2, adapt_rounds=2)
        finish(launch.begin(config, tmp_path / keep))
    assert_same_end(tmp_path / "device", tmp_path / "disk")


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing = launch.begin(config_of("fedacs", keep="disk"), tmp_path / "run")
    write, calls = DiskBackend.write_storage, 0

    def fails(self: DiskBackend, index: Tensor, values: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:  # two matrices a round: in the fourth
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, index, values)

    monkeypatch.setattr(DiskBackend, "write_storage", fails)
    with playing.folder, pytest.raises(RunFolderError, match=r"No space left on device.*--scratch, or --keep host"):
        playing.run()
    monkeypatch.undo()
    assert last_state(tmp_path / "run").round == 2


def test_a_file_is_only_as_large_as_what_was_written(tmp_path: Path) -> None:
    rows = repeat_row(torch.full((2**16,), 0.5), 1000)
    placement = Placement("disk", torch.device("cpu"), tmp_path)
    placement.place({"w": rows}, {}, 1000)
    backend = rows.backend
    assert isinstance(backend, DiskBackend)
    index = torch.tensor([7, 8, 900])
    rows = rows.patched(RowIndex(index), torch.arange(3.0).unsqueeze(1).expand(3, 2**16))
    rows.commit()
    assert rows.backend.changed().tolist() == [7, 8, 900]
    assert rows[torch.tensor([900, 0, 8, 7])][:, -1].tolist() == [2.0, 0.5, 1.0, 0.0]
    found = os.fstat(backend._file)
    assert found.st_size == 1000 * 2**18
    assert found.st_blocks * 512 < 8 * 2**18


# To and from a GPU, without one


class Staged:
    """Stands for a stream and its events: whoever waits for an event runs what was copied before it was recorded."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, stream: object = None) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        pass

    def wait(self, stream: object) -> None:
        assert self.recorded

    def wait_event(self, event: Staged) -> None:
        assert event.recorded


def test_rows_go_through_two_buffers_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", Staged)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Staged())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    transfers = Transfers(torch.device("cpu"))
    transfers.stream, transfers._copied = Staged(), [Staged(), Staged()]  # type: ignore[assignment, list-item]
    transfers._buffers = [torch.empty(3 * 5 * 4 + 7, dtype=torch.uint8) for _ in range(2)]  # three rows and some bytes
    for kind in (HostBackend, DiskBackend):
        backend = kind(20, torch.full((5,), 0.5), transfers, *([tmp_path] if kind is DiskBackend else []))
        plain = torch.full((20, 5), 0.5)
        for seed, index in enumerate(([0, 3, 4, 5, 6, 9, 19], [5], list(range(20)), [])):
            chosen = torch.tensor(index, dtype=torch.int64)
            values = torch.from_numpy(randomness.stream(seed, "staged").normal(size=(len(index), 5))).float()
            some = torch.tensor([19, 2, 3, 4, 17, 5, 5, 0])
            backend.prefetch(RowIndex(some.unique()))
            backend.write(RowIndex(chosen), values)
            plain[chosen] = values
            assert torch.equal(backend.gather(RowIndex(some.unique())), plain[some.unique()])
            backend.drop_prefetched()
            assert torch.equal(backend.gather(RowIndex(some)), plain[some])
            assert torch.equal(torch.cat(list(backend.blocks(7))), plain)
            assert torch.equal(backend.gather_to_host(some), plain[some])
        assert all(event.recorded > 3 for event in transfers._copied)  # type: ignore[attr-defined]


class Lent:
    """A stream as PyTorch lends them: 32 of each priority, in turn."""

    lent: ClassVar[Counter[int]] = Counter()

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream = 100 * priority + Lent.lent[priority] % 32
        Lent.lent[priority] += 1


def test_rows_never_move_on_a_stream_that_steps_may_be_recorded_on(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch.cuda, "Stream", Lent)
        monkeypatch.setattr(torch.cuda, "Event", Staged)
        monkeypatch.setattr(_transfers, "gpu_memory", lambda device: (2**30, 2**30))
    transfers = Transfers(torch.device("cuda"))
    assert transfers.stream is not None
    assert transfers.stream.cuda_stream not in {torch.cuda.Stream().cuda_stream for _ in range(64)}


def test_what_waits_to_be_written_is_bounded(tmp_path: Path) -> None:
    transfers = Transfers(torch.device("cpu"))
    transfers._max_pending_bytes = 100
    backend = HostBackend(8, torch.zeros(20), transfers)
    go_on = threading.Event()
    transfers.submit(go_on.wait)
    backend.write(RowIndex(torch.tensor([0])), torch.ones(1, 20))  # 80 bytes: they may wait
    assert not transfers._pending_writes[0][0].done()
    threading.Timer(0.2, go_on.set).start()
    backend.write(RowIndex(torch.tensor([1])), torch.ones(1, 20))
    assert go_on.is_set() and sum(size for _, size in transfers._pending_writes) <= 80
    assert backend.changed().tolist() == [0, 1]
