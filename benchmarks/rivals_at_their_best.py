"""The same rounds of FedAvg by Coterie and by each rival in the way that is fastest for it.

    python benchmarks/rivals_at_their_best.py --with-jax FOLDER --with-pfl FOLDER --json FILE       two CPU cores
    python benchmarks/rivals_at_their_best.py --device cuda --with-pfl FOLDER --json FILE           one GPU

Against: pfl-research in 1, 2, 4 and 8 processes that share the device (on a CPU no more than there are cores), gloo
between them; ``torch.func`` with ``vmap``, as it is and with ``torch.compile``; and on the CPU a plain JAX program with
``vmap`` or ``scan`` over clients and ``scan`` over steps. Of each family the best counts.

Everything is as in ``side_by_side.py``: the same initial model and samples, rounds in turn, losses at the end. Before a
work is timed, all play two rounds of one step on four clients, in which the order of samples does not matter: there the
update of each must be ours but for rounding (models with dropout, whose masks differ, are held to their losses alone).
On a machine that others use too, ``--clock processor`` compares processor times, for which one core must be all that
there is: ``taskset -c 0 python … --threads 1 --clock processor``.

The folders: as in ``side_by_side.py`` for pfl, and

    pip install --target JAX --no-deps jax==0.10.2 jaxlib==0.10.2 ml_dtypes opt_einsum
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import measuring
import rivals
import side_by_side
from rivals import Federation, Work, jax_program, pfl_research
from rivals.jax_program import JaxProgram
from rivals.ours import Ours
from rivals.pfl_processes import PflProcesses
from rivals.pfl_research import PflResearch
from rivals.torch_func import TorchFunc

from coterie.memory import keep_freed_memory

CPU_WORKS = ("linear-10", "mlp-10", "mlp-50", "cnn-10", "pfl")
PROCESSES = (1, 2, 4, 8)
FAMILIES = {"ours": "Coterie", "pfl": "pfl", "torch.func": "torch.func", "jax": "JAX"}
EXACT = 2e-3  # of the update: two float32 ways through a few hundred products each
Maker = Callable[[Federation], rivals.Rival]


def makers(device: str, threads: int, pfl: Path | None, jax: Path | None) -> dict[str, Maker]:
    """Give all that can play, by what they are called: a family, and after a comma the way."""
    found: dict[str, Maker] = {"ours": Ours}
    if device == "cuda":
        found["ours, tf32"] = lambda federation: Ours(federation, precision="tf32")
    if pfl is not None:
        cores = len(os.sched_getaffinity(0))
        for count in PROCESSES:
            if count == 1:
                found["pfl, 1 process"] = PflResearch
            elif device == "cuda" or count <= cores:
                found[f"pfl, {count} processes"] = _shared(pfl, count, threads)
    found["torch.func, vmap"] = TorchFunc
    found["torch.func, compiled"] = lambda federation: TorchFunc(federation, compiled=True)
    if jax is not None and device == "cpu":
        found["jax, vmap"] = JaxProgram
        found["jax, scan"] = lambda federation: JaxProgram(federation, in_turn=True)
    return found


def _shared(folder: Path, count: int, threads: int) -> Maker:
    return lambda federation: PflProcesses(federation, folder, count, threads)


def family(name: str) -> str:
    """Say whose way this is."""
    return name.partition(",")[0]


def updates_apart(work: Work, device: str, making: Mapping[str, Maker]) -> dict[str, float]:
    """Let all play two rounds of one step; say how far their updates lie from ours, in parts of ours."""
    federation = Federation(replace(work, sizes=(work.batch,) * 4, cohort=4), device)
    if any(isinstance(layer, nn.Dropout) for layer in federation.module().modules()):
        return {}
    start = nn.utils.parameters_to_vector(federation.module().parameters()).detach().cpu()
    ended = {}
    for name, make in making.items():
        player = make(federation)
        try:
            for _ in range(2):
                player.play()
            ended[name] = player.parameters().detach().cpu()
        finally:
            player.close()
    moved = (ended["ours"] - start).norm()
    return {name: float((there - ended["ours"]).norm() / moved) for name, there in ended.items() if name != "ours"}


def measure(
    name: str, work: Work, device: str, making: Mapping[str, Maker], repeats: int, warm: int, clock: str
) -> dict[str, Any]:
    """Let all play the same rounds in turn."""
    apart = updates_apart(work, device, making)
    federation = Federation(work, device)
    playing: dict[str, rivals.Rival] = {}
    with contextlib.ExitStack() as unfinished:
        for each, make in making.items():
            playing[each] = make(federation)
            unfinished.callback(playing[each].close)
        unfinished.pop_all()
    played = side_by_side.play(federation, playing, side_by_side.Setting(device, repeats=repeats, warm=warm))
    losses, seconds, processor = played.losses_apart, played.seconds, played.processor
    return {
        **side_by_side.facts_of(name, work, federation),
        "seconds": seconds,
        "processor_seconds": processor,
        "best": best(processor if clock == "processor" else seconds),
        "updates_apart": apart,
        "losses_apart": losses,
        "same_work": losses <= side_by_side.APART and all(part <= EXACT for part in exact(apart).values()),
        "others_share_of_cores": played.others.share,
        "start": played.start,
        "reached": played.reached,
    }


def exact(apart: Mapping[str, float]) -> dict[str, float]:
    """Leave out what is not meant to be exact."""
    return {name: part for name, part in apart.items() if name != "ours, tf32"}


def best(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Give the fastest way of each family, and how many times ours it takes."""
    ours = seconds["ours"]["median"]
    found: dict[str, dict[str, Any]] = {}
    for name, times in seconds.items():
        if name == "ours, tf32":  # which computes something else
            continue
        known = found.get(family(name))
        if known is None or times["median"] < known["seconds"]:
            found[family(name)] = {"way": name, "seconds": times["median"], "times_ours": times["median"] / ours}
    return found


