"""Rounds of FedAvg by Coterie, by a plain loop, by pfl-research and by Flower's simulation engine, in one run.

    python benchmarks/side_by_side.py                                  ours and the plain loop, on two CPU cores
    python benchmarks/side_by_side.py --with-pfl FOLDER --with-flower FOLDER --json FILE
    python benchmarks/side_by_side.py --device cuda --with-pfl FOLDER  the larger shapes, on a GPU

All play whole rounds (send the model, train, average) of the same work: the same initial model, the same samples, as
many clients, steps and samples a step. Rounds are taken in turn. At the end the models that all have reached are scored
on the same samples: whoever had done less, or something else, would have another loss. Batch orders differ (Coterie
shuffles, the others do not), so losses agree closely and not exactly.

How to get the folders, which nothing else here needs; what Coterie has installed stays as it is:

    pip install --target PFL --no-deps pfl==0.6.0 dp-accounting==0.5.0 prv-accountant==0.2.0 multiprocess==0.70.19 \\
        dill==0.4.1 attrs absl-py dm-tree
    pip install --target RAY --no-deps ray==2.55.1 jsonschema msgpack attrs referencing rpds-py \\
        jsonschema-specifications typing_extensions                    (beside flwr, of the extra ``federation``)

A ratio is the rival's seconds by ours, taken within each repeat; its median and quartiles are given. On a machine that
others use too, seconds say little: the processor time that each has used is noted as well (with one thread, and no
cores to wait for, it is the same), and which part of the cores others had; ``--clock processor`` makes tables and
pictures of that. ``roofline`` is the part of our time that the counted operations or bytes would take at the rates of a
plain matrix product and a plain copy, which are timed in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import measuring
import rivals
from rivals import Federation, Work, flower, pfl_research
from rivals.ours import Ours
from rivals.plain import PlainLoop

from coterie.memory import keep_freed_memory

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
CPU = {
    "linear-10": Work("linear", GREY, (100,) * 100, 100, 10),
    "linear-50": Work("linear", GREY, (500,) * 100, 100, 50),
    "mlp-10": Work("mlp", GREY, (100,) * 100, 100, 10),
    "mlp-50": Work("mlp", GREY, (500,) * 100, 100, 50),
    "cnn-10": Work("cnn_pfllib", GREY, (100,) * 10, 10, 10),
    "cnn-50": Work("cnn_pfllib", GREY, (500,) * 10, 10, 50),
    # pfl-research's own benchmark but for its cohort of 50, which would take half a minute a round here
    "pfl": Work("cnn_pfl", COLOUR, (50,) * 1000, 5, 10),
}
# as unequal as Dirichlet 0.1 on Fashion-MNIST: 52,000 samples, the largest client has 653 steps and the smallest 40
UNEQUAL = (393, 421, 490, 598, 742, 919, 1128, 1370, 1642, 1944)
UNEQUAL += (2275, 2636, 3026, 3443, 3889, 4362, 4863, 5390, 5944, 6525)
GPU = {
    "pfl": Work("cnn_pfl", COLOUR, (50,) * 1000, 50, 10),
    "pfllib": Work("cnn_pfllib", GREY, UNEQUAL, 20, 10, lr=0.005),
    "mlp": Work("mlp", GREY, (500,) * 100, 100, 50),
}
BARS = {"linear-10": 6.0, "linear-50": 4.0, "mlp-10": 2.0, "mlp-50": 1.2, "cnn-10": 1.0, "cnn-50": 1.0, "pfl": 1.0}
Times = dict[str, list[float]]
APART = 0.15  # losses further apart than this part of what was learnt (two dropouts: 0.05) are not of the same work


@dataclass(frozen=True)
class Setting:
    """Where to play, who plays and how often."""

    device: str = "cpu"
    pfl: Path | None = None
    flower: Path | None = None
    threads: int = 2
    repeats: int = 7
    warm: int = 2
    smallest: bool = False
    clock: str = "wall"

    def contenders(self, federation: Federation) -> dict[str, rivals.Rival]:
        """Give those that can play; those that cannot are left out by :func:`seen_to`."""
        found: dict[str, rivals.Rival] = {"ours": Ours(federation)}
        if self.device == "cuda":
            found["ours, tf32"] = Ours(federation, precision="tf32")
        found["loop"] = PlainLoop(federation)
        if self.pfl is not None:
            found["pfl"] = pfl_research.PflResearch(federation)
        if self.flower is not None:
            found["flower"] = flower.FlowerSimulation(federation, self.flower, self.threads)
        return found


def seen_to(setting: Setting) -> tuple[Setting, dict[str, str]]:
    """Leave out who cannot play, and say why."""
    absent = {}
    for name, module in (("pfl", pfl_research), ("flower", flower)):
        folder = getattr(setting, name)
        why = module.find(folder) if folder is not None else "not asked for"
        if name == "flower" and setting.device != "cpu":
            why = "its clients compute on a CPU here"
        if why is not None:
            absent[name] = why
            setting = replace(setting, **{name: None})
    return setting, absent


def smallest(work: Work) -> Work:
    """Give as little of the same kind of work as there can be."""
    return replace(work, sizes=(2 * work.batch,) * 3, cohort=min(work.cohort, 2))


def measure(name: str, work: Work, setting: Setting) -> dict[str, Any]:
    """Let all play the same rounds in turn."""
    rates = measuring.ceilings(setting.device, setting.smallest, measuring.CLOCKS[setting.clock])
    federation = Federation(work, setting.device)
    played = play(federation, setting.contenders(federation), setting)
    times, used, seconds, processor = played.times, played.used, played.seconds, played.processor
    counted = processor if setting.clock == "processor" else seconds
    floors = {rival: rivals.floor(work, rates, _product(rival)) for rival in times}
    return {
        **facts_of(name, work, federation),
        "samples": work.samples,
        "seconds": seconds,
        "ratios": _ratios(times),
        "processor_seconds": processor,
        "processor_ratios": _ratios(used),
        "bar": BARS[name] if setting.device == "cpu" else None,
        "samples_a_second": {rival: work.samples / found["median"] for rival, found in counted.items()},
        "roofline": {rival: floors[rival]["seconds"] / found["median"] for rival, found in counted.items()},
        "floor": floors["ours"],
        "ceilings": rates,
        "others_share_of_cores": played.others.share,
        "start": played.start,
        "reached": played.reached,
        "losses_apart": played.losses_apart,
        "same_work": played.losses_apart <= APART,
    }


def facts_of(name: str, work: Work, federation: Federation) -> dict[str, Any]:
    """Say what the work is."""
    return {
        "work": name,
        "model": work.model,
        "parameters": sum(parameter.numel() for parameter in federation.module().parameters()),
        "clients": len(work.sizes),
        "cohort": work.cohort,
        "batch": work.batch,
        "steps": work.steps,
    }


@dataclass(frozen=True)
class Played:
    """What came of a work that all played in turn."""

    start: dict[str, float]
    reached: dict[str, dict[str, float]]
    times: Times
    used: Times
    others: measuring.Others

    @property
    def losses_apart(self) -> float:
        """How far apart they ended, as a part of the way that they went."""
        return rivals.same_work(list(self.reached.values()), self.start["loss"])

    @property
    def seconds(self) -> dict[str, dict[str, Any]]:
        """Seconds of a round by the wall's clock."""
        return {each: measuring.spread(taken) for each, taken in self.times.items()}

    @property
    def processor(self) -> dict[str, dict[str, Any]]:
        """Seconds of processor time of a round."""
        return {each: measuring.spread(taken) for each, taken in self.used.items()}


