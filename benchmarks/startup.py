"""How long the command line takes to answer: help, mistakes, lists, and a run of one round on the embedded digits.

    python benchmarks/startup.py [--repeats 7] [--json benchmarks/results/startup.json]

Each command line runs in a process of its own, all in turn, between two bounds: ``python -c pass``, below which nothing
can be, and ``python -c "import torch"``, which every command that computes pays. Processor time, which other work on
the machine does not make longer, as ratios to both; seconds by the wall's clock beside it.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import measuring

NOTHING, TORCH = "python -c pass", 'python -c "import torch"'
BOUNDS = {NOTHING: ["-c", "pass"], TORCH: ["-c", "import torch"]}
COMMANDS = (
    "--help",
    "run --help",
    "compare --help",
    "federate run --help",
    "rum",
    "run fedavg --client 3",
    "run fedavgg",
    "run fedavg --data digit",
    "list algorithms fedavg",
    "list algorithms",
    "list data",
    "list partitions",
    "recipe run fedamp-table33",
    "run local --rounds 1 --quiet",
)


def spent(arguments: Sequence[str], folder: Path) -> tuple[float, float]:
    """Run Python with some arguments in a folder; give the seconds by the wall's clock, and of processor time."""
    quiet = {"check": False, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], **quiet)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(commands: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Time all commands in turn, once unmeasured: the first time Python compiles, and the disk is read."""
    lines = {**BOUNDS, **{f"coterie {words}": ["-m", "coterie", *words.split()] for words in commands}}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in lines}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats + 1):
            for name, arguments in lines.items():
                pair = spent(arguments, Path(folder))
                if number:
                    times[name].append(pair)
    wall = {name: measuring.spread(pair[0] for pair in pairs) for name, pairs in times.items()}
    processor = {name: measuring.spread(pair[1] for pair in pairs) for name, pairs in times.items()}
    return [
        {
            "command": name,
            "seconds": wall[name],
            "processor_seconds": processor[name],
            "times_nothing": processor[name]["median"] / processor[NOTHING]["median"],
            "times_torch": processor[name]["median"] / processor[TORCH]["median"],
        }
        for name in lines
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--smallest", action="store_true", help="once: a trial")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(argv)
    rows = measure(args.only, 1 if args.smallest else args.repeats)
    result = {"command": "benchmarks/startup.py", **measuring.facts(), "rows": rows}
    print("\n".join(table(result)))
    measuring.write(args.json, result)


def table(result: dict[str, Any]) -> list[str]:
    """Give the rows of the page's table."""
    return [
        f"| `{row['command']}` | {1000 * row['processor_seconds']['median']:,.0f} ms | {row['times_nothing']:.1f} | "
        f"{row['times_torch']:.2f} |"
        for row in result["rows"]
    ]


if __name__ == "__main__":
    main()
