"""Where the time of a round goes on a GPU: kernels, and the host's phases.

python benchmarks/profile_gpu.py {pfl,pfllib,cnn,mlp,fedpg} [--precision KIND] [--convolution KIND] [--top N]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from gpu import DEVICE, randomness, samples_of, simulation, synchronise

from coterie.compute import batched, cuda_graphs
from coterie.compute.engine import Engine

SHAPES: dict[str, tuple[str, int | None, list[int], tuple[int, ...], str, int]] = {
    "pfl": ("fedavg", 10, [50] * 1000, (3, 32, 32), "cnn_pfl", 50),
    "pfllib": ("fedavg", 10, [400 + 250 * i for i in range(20)], (1, 28, 28), "cnn_pfllib", 20),
    "cnn": ("fedavg", 50, [250] * 100, (1, 28, 28), "cnn_pfllib", 100),
    "mlp": ("fedavg", 50, [500] * 100, (1, 28, 28), "mlp", 100),
    "fedpg": ("fedpg", None, [600] * 100, (1, 28, 28), "mlp", 10),
}
"""Method, batch size, samples of each client, shape of a sample, model, clients in a round."""


def kernels(title: str, simulated: Any, cohort: int, top: int) -> None:
    total = simulated.engine.samples.clients

    def play(number: int) -> None:
        drawn = randomness.stream(1, "benchmark cohort", number).choice(total, size=cohort, replace=False)
        simulated.play_round(torch.from_numpy(drawn).sort().values.to(DEVICE), number)

    for number in (1, 2, 3):
        play(number)
    synchronise()
    spent: dict[str, float] = {}

    def clocked(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            synchronise()
            began = time.perf_counter()
            out = original(*args, **kwargs)
            synchronise()
            spent[name] = spent.get(name, 0.0) + (time.perf_counter() - began) * 1e3
            return out

        setattr(owner, name, wrapper)
        return original

    places = [
        (batched, "make_schedule"),
        (cuda_graphs.RecordedFold, "play"),
        (cuda_graphs.RecordedFold, "_load"),
        (type(simulated.engine), "run"),
        (type(simulated.clients), "scatter"),
        (type(simulated.clients), "gather"),
        (type(simulated), "_played"),
        (Engine, "client_context"),
    ]
    originals = [(owner, name, clocked(owner, name)) for owner, name in places]
    began = time.perf_counter()
    play(4)
    synchronise()
    whole = (time.perf_counter() - began) * 1e3
    for owner, name, original in originals:
        setattr(owner, name, original)
    print(f"== {title}: {whole:.2f} ms with clocks; " + ", ".join(f"{k} {v:.2f}" for k, v in spent.items()))
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        play(5)
        synchronise()
    averages = [e for e in prof.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    averages.sort(key=lambda e: -e.self_device_time_total)
    everything = sum(e.self_device_time_total for e in averages)
    print(f"   kernels {everything / 1e3:.2f} ms, {sum(e.count for e in averages)} launches")
    for e in averages[:top]:
        print(f"   {e.self_device_time_total / 1e3:8.3f} ms {e.count:6d}x  {e.key[:120]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--convolution", default=None)
    parser.add_argument("--top", type=int, default=20)
    args = parser.parse_args()
    name, batch, sizes, shape, model, cohort = SHAPES[args.shape]
    settings = {"lr": 0.05} if batch is None else {"local_epochs": 1, "batch_size": batch, "lr": 0.05}
    options = {"precision": args.precision, "convolution": args.convolution}
    simulated = simulation(name, settings, model, samples_of(sizes, shape), **options)
    kernels(f"{args.shape} {options}", simulated, cohort, args.top)


if __name__ == "__main__":
    main()
