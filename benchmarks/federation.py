"""Seconds and processor time of an exchange between real processes: a server, nodes and a run, all on this machine.

    python benchmarks/federation.py [--nodes 3 15 30] [--rounds 8] [--json benchmarks/results/federation_cpu.json]

FedAvg on the embedded digits: one exchange a round, the evaluation of the round before with it. What is timed are
rounds from the third on; the first two put the run together. Processor time is that of all processes of a party, which
other work on the machine does not make longer; ``idle`` is what they use in a second in which nothing is asked of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import measuring

from coterie.federation import project
from coterie.federation.flower import processes
from coterie.federation.flower.control import Control

PATIENCE = 900.0
IDLE = 10.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.5)


def start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    env = processes.environment(folder / "flower")
    return processes.start([sys.executable, "-m", "coterie", "federate", *arguments], env, folder / f"{name}.log")


def free_pair() -> int:
    while True:
        port = processes.free_port()
        try:
            import socket

            with socket.socket() as other:
                other.bind(("127.0.0.1", port + 1))
            return port
        except OSError:
            continue


def measure(nodes: int, rounds: int, home: Path) -> dict[str, Any]:
    folder = home / f"federation-{nodes}"
    port = free_pair()
    names = [f"silo-{number}" for number in range(nodes)]
    project.init(folder, names, port=port)
    started = {"server": start(home, "server", "server", str(folder))}
    try:
        control = Control(folder / "server", port + 1)
        wait_until(lambda: "ready" in (home / "server.log").read_text(errors="replace"), "the server is ready")
        for name in names:
            started[name] = start(home, name, "node", str(folder / "nodes" / name))
        wait_until(lambda: list(control.statuses().values()).count("online") == nodes, "all nodes are there")
        spent = _spent(started, names)
        time.sleep(IDLE)
        idle = {party: (after - spent[party]) / IDLE for party, after in _spent(started, names).items()}
        run = ["run", str(folder), "fedavg", "--rounds", str(rounds), "--minimum", str(nodes), "--eval-every", "1"]
        before, began = _spent(started, names), time.monotonic()
        # Like a node it is a process of ours; what it costs is counted with the server, for it only looks on.
        code = subprocess.run(
            [sys.executable, "-m", "coterie", "federate", *run, "--wait", "300", "--out", str(folder / "run")],
            env=processes.environment(home / "flower"),
            check=False,
            capture_output=True,
            text=True,
        )
        whole = time.monotonic() - began
        if code.returncode:
            raise RuntimeError(code.stderr)
        after = _spent(started, names)
    finally:
        for process in reversed(list(started.values())):
            process.terminate()
        for process in reversed(list(started.values())):
            processes.stop(process)
    lines = (folder / "run" / "timings.jsonl").read_text().splitlines()
    seconds = [float(json.loads(line)["training"]) for line in lines]
    timed = seconds[2:]
    database = sum(path.stat().st_size for path in (folder / "server").glob("superlink.db*"))
    return {
        "nodes": nodes,
        "seconds an exchange": round(statistics.median(timed), 3),
        "least": round(min(timed), 3),
        "most": round(max(timed), 3),
        "first two rounds": [round(value, 2) for value in seconds[:2]],
        "whole run": round(whole, 1),
        # Of a process that ended in between (the run's own) nothing is left to read.
        "processor seconds a round": {party: round((after[party] - before[party]) / rounds, 3) for party in after},
        "processor seconds an idle second": {party: round(value, 3) for party, value in idle.items()},
        "superlink.db bytes": database,
    }


def _spent(started: dict[str, subprocess.Popen[bytes]], names: list[str]) -> dict[str, float]:
    each = {name: measuring.tree_seconds(process.pid) for name, process in started.items()}
    return {"server": each["server"], "all nodes": sum(each[name] for name in names)}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    rows = []
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory() as home:
            rows.append(measure(nodes, options.rounds, Path(home)))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if options.json:
        measuring.write(options.json, rows, "cpu")


if __name__ == "__main__":
    main()
