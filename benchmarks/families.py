"""Recurrent nets and transformers: the batched engine against client after client, side by side in one run.

    python benchmarks/families.py
    python benchmarks/families.py --clients 50 --batch 20 --device cuda

The work is one round of FedAvg's client side: every client starts from the same model and takes its local steps.
``loop`` is the engine that calls the plain module for one client after another; ``vmap`` and ``stacked`` are the two
ways of the batched engine. Each figure is the median over repeats, taken in turn. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from measuring import CLOCKS, interleaved
from torch import Tensor, nn

from coterie import randomness
from coterie.algorithms.local_training import Minibatches, Optimiser, ProximalTraining
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Call, Engine
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.data.partitions import Ragged
from coterie.memory import keep_freed_memory
from coterie.models.problem import Problem

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


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "transformer": Transformer,
}


def make_samples(clients: int, per_client: int, device: str, words: int = WORDS, times: int = TIMES) -> Samples:
    draw = randomness.stream(1, "benchmark")
    count = clients * per_client
    x = torch.from_numpy(draw.integers(words, size=(count, times))).to(device)
    y = torch.from_numpy(draw.integers(OUTPUTS, size=count)).to(device)
    index = Ragged.of(list(torch.arange(count).split(per_client)))
    none = Ragged.of([torch.arange(0) for _ in range(clients)])
    one = torch.ones((), device=device)
    splits = {"train": index, "validation": none, "test": none}
    splits = {name: Ragged(each.flat.to(device), each.offsets.to(device)) for name, each in splits.items()}
    return Samples(x, y, one, 0 * one, splits, torch.zeros(clients, OUTPUTS, device=device), None, torch.float32)


def round_of(engine: Engine, batch: int) -> Callable[[], None]:
    task = ProximalTraining(Optimiser(lr=0.05), Minibatches(batch))
    clients = torch.arange(engine.samples.clients, device=engine.device)
    message = {"w": engine.problem.start.expand(len(clients), -1)}

    def run() -> None:
        with torch.no_grad():
            engine.run(task, clients, {}, message, Call(1))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="processor: of one thread on a CPU")
    args = parser.parse_args()
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.clients} clients of {args.steps} steps")
    print(f"{'model':<14}{'loop ms':>10}{'vmap ms':>10}{'stacked ms':>12}{'loop / stacked':>16}")
    samples = make_samples(args.clients, args.batch * args.steps, args.device)
    for name, make in FAMILIES.items():
        with randomness.torch_stream(1, "benchmark model"):
            module = make()
        problems = [Problem.of(copy.deepcopy(module), device=args.device) for _ in range(3)]
        engines: dict[str, Engine] = {
            "loop": LoopEngine(problems[0], samples, 1),
            "vmap": BatchedEngine(problems[1], samples, 1, kernel="vmap"),
            "stacked": BatchedEngine(problems[2], samples, 1),
        }
        rounds = {way: round_of(engine, args.batch) for way, engine in engines.items()}
        found = interleaved(rounds, args.repeats, device=args.device, clock=CLOCKS[args.clock])
        ms = {way: each["median"] * 1e3 for way, each in found.items()}
        ratio = ms["loop"] / ms["stacked"]
        print(f"{name:<14}{ms['loop']:>10.1f}{ms['vmap']:>10.1f}{ms['stacked']:>12.1f}{ratio:>16.2f}", flush=True)


if __name__ == "__main__":
    main()
