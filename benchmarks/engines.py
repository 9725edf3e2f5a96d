"""The batched engine against a plain loop, side by side in one run, on one CPU.

    python benchmarks/engines.py                       the table of the documentation
    python benchmarks/engines.py --models linear mlp --batches 10 50 --repeats 7 --json FILE

The baseline is what a careful user writes by hand: one ``nn.Module`` a client, ``torch.optim.SGD``, minibatches indexed
beforehand (no DataLoader). The work is one round of FedAvg's client side: every client starts from the global model and
takes its local steps. Each figure is the median over repeats, the two taken in turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from coterie import randomness
from coterie.algorithms.local_training import Minibatches, Optimiser, ProximalTraining
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Call
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.data.partitions import Ragged
from coterie.memory import keep_freed_memory
from coterie.models import build
from coterie.models.problem import Problem

SHAPES = {"linear": (1, 28, 28), "mlp": (1, 28, 28), "cnn_pfllib": (1, 28, 28), "cnn_cifar_flame": (3, 32, 32)}
BARS = {("linear", 10): 6.0, ("mlp", 10): 2.0, ("linear", 50): 4.0, ("mlp", 50): 1.2}


def make_samples(clients: int, per_client: int, shape: tuple[int, ...]) -> Samples:
    draw = randomness.stream(1, "benchmark")
    count = clients * per_client
    x = torch.from_numpy(draw.standard_normal((count, *shape), dtype="float32"))
    y = torch.from_numpy(draw.integers(10, size=count))
    index = Ragged.of(list(torch.arange(count).split(per_client)))
    none = Ragged.of([torch.arange(0) for _ in range(clients)])
    one = torch.ones(())
    splits = {"train": index, "validation": none, "test": none}
    return Samples(x, y, one, torch.zeros(()), splits, torch.zeros(clients, 10), None, torch.float32)


def plain_loop(module: nn.Module, samples: Samples, batch: int) -> Callable[[], None]:
    """Give the baseline's round, its minibatches indexed already."""
    train = samples.splits["train"]
    data = [[(samples.x[part], samples.y[part]) for part in train[client].split(batch)] for client in range(len(train))]
    models = [copy.deepcopy(module) for _ in data]
    start = [parameter.detach().clone() for parameter in module.parameters()]

    def run() -> None:
        for model, batches in zip(models, data, strict=True):
            with torch.no_grad():
                for parameter, initial in zip(model.parameters(), start, strict=True):
                    parameter.copy_(initial)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
            for x, y in batches:
                optimiser.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimiser.step()

    return run


def ours(engine: BatchedEngine | LoopEngine, batch: int) -> Callable[[], None]:
    task = ProximalTraining(Optimiser(lr=0.05), Minibatches(batch))
    clients = torch.arange(engine.samples.clients)
    message = {"w": engine.problem.start.expand(len(clients), -1)}
    call = Call(1)

    def run() -> None:
        with torch.no_grad():
            engine.run(task, clients, {}, message, call)

    return run


def timed(functions: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["linear", "mlp", "cnn_pfllib"], choices=sorted(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[10, 50])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--with-oracle", action="store_true", help="time our own loop engine too")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    keep_freed_memory()  # as the command line does; whoever plays in this process profits
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.clients} clients, {args.steps} steps")
    print(f"{'model':<16}{'batch':>6}{'loop ms':>10}{'batched ms':>12}{'ratio':>8}{'bar':>6}")
    rows = []
    for name in args.models:
        for batch in args.batches:
            clients = args.clients if not name.startswith("cnn") else max(10, args.clients // 10)
            samples = make_samples(clients, batch * args.steps, SHAPES[name])
            with randomness.torch_stream(1, "benchmark model"):
                module = build(name, SHAPES[name], 10)
            engine = BatchedEngine(Problem.of(copy.deepcopy(module)), samples, 1, chunk=args.chunk)
            functions = {"loop": plain_loop(module, samples, batch), "batched": ours(engine, batch)}
            if args.with_oracle:
                functions["oracle"] = ours(LoopEngine(Problem.of(copy.deepcopy(module)), samples, 1), batch)
            seconds = timed(functions, args.repeats)
            ratio = seconds["loop"] / seconds["batched"]
            bar = BARS.get((name, batch), 1.0)
            extra = f"   oracle {seconds['oracle'] * 1e3:.1f} ms" if args.with_oracle else ""
            print(
                f"{name:<16}{batch:>6}{seconds['loop'] * 1e3:>10.1f}{seconds['batched'] * 1e3:>12.1f}"
                f"{ratio:>8.2f}{bar:>6.1f}{extra}",
                flush=True,
            )
            rows.append({"model": name, "batch": batch, "seconds": seconds, "ratio": ratio, "bar": bar})
            rows[-1] |= {"clients": clients, "chunk": engine.chunk, "convolution": engine.convolution}
    if args.json:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.processor()}
        args.json.write_text(json.dumps({"command": "benchmarks/engines.py", **facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
