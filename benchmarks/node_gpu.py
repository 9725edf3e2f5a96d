"""A silo's node on its GPU against the same node on its CPU: seconds from a message to the reply.

    python benchmarks/node_gpu.py [--samples 6000] [--rounds 5] [--model cnn_mcmahan] [--json FILE]

A federation of two members in this process, without Flower: FedACS on images of 1x28x28 drawn at random, in 10 classes.
The messages are what a server sends, and what is timed is all that a node does with one: reading it, its state on disk,
local training, evaluation of the last round's models, writing and packing. Kinds of nodes: ``cpu loop``, as a node is
by default, ``cpu batched``, and ``cuda batched`` where there is a GPU. Each plays the same rounds; the first two, in
which the run is put together and kernels are compiled, are not counted. Beside the times stands how far the replies of
a kind are from those of ``cpu loop`` in the first round, from the same start: relative to the length of the update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import measuring
import torch

from coterie.data import Dataset
from coterie.federation.agreement import Agreement, Member, Schema
from coterie.federation.node import Node
from coterie.federation.plan import Plan
from coterie.federation.resident import Means
from coterie.federation.server import serve
from coterie.federation.transport import Failure
from coterie.federation.wire import unpack

MEMBERS, LIMIT = 2, 2**31


class Timing:
    """A transport in one process that times the first node's answers."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self._nodes = nodes
        self.seconds: dict[int, float] = {}
        self.updates: dict[int, torch.Tensor] = {}

    def nodes(self) -> dict[int, str]:
        return dict.fromkeys(self._nodes, "")

    def exchange(
        self, messages: Mapping[int, bytes], deadline: float, patience: frozenset[int]
    ) -> dict[int, bytes | Failure]:
        out: dict[int, bytes | Failure] = {}
        for number, message in messages.items():
            began = time.perf_counter()
            reply = self._nodes[number].handle(message)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took = time.perf_counter() - began
            header = unpack(reply, LIMIT).header
            if header.get("error"):
                raise RuntimeError(header["error"])
            if number == 0 and header.get("purpose") == "round":
                self.seconds[int(header["round"])] = took
                envelope = unpack(reply, LIMIT)
                sent = unpack(message, LIMIT).under("message")
                (name,) = [each for each in envelope.under("reply") if each in sent] or [""]
                told = envelope.under("reply")
                whole = torch.cat([value.reshape(-1).double() for value in told.values()])
                self.updates[int(header["round"])] = whole - sent[name].double() if name else whole
            out[number] = reply
        return out


def images(samples: int, seed: int) -> Dataset:
    draw = torch.Generator()
    draw.manual_seed(seed)
    y = torch.randint(10, (samples,), generator=draw)
    means = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    x = (means[y] + 0.3 * torch.randn(samples, 1, 28, 28, generator=draw)).clamp(0, 1)
    return Dataset("images", x, y, samples, "multiclass", tuple(map(str, range(10))), (0.5,), (0.25,))


def play(kind: str, options: argparse.Namespace, folder: Path) -> Timing:
    device, engine = kind.split()
    schema = Schema(input_shape=(1, 28, 28), classes=tuple(map(str, range(10))), mean=(0.5,), std=(0.25,))
    members = tuple(Member(name=f"silo-{number}") for number in range(MEMBERS))
    agreed = Agreement(name="gpu", members=members, data=schema, model=options.model, seed=1, threads=options.threads)
    means = Means(engine=engine, device=device, threads=options.threads)  # type: ignore[arg-type]
    # The other member is there so that there is somebody to attend to; it has few samples, and is not timed.
    sizes = [options.samples, min(options.samples, 200)]
    nodes = {
        number: Node(agreed, number, images(sizes[number], number + 2), folder / f"{number}", means=means)
        for number in range(MEMBERS)
    }
    grid = Timing(nodes)
    settings = {"local_epochs": options.epochs, "batch_size": options.batch}
    plan = Plan(algorithm="fedacs", rounds=options.rounds, wait=0.0, settings=settings)
    serve(agreed, grid, plan, folder / "run")
    return grid


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--model", default="cnn_mcmahan")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    kinds = ["cpu loop", "cpu batched", *(["cuda batched"] if torch.cuda.is_available() else [])]
    found = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = play(kind, options, Path(folder))
        print(kind, {number: round(value, 4) for number, value in found[kind].seconds.items()}, flush=True)
    base, rows = found["cpu loop"], []
    for kind, grid in found.items():
        timed = [value for number, value in grid.seconds.items() if number > 2]
        away = float((grid.updates[1] - base.updates[1]).norm() / base.updates[1].norm())
        rows.append(
            {
                "node": kind,
                "seconds a message": statistics.median(timed),
                "first message": grid.seconds[1],
                "times the cpu node": statistics.median(base.seconds[number] for number in base.seconds if number > 2)
                / statistics.median(timed),
                "first update differs by": away,
            }
        )
    print(json.dumps(rows, indent=1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown = {name: value for name, value in vars(options).items() if name != "json"}
    facts = {"command": "benchmarks/node_gpu.py", **measuring.facts(device), "threads": options.threads}
    measuring.write(options.json, {**facts, "options": shown, "rows": rows})


if __name__ == "__main__":
    main()
