"""Ways to convolve each client's samples with its own filters, side by side on one GPU.

python benchmarks/convolutions.py
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from gpu import DEVICE, median_ms

from coterie.compute.nets.layers import _conv2d_unfold

SHAPES = {
    "pfl conv1": (50, 10, 3, 32, 32, 3),
    "pfl conv2": (50, 10, 32, 64, 30, 3),
    "pfllib conv1": (20, 10, 1, 32, 28, 5),
    "pfllib conv2": (20, 10, 32, 64, 12, 5),
}


def grouped(x: Tensor, w: Tensor, rows: int, last: bool) -> Tensor:
    wide = x.unflatten(0, (rows, -1)).transpose(0, 1).flatten(1, 2)
    if last:
        wide = wide.contiguous(memory_format=torch.channels_last)
    out = F.conv2d(wide, w.flatten(0, 1), None, 1, 0, 1, rows)
    return out.unflatten(1, (rows, -1)).transpose(0, 1).flatten(0, 1)


def unfolded(x: Tensor, w: Tensor, rows: int, last: bool) -> Tensor:
    layer = nn.Conv2d(w.shape[2], w.shape[1], w.shape[-1], bias=False, device="meta")
    return _conv2d_unfold(layer, w, None, x, rows)


def backward(way: Any, x: Tensor, w: Tensor, rows: int, last: bool, wanted: Any, grad: Tensor) -> None:
    torch.autograd.grad(way(x, w, rows, last), wanted, grad)


def main() -> None:
    for name, (rows, batch, inside, outside, side, k) in SHAPES.items():
        x = torch.randn(rows * batch, inside, side, side, device=DEVICE)
        w = torch.randn(rows, outside, inside, k, k, device=DEVICE)
        for tf32, bench in itertools.product((True, False), (False, True)):
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.benchmark = bench
            line = []
            for label, way, last in (
                ("grouped", grouped, False),
                ("grouped last", grouped, True),
                ("unfold", unfolded, False),
            ):
                if bench and "grouped" not in label:
                    continue
                with torch.no_grad():
                    forward = median_ms(partial(way, x, w, rows, last), 5, 3)
                xg, wg = x.clone().requires_grad_(not name.endswith("1")), w.clone().requires_grad_()
                wanted = (xg, wg) if xg.requires_grad else (wg,)
                grad = torch.randn_like(way(xg, wg, rows, last))
                both = partial(backward, way, xg, wg, rows, last, wanted, grad)
                line.append(f"{label} {forward:.3f}/{median_ms(both, 5, 3):.3f}")
            print(f"{name:13} tf32={tf32!s:5} benchmark={bench!s:5} fwd/fwd+bwd ms: " + "; ".join(line), flush=True)


if __name__ == "__main__":
    main()
