"""What a round costs when most clients are not in it: FedACS and FLAME over the number of clients and places for rows.

    python benchmarks/many_clients.py [--device cuda] [--clients 1000 10000 ...] [--keep device host disk]
        [--methods fedacs flame] [--cohort 10% 100] [--model mlp2] [--rounds 20] [--in-turn] [--evaluate]
        [--checkpoint] [--scratch FOLDER] [--json FILE]

A round is the whole of ``Simulation.play_round``: messages, training, replies, aggregation, the clients' state. The
next cohort is announced as a run announces it, so that its rows are brought while this one trains. All clients hold 50
samples of one common pool, so that what grows with their number is their state alone. Cohorts are drawn anew each
round. ``--cohort`` is a share of the clients or a number of them: with a number, seconds per round should not depend on
how many others there are. On a CPU, ``host`` and ``device`` are the same memory.

Seconds are per round, medians with quartiles, the device synchronised and, after the last round, everything written.
Memory is the peak of this process on the device and on the host while it plays, above what it had before the
simulation was made, with the size of all rows beside it. A size that cannot fit is skipped and says so. With
``--in-turn`` all sizes are there at once and play their rounds in turn, for a machine that does other things as well;
memory is then not told apart. ``--evaluate`` times one evaluation of all clients, ``--checkpoint`` one checkpoint and
its way back.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import measuring

from coterie import randomness
from coterie.algorithms import registry
from coterie.compute.batched import BatchedEngine
from coterie.compute.samples import Samples
from coterie.data.partitions import Ragged
from coterie.memory import free_memory
from coterie.models import build
from coterie.models.problem import Problem
from coterie.rows import ClientMatrix
from coterie.runs.storage import Checkpoints
from coterie.simulation.scoring import Scorer
from coterie.simulation.simulation import Simulation

SIZES = [1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000]
MATRICES = {"fedacs": 2, "flame": 4}  # with a row of the model's size for every client
SETTINGS = {"fedacs": {"local_epochs": 1, "batch_size": 10}, "flame": {"local_epochs": 5, "batch_size": 10}}
WARM = 3  # rounds before the clock counts
HELD, POOL, TESTED = 50, 20_000, 10  # training samples of a client, all samples, test samples of a client


def samples_of(clients: int, device: torch.device) -> Samples:
    draw = torch.Generator()
    draw.manual_seed(1)
    x = torch.randn((POOL, 1, 28, 28), generator=draw).to(device)
    y = torch.randint(10, (POOL,), generator=draw).to(device)
    splits: dict[Any, Ragged] = {}
    for split, count in (("train", HELD), ("validation", 0), ("test", TESTED)):
        flat = torch.randint(POOL, (clients * count,), generator=draw)
        splits[split] = Ragged(flat.to(device), (torch.arange(clients + 1) * count).to(device))
    one = torch.ones((), device=device)
    counts = torch.zeros(clients, 10, device=device)
    return Samples(x, y, one, torch.zeros_like(one), splits, counts, None, torch.float32)


class Peak:
    """The most memory that this process has held since it was made, on the host and on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: begin the peak anew
            self.exact = True
        except OSError:
            self.exact = False
        self.before = _status("VmRSS")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, float | None]:
        host = None if self.before is None or not self.exact else (_status("VmHWM") or 0) - self.before
        on_device = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {
            "host_gb": None if host is None else host / 1e9,
            "device_gb": None if on_device is None else on_device / 1e9,
        }


def _status(field: str) -> int | None:
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(field))


def room_for(rows: int, clients: int, cohort: int, rounds: int, keep: str, device: torch.device, scratch: Path) -> str:
    """Say why so many bytes of rows cannot be kept there, nothing if they can."""
    # Elsewhere than on the device only rows that were written take room.
    touched = rows * min(1.0, cohort * (rounds + WARM) / clients)
    if keep == "device" and device.type == "cuda":
        need, free = rows, 0.8 * torch.cuda.mem_get_info(device)[0]
    elif keep == "disk":
        need, free = touched, 0.9 * shutil.disk_usage(scratch).free
    else:
        need, free = rows if keep == "device" else touched, 0.8 * free_memory()
    return "" if need <= free else f"needs {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"


def cohorts(clients: int, count: int, device: torch.device) -> Iterator[Tensor]:
    number = 0
    while True:
        number += 1
        drawn = randomness.stream(1, "benchmark cohort", number).choice(clients, size=count, replace=False)
        yield torch.from_numpy(drawn).sort().values.to(device)


