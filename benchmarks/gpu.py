"""Rounds and server steps on one GPU, our variants side by side in one run.

    python benchmarks/gpu.py [--only pfl pfllib cnn mlp fedpg server check] [--json FILE]

Shapes: ``pfl`` is the benchmark of pfl-research (1,000 users of 50 images of 3x32x32, cohort 50, batch 10, one epoch, a
CNN of 1,626,442 parameters); ``pfllib`` is 20 clients of 52,000 images of 1x28x28 with very unequal shares, a CNN of
582,026 parameters, batch 10, one epoch; ``cnn`` is 100 clients with that model, batch 50, 5 steps; ``fedpg`` is 10 of
100 clients, an MLP, the full gradient of 600 samples; ``mlp`` is 100 clients, 784-200-10, batch 50, 10 steps;
``server`` is the attention of 1,000 clients with 1.6 million parameters. A round is the whole of
``Simulation.play_round``: messages, training, replies, aggregation, the clients' state. Figures are medians over
rounds after warm-up rounds, the device synchronised. The ceilings (a copy, a matrix product) are timed in the same
run. Beside others: side_by_side.py. With many clients of which few take part: many_clients.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coterie import randomness
from coterie.algorithms import registry
from coterie.algorithms.server_math.attention import fedacs_weights, fedamp_weights, median_squared_distance
from coterie.compute.batched import BatchedEngine
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.data.partitions import Ragged
from coterie.models import build
from coterie.models.problem import Problem
from coterie.rows import cosines, matrix_units, mix, squared_distances
from coterie.simulation.simulation import Simulation

KINDS = ("float32", "tf32", "bf16")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronise() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def median_ms(function: Callable[[], Any], repeats: int = 7, warm: int = 3) -> float:
    for _ in range(warm):
        function()
    synchronise()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        synchronise()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def samples_of(sizes: list[int], shape: tuple[int, ...]) -> Samples:
    draw = torch.Generator(device=DEVICE)
    draw.manual_seed(1)
    count = sum(sizes)
    x = torch.randn((count, *shape), generator=draw, device=DEVICE)
    y = torch.randint(10, (count,), generator=draw, device=DEVICE)
    train = Ragged.of(list(torch.arange(count).split(sizes)))
    none = Ragged.of([torch.arange(0) for _ in sizes])
    one = torch.ones((), device=DEVICE)
    splits = {
        name: Ragged(ragged.flat.to(DEVICE), ragged.offsets.to(DEVICE))
        for name, ragged in (("train", train), ("validation", none), ("test", none))
    }
    counts = torch.zeros(len(sizes), 10, device=DEVICE)
    return Samples(x, y, one, torch.zeros_like(one), splits, counts, None, torch.float32)


def simulation(name: str, settings: dict[str, Any], model: str, samples: Samples, **options: Any) -> Simulation:
    with randomness.torch_stream(1, "benchmark model"):
        module = build(model, tuple(samples.x.shape[1:]), 10)
    problem = Problem.of(module, device=DEVICE)
    engine = (
        LoopEngine(problem, samples, 1) if options.pop("loop", False) else BatchedEngine(problem, samples, 1, **options)
    )
    return Simulation(registry.make(name, settings), engine)


def round_ms(simulated: Simulation, cohort: int, repeats: int = 7) -> float:
    number = 0
    total = simulated.engine.samples.clients

    def play() -> None:
        nonlocal number
        number += 1
        drawn = randomness.stream(1, "benchmark cohort", number).choice(total, size=cohort, replace=False)
        simulated.play_round(torch.from_numpy(drawn).sort().values.to(DEVICE), number)

    return median_ms(play, repeats)


def variants(
    shape: str,
    name: str,
    settings: dict[str, Any],
    model: str,
    samples: Samples,
    cohort: int,
    which: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    rows = []
    for options in which:
        try:
            ms = round_ms(simulation(name, settings, model, samples, **dict(options)), cohort)
        except Exception as error:  # a variant that fails must not cost the others their run
            print(f"{shape:8} {name:8} {options}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        rows.append({"shape": shape, "algorithm": name, "options": options, "ms": ms})
        print(f"{shape:8} {name:8} {ms:9.2f} ms  {options}", flush=True)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def pfl() -> list[dict[str, Any]]:
    samples = samples_of([50] * 1000, (3, 32, 32))
    settings = {"local_epochs": 1, "batch_size": 10, "lr": 0.05}
    which: list[dict[str, Any]] = [{"precision": kind} for kind in KINDS] + [{"record": False}]
    return variants("pfl", "fedavg", settings, "cnn_pfl", samples, 50, which)


def pfllib() -> list[dict[str, Any]]:
    draw = randomness.stream(3, "benchmark sizes")
    shares = draw.dirichlet([1.0] * 20)
    sizes = [int(n) for n in 393 + shares / shares.sum() * (52000 - 20 * 393)]
    sizes[0] += 52000 - sum(sizes)
    samples = samples_of(sizes, (1, 28, 28))
    print(f"pfllib sizes {min(sizes)} to {max(sizes)}")
    rows = []
    for name in ("fedavg", "fedamp"):
        settings = {"local_epochs": 1, "batch_size": 10, "lr": 0.005}
        which: list[dict[str, Any]] = [{"precision": kind} for kind in KINDS]
        rows += variants("pfllib", name, settings, "cnn_pfllib", samples, 20, which)
    return rows


def mlp() -> list[dict[str, Any]]:
    samples = samples_of([500] * 100, (1, 28, 28))
    settings = {"local_epochs": 1, "batch_size": 50, "lr": 0.05}
    which: list[dict[str, Any]] = [{"precision": kind} for kind in KINDS] + [{"record": False}, {"loop": True}]
    return variants("mlp", "fedavg", settings, "mlp", samples, 100, which)


def cnn() -> list[dict[str, Any]]:
    settings = {"local_epochs": 1, "batch_size": 50, "lr": 0.05}
    which: list[dict[str, Any]] = [{"precision": kind} for kind in KINDS]
    return variants("cnn", "fedavg", settings, "cnn_pfllib", samples_of([250] * 100, (1, 28, 28)), 100, which)


def fedpg() -> list[dict[str, Any]]:
    samples = samples_of([600] * 100, (1, 28, 28))
    return variants("fedpg", "fedpg", {"lr": 0.05}, "mlp", samples, 10, [{}])


def server() -> list[dict[str, Any]]:
    draw = torch.Generator(device=DEVICE)
    draw.manual_seed(2)
    clients, parameters = (1000, 1_600_000) if DEVICE.type == "cuda" else (50, 16_000)
    base = torch.randn(parameters, generator=draw, device=DEVICE)
    w = base + 0.1 * torch.randn(clients, parameters, generator=draw, device=DEVICE)
    rows = []

    def fedacs() -> Any:
        return mix(fedacs_weights(w, 0.5), w)

    def fedamp() -> Any:
        apart = squared_distances(w)
        sigma = median_squared_distance(w, distances=apart)
        return mix(fedamp_weights(w, 2 / clients, sigma, distances=apart)[0], w)

    steps: dict[str, Callable[[], Any]] = {
        "fedacs": fedacs,
        "fedamp": fedamp,
        "fedacs weights": lambda: fedacs_weights(w, 0.5),
        "distances": lambda: squared_distances(w),
        "mix": lambda: mix(torch.full((clients, clients), 1 / clients, device=DEVICE), w),
        "mix, plain float32": lambda: torch.full((clients, clients), 1 / clients, device=DEVICE) @ w,
    }
    for kind, some in (("float32", list(steps)), ("tf32", ["fedacs", "fedamp"])):
        for name in some:
            with matrix_units.rounded(kind):  # type: ignore[arg-type]
                ms = median_ms(steps[name], 5, 2)
            label = name if kind == "float32" else f"{name}, {kind}"
            rows.append({"shape": "server", "step": label, "ms": ms})
            print(f"server   {label:20} {ms:9.2f} ms", flush=True)
    exact = torch.zeros(clients, clients, dtype=torch.float64, device=DEVICE)
    for block in w.split(2**14, dim=1):
        exact.addmm_(block.double(), block.double().T)
    length = exact.diagonal().sqrt()
    error = float((cosines(w) - exact / length.unsqueeze(1) / length).abs().max())
    square = exact.diagonal()
    apart = square.unsqueeze(1) + square - 2 * exact
    off = ~torch.eye(clients, dtype=torch.bool, device=DEVICE)
    relative = float(((squared_distances(w) - apart)[off] / apart[off]).abs().max())
    some = torch.rand(8, clients, generator=draw, device=DEVICE)
    wanted = some.double() @ w[:, : 2**14].double()
    mixed = float((mix(some, w)[:, : 2**14] - wanted).norm() / wanted.norm())
    print(f"server   errors: cosines {error:.1e}, distances {relative:.1e} relative, mix {mixed:.1e}")
    rows.append({"shape": "server errors", "cosines": error, "distances": relative, "mix": mixed})
    return rows


def check() -> list[dict[str, Any]]:
    """The engines on this device against the oracle in float64 on the CPU."""
    rows = []
    sizes = [30, 11, 25, 7]
    for model, shape in (("mlp", (1, 28, 28)), ("cnn_pfllib", (1, 28, 28)), ("cnn_pfl", (3, 32, 32))):
        ends = {}
        cpu = samples_of(sizes, shape)
        for label, options in (
            ("oracle64", {"loop": True}),
            ("recorded", {}),
            ("eager", {"record": False}),
            ("grouped", {"convolution": "grouped"}),
            ("tf32", {"precision": "tf32"}),
            ("bf16", {"precision": "bf16"}),
        ):
            simulated = simulation("fedavg", {"local_epochs": 1, "batch_size": 10, "lr": 0.05}, model, cpu, **options)
            if label == "oracle64":
                problem = simulated.engine.problem
                wide = problem.module.double()
                samples64 = Samples(
                    cpu.x.double(),
                    cpu.y,
                    cpu.scale.double(),
                    cpu.shift.double(),
                    cpu.splits,
                    cpu.class_counts.double(),
                    None,
                    torch.float64,
                )
                engine = LoopEngine(Problem.of(wide, dtype=torch.float64, device=DEVICE), samples64, 1)
                simulated = Simulation(
                    registry.make("fedavg", {"local_epochs": 1, "batch_size": 10, "lr": 0.05}), engine
                )
            for number in (1, 2):
                simulated.play_round(torch.arange(4, device=DEVICE), number)
            ends[label] = simulated.server["w"].double() - simulated.engine.problem.start.double()
        for label, end in ends.items():
            error = float((end - ends["oracle64"]).norm() / ends["oracle64"].norm())
            rows.append({"shape": "check", "model": model, "variant": label, "relative_error": error})
            print(f"check    {model:12} {label:10} relative error of the update {error:.2e}", flush=True)
    return rows


def ceilings() -> dict[str, float]:
    size = 2**30 if DEVICE.type == "cuda" else 2**24
    a = torch.empty(size // 4, device=DEVICE).normal_()
    b = torch.empty_like(a)
    copy = 2 * size / median_ms(lambda: b.copy_(a)) / 1e9
    n = 8192 if DEVICE.type == "cuda" else 512
    m = torch.randn(n, n, device=DEVICE)
    rates = {}
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        rates[f"matmul_tf32_{tf32}_tflops"] = 2 * n**3 / median_ms(lambda: m @ m) / 1e9
    torch.backends.cuda.matmul.allow_tf32 = False
    d = m.double()[: n // 2, : n // 2].contiguous()
    rates["matmul_float64_tflops"] = 2 * (n // 2) ** 3 / median_ms(lambda: d @ d) / 1e9
    return {"copy_tb_s": copy, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"check": check, "pfl": pfl, "pfllib": pfllib, "cnn": cnn, "mlp": mlp, "fedpg": fedpg, "server": server}
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    facts = {"device": name, "torch": torch.__version__, "ceilings": ceilings()}
    print(facts, flush=True)
    rows = []
    for part in args.only:
        began = time.perf_counter()
        rows += parts[part]()
        print(f"-- {part} took {time.perf_counter() - began:.0f} s", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"command": "benchmarks/gpu.py", **facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
