"""Seconds and processor time of an exchange between real processes: a server, nodes and a run, all on this machine.

    python benchmarks/federation.py [--nodes 3 15 30] [--rounds 8] [--before SRC] [--json FILE]

With ``--before``, the folder ``src`` of another version of Coterie, both are measured in turn.

FedAvg on the embedded digits: one exchange a round, the evaluation of the round before with it. What is timed are
rounds from the third on; the first two put the run together. Processor time, which other work on the machine does not
make much longer, is that of these rounds too, by the program that spent it, all nodes' together; ``idle`` is what they
use in a second in which nothing is asked of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import measuring

from coterie.federation.flower import processes
from coterie.federation.flower.control import Control

PATIENCE = 900.0
PROGRAMS = {
    "superlink_program": "SuperLink",
    "flower-superlink": "SuperLink",  # of versions before
    "flwr-serverapp": "run",
    "supernode": "SuperNode",  # of versions before
    "federate\0server": "gate",
    "federate\0node": "node",
}
IDLE = 10.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.5)


def environment(folder: Path, source: Path) -> dict[str, str]:
    return {**processes.environment(folder / "flower"), "PYTHONPATH": str(source)}


def start(folder: Path, source: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "coterie", "federate", *arguments]
    return processes.start(command, environment(folder, source), folder / f"{name}.log")


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


class Look:
    """Looks at all processes twice a second: the most memory of one (MB), the processor time of all, by what they are.

    Processor time is of the rounds from the third on, as far as a look tells.
    """

    def __init__(self, roots: list[int], timings: Path) -> None:
        self.held: dict[str, float] = {}
        self._roots, self._timings, self._over = roots, timings, threading.Event()
        self._first: tuple[int, dict[str, float]] | None = None
        self._last: tuple[int, dict[str, float]] | None = None
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Give the processor time of a round, by program."""
        self._over.set()
        self._thread.join()
        if self._first is None or self._last is None or self._first[0] == self._last[0]:
            return {}
        rounds = self._last[0] - self._first[0]
        return {
            kind: round((spent - self._first[1].get(kind, 0.0)) / rounds, 3) for kind, spent in self._last[1].items()
        }

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            done = self._timings.read_text().count("\n") if self._timings.exists() else 0
            spent: dict[str, float] = {}
            for pid, seconds in (each for root in self._roots for each in measuring.family(root).items()):
                with contextlib.suppress(OSError, IndexError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                    status = Path(f"/proc/{pid}/status").read_text()
                    kind = next((name for mark, name in PROGRAMS.items() if mark in words), "other")
                    most = float(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
                    self.held[kind] = max(self.held.get(kind, 0.0), round(most))
                    spent[kind] = spent.get(kind, 0.0) + seconds
            if done >= 2 and (self._last is None or done > self._last[0]) and "run" in spent:
                self._first = self._first or (done, spent)
                self._last = done, spent


def measure(nodes: int, rounds: int, home: Path, source: Path, model: str, settings: list[str]) -> dict[str, Any]:
    folder = home / f"federation-{nodes}"
    port = free_pair()
    names = [f"silo-{number}" for number in range(nodes)]
    init = ["init", str(folder), "--nodes", str(nodes), "--port", str(port)]
    subprocess.run(
        [sys.executable, "-m", "coterie", "federate", *init],
        env=environment(home, source),
        check=True,
        capture_output=True,
    )
    for file in folder.rglob("federation.yaml"):
        file.write_text(file.read_text().replace("\nmodel: mlp\n", f"\nmodel: {model}\n"))
    started = {"server": start(home, source, "server", "server", str(folder))}
    try:
        control = Control(folder / "server", port + 1)
        wait_until(lambda: "ready" in (home / "server.log").read_text(errors="replace"), "the server is ready")
        for name in names:
            started[name] = start(home, source, name, "node", str(folder / "nodes" / name))
        wait_until(lambda: list(control.statuses().values()).count("online") == nodes, "all nodes are there")
        spent = _spent(started, names)
        time.sleep(IDLE)
        idle = {party: (after - spent[party]) / IDLE for party, after in _spent(started, names).items()}
        run = ["run", str(folder), "fedavg", "--rounds", str(rounds), "--minimum", str(nodes), "--eval-every", "1"]
        run += [word for each in settings for word in ("--set", each)]
        began = time.monotonic()
        look = Look([process.pid for process in started.values()], folder / "run" / "timings.jsonl")
        # What this costs is not counted: it only looks on.
        code = subprocess.run(
            [sys.executable, "-m", "coterie", "federate", *run, "--wait", "300", "--out", str(folder / "run")],
            env=environment(home, source),
            check=False,
            capture_output=True,
            text=True,
        )
        each = look.stop()
        whole = time.monotonic() - began
        if code.returncode:
            raise RuntimeError(code.stderr)
    finally:
        for process in reversed(list(started.values())):
            process.terminate()
        for process in reversed(list(started.values())):
            processes.stop(process)
    lines = (folder / "run" / "timings.jsonl").read_text().splitlines()
    seconds = [float(json.loads(line)["training"]) for line in lines]
    timed = seconds[2:] or seconds
    database = sum(path.stat().st_size for path in (folder / "server").glob("superlink.db*"))
    return {
        "nodes": nodes,
        "seconds an exchange": round(statistics.median(timed), 3),
        "least": round(min(timed), 3),
        "most": round(max(timed), 3),
        "first two rounds": [round(value, 2) for value in seconds[:2]],
        "whole run": round(whole, 1),
        "processor seconds a round": dict(sorted(each.items())),
        "processor seconds an idle second": {party: round(value, 3) for party, value in idle.items()},
        "largest memory of a process (MB)": dict(sorted(look.held.items())),
        "superlink.db bytes": database,
        "load of the machine": round(os.getloadavg()[0], 1),
    }


def _spent(started: dict[str, subprocess.Popen[bytes]], names: list[str]) -> dict[str, float]:
    each = {name: measuring.tree_seconds(process.pid) for name, process in started.items()}
    return {"server": each["server"], "all nodes": sum(each[name] for name in names)}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="the method's parameters")
    options = parser.parse_args(given)
    versions = {"this": Path(__file__).resolve().parents[1] / "src"}
    versions |= {"before": options.before.resolve()} if options.before else {}
    rows = []
    for nodes in options.nodes:
        for version, source in versions.items():
            with tempfile.TemporaryDirectory() as home:
                rows.append(
                    {
                        "version": version,
                        "model": options.model,
                        **measure(nodes, options.rounds, Path(home), source, options.model, options.set),
                    }
                )
            print(json.dumps(rows[-1]), flush=True)
            facts = {"command": "benchmarks/federation.py", **measuring.facts(flwr=None)}
            measuring.write(options.json, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
