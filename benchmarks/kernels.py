"""Our Triton kernels beside what they replace, over tile sizes, on one GPU.

python benchmarks/kernels.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from convolutions import SHAPES
from gpu import DEVICE, median_ms

from coterie.compute.nets.layers import _conv2d_unfold
from coterie.kernels._convolution_products import Tiles, arranged, filters_gradient, images_with_filters
from coterie.kernels.convolution import ConvolutionGeometry, convolve
from coterie.rows import matrix_units

CUTS = (
    (128, 64, 32, 4, 3),
    (64, 64, 32, 4, 3),
    (128, 64, 32, 8, 3),
    (64, 32, 32, 4, 3),
    (128, 32, 32, 4, 3),
    (256, 64, 32, 8, 3),
    (128, 64, 64, 4, 2),
    (128, 64, 64, 8, 2),
    (128, 64, 16, 4, 4),
    (64, 64, 64, 4, 3),
    (64, 64, 32, 2, 3),
    (128, 64, 32, 2, 3),
    (32, 64, 32, 4, 3),
    (32, 64, 64, 2, 3),
)


def timed(function: Any) -> float:
    """Milliseconds of a recorded graph's replay: no launch gaps."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            function()
    return median_ms(graph.replay, 5, 2) / 5


def unfolded(layer: nn.Conv2d, x: Tensor, w: Tensor, wanted: Any, gradient: Tensor) -> Any:
    return torch.autograd.grad(_conv2d_unfold(layer, w, None, x, len(w)), wanted, gradient)


def fused(shape: ConvolutionGeometry, x: Tensor, w: Tensor, wanted: Any, gradient: Tensor, precision: str) -> Any:
    return torch.autograd.grad(convolve(x, w, None, shape, False, precision), wanted, gradient)


def convolutions() -> None:
    for name, (rows, batch, inside, outside, side, k) in SHAPES.items():
        x = torch.randn(rows * batch, inside, side, side, device=DEVICE)
        if inside > 3:
            x = x.contiguous(memory_format=torch.channels_last)
        w = torch.randn(rows, outside, inside, k, k, device=DEVICE)
        shape = ConvolutionGeometry((k, k), (1, 1), (0, 0), (1, 1))
        size = (side - k + 1, side - k + 1)
        gradient = torch.randn(rows * batch, outside, *size, device=DEVICE).contiguous(
            memory_format=torch.channels_last
        )
        back = ConvolutionGeometry((k, k), (1, 1), (k - 1, k - 1), (1, 1))
        exact = torch.cat([F.conv2d(x[r * batch : (r + 1) * batch].double(), w[r].double()) for r in range(rows)])
        xd, wd = x.double(), w.double().requires_grad_()
        outs = torch.cat([F.conv2d(xd[r * batch : (r + 1) * batch], wd[r]) for r in range(rows)])
        (exact_w,) = torch.autograd.grad(outs, wd, gradient.double())
        layer = nn.Conv2d(inside, outside, k, bias=False, device="meta")
        for tf32 in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            xg, wg = x.clone().requires_grad_(inside > 3), w.clone().requires_grad_()
            wanted = (xg, wg) if inside > 3 else (wg,)
            both = partial(unfolded, layer, xg, wg, wanted, gradient)
            ours = partial(fused, shape, xg, wg, wanted, gradient)
            line = f"{name} tf32={tf32}: unfold fwd+bwd {timed(both):.3f}"
            for p in ("tf32",) if tf32 else ("tf32x3", "ieee"):
                line += f"; fused {p} {timed(partial(ours, p)):.3f}"
            print(line, flush=True)
        torch.backends.cuda.matmul.allow_tf32 = False
        for precision in ("bf16", "tf32", "tf32x3", "ieee"):
            found: dict[str, list[Any]] = {"forward": [], "images": [], "filters": []}
            filters, turned = arranged(w, precision), arranged(w, precision, turned=True)
            for cut in CUTS if inside > 3 else CUTS[:4]:
                tiles = Tiles(*cut)
                if precision == "ieee" and cut not in CUTS[:3]:
                    continue
                tries: dict[str, Any] = {"forward": partial(images_with_filters, x, filters, None, shape, size)}
                if tiles.m <= 128:
                    tries["filters"] = partial(filters_gradient, x, gradient, rows, shape, bias=False)
                if inside > 3:
                    tries["images"] = partial(images_with_filters, gradient, turned, None, back, (side, side))
                for kind, function in tries.items():
                    fitted = tiles._replace(n=min(tiles.n, 32)) if kind == "images" else tiles
                    try:
                        found[kind].append((timed(partial(function, precision=precision, tiles=fitted)), fitted))
                    except Exception as error:
                        print(f"{kind} {tiles}: {type(error).__name__} {str(error)[:80]}")
            error = float(
                (images_with_filters(x, filters, None, shape, size, precision=precision)[0].double() - exact).norm()
                / exact.norm()
            )
            error_w = float(
                (
                    filters_gradient(x, gradient, rows, shape, bias=False, precision=precision)[0].double() - exact_w
                ).norm()
                / exact_w.norm()
            )
            for kind, each in found.items():
                best = sorted(each)[:3]
                print(
                    f"  {name} {precision} {kind}: " + "; ".join(f"{ms:.3f} {tuple(t)}" for ms, t in best), flush=True
                )
            print(f"  errors: forward {error:.1e}, filters {error_w:.1e}", flush=True)


def server() -> None:
    draw = torch.Generator(device=DEVICE)
    draw.manual_seed(2)
    clients, parameters = 1000, 1_600_000
    w = torch.randn(parameters, generator=draw, device=DEVICE)
    w = w + 0.1 * torch.randn(clients, parameters, generator=draw, device=DEVICE)
    a = torch.rand(clients, clients, generator=draw, device=DEVICE)
    a /= a.sum(1, keepdim=True)
    some = w[:, : 2**14].double()
    exact = a.double() @ some
    gram = torch.zeros(clients, clients, dtype=torch.float64, device=DEVICE)
    mean = w.mean(0, dtype=torch.float64)
    for block, middle in zip(w.split(2**14, 1), mean.split(2**14), strict=True):
        wide = block.double() - middle
        gram.addmm_(wide, wide.T)
    for rough in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = rough
        u = matrix_units.mixed(a, w)[:, : 2**14].double()
        plain = (a @ w)[:, : 2**14].double()
        c = matrix_units.centred_gram(w)[0]
        print(
            f"server tf32={rough}: gram {median_ms(lambda: matrix_units.centred_gram(w), 5, 2):.2f} ms"
            f" (error {float((c - gram).norm() / gram.norm()):.1e});"
            f" mixed {median_ms(lambda: matrix_units.mixed(a, w), 5, 2):.2f} ms"
            f" (error {float((u - exact).norm() / exact.norm()):.1e},"
            f" of the spread {float((u - exact).norm() / (some - some.mean(0)).norm()):.1e});"
            f" plain {median_ms(lambda: a @ w, 5, 2):.2f} ms"
            f" (error {float((plain - exact).norm() / exact.norm()):.1e})",
            flush=True,
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    blocks = matrix_units._Blocks(w, 3)
    print(f"server split alone {median_ms(lambda: [None for _ in blocks], 5, 2):.2f} ms", flush=True)


if __name__ == "__main__":
    server()
    convolutions()
