"""Recurrent nets, transformers, a residual net with BatchNorm, adapters: all clients at once against one after another.

    python benchmarks/families.py
    python benchmarks/families.py --clients 50 --batch 20 --device cuda
    python benchmarks/families.py --only LSTM:clients=50 LoRA:clients=100,batch=8,steps=2,size=base
        --ways plain stacked --device cuda --precision tf32 --json families.json

The work is one round of FedAvg's client side: every client starts from the same model and takes its local steps.
``plain`` is a loop in PyTorch alone, with the module as its author wrote it and ``torch.optim.SGD``; ``loop`` is the
engine that calls the module for one client after another; ``vmap`` and ``stacked`` are the two ways of the batched
engine. Each figure is the median over repeats, taken in turn. Nothing is asserted. A model's clients, batches and steps
may be given after its name.

ResNet-18 is torchvision's where that is installed, else the same layers from plain modules; its images are 32 by 32.
LoRA is that of ``benchmarks/adapters.py`` and needs the extra ``hf``: its ``plain`` is PEFT, and ``vmap`` is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import CLOCKS, Others, facts, interleaved, kept, write
from torch import Tensor, nn

from coterie import models, randomness
from coterie.algorithms.base import Task
from coterie.algorithms.local_training import Minibatches, Optimiser, ProximalTraining
from coterie.algorithms.running_statistics import STATISTICS, MeasuredTask
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Call, Engine
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.data.partitions import Ragged
from coterie.memory import keep_freed_memory
from coterie.models.problem import Problem
from coterie.rows import Columns, matrix_units

WORDS, TIMES, WIDTH, OUTPUTS = 100, 20, 32, 10


class Recurrent(nn.Module):
    """An embedding, a recurrent layer, a linear layer on what it ends with."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = kind(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.body(self.words(x))
        return self.head(out[:, -1])


class Transformer(nn.Module):
    """An embedding, two encoder layers, a linear layer on the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x)).mean(1))


class Positions(nn.Module):
    """Adds a vector to each place of a sequence."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(places, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class VisionTransformer(nn.Module):
    """Patches of 8 by 8, four encoder layers, a linear layer on the mean over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 2 * WIDTH, 8, 8)
        self.positions = Positions(16)
        layer = nn.TransformerEncoderLayer(2 * WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(2 * WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.positions(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


class Block(nn.Module):
    """Two convolutions around which the input goes on."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def resnet18() -> nn.Module:
    with contextlib.suppress(ImportError):
        from torchvision.models import resnet18

        return resnet18(num_classes=OUTPUTS)
    blocks, before = [], 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(before, width, stride), Block(width, width, 1)]
        before = width
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, OUTPUTS))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "LSTM": (lambda: Recurrent(nn.LSTM), True),
    "GRU": (lambda: Recurrent(nn.GRU), True),
    "transformer": (Transformer, True),
    "ViT": (VisionTransformer, False),
    "MLP": (lambda: models.build("mlp", (3, 32, 32), OUTPUTS), False),
    "CNN": (lambda: models.build("cnn_cifar_flame", (3, 32, 32), OUTPUTS), False),
    "ResNet-18": (resnet18, False),
}
"""How each is made, and whether its samples are words rather than images."""
LORA = "LoRA"
WAYS = ("plain", "loop", "vmap", "stacked")


def make_samples(clients: int, per_client: int, device: str, words: int | None = WORDS, times: int = TIMES) -> Samples:
    """Draw texts of so many numbers of words below ``words``, or images where it is none."""
    draw = randomness.stream(1, "benchmark")
    count = clients * per_client
    if words is not None:
        x = torch.from_numpy(draw.integers(words, size=(count, times))).to(device)
    else:
        x = torch.from_numpy(draw.standard_normal((count, 3, 32, 32), dtype="float32")).to(device)
    y = torch.from_numpy(draw.integers(OUTPUTS, size=count)).to(device)
    index = Ragged.of(list(torch.arange(count).split(per_client)))
    none = Ragged.of([torch.arange(0) for _ in range(clients)])
    one = torch.ones((), device=device)
    splits = {"train": index, "validation": none, "test": none}
    splits = {name: Ragged(each.flat.to(device), each.offsets.to(device)) for name, each in splits.items()}
    return Samples(x, y, one, 0 * one, splits, torch.zeros(clients, OUTPUTS, device=device), None, torch.float32)


def round_of(engine: Engine, batch: int) -> Callable[[], None]:
    task: Task = ProximalTraining(Optimiser(lr=0.05), Minibatches(batch))
    clients = torch.arange(engine.samples.clients, device=engine.device)
    message, state = {"w": engine.problem.start.expand(len(clients), -1)}, {}
    if engine.problem.statistics.size:
        task, state = (
            MeasuredTask(task, {"": STATISTICS}, Columns(())),
            {STATISTICS: engine.problem.running.expand(len(clients), -1)},
        )

    def run() -> None:
        with torch.no_grad():
            engine.run(task, clients, state, message, Call(1))

    return run


