"""How long a round takes with one CPU thread, with all, and with as many as are chosen where nobody says how many.

    python benchmarks/threads.py [--cases digits-mlp-10 ...] [--policy ACTIVE] [--json FILE]

Whole runs of FedAvg, in turn; a time is the least of the repeats, of a round on the average, with what is evaluated
after the last one. Threads sleep while they wait, as the command line has it (``OMP_WAIT_POLICY=PASSIVE``). Give it
free cores: two threads that have to share one take many times as long.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

IMAGES = 7_000


@dataclass(frozen=True)
class Case:
    """What is played: some of the clients take part, on the embedded digits or on drawn images of 28x28."""

    data: str
    model: str
    batch: int
    clients: int
    cohort: int
    rounds: int

    def run(self, threads: int | None, source: str, folder: Path) -> float:
        """Play it, and give the seconds of a round."""
        import coterie

        found = coterie.run(
            "fedavg",
            data="digits" if self.data == "digits" else source,
            model=self.model,
            clients=self.clients,
            participation=self.cohort / self.clients,
            rounds=self.rounds,
            eval_every=self.rounds,
            settings={"batch_size": self.batch, "lr": 0.01},
            threads=threads,
            out=folder,
            progress=False,
        )
        return float(found.summary["seconds"]["per_round"])


CASES = {
    "digits-linear-10": Case("digits", "linear", 10, 20, 20, 30),
    "digits-mlp-10": Case("digits", "mlp", 10, 20, 20, 30),
    "digits-mlp-50": Case("digits", "mlp", 50, 20, 20, 30),
    "digits-mlp-50-many": Case("digits", "mlp", 50, 200, 200, 30),
    "digits-cnn-10": Case("digits", "cnn_small", 10, 20, 20, 5),
    "images-linear-50": Case("images", "linear", 50, 100, 10, 10),
    "images-mlp2-10": Case("images", "mlp2", 10, 100, 5, 10),
    "images-mlp2-50": Case("images", "mlp2", 50, 20, 10, 10),
    "images-cnn-10": Case("images", "cnn_pfllib", 10, 100, 2, 3),
    "images-cnn-50": Case("images", "cnn_pfllib", 50, 100, 2, 3),
}


def table(result: dict[str, Any]) -> list[str]:
    """Give the rows of the page's table, in milliseconds."""
    return [
        f"| {row['data']}, {row['model']} | {row['batch']} | {row['cohort']} of {row['clients']} | "
        + " | ".join(f"{1000 * row['seconds'][way]:,.0f}" for way in ("one", "all", "chosen"))
        + " |"
        for row in result["rows"]
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--policy", choices=["PASSIVE", "ACTIVE"], default="PASSIVE", help="of threads that wait")
    parser.add_argument("--threads", type=int, default=None, help="how many all are; PyTorch's own choice by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smallest", action="store_true", help="next to no work, once: a trial")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(argv)
    os.environ["OMP_WAIT_POLICY"] = given.policy  # read once, when PyTorch is imported
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    import measuring
    import study

    from coterie.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(given.threads or torch.get_num_threads())
    ways = {"one": 1, "all": torch.get_num_threads(), "chosen": None}
    rows = []
    with tempfile.TemporaryDirectory() as folder, measuring.Others() as others:
        source = study.drawn(Path(folder) / "images.npz", IMAGES)
        for name in given.cases:
            case, seconds = CASES[name], dict[str, list[float]]()
            case = replace(case, rounds=1) if given.smallest else case
            for repeat in range(1 if given.smallest else given.repeats):
                for way, threads in ways.items():
                    spent = case.run(threads, source, Path(folder) / f"{name}-{way}-{repeat}")
                    seconds.setdefault(way, []).append(spent)
            least = {way: min(times) for way, times in seconds.items()}
            rows.append({"case": name, **vars(case), "seconds": least})
            print(f"{name:20}", *(f"{way} {1000 * each:8,.1f} ms" for way, each in least.items()), flush=True)
    told = {"policy": given.policy, "others_share_of_cores": others.share}
    measuring.write(given.json, {"command": "benchmarks/threads.py", **measuring.facts(), **told, "rows": rows})


if __name__ == "__main__":
    main()