class Playing:
    """A federation that is played round by round."""

    def __init__(self, args: argparse.Namespace, name: str, clients: int, count: int, keep: str, scratch: Path) -> None:
        self.device, self.clients = torch.device(args.device), clients
        with randomness.torch_stream(1, "benchmark model"):
            module = build(args.model, (1, 28, 28), 10)
        problem = Problem.of(module, device=self.device)
        rows = MATRICES[name] * clients * problem.layout.size * 4
        self.row: dict[str, Any] = {"method": name, "clients": clients, "cohort": count, "keep": keep}
        self.row |= {"rows_gb": rows / 1e9}
        why = room_for(rows, clients, count, args.rounds, keep, self.device, scratch)
        if why:
            raise NoRoom(why)
        engine = BatchedEngine(problem, samples_of(clients, self.device), 1)
        self.peak = Peak(self.device)
        began = time.perf_counter()
        method = registry.make(name, SETTINGS[name])
        self.simulation = Simulation(method, engine, keep=keep, scratch=scratch)  # type: ignore[arg-type]
        measuring.synchronise(self.device)
        self.row |= {"parameters": problem.layout.size, "setup_s": time.perf_counter() - began}
        self._drawn = cohorts(clients, count, self.device)
        self._cohort = next(self._drawn)
        self.times: list[float] = []

    def play(self) -> None:
        """Play the next round."""
        cohort, self._cohort = self._cohort, next(self._drawn)
        self.simulation.expect(self._cohort)
        number = len(self.times) + 1
        self.times.append(measuring.seconds_of(lambda: self.simulation.play_round(cohort, number), self.device))

    def end(self, args: argparse.Namespace, scratch: Path, alone: bool) -> dict[str, Any]:
        """Say what was measured; the first rounds, in which buffers are made, do not count."""
        began = time.perf_counter()
        kept = [value for value in self.simulation.clients.rows.values() if isinstance(value, ClientMatrix)]
        seen = max(len(value.backend.changed()) for value in kept)
        row = self.row | {
            "round_s": measuring.spread(self.times[WARM:]),
            "left_to_write_s": time.perf_counter() - began,
        }
        row |= {"clients_seen": seen, **(self.peak.read() if alone else {"host_gb": None, "device_gb": None})}
        if args.evaluate:
            everyone = torch.arange(self.clients, device=self.device)
            scorer = Scorer(self.simulation, everyone, everyone[:0])
            row["evaluate_s"] = measuring.seconds_of(lambda: scorer.scores(1), self.device)
        if args.checkpoint:
            row |= checkpointed(self.simulation, scratch, self.device)
        return row


class NoRoom(Exception):
    """A size does not fit; says why."""


def begun(
    args: argparse.Namespace, name: str, clients: int, count: int, keep: str, scratch: Path
) -> Playing | dict[str, Any]:
    """Begin one federation, or say why not: the others are still worth measuring."""
    try:
        return Playing(args, name, clients, count, keep, scratch)
    except (NoRoom, RuntimeError, MemoryError) as error:
        row = {"method": name, "clients": clients, "cohort": count, "keep": keep, "rows_gb": float("nan")}
        return row | {"skipped": f"{type(error).__name__}: {str(error)[:200]}"}


def measured(args: argparse.Namespace, places: list[str], scratch: Path) -> Iterator[dict[str, Any]]:
    for name in args.methods:
        for text in args.cohort:
            cases = [(name, clients, cohort_of(text, clients), keep) for clients in args.clients for keep in places]
            # In turn, whatever else the machine does meets all sizes alike; one by one, memory can be told apart.
            for together in [cases] if args.in_turn else [[case] for case in cases]:
                playing = [begun(args, *case, scratch) for case in together]
                for _ in range(args.rounds + WARM):
                    for each in playing:
                        if isinstance(each, Playing):
                            each.play()
                while playing:
                    each = playing.pop(0)
                    yield each if isinstance(each, dict) else each.end(args, scratch, not args.in_turn)
                    del each
                    gc.collect()
                    if torch.device(args.device).type == "cuda":
                        torch.cuda.empty_cache()


def checkpointed(simulation: Simulation, scratch: Path, device: torch.device) -> dict[str, Any]:
    states = {"server": simulation.server, "clients": simulation.clients.rows}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        store = Checkpoints(Path(folder), "benchmark")
        peak = Peak(device)
        began = time.perf_counter()
        path = store.save(1, states["server"], states["clients"])
        written = time.perf_counter()
        size = (path / "state.safetensors").stat().st_size
        store.latest(device, states)
        read = time.perf_counter()
    spent = {"save_s": written - began, "load_s": read - written, "file_gb": size / 1e9}
    return {"checkpoint": spent | {f"peak_{name}": value for name, value in peak.read().items()}}


def cohort_of(text: str, clients: int) -> int:
    return max(1, round(float(text[:-1]) / 100 * clients)) if text.endswith("%") else min(int(text), clients)


def shown(row: dict[str, Any]) -> str:
    what = f"{row['method']:7} {row['clients']:7} clients, {row['cohort']:6} a round"
    what += f", {row['keep']:6} {row['rows_gb']:7.2f} GB"
    if "skipped" in row:
        return f"{what}  skipped: {row['skipped']}"
    spread = row["round_s"]
    times = f"{1e3 * spread['median']:9.1f} ms ({1e3 * spread['lower']:.1f} to {1e3 * spread['upper']:.1f})"
    peaks = ", ".join(f"{name[:-3]} {row[name]:.2f} GB" for name in ("host_gb", "device_gb") if row[name] is not None)
    more = f"  evaluation {row['evaluate_s']:.2f} s" if "evaluate_s" in row else ""
    if "checkpoint" in row:
        saved = row["checkpoint"]
        more += f"  checkpoint {saved['save_s']:.1f} s, back {saved['load_s']:.1f} s, {saved['file_gb']:.2f} GB"
    return f"{what}  {times}{'  peak ' if peaks else ''}{peaks}{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", nargs="+", type=int, default=SIZES)
    parser.add_argument("--keep", nargs="+", choices=["device", "host", "disk"], default=None)
    parser.add_argument("--methods", nargs="+", choices=list(MATRICES), default=list(MATRICES))
    parser.add_argument("--cohort", nargs="+", default=["10%", "100"])
    parser.add_argument("--model", default="mlp2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    on_cpu = torch.device(args.device).type == "cpu"
    places = args.keep or (["device", "disk"] if on_cpu else ["device", "host", "disk"])
    scratch = Path(tempfile.gettempdir()) if args.scratch is None else args.scratch
    result = {"command": "benchmarks/many_clients.py", **measuring.facts(args.device), "model": args.model, "rows": []}
    result |= {"in_turn": args.in_turn, "ceilings": measuring.ceilings(args.device)}
    for row in measured(args, places, scratch):
        print(shown(row), flush=True)
        result["rows"].append(row)
        measuring.write(args.json, result)


if __name__ == "__main__":
    main()