def plain_round(module: nn.Module, samples: Samples, batch: int, precision: str) -> Callable[[], None]:
    """One client after another in PyTorch alone; the models that come out are kept, as a server needs them."""
    module = module.to(samples.y.device).train()
    begin = copy.deepcopy(module.state_dict())
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)

    def run() -> None:
        ends: list[dict[str, Any]] = []
        with matrix_units.tf32(precision == "tf32"):
            for client in range(samples.clients):
                module.load_state_dict(begin)
                mine = samples.splits["train"][client]
                for index in mine[torch.randperm(len(mine), device=mine.device)].split(batch):
                    optimiser.zero_grad()
                    F.cross_entropy(module(samples.x[index]), samples.y[index]).backward()
                    optimiser.step()
                ends.append({name: value.clone() for name, value in module.state_dict().items()})

    return run


@dataclass(frozen=True)
class Work:
    """One model, and what its clients do in a round."""

    name: str
    clients: int
    batch: int
    steps: int
    size: str = "small"

    @property
    def label(self) -> str:
        return f"{self.name}, {self.clients} clients, {self.steps} steps of {self.batch}"

    @classmethod
    def parse(cls, text: str, args: argparse.Namespace) -> Work:
        name, _, rest = text.partition(":")
        given = dict(part.split("=") for part in rest.split(",") if part)
        own = {key: value if key == "size" else int(value) for key, value in given.items()}
        return cls(**({"name": name, "clients": args.clients, "batch": args.batch, "steps": args.steps} | own))

    def rounds(self, ways: list[str], device: str, precision: matrix_units.Precision) -> dict[str, Callable[[], None]]:
        """Give a round of each way."""
        if self.name == LORA:
            from adapters import SIZES, adapter_rounds

            samples = make_samples(self.clients, self.batch * self.steps, device, SIZES[self.size]["vocab_size"], 64)
            found = adapter_rounds(self.size, samples, self.batch, device, precision)
            named = {"plain": "peft", "loop": "loop", "stacked": "batched"}
            return {way: found[named[way]] for way in ways if way in named}
        make, words = FAMILIES[self.name]
        samples = make_samples(self.clients, self.batch * self.steps, device, WORDS if words else None)
        with randomness.torch_stream(1, "benchmark model"):
            module = make()
        rounds: dict[str, Callable[[], None]] = {}
        for way in ways:
            if way == "plain":
                rounds[way] = plain_round(copy.deepcopy(module), samples, self.batch, precision)
                continue
            problem = Problem.of(copy.deepcopy(module), device=device)
            if way == "loop":
                rounds[way] = round_of(LoopEngine(problem, samples, 1), self.batch)
                continue
            engine = BatchedEngine(problem, samples, 1, kernel=way, precision=precision)
            assert engine.kernel == way, f"{self.name} cannot be run {way}"
            rounds[way] = round_of(engine, self.batch)
        return rounds


def table(found: Mapping[str, Any]) -> list[str]:
    """Give the rows of the page's table: milliseconds of a round, and how many times one is as fast as another."""
    lines = []
    ways = [way for way in WAYS if any(way in row["seconds"] for row in found["rows"])]
    for row in found["rows"]:
        ms = {way: each["median"] * 1e3 for way, each in row["seconds"].items()}
        figures = ["–" if way not in ms else f"{ms[way]:.3g}" if ms[way] < 1000 else f"{ms[way]:,.0f}" for way in ways]
        ratios = [f"{ms[way] / ms['stacked']:.3g}" for way in ("plain", "loop") if way in ms]
        what = f"{row['clients']} × {row['steps']} × {row['batch']}"
        lines.append("| " + " | ".join([row["name"], what, *figures, *ratios]) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="processor: of one thread on a CPU")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32"])
    parser.add_argument("--only", nargs="+", default=list(FAMILIES)[:-1], help="MODEL or MODEL:clients=20,batch=50")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--add", action="store_true", help="keep the file's rows of other models and sizes")
    parser.add_argument("--smallest", action="store_true", help="two clients, one step, once: to see that it runs")
    args = parser.parse_args(arguments)
    if args.smallest:
        args.clients, args.batch, args.steps, args.repeats = 2, 4, 1, 1
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    on = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {on}, {args.precision}, clock: {args.clock}")
    head = f"{'model':<14}{'clients':>8}{'steps':>6}{'batch':>6}"
    print(head + "".join(f"{way + ' ms':>12}" for way in args.ways) + f"{args.ways[0] + ' / last':>16}")
    rows = []
    for text in args.only:
        work = Work.parse(text, args)
        with Others() as others:
            rounds = work.rounds(args.ways, args.device, args.precision)
            with matrix_units.rounded(args.precision) if work.name == LORA else contextlib.nullcontext():
                found = interleaved(rounds, args.repeats, device=args.device, clock=CLOCKS[args.clock])
        del rounds
        times = [found[way]["median"] if way in found else None for way in args.ways]
        figures = "".join(f"{'-' if each is None else f'{each * 1e3:.1f}':>12}" for each in times)
        ratio = times[0] / times[-1] if times[0] is not None and times[-1] is not None else math.nan
        print(f"{work.name:<14}{work.clients:>8}{work.steps:>6}{work.batch:>6}{figures}{ratio:>16.2f}", flush=True)
        about = {"precision": args.precision, "clock": args.clock, "repeats": args.repeats}
        rows.append({"work": work.label, **asdict(work), **about, "seconds": found, "others": others.share})
    if args.add:
        rows = kept(args.json, "work", [row["work"] for row in rows]) + rows
    write(args.json, {"command": "benchmarks/families.py", **facts(args.device), "rows": rows})


if __name__ == "__main__":
    main()