def show(row: Mapping[str, Any], clock: str) -> None:
    """Print one work, a line for each that played."""
    share = row["others_share_of_cores"]
    print(f"{row['work']}: " + ("" if share is None else f"others took {share:.0%} of the cores"))
    seconds = row["processor_seconds" if clock == "processor" else "seconds"]
    ours = seconds["ours"]["median"]
    for name, times in seconds.items():
        mark = "*" if any(found["way"] == name for found in row["best"].values()) else " "
        off = row["updates_apart"].get(name)
        line = f" {mark} {name:<24}{times['median'] * 1e3:>10.1f} ms ({times['lower'] * 1e3:.0f} to "
        line += f"{times['upper'] * 1e3:.0f})  {times['median'] / ours:>6.2f} times ours"
        line += f"  loss {row['reached'][name]['loss']:.4f}" + ("" if off is None else f"  update off by {off:.1e}")
        print(line, flush=True)
    if not row["same_work"]:
        print(f"   {row['work']}: this was not the same work", flush=True)


def table(result: Mapping[str, Any]) -> list[str]:
    """Give the rows of the page's table."""
    rows = []
    for row in result["rows"]:
        cells = [f"{_model(row['model'])}, {row['parameters']:,}", str(row["batch"]), str(row["cohort"])]
        cells.append(f"{row['best']['ours']['seconds'] * 1e3:,.0f} ms")
        for name in [each for each in FAMILIES if each != "ours"]:
            found = row["best"].get(name)
            if found is not None:
                way = found["way"].partition(", ")[2]
                cells.append(f"{found['seconds'] * 1e3:,.0f} ms, {way} ({found['times_ours']:.1f})")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _model(name: str) -> str:
    return {"cnn_pfl": "pfl's CNN", "cnn_pfllib": "CNN", "mlp": "MLP"}.get(name, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(side_by_side.CPU | side_by_side.GPU), default=None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--with-pfl", type=Path, default=None, metavar="FOLDER", help="where pfl 0.6.0 lies")
    parser.add_argument("--with-jax", type=Path, default=None, metavar="FOLDER", help="where JAX lies (CPU only)")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="WAY", help="ways that are left out, by their names"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2, help="rounds before the clock runs")
    parser.add_argument("--smallest", action="store_true", help="next to no work, once: a trial")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument(
        "--clock", choices=list(measuring.CLOCKS), default="wall", help="by which times the best is told"
    )
    parser.add_argument("--add", action="store_true", help="keep the file's rows that are not measured again")
    args = parser.parse_args(argv)
    if args.smallest:
        args.threads, args.repeats, args.warm = 1, 1, 0
    works = side_by_side.GPU if args.device == "cuda" else {name: side_by_side.CPU[name] for name in CPU_WORKS}
    chosen = {
        name: side_by_side.smallest(work) if args.smallest else work
        for name, work in works.items()
        if args.only is None or name in args.only
    }
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    absent = {
        name: "not asked for" if folder is None else module.find(folder)
        for name, folder, module in (("pfl", args.with_pfl, pfl_research), ("jax", args.with_jax, jax_program))
    }
    absent = {name: why for name, why in absent.items() if why is not None}
    for name, why in absent.items():
        print(f"{name} does not play: {why}")
    pfl, jax = (None if name in absent else folder for name, folder in (("pfl", args.with_pfl), ("jax", args.with_jax)))
    making = makers(args.device, args.threads, pfl, jax)
    making = {name: make for name, make in making.items() if name not in args.without}
    facts = measuring.facts(args.device, pfl=pfl, jax=jax)
    rows = measuring.kept(args.json, "work", chosen) if args.add else []
    for name, work in chosen.items():
        torch.compiler.reset()
        row = measure(name, work, args.device, making, args.repeats, args.warm, args.clock)
        show(row, args.clock)
        rows.append(row)
        rows.sort(key=lambda known: list(works).index(known["work"]))
        found = {
            "command": "benchmarks/rivals_at_their_best.py",
            **facts,
            "absent": absent,
            "clock": args.clock,
            "rows": rows,
        }
        measuring.write(args.json, found)


if __name__ == "__main__":
    main()