def play(federation: Federation, playing: Mapping[str, rivals.Rival], setting: Setting) -> Played:
    """Have all play in turn, and end them whatever happens."""
    try:
        start = federation.score(playing["ours"].parameters())
        times, used, others = in_turn(playing, setting)
        reached = {each: federation.score(player.parameters()) for each, player in playing.items()}
    finally:
        for player in playing.values():
            player.close()
    return Played(start, reached, times, used, others)


def in_turn(playing: Mapping[str, rivals.Rival], setting: Setting) -> tuple[Times, Times, measuring.Others]:
    """Play round after round, all in turn; watch what else runs, but not while Flower's processes do."""
    others = measuring.Others()
    times: Times = {rival: [] for rival in playing}
    used: Times = {rival: [] for rival in playing}
    for repeat in range(setting.warm + setting.repeats):
        for rival, player in playing.items():
            before = player.processor_seconds()
            with others if rival != "flower" else contextlib.nullcontext():
                seconds = measuring.seconds_of(player.play, setting.device)
            if repeat >= setting.warm:
                times[rival].append(seconds)
                used[rival].append(player.processor_seconds() - before)
    return times, used, others


def _ratios(times: Times) -> dict[str, dict[str, float]]:
    """Give each one's times by ours, repeat by repeat."""
    return {
        rival: measuring.spread(theirs / max(ours, 1e-9) for theirs, ours in zip(taken, times["ours"], strict=True))
        for rival, taken in times.items()
        if rival != "ours"
    }


