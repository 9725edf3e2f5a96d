"""What one rank of a small group plays in the tests of sharded runs: ``python sharded_play.py RANK RANKS FOLDER``.

All scenes are played one after the other by the same processes. What each rank saw is left in ``FOLDER/SCENE.RANK``;
what the same scene gives in one process is for the tests to find.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coterie import randomness
from coterie.compute.engine import Call
from coterie.errors import CoterieError, Diverged
from coterie.rows import (
    ClientMatrix,
    algebra,
    cosines,
    distances_from,
    gram,
    mix,
    norms,
    placement,
    put_rows,
    repeat_row,
    squared_distances,
    take_rows,
    total,
)
from coterie.rows._collectives import divided
from coterie.rows.backends import DeviceBackend, RowIndex
from coterie.rows.distributed import Ranks
from coterie.rows.distributed.backends import OwnRowsBackend, ShardedBackend
from coterie.rows.placement import Placement
from coterie.runs import launch
from coterie.runs.storage import tensor_file
from coterie.simulation.sharded import ShardedProcesses
from coterie.simulation.simulation import Simulation
from tests.conformance_table import TABLE
from tests.small_runs import config_of, finish
from tests.support import classification, simulate, small_model

METHODS = sorted(TABLE)
FEW = ["fedacs", "fedamp", "fedfomo", "fedpg", "flame", "scaffold", "sfedpg"]
PLAYED = {1: [0, 2, 4], 2: [1, 3], 3: [0, 1, 2, 3, 4], 4: [3], 5: [1, 2]}  # the first two of one rank alone, of two
CLIENTS, COLUMNS = 11, 37

RUNS: dict[str, dict[str, Any]] = {
    "everything": {
        "hold_out": 0.2,
        "attack": "sign_flip:0.3",
        "matrix": True,
        "eval_train": True,
        "validation": 0.3,
        "clients": 10,
        "data": "synthetic:clients=10,samples=14,features=6,classes=3",
    },
    "private": {"privacy": "clip=1.0,noise=0.5", "participation": 0.4},
    "few samples": {"partition": "dirichlet:0.05", "data": "digits", "scarcity": 3, "max_test": 3, "eval_every": 2},
}
"""Options of runs beside the method; all in float64."""


def options(engine: str, **more: Any) -> dict[str, Any]:
    return {"dtype": "float64", "engine": engine, "rounds": 2, **more}


# ---------------------------------------------------------------------------------------- what is played in one process


def lost(clients: Tensor, call: Call) -> Tensor:
    """Lose the first reply of every second exchange."""
    gone = torch.zeros(len(clients), dtype=torch.bool)
    gone[:1] = len(clients) > 1 and (call.round + call.exchange) % 2 == 0
    return gone


def simulation_of(name: str, ranks: Ranks | None, **more: Any) -> Simulation:
    plain = simulate(name, classification(5), small_model(), task="multiclass", settings=TABLE[name].settings)
    if ranks is None:
        return Simulation(plain.algorithm, plain.engine, **more)
    return Simulation(plain.algorithm, plain.engine, processes=ShardedProcesses(ranks), **more)


def seen(simulation: Simulation, number: int) -> dict[str, Tensor]:
    """Everything that a round left, whole on every rank."""
    clients = torch.arange(simulation.engine.samples.clients)
    out = {f"server {name}": value.clone() for name, value in simulation.server.items()}
    mine = simulation.processes.mine(clients)
    found = {f"clients {name}": take_rows(value, mine) for name, value in simulation.clients.rows.items()}
    found |= {f"personal {name}": value for name, value in simulation.personal(clients, number).items()}
    for name, rows in found.items():
        flat = rows.reshape(len(rows), -1).T
        out[name] = simulation.processes.gathered(flat, clients).T.reshape(len(clients), *rows.shape[1:])
    shared = simulation.algorithm.global_model(simulation.server) or {}
    return out | {f"global {name}": value.clone() for name, value in shared.items()}


def played(simulation: Simulation) -> list[dict[str, Tensor]]:
    out = []
    for number, clients in PLAYED.items():
        simulation.expect(torch.tensor(PLAYED.get(number + 1, clients)))
        simulation.play_round(torch.tensor(clients), number)
        out.append(seen(simulation, number))
    return out


def products(spread: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """All that is computed of whole matrices, for matrices that are plain and such as ``spread`` makes."""
    draw = randomness.stream(5, "test products")
    rows, patch = (torch.from_numpy(draw.normal(size=(count, COLUMNS))) for count in (CLIENTS, 3))
    weights = torch.from_numpy(draw.normal(size=(4, CLIENTS)))
    some = torch.tensor([2, 3, 9])
    kept = spread(rows)
    matrices = {"plain": rows, "kept": kept, "patched": put_rows(kept, some, patch)}
    found = {}
    for name, matrix in matrices.items():
        found |= {
            f"{name} gram": gram(matrix),
            f"{name} gram of two": gram(patch, matrix),
            f"{name} gram turned": gram(matrix, patch),
            f"{name} gram with itself": gram(matrix, matrix),
            f"{name} cosines": cosines(matrix),
            f"{name} norms": norms(matrix),
            f"{name} squared distances": squared_distances(matrix),
            f"{name} distances from": distances_from(matrix, some),
            f"{name} mix": mix(weights, matrix),
            f"{name} mean": mix(weights[0], matrix),
            f"{name} total": total(matrix, weights[0]),
            f"{name} taken": take_rows(matrix, torch.tensor([[9, 0], [0, 5]])),
            f"{name} whole": matrix + 0.0,
        }
    return found


# ------------------------------------------------------------------------------------------------------ what ranks play


def scene_methods(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """Whole runs of every method; what is left of the server's state on each rank."""
    out = {}
    for name in METHODS:
        playing = launch.begin(
            config_of(name, **options("sharded")), folder / name, processes=ShardedProcesses(ranks())
        )
        finish(playing)
        out[name] = {key: value.clone() for key, value in playing.simulation.server.items()}
    return out


