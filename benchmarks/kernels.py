"""Our Triton kernels over tile sizes, and the server's products beside what they replace, on one GPU.

    python benchmarks/kernels.py [--layers NAME ...] [--precision KIND ...] [--server]

Of each product of a layer it says how long the tiles that it takes need, and which of some others are the fastest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu import DEVICE, median_ms

from coterie import kernels
from coterie.kernels._convolution_products import (
    Pooling,
    Tiles,
    arranged,
    images_with_filters,
    pooled_images_with_filters,
    pooled_tiles_of,
    tiles_of,
)
from coterie.kernels._filters_gradients import filters_gradient
from coterie.kernels.convolution import ConvolutionGeometry
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
NEAR: dict[str, tuple[int, ...]] = {
    "m": (32, 64, 128),
    "k": (16, 32, 64),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4),
}


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


LAYERS = {
    "pfl 1": (50, 10, 3, 32, 32, 3, 0),
    "pfl 2": (50, 10, 32, 64, 30, 3, 0),
    "pfllib 1": (20, 10, 1, 32, 28, 5, 0),
    "pfllib 2": (20, 10, 32, 64, 12, 5, 0),
    "cnn 1": (100, 50, 1, 32, 28, 5, 0),
    "cnn 2": (100, 50, 32, 64, 12, 5, 0),
    "McMahan 2": (64, 50, 32, 64, 14, 5, 2),
    "FedPG 2": (64, 50, 64, 64, 14, 5, 0),
    "FLAME CIFAR-10 1": (64, 100, 3, 16, 32, 3, 1),
    "FLAME CIFAR-10 2": (64, 100, 16, 32, 16, 3, 1),
    "FLAME Medical MNIST 1": (64, 100, 1, 32, 64, 3, 0),
    "FLAME Medical MNIST 2": (64, 100, 32, 16, 31, 3, 0),
}
"""Rows, samples of each, channels, features, side of the images, side of the filters, padding."""


def ways(name: str, precision: str) -> dict[str, tuple[Tiles, Callable[[Tiles], Any]]]:
    """Give for each product of a layer the tiles that it takes, and a function of others."""
    rows, batch, inside, outside, side, k, pad = LAYERS[name]
    x = torch.randn(rows * batch, inside, side, side, device=DEVICE)
    if inside > 3:
        x = x.contiguous(memory_format=torch.channels_last)
    w = torch.randn(rows, outside, inside, k, k, device=DEVICE)
    shape = ConvolutionGeometry((k, k), (1, 1), (pad, pad), (1, 1))
    back = ConvolutionGeometry((k, k), (1, 1), (k - 1 - pad, k - 1 - pad), (1, 1))
    out, terms = side + 2 * pad - k + 1, k * k * inside
    gradient = torch.randn(rows * batch, outside, out, out, device=DEVICE).contiguous(memory_format=torch.channels_last)
    filters, turned = arranged(w, precision), arranged(w, precision, turned=True)
    pooling = Pooling((2, 2), inside > 3)

    def forward(tiles: Tiles) -> Any:
        return images_with_filters(x, filters, None, shape, (out, out), precision=precision, tiles=tiles)

    def pooled(tiles: Tiles) -> Any:
        return pooled_images_with_filters(
            x, filters, None, shape, (out, out), pooling, precision=precision, tiles=tiles
        )

    def images(tiles: Tiles) -> Any:
        return images_with_filters(gradient, turned, None, back, (side, side), precision=precision, tiles=tiles)

    def of_filters(tiles: Tiles) -> Any:
        return filters_gradient(x, gradient, rows, shape, bias=True, precision=precision, tiles=tiles)

    found: dict[str, tuple[Tiles, Callable[[Tiles], Any]]] = {
        "forward": (tiles_of("forward", outside, terms, precision), forward),
        "pooled": (pooled_tiles_of(outside, inside, terms, 4, precision), pooled),
        "filters": (tiles_of("filters", outside, terms, precision), of_filters),
    }
    if inside > 3:
        found["images"] = (tiles_of("images", inside, k * k * outside, precision), images)
    return found


def tried(own: Tiles, most: int) -> list[Tiles]:
    """Give a product's own tiles first, and others beside them."""
    others = [Tiles(*cut)._replace(n=min(cut[1], most)) for cut in CUTS]
    near = [own._replace(**{name: value}) for name, values in NEAR.items() for value in values]
    return list(dict.fromkeys([own, *near, *others]))


def convolutions(names: Sequence[str], precisions: Sequence[str]) -> None:
    for name, precision in itertools.product(names, precisions):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        features = max(16, 1 << (LAYERS[name][3] - 1).bit_length())
        for kind, (own, function) in ways(name, precision).items():
            tiles = tried(own, min(64, features))
            with contextlib.suppress(Exception), kernels.rehearsal():  # compiled side by side; what cannot be, is told
                for each in tiles:
                    function(each)
            found = []
            for each in tiles:
                try:
                    found.append((timed(partial(function, each)), each))
                except Exception as error:
                    print(f"  {kind} {tuple(each)}: {type(error).__name__} {str(error)[:80]}")
            mine = next((ms for ms, each in found if each == own), float("nan"))
            best = "; ".join(f"{ms:.3f} {tuple(each)}" for ms, each in sorted(found)[:4])
            print(f"{name} {precision} {kind}: {mine:.3f} {tuple(own)}; the fastest {best}", flush=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument(
        "--precision", nargs="+", choices=["bf16", "tf32", "tf32x3", "ieee"], default=["tf32", "tf32x3"]
    )
    parser.add_argument("--server", action="store_true", help="the server's products alone")
    args = parser.parse_args()
    if args.server:
        server()
    else:
        convolutions(args.layers, args.precision)


if __name__ == "__main__":
    main()
