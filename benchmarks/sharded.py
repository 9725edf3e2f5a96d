"""What a round costs on one rank and on several: the same rounds in turn, by the same processes.

    python benchmarks/sharded.py [--ranks 2] [--device cuda] [--methods fedavg fedacs flame] [--clients 64]
        [--hidden 200] [--rounds 7] [--json FILE]

Starts so many processes on this machine, each with one thread (on GPUs: a device each). In turn, the first of them
plays a round of the whole federation alone, while the others wait, and all of them play the same round sharded. A round
is the whole of ``Simulation.play_round``. All clients take part; each has 50 samples of 784 features, in batches of 10.
Between these, all processes play a round of the whole federation at once, unrelated to each other: what the machine
then gives is what sharding can gain at most (``possible``). Cores that are shared give less than their number.

Seconds are medians with quartiles, as the first rank sees them: as they pass, and as its processor has spent them. The
second, on a machine that does other work as well, says how much of the work a rank is spared (``spared``). Bytes are
those that reach the first rank in a round or leave it: replies of the other ranks' clients, rows of the server's that
lie with them, partial products. How far the two ends lie apart is told too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import measuring

from coterie.config import ExperimentConfig, from_mapping
from coterie.rows.distributed import Ranks
from coterie.runs.builder import assemble
from coterie.simulation.simulation import Simulation

METHODS = ("fedavg", "fedacs", "flame")
WARM = 1


def config_of(method: str, clients: int, hidden: int, device: str) -> ExperimentConfig:
    features, samples = (784, 72) if hidden >= 100 else (8, 20)  # of which 50 are to train on
    return from_mapping(
        {
            "algorithm": method,
            "data": f"synthetic:clients={clients},samples={samples},features={features},classes=10",
            "partition": "natural",
            "clients": clients,
            "model": f"mlp:hidden={hidden}",
            "engine": "sharded",
            "device": device,
            "batch_size": 10,
            "local_epochs": 2,
            "lr": 0.01,
        }
    )


def state(simulation: Simulation) -> torch.Tensor:
    """Give all models that the server has, or the one."""
    return next(value.clone() for name, value in simulation.server.items() if name in ("w", "u"))


def measure(method: str, arguments: argparse.Namespace, group: Ranks) -> dict[str, Any] | None:
    """Play rounds in turn; the first rank's clock counts."""
    config = config_of(method, arguments.clients, arguments.hidden, arguments.device)
    sharded = assemble(config, ranks=group).simulation
    alone = assemble(config).simulation
    everyone = torch.arange(config.clients, device=sharded.engine.device)
    times: dict[str, list[float]] = {"alone": [], "unrelated": [], "sharded": []}
    spent: dict[str, list[float]] = {name: [] for name in times}
    moved: list[int] = []

    def clock(kind: str, simulation: Simulation, number: int) -> None:
        device, began = simulation.engine.device, time.process_time()
        times[kind].append(measuring.seconds_of(lambda: simulation.play_round(everyone, number), device))
        spent[kind].append(time.process_time() - began)

    for number in range(1, WARM + arguments.rounds + 1):
        dist.barrier()
        if group.leads:
            clock("alone", alone, 2 * number - 1)
        dist.barrier()
        clock("unrelated", alone, 2 * number)
        for at in (2 * number - 1, 2 * number):
            dist.barrier()
            before = group.moved
            clock("sharded", sharded, at)
            moved.append(group.moved - before)
    found = state(sharded)
    if not group.leads:
        return None
    wanted = state(alone)
    spreads, work = (
        {name: measuring.spread(values[WARM:]) for name, values in each.items()} for each in (times, spent)
    )
    return {
        "method": method,
        "clients": config.clients,
        "parameters": sharded.engine.net.layout.size,
        "seconds": spreads,
        "processor_seconds": work,
        "ratio": spreads["alone"]["median"] / spreads["sharded"]["median"],
        "spared": work["alone"]["median"] / work["sharded"]["median"],
        "possible": group.count * spreads["alone"]["median"] / spreads["unrelated"]["median"],
        "bytes_a_round": moved[-1],
        "apart": float((found - wanted).abs().max() / wanted.abs().max()),
    }


@contextlib.contextmanager
def joined(rank: int, count: int, meet: Path) -> Iterator[Ranks]:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=count)
    yield Ranks.join()
    dist.destroy_process_group()


def play(arguments: argparse.Namespace) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    others = measuring.Others()
    with joined(arguments.rank, arguments.ranks, arguments.meet) as group, others:
        rows = [measure(method, arguments, group) for method in arguments.methods]
    if not group.leads:
        return
    titles = {"method": -10, "alone": 10, "sharded": 10, "ratio": 7, "possible": 9, "spared": 7, "MB a round": 11}
    print(" ".join(f"{name:{'<' if width < 0 else '>'}{abs(width)}}" for name, width in {**titles, "apart": 9}.items()))
    for row in rows:
        assert row is not None
        alone, sharded = (row["seconds"][name]["median"] for name in ("alone", "sharded"))
        print(
            f"{row['method']:10} {alone * 1e3:7.1f} ms {sharded * 1e3:7.1f} ms {row['ratio']:7.2f} "
            f"{row['possible']:9.2f} {row['spared']:7.2f} {row['bytes_a_round'] / 1e6:11.2f} {row['apart']:9.1e}"
        )
    device = "cuda" if arguments.device == "cuda" else "cpu"
    result = {"command": arguments.command, "ranks": arguments.ranks, **measuring.facts(device)}
    result |= {"busy_beside_the_first_rank": others.share, "rows": rows}
    measuring.write(arguments.json, result)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smallest", action="store_true", help="the least work that goes through all of it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--command", default="", help=argparse.SUPPRESS)
    words = sys.argv[1:] if words is None else words
    arguments = parser.parse_args(words)
    if arguments.rank is not None:
        play(arguments)
        return
    asked = words[: words.index("--json")] + words[words.index("--json") + 2 :] if "--json" in words else words
    command = " ".join(["benchmarks/sharded.py", *asked])
    small = ["--clients", "5", "--hidden", "5", "--rounds", "1", "--methods", "fedacs"] if arguments.smallest else []
    with tempfile.TemporaryDirectory() as folder:
        meet = ["--meet", str(Path(folder) / "meet"), f"--command={command}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([sys.executable, __file__, *words, *small, *meet, "--rank", str(rank)], env=environment)
            for rank in range(arguments.ranks)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit(1)


if __name__ == "__main__":
    main()