def scene_rounds(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """Chosen cohorts, with and without replies that are lost."""
    return {
        (name, lossy): played(simulation_of(name, ranks(), lost=lost if lossy else None))
        for name in FEW
        for lossy in (False, True)
    }


def scene_places(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """The same with rows that are kept away from the device, and a run with them that is stopped and goes on."""
    placement._SMALL_ROW = 0
    on_host, Placement._device_is_host = Placement._device_is_host, lambda self: False  # type: ignore[method-assign]
    config = config_of("flame", **options("sharded", rounds=4, keep="disk", scratch=str(folder.parent)))

    def stops(number: int, mean: float | None) -> None:
        if number == 3:
            raise TimeoutError

    try:
        playing = launch.begin(config, folder / "flame", processes=ShardedProcesses(ranks()))
        with playing.folder, contextlib.suppress(TimeoutError):
            playing.run(stops)
        again = launch.resume(folder / "flame")
        assert (
            again.completed == 3
            and again.simulation.placement.keep == "disk"
            and len(again.simulation.placement._off_device) > 3
        )
        finish(again)
        return {
            (name, keep): played(simulation_of(name, ranks(), keep=keep, scratch=folder.parent))
            for name in FEW
            for keep in ("host", "disk")
        }
    finally:
        placement._SMALL_ROW = 2**12
        Placement._device_is_host = on_host  # type: ignore[method-assign]


def scene_options(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """Runs with newcomers, attackers, privacy, accuracy matrices, clients without samples."""
    for name, more in RUNS.items():
        finish(
            launch.begin(
                config_of("fedamp", **options("sharded", **more)), folder / name, processes=ShardedProcesses(ranks())
            )
        )


def scene_products(ranks: Callable[[], Ranks], folder: Path) -> Any:
    group = ranks()
    group.worth = 0
    algebra._MANY_SUMS = algebra._LONG_SUM = 1

    def spread(rows: Tensor) -> ClientMatrix:
        local = DeviceBackend(group.count_owned(CLIENTS), torch.zeros(COLUMNS, dtype=rows.dtype))
        backend = ShardedBackend(CLIENTS, torch.zeros(COLUMNS, dtype=rows.dtype), group, local)
        backend.write(backend.index_range(0, CLIENTS), rows)
        kept = repeat_row(torch.zeros(COLUMNS, dtype=rows.dtype), CLIENTS)
        kept.move_to(backend)
        return kept

    at_once = algebra._DENSE_BYTES
    try:
        with group.sharing():
            assert divided().ranks is group  # type: ignore[union-attr]
            before = group.moved
            found = {"by columns": products(spread)}
            assert group.moved > before
            algebra._DENSE_BYTES, algebra._PAIR_BYTES = 0, 1
            found["by pairs"] = products(spread)
            assert group.together(divided) is None  # what a rank computes apart, it computes alone
    finally:
        algebra._DENSE_BYTES, algebra._PAIR_BYTES, algebra._MANY_SUMS, algebra._LONG_SUM = at_once, 2**28, 64, 256
    return found


def scene_owned_rows(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """Rows of clients lie with their rank, and a rank that asks for others' is told so."""
    group = ranks()
    backend = OwnRowsBackend(5, torch.zeros(2), group, DeviceBackend(group.count_owned(5), torch.zeros(2)))
    backend.write(backend.index_range(0, 5), torch.arange(10.0).view(5, 2))
    mine = torch.arange(5)[group.owns(torch.arange(5))]
    assert torch.equal(backend.gather(RowIndex(mine)), torch.arange(10.0).view(5, 2)[mine])
    try:
        backend.gather(RowIndex(torch.arange(5)))
    except CoterieError as error:
        return len(backend.local.changed()), str(error)


def scene_stop(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """The second rank alone is asked to stop: in a round, and after one; then the run goes on."""
    out = []
    for name, in_round in (("in", True), ("after", False)):
        playing = launch.begin(
            config_of("fedacs", **options("sharded", rounds=5, checkpoint_every=9)),
            folder / name,
            processes=ShardedProcesses(ranks()),
        )
        run = playing.parts.engine.run if in_round else playing.parts.scorer.scores

        def asks(*args: Any, playing: Any = playing, run: Any = run, **more: Any) -> Any:
            if playing.completed == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return run(*args, **more)

        if in_round:
            playing.parts.engine.run = asks  # type: ignore[method-assign]
        else:
            playing.parts.scorer.scores = asks  # type: ignore[method-assign]
        try:
            finish(playing)
        except CoterieError as error:
            out.append((type(error).__name__, playing.completed, playing._checkpointed))
    again = launch.resume(folder / "in")
    out.append(("resumed", again.completed, again._checkpointed))
    finish(again)
    finish(launch.begin(again.config, folder / "never", processes=ShardedProcesses(ranks())))
    return out


def scene_resume(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """Go on with a run that one process began."""
    finish(launch.resume(folder.parent / "begun alone"))


def scene_diverged(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """A client of the second rank diverges: all ranks say so, nothing has changed, and the next round is played."""
    simulation = simulation_of("fedavg", ranks())
    before = seen(simulation, 0)
    run = simulation.engine.run

    def diverges(task: Any, clients: Tensor, *rest: Any) -> Any:
        changes, reply = run(task, clients, *rest)
        reply["w"][clients == 3] = torch.inf
        return changes, reply

    simulation.engine.run = diverges  # type: ignore[method-assign]
    try:
        simulation.play_round(torch.arange(5), 1)
    except Diverged as error:
        said = (error.round_number, error.clients, str(error))
    after = seen(simulation, 0)
    assert all(torch.equal(before[name], after[name]) for name in before)
    simulation.play_round(torch.tensor([0, 1]), 1)
    return said, seen(simulation, 1)


def scene_failures(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """What fails on one rank alone is raised on all, wherever it is, and nobody waits."""
    out: dict[str, Any] = {}

    def tried(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:
            out[name] = (type(error).__name__, str(error))

    def fails(error: Exception, where: int, then: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if dist.get_rank() == where:
            raise error
        return then(*args, **named)

    simulation = simulation_of("fedavg", ranks())
    simulation.engine.run = functools.partial(fails, ValueError("no luck"), 1, simulation.engine.run)  # type: ignore[method-assign]
    tried("engine", lambda: simulation.play_round(torch.arange(5), 1))

    config = config_of("fedacs", **options("sharded", checkpoint_every=1))
    playing = launch.begin(config, folder / "full", processes=ShardedProcesses(ranks()))
    write = tensor_file.write
    tensor_file.write = functools.partial(fails, OSError(28, "No space left on device"), 0, write)
    tried("checkpoint", functools.partial(finish, playing))
    tensor_file.write = write
    finish(launch.resume(folder / "full"))  # nothing is locked, and nobody is out of step

    playing = launch.begin(config, folder / "evaluation", processes=ShardedProcesses(ranks()))
    playing.parts.engine.predict_all = functools.partial(
        fails, RuntimeError("odd"), 1, playing.parts.engine.predict_all
    )  # type: ignore[method-assign]
    tried("evaluation", functools.partial(finish, playing))

    playing = launch.begin(config, folder / "watched", processes=ShardedProcesses(ranks()))
    tried("watcher", lambda: playing.run(functools.partial(fails, KeyError("who"), 0, lambda number, mean: None)))
    playing.folder.close()
    tried("taken", lambda: launch.begin(config, folder / "watched", processes=ShardedProcesses(ranks())))
    config = config.model_copy(update={"device": "cuda:0"})
    tried("device", lambda: launch.begin(config, folder / "device", processes=ShardedProcesses(ranks())))

    simulation = simulation_of("fedavg", ranks())
    rounds = type(simulation.algorithm).round

    def of_its_own(self: Any, server: Any, cohort: Any) -> Any:
        new, info = yield from rounds(self, server, cohort)
        return {"w": new["w"] + dist.get_rank()}, info

    type(simulation.algorithm).round = of_its_own  # type: ignore[method-assign]
    try:
        tried("differ", lambda: simulation.play_round(torch.arange(5), 1))
    finally:
        type(simulation.algorithm).round = rounds  # type: ignore[method-assign]
    return out


def scene_lost_rank(ranks: Callable[[], Ranks], folder: Path) -> Any:
    """The second rank fails where all compute alike, and ends; must be the last scene."""
    playing = launch.begin(
        config_of("fedacs", **options("sharded", rounds=4)), folder / "run", processes=ShardedProcesses(ranks())
    )
    check = playing.processes.agree_on_server

    def fails(*args: Any) -> Any:
        if playing.completed == 2 and dist.get_rank() == 1:
            raise ZeroDivisionError
        return check(*args)

    playing.processes.agree_on_server = fails  # type: ignore[method-assign]
    try:
        finish(playing)
    except (CoterieError, ZeroDivisionError) as error:
        return type(error).__name__, str(error)


@contextlib.contextmanager
def group(rank: int, count: int, folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=count)
    yield
    dist.destroy_process_group()


SCENES = {name.removeprefix("scene_"): play for name, play in list(globals().items()) if name.startswith("scene_")}


def main(rank: int, count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda handle: None
    with group(rank, count, folder):
        for name, play in SCENES.items():
            try:
                facts = play(Ranks.join, folder / name)
            except Exception:
                facts = traceback.format_exc()
            (folder / f"{name}.{rank}").write_bytes(pickle.dumps(facts))
            if isinstance(facts, str):  # the others wait for this rank
                os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