def _product(rival: str) -> str:
    return "product_tf32_gflop_s" if rival == "ours, tf32" else "product_gflop_s"


def rows_of(works: Mapping[str, Work], setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure works one after another, and print each."""
    for name, work in works.items():
        row = measure(name, work, setting)
        show(row)
        yield row


def show(row: dict[str, Any]) -> None:
    """Print one row of the table, a line for each that played."""
    rates = row["ceilings"]
    share = row["others_share_of_cores"]
    busy = "" if share is None else f"; others took {share:.0%} of the cores"
    print(f"copy {rates['copy_gb_s']:.1f} GB/s, product {rates['product_gflop_s']:.0f} GFLOP/s{busy}")
    for rival, times in row["seconds"].items():
        line = f"{row['work']:<10}{rival:<11}{times['median'] * 1e3:>9.1f} ms"
        line += f" ({times['lower'] * 1e3:.0f} to {times['upper'] * 1e3:.0f})".ljust(18)
        line += f"{row['samples_a_second'][rival]:>10,.0f} samples/s  roofline {row['roofline'][rival]:>6.1%}"
        line += f"  loss {row['reached'][rival]['loss']:.4f}"
        if rival in row["ratios"]:
            ratio = row["ratios"][rival]
            line += f"  {ratio['median']:>6.2f} times ours ({ratio['lower']:.2f} to {ratio['upper']:.2f}),"
            line += f" {row['processor_ratios'][rival]['median']:.2f} times the processor time"
        print(line, flush=True)
    if not row["same_work"]:
        print(
            f"{row['work']:<10}the losses lie {row['losses_apart']:.0%} apart: this was not the same work", flush=True
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CPU | GPU), default=None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--with-pfl", type=Path, default=None, metavar="FOLDER", help="where pfl 0.6.0 lies")
    parser.add_argument("--with-flower", type=Path, default=None, metavar="FOLDER", help="where Ray lies (CPU only)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2, help="rounds before the clock runs")
    parser.add_argument("--smallest", action="store_true", help="next to no work, once: a trial")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--clock", choices=list(measuring.CLOCKS), default="wall", help="which times the page shows")
    parser.add_argument("--add", action="store_true", help="keep the file's rows that are not measured again")
    args = parser.parse_args(argv)
    if args.smallest:
        args.threads, args.repeats, args.warm = 1, 1, 0
    table = CPU if args.device == "cpu" else GPU
    works = {name: smallest(work) if args.smallest else work for name, work in table.items()}
    works = {name: work for name, work in works.items() if args.only is None or name in args.only}
    keep_freed_memory()  # as the command line does; whoever plays in this process profits
    torch.set_num_threads(args.threads)
    folders = {"pfl": args.with_pfl, "flower": args.with_flower}
    often = {"repeats": args.repeats, "warm": args.warm, "smallest": args.smallest, "clock": args.clock}
    setting, absent = seen_to(Setting(args.device, **folders, threads=args.threads, **often))
    for rival, why in absent.items():
        print(f"{rival} does not play: {why}")
    facts = measuring.facts(args.device, pfl=args.with_pfl, flwr=None, ray=args.with_flower)
    rows = measuring.kept(args.json, "work", works) if args.add else []
    for row in rows_of(works, setting):
        rows.append(row)
        rows.sort(key=lambda known: list(table).index(known["work"]))
        found = {"command": "benchmarks/side_by_side.py", **facts, "absent": absent, "clock": args.clock, "rows": rows}
        measuring.write(args.json, found)


if __name__ == "__main__":
    main()
