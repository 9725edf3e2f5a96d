"""Products of each row's own matrices by oneDNN, where MKL leaves half of a processor idle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import Batch
from coterie.compute import cpu_threads
from coterie.compute.nets import products
from coterie.compute.nets.stacked import StackedNet
from tests.support import small_model

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of PyTorch has no oneDNN"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def idle_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every processor one whose wider units MKL leaves idle."""
    monkeypatch.setattr(products, "has_idle_units", lambda: True)


def drawn(*shape: int, name: str) -> Tensor:
    return torch.from_numpy(randomness.stream(5, name).normal(size=shape))


def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum("rsi,roi->rso", x, weight) + bias.unsqueeze(1)


@pytest.mark.parametrize(("rows", "samples", "inside", "outside"), [(3, 7, 5, 4), (1, 50, 30, 1), (4, 1, 3, 20)])
def test_values_and_two_derivatives_are_those_of_float64(rows: int, samples: int, inside: int, outside: int) -> None:
    exact = [
        drawn(rows, samples, inside, name="x"),
        drawn(rows, outside, inside, name="weight"),
        drawn(rows, outside, name="bias"),
    ]
    pull = drawn(rows, samples, outside, name="pull")
    found = []
    for way, given, scale in [
        (by_hand, exact, pull),
        (products.linear, [value.float() for value in exact], pull.float()),
    ]:
        leaves = [value.clone().requires_grad_() for value in given]
        out = way(*leaves)
        # Of a square, so that second derivatives are not zero.
        first = torch.autograd.grad((out.square() * scale).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum((value.square().sum() for value in first), torch.zeros(())), leaves)
        found.append([out, *first, *second])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.detach().abs().max()))


def test_transposed_factors_and_no_bias() -> None:
    x, weight = drawn(2, 6, 4, name="x").transpose(1, 2), drawn(2, 6, 3, name="weight").transpose(1, 2)
    wanted = torch.einsum("rsi,roi->rso", x, weight)
    got = products.linear(x.float(), weight.float())
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("idle_units")
def test_a_call_for_each_row_must_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    def goes(samples: int, kind: torch.dtype = torch.float32) -> bool:
        return products.goes_by_rows(torch.zeros(2, samples, 1024, dtype=kind), torch.zeros(2, 64, 1024, dtype=kind))

    assert goes(32) and not goes(31)  # 2^21 multiplications
    assert not goes(32, torch.float64)
    torch.set_num_threads(2)
    assert not goes(32) and goes(2 * cpu_threads.worth_waking() // 2**16 + 1)


def test_only_where_the_processor_has_units_that_mkl_leaves_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    products.has_idle_units.cache_clear()
    try:
        assert not products.has_idle_units()
        assert not products.goes_by_rows(torch.zeros(1, 4096, 1024), torch.zeros(1, 64, 1024))
    finally:
        products.has_idle_units.cache_clear()


@pytest.mark.parametrize(
    ("described", "idle"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n", True),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n", False),  # Zen 4: its units are 256 bits wide
        ("vendor_id\t: GenuineIntel\ncpu family\t: 26\n", False),
        ("AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD", True),
        ("AuthenticAMD", False),
    ],
)
def test_which_processors_those_are(described: str, idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products.Path, "exists", lambda path: True)
    monkeypatch.setattr(products.Path, "read_text", lambda path, encoding: described)
    products.has_idle_units.cache_clear()
    try:
        assert products.has_idle_units() is idle
    finally:
        products.has_idle_units.cache_clear()


@pytest.mark.usefixtures("idle_units")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_computes_the_same_by_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Outputs, gradient and fused step where every layer goes that way, and where none does."""
    calls = []
    forward = products._RowLinear.forward
    monkeypatch.setattr(products._RowLinear, "forward", lambda *given: calls.append(1) or forward(*given))
    net = StackedNet(small_model(6, 3, "5").float())
    x, params = drawn(rows, 9, 6, name="samples").float(), drawn(rows, net.layout.size, name="rows").float()
    y = torch.arange(rows * 9).remainder(3).view(rows, 9)
    batch = Batch(net, partial(F.cross_entropy, reduction="none"), x, y, torch.full((rows, 9), 1 / 9), torch.ones(rows))
    ends, counts = [], []
    for least in (1, 2**40):
        monkeypatch.setattr(products, "_ALONE", least)
        before, moved = len(calls), params.clone()
        batch.descend_(moved, torch.linspace(0.1, 0.5, rows).unsqueeze(1))
        ends.append((net.outputs(params, x), batch.grad(params), moved))
        counts.append(len(calls) - before)
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # Of two layers: two passes forward and one gradient of the hidden layer's output for the step and for the gradient
    # each, two gradients of weights for each, and two passes forward of outputs.
    assert counts == [12, 0]
