"""What all benchmarks share: clocks, the ceilings of the machine, and how a result is written down.

Times are medians, with the quartiles beside them, over repeats that are taken in turn: whatever else the machine does
meanwhile meets all that is compared alike. Nothing here names the machine's host, user or folders.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
"""Seconds as they pass, or as this process has used them, which no other process makes longer."""


def synchronise(device: torch.device | str = "cpu") -> None:
    """Wait until a device has done all that it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    function: Callable[[], Any], device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Time one call, the device's work included."""
    synchronise(device)
    began = clock()
    function()
    synchronise(device)
    return clock() - began


def family(root: int) -> dict[int, float]:
    """Give a process and all that it has started and that still runs, with the processor time of each."""
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may end while it is looked at
            # The name, in brackets, may hold anything; then state and parent, and further on user and system time.
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            spent[int(folder.name)] = int(fields[11]) + int(fields[12])
    found, waiting = {root}, [root]
    while waiting:
        parent = waiting.pop()
        children = [child for child, above in parents.items() if above == parent and child not in found]
        found.update(children)
        waiting.extend(children)
    return {member: spent.get(member, 0) / os.sysconf("SC_CLK_TCK") for member in found}


def tree_seconds(root: int) -> float:
    """Give the processor time of a process and all that it has started and that still runs, in steps of a hundredth."""
    return sum(family(root).values())


def spread(values: Iterable[float]) -> dict[str, float]:
    """Give the median of repeated times with the quartiles and the least."""
    times = sorted(values)
    if len(times) == 1:
        return {"median": times[0], "lower": times[0], "upper": times[0], "least": times[0], "repeats": 1}
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive")
    middle = statistics.median(times)
    return {"median": middle, "lower": lower, "upper": upper, "least": times[0], "repeats": len(times)}


def in_turn(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int,
    warm: int = 1,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time several functions in turn, so that a change of the machine's load meets all of them."""
    for _ in range(warm):
        for function in functions.values():
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds_of(function, device, clock))
    return times


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int,
    warm: int = 1,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Time several functions in turn, and give the spread of each one's times."""
    return {name: spread(values) for name, values in in_turn(functions, repeats, warm, device, clock).items()}


def ceilings(
    device: torch.device | str = "cpu", smallest: bool = False, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Measure what no computation on the device can beat: a copy (bytes read and written), and float32 products."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    size, side = (2**30, 8192) if on_gpu else (2**28, 1024)
    if smallest:
        size, side = 2**16, 64
    repeats = 1 if smallest else 7
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    draw = torch.Generator(device=device)
    draw.manual_seed(1)
    square = torch.randn(side, side, generator=draw, device=device)
    out = torch.empty_like(square)
    work: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "product": lambda: torch.mm(square, square, out=out),
    }
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    times = in_turn(work, repeats, 2, device, clock)
    rates = {
        "copy_gb_s": 2 * size / statistics.median(times["copy"]) / 1e9,
        "product_gflop_s": 2 * side**3 / statistics.median(times["product"]) / 1e9,
    }
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
        fast = in_turn({"product": work["product"]}, repeats, 2, device, clock)
        rates["product_tf32_gflop_s"] = 2 * side**3 / statistics.median(fast["product"]) / 1e9
    torch.backends.cuda.matmul.allow_tf32 = before
    return rates


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(package: str, folder: Path | None = None) -> str | None:
    """Give the version of a package, installed or in a folder; ``None`` if there is none."""
    path = [*sys.path, *([str(folder)] if folder is not None else [])]
    for found in importlib.metadata.distributions(name=package, path=path):
        return str(found.version)
    return None


def facts(device: torch.device | str = "cpu", **packages: Path | None) -> dict[str, Any]:
    """Say where and with what something was measured; further packages may lie in a folder of their own."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    wanted = {"coterie": None, "torch": None, "numpy": None} | packages
    versions = {name: version(name, folder) for name, folder in wanted.items()}
    return found | {"versions": {name: number for name, number in versions.items() if number}}


class Others:
    """Watches how much of the machine's cores other processes take: where that is much, all times are longer."""

    def __init__(self) -> None:
        self._seconds, self._busy = 0.0, 0.0
        self._began: tuple[float, float, float] | None = None

    def __enter__(self) -> Others:
        self._began = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        before, after = self._began, self._now()
        if before is not None and after is not None:
            all_busy, own, all_seconds = (late - early for late, early in zip(after, before, strict=True))
            self._busy += max(0.0, all_busy - own)
            self._seconds += all_seconds

    @property
    def share(self) -> float | None:
        """The part of all cores that others took while this was open; ``None`` where it cannot be told."""
        return self._busy / self._seconds if self._seconds > 0 else None

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Give the seconds that all cores were busy, that this process has used, and that there were."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        # user, nice, system, idle, waiting for disks, and the rest, which is work too
        ticks = [int(word) for word in stat.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
        unit = os.sysconf("SC_CLK_TCK")
        own = time.process_time()
        return (sum(ticks) - ticks[3] - ticks[4]) / unit, own, sum(ticks) / unit


def kept(path: Path | None, name: str, again: Iterable[str]) -> list[dict[str, Any]]:
    """Give the rows of an earlier result that are not measured again, told by the value of ``name``."""
    if path is None or not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    measured = set(again)
    return [row for row in rows if row[name] not in measured]


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result, if it was asked for."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(result), indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    """Four digits are more than a clock on a shared machine can tell apart."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
