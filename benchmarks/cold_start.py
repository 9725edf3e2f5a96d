"""How long a GPU's first round and first evaluation take: with no kernel compiled yet (cold), and with all (warm).

    python benchmarks/cold_start.py [--model cnn_pfllib] [--precision float32] [--json FILE]

The second benchmark shape: 100 clients with 250 training and 50 test images of 1x28x28 each, a CNN of 582,026
parameters, batches of 50, 5 steps. Each start is a process of its own; a cold one gets an empty folder for Triton's
compiled kernels, the warm one the same folder again. Compiled kernels are listed with their seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLIENTS, TRAIN, TEST, BATCH = 100, 250, 50, 50


def one_start(model: str, precision: str) -> dict[str, Any]:
    """Start, play and evaluate in this process; give the seconds of each phase and the kernels that were compiled."""
    began = time.perf_counter()
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        nonlocal began
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks[name] = time.perf_counter() - began
        began = time.perf_counter()

    import torch
    from torch.func import vmap  # noqa: F401  (part of what every start imports)

    from coterie.compute.samples import Samples
    from coterie.data.partitions import Ragged

    sys.path.insert(0, str(Path(__file__).parent))
    from gpu import DEVICE, simulation

    from coterie.simulation.scoring import Scorer

    mark("import")
    torch.ones(1, device=DEVICE)
    mark("device")
    compiled = watch_compiler()
    count = CLIENTS * (TRAIN + TEST)
    x, y = torch.randn(count, 1, 28, 28, device=DEVICE), torch.randint(10, (count,), device=DEVICE)
    own = torch.arange(count, device=DEVICE).view(CLIENTS, -1)
    edges = torch.arange(CLIENTS + 1, device=DEVICE)
    none = Ragged(torch.arange(0, device=DEVICE), edges * 0)
    splits = {
        "train": Ragged(own[:, :TRAIN].flatten(), edges * TRAIN),
        "validation": none,
        "test": Ragged(own[:, TRAIN:].flatten(), edges * TEST),
    }
    one = torch.ones((), device=DEVICE)
    counts = torch.zeros(CLIENTS, 10, device=DEVICE)
    samples = Samples(x, y, one, torch.zeros_like(one), splits, counts, None, torch.float32)
    mark("data")
    settings = {"local_epochs": 1, "batch_size": BATCH, "lr": 0.05}
    played = simulation("fedavg", settings, model, samples, precision=precision)
    everyone = torch.arange(CLIENTS, device=DEVICE)
    scorer = Scorer(played, everyone, everyone[:0], ("test",), 0)
    mark("model")
    played.play_round(everyone, 1)
    mark("first_round")
    scorer.scores(1)
    mark("first_evaluation")
    later = []
    for number in range(2, 9):
        played.play_round(everyone, number)
        mark("round")
        later.append(marks.pop("round"))
    scorer.scores(8)
    mark("later_evaluation")
    return {"seconds": marks, "round_ms": 1e3 * statistics.median(later[2:]), "compiled": compiled}


def watch_compiler() -> list[dict[str, Any]]:
    """Return a list that Triton's compiler adds each kernel to, if there is one."""
    compiled: list[dict[str, Any]] = []
    try:
        from triton import knobs
    except ImportError:
        return compiled

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        compiled.append({"name": src.fn.__name__, "seconds": times.total / 1e6, "cached": cache_hit})

    knobs.compilation.listener = listener
    return compiled


def main() -> None:
    """Start cold and warm, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn_pfllib")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--starts", type=int, default=3, help="starts: the first is cold")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(one_start(args.model, args.precision)))
        return
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.starts):
            words = [sys.executable, __file__, "--child", "--model", args.model, "--precision", args.precision]
            began = time.perf_counter()
            done = subprocess.run(
                words, check=True, stdout=subprocess.PIPE, env={**os.environ, "TRITON_CACHE_DIR": folder}
            )
            start = json.loads(done.stdout.splitlines()[-1])
            start["process_seconds"] = time.perf_counter() - began
            found.append(start)
            seconds = ", ".join(f"{name} {value:.2f}" for name, value in start["seconds"].items())
            fresh = [kernel for kernel in start["compiled"] if not kernel["cached"]]
            print(f"{'warm' if number else 'cold'}: {seconds}; a later round {start['round_ms']:.2f} ms; ", end="")
            print(f"{len(fresh)} kernels compiled in {sum(k['seconds'] for k in fresh):.1f} s, ", end="")
            print(f"{len(start['compiled'])} taken; whole {start['process_seconds']:.1f} s", flush=True)
            names = sorted({kernel["name"] for kernel in fresh})
            for name in names:
                mine = [kernel["seconds"] for kernel in fresh if kernel["name"] == name]
                print(f"   {name}: {len(mine)} in {sum(mine):.2f} s", flush=True)
    if args.json:
        import measuring  # here, because what a start imports is timed
        import torch

        facts = measuring.facts("cuda" if torch.cuda.is_available() else "cpu")
        measuring.write(args.json, {"command": "benchmarks/cold_start.py", **facts, "rows": found})


if __name__ == "__main__":
    main()
