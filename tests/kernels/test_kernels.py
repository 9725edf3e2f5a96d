"""Triton's kernels against the same mathematics in float64: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed: pip install 'coterie[kernels]'")

from coterie import kernels, models, randomness
from coterie.algorithms.base import Batch
from coterie.compute.nets.row_net import ModuleNet
from coterie.compute.nets.stacked import StackedNet
from coterie.kernels import _convolution_products as products
from coterie.kernels import _filters_gradients as gradients
from coterie.kernels import linear
from coterie.kernels.convolution import ConvolutionGeometry, Pooling, convolve
from coterie.kernels.dropout import DropoutRule, drop
from coterie.kernels.half_precision import add_centre, split_centred
from coterie.kernels.pooling import pool
from coterie.kernels.steps import descend_
from coterie.models.dropout import StreamDropout
from coterie.models.problem import Problem
from coterie.rows import matrix_units
from tests.support import DEVICE

FLOAT32 = 2e-6
CUT = 2e-6 if DEVICE.type == "cpu" else 5e-5  # matrix units cut off what long sums cannot hold, others round it


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "INTERPRETED", DEVICE.type == "cpu")
    with DEVICE:
        yield


def numbers(*shape: int, seed: int = 1) -> Tensor:
    key = randomness.keys(seed, "kernel tests", 0, torch.arange(1, device="cpu"))
    count = int(torch.tensor(shape).prod())
    return randomness.normal(key, count, torch.float32).view(shape).to(DEVICE)


def apart(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted.detach()).norm() / (wanted.detach().norm() + 1e-30))


CONVOLUTIONS = {
    "one channel": (2, 2, 1, 6, 9, 8, 5, 0, 1, False),
    "padded, cut": (3, 2, 5, 20, 8, 8, 5, 2, 1, True),
    "dilated": (1, 2, 4, 6, 9, 9, 3, 1, 2, True),
    "many channels": (2, 1, 33, 17, 5, 6, 3, 0, 1, False),
    "over the border": (2, 3, 32, 32, 6, 5, 5, 0, 1, False),
    "over the border, dilated": (2, 2, 32, 16, 7, 7, 3, 2, 2, True),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("last", [False, True])
def test_convolution_and_its_gradients(case: str, last: bool) -> None:
    rows, batch, channels, features, height, width, k, pad, dilation, cut = CONVOLUTIONS[case]
    x = numbers(rows * batch, channels, height, width)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    # As an engine has them: views of rows that hold other parameters too.
    whole = numbers(rows, 7 + features * channels * k * k + features, seed=2)
    w = whole[:, 7 : 7 + features * channels * k * k].view(rows, features, channels, k, k)
    b = whole[:, 7 + features * channels * k * k :]
    shape = ConvolutionGeometry((k, k), (1, 1), (pad, pad), (dilation, dilation))
    ours = [value.detach().requires_grad_() for value in (x, w, b)]
    out = convolve(*ours, shape, cut, "ieee")
    wide = [value.double().requires_grad_() for value in (x, w, b)]
    each = [
        F.conv2d(wide[0][r * batch : (r + 1) * batch], wide[1][r], wide[2][r], 1, pad, dilation) for r in range(rows)
    ]
    wanted = torch.cat(each)
    wanted = wanted.relu() if cut else wanted
    assert apart(out, wanted) < FLOAT32
    gradient = numbers(*wanted.shape, seed=3)
    got = torch.autograd.grad(out, ours, gradient)
    for mine, theirs in zip(got, torch.autograd.grad(wanted, wide, gradient.double()), strict=True):
        assert apart(mine, theirs) < FLOAT32


POOLED = {
    # Of 9 x 7 results of the first case, a line and a column are in no window of 2 x 2.
    "remainder": (2, 3, 3, 32, (11, 9), 3, 0, 1, (2, 2)),
    "padded": (2, 2, 32, 32, (6, 6), 5, 2, 1, (1, 2)),
    "first, padded": (3, 2, 1, 20, (7, 8), 3, 1, 1, (2, 2)),
    "dilated": (1, 2, 16, 10, (9, 9), 3, 1, 2, (2, 1)),
    "large windows": (1, 2, 2, 6, (6, 10), 3, 0, 1, (2, 4)),
    "windows of six": (1, 2, 3, 4, (8, 8), 3, 0, 1, (3, 2)),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("case", POOLED)
def test_a_convolution_that_pools_its_results(case: str, cut: bool, first: bool) -> None:
    rows, batch, channels, features, side, k, pad, dilation, window = POOLED[case]
    x = numbers(rows * batch, channels, *side).contiguous(memory_format=torch.channels_last)
    w, b = numbers(rows, features, channels, k, k, seed=2), numbers(rows, features, seed=3)
    ours = [value.detach().requires_grad_() for value in (x, w, b)]
    geometry = ConvolutionGeometry((k, k), (1, 1), (pad, pad), (dilation, dilation))
    out = convolve(*ours, geometry, cut, "ieee", Pooling(window, first))
    wide = [value.double().requires_grad_() for value in (x, w, b)]
    images = wide[0].unflatten(0, (rows, batch))
    each = [F.conv2d(images[r], wide[1][r], wide[2][r], padding=pad, dilation=dilation) for r in range(rows)]
    wanted = F.max_pool2d(torch.cat(each).relu() if cut else torch.cat(each), window)
    assert apart(out, wanted) < FLOAT32
    assert out.is_contiguous(memory_format=torch.contiguous_format if first else torch.channels_last)
    gradient = numbers(*wanted.shape, seed=4)
    got, exact = torch.autograd.grad(out, ours, gradient), torch.autograd.grad(wanted, wide, gradient.double())
    for mine, theirs in zip(got, exact, strict=True):
        assert apart(mine, theirs) < FLOAT32
    # A first layer's filters take theirs from the pooled gradient, which is never written out.
    out = convolve(x, *ours[1:], geometry, cut, "ieee", Pooling(window, first))
    for mine, theirs in zip(torch.autograd.grad(out, ours[1:], gradient), exact[1:], strict=True):
        assert apart(mine, theirs) < FLOAT32


@pytest.mark.parametrize("long", [False, True])
def test_of_equal_results_the_first_is_the_largest_as_in_torch(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (products, gradients):
        monkeypatch.setattr(module, "is_long", lambda *given: long)
    x, w = (numbers(2 * 3, 2, 9, 9) * 2).round(), numbers(2, 5, 2, 3, 3, seed=2).sign()
    ours, wide = w.clone().requires_grad_(), w.double().requires_grad_()
    pooling = Pooling((2, 2))
    out = convolve(x, ours, None, ConvolutionGeometry((3, 3), (1, 1), (0, 0), (1, 1)), False, "ieee", pooling)
    images = x.double().unflatten(0, (2, 3))
    wanted = torch.cat([F.max_pool2d(F.conv2d(images[r], wide[r]), 2) for r in range(2)])
    assert torch.equal(out.double(), wanted)
    gradient = numbers(*wanted.shape, seed=3)
    (got,), (exact,) = torch.autograd.grad(out, ours, gradient), torch.autograd.grad(wanted, wide, gradient.double())
    assert apart(got, exact) < FLOAT32


@pytest.mark.parametrize("pooling", [None, Pooling((2, 2)), Pooling((1, 2), True)])
@pytest.mark.parametrize("cut", [False, True])
def test_a_convolution_that_diverged_says_so(cut: bool, pooling: Pooling | None) -> None:
    x, w = numbers(2 * 2, 1, 7, 7), numbers(2, 3, 1, 3, 3, seed=2)
    x[0, 0, 3, 2], w[1, 2] = float("nan"), float("nan")
    out = convolve(x, w, None, ConvolutionGeometry((3, 3), (1, 1), (0, 0), (1, 1)), cut, "ieee", pooling)
    wanted = torch.cat([F.conv2d(x[r * 2 : (r + 1) * 2], w[r]) for r in range(2)])
    wanted = wanted.relu() if cut else wanted
    wanted = wanted if pooling is None else F.max_pool2d(wanted, pooling.window)
    assert torch.equal(out.isnan(), wanted.isnan()) and bool(wanted.isnan().any()) and not bool(wanted.isnan().all())


@pytest.mark.parametrize("pooling", [None, Pooling((2, 2), False)])
def test_channels_that_are_one_in_memory_are_convolved_once(
    pooling: Pooling | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, batch, features, side = 2, 3, 8, 9
    seen: list[int] = []
    name = "images_with_filters" if pooling is None else "pooled_images_with_filters"
    convolution = getattr(products, name)

    def watched(image: Tensor, *args: Any, **more: Any) -> Any:
        seen.append(image.shape[1])
        return convolution(image, *args, **more)

    monkeypatch.setattr(f"coterie.kernels.convolution.{name}", watched)
    grey = numbers(rows * batch, 1, side, side).expand(-1, 3, -1, -1)
    w, b = numbers(rows, features, 3, 3, 3, seed=2), numbers(rows, features, seed=3)
    ours, geometry = (
        [w.clone().requires_grad_(), b.clone().requires_grad_()],
        ConvolutionGeometry((3, 3), *((1, 1),) * 3),
    )
    out = convolve(grey, *ours, geometry, True, "ieee", pooling)
    wide = [w.double().requires_grad_(), b.double().requires_grad_()]
    x = grey.double().unflatten(0, (rows, batch))
    wanted = torch.cat([F.conv2d(x[r], wide[0][r], wide[1][r], padding=1) for r in range(rows)]).relu()
    wanted = wanted if pooling is None else F.max_pool2d(wanted, pooling.window)
    assert apart(out, wanted) < FLOAT32
    gradient = numbers(*wanted.shape, seed=4)
    got, exact = torch.autograd.grad(out, ours, gradient), torch.autograd.grad(wanted, wide, gradient.double())
    for mine, theirs in zip(got, exact, strict=True):
        assert apart(mine, theirs) < FLOAT32
    assert seen == [1]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("terms", [(), ("pull",), ("decay",), ("momentum",), ("pull", "decay", "momentum")])
def test_a_step_with_all_that_may_belong_to_it(terms: tuple[str, ...], columns: bool) -> None:
    rows, count = 3, 4100  # a little more than two programs have
    whole, centre = numbers(rows, count + 60), numbers(1, count, seed=2).expand(rows, -1)
    params, beside = whole[:, :count], whole[:, count:].clone()
    gradient, rate = numbers(rows, count, seed=3), numbers(rows, 1, seed=4)
    velocity = numbers(rows, count, seed=5) if "momentum" in terms else None
    given: dict[str, Any] = dict.fromkeys(terms, 0.3)
    if columns:
        given = {name: torch.linspace(0.1, 0.9, rows, dtype=torch.float64).unsqueeze(1) for name in terms}
    w, step = params.double(), gradient.double()
    step = step + given.get("pull", 0.0) * (w - centre.double()) + given.get("decay", 0.0) * w
    if velocity is not None:
        step = step + given["momentum"] * velocity.double()
    descend_(params, gradient, rate, centre=centre if "pull" in terms else None, velocity=velocity, **given)
    assert apart(params, w - rate.double() * step) < FLOAT32
    if velocity is not None:
        assert apart(velocity, step) < FLOAT32
    assert torch.equal(whole[:, count:], beside)


@pytest.mark.parametrize("turned", [False, True])
def test_filters_are_arranged_and_split_without_loss(turned: bool) -> None:
    w = numbers(2, 5, 3, 3, 2)
    upper, lower = products.arranged(w, "tf32x3", turned=turned)
    wanted = w.flip(3, 4).permute(0, 2, 3, 4, 1) if turned else w.permute(0, 1, 3, 4, 2)
    assert torch.equal(upper + lower, wanted.flatten(2, 3))
    assert torch.equal(upper.view(torch.int32) & 0x1FFF, torch.zeros_like(upper, dtype=torch.int32))
    assert float((lower.abs() / upper.abs()).max()) < 2**-10
    assert torch.equal(products.arranged(w, "ieee", turned=turned).upper, wanted.flatten(2, 3))


def test_three_products_are_as_exact_as_float32() -> None:
    x = numbers(2 * 2, 32, 7, 7).contiguous(memory_format=torch.channels_last)
    w = numbers(2, 16, 32, 5, 5, seed=2)
    out = convolve(x, w, None, ConvolutionGeometry((5, 5), (1, 1), (0, 0), (1, 1)), False, "tf32x3")
    wanted = torch.cat([F.conv2d(x[r * 2 : (r + 1) * 2].double(), w[r].double()) for r in range(2)])
    assert apart(out, wanted) < 1e-6
    pooled = convolve(x, w, None, ConvolutionGeometry((5, 5), (1, 1), (0, 0), (1, 1)), False, "tf32x3", Pooling((1, 2)))
    assert apart(pooled, F.max_pool2d(wanted, (1, 2))) < 1e-6


@pytest.mark.parametrize("warps", [1, 1000])
def test_a_sum_that_is_split_between_programs(warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_WARPS", warps)
    x, gradient = numbers(2 * 6, 2, 12, 12), numbers(2 * 6, 3, 10, 10, seed=2)
    got, shift = gradients.filters_gradient(
        x, gradient, 2, ConvolutionGeometry((3, 3), (1, 1), (0, 0), (1, 1)), bias=True, precision="ieee"
    )
    w = torch.zeros(2, 3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    out = torch.cat([F.conv2d(x[r * 6 : (r + 1) * 6].double(), w[r]) for r in range(2)])
    (wanted,) = torch.autograd.grad(out, w, gradient.double())
    assert apart(got, wanted) < FLOAT32
    assert shift is not None
    assert apart(shift, gradient.double().view(2, 6, 3, -1).sum((1, 3))) < FLOAT32


def test_gradients_of_gradients_are_refused() -> None:
    x = numbers(2, 1, 5, 5).requires_grad_()
    out = convolve(x, numbers(1, 2, 1, 3, 3), None, ConvolutionGeometry((3, 3), (1, 1), (0, 0), (1, 1)), False, "ieee")
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("window", [(2, 2), (3, 2)])
@pytest.mark.parametrize("first", [False, True])
def test_pooling_is_bit_for_bit_that_of_torch(cut: bool, window: tuple[int, int], first: bool) -> None:
    x = numbers(4, 5, 7, 6).contiguous(memory_format=torch.channels_last)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, wanted = pool(mine, window, cut, first), F.max_pool2d(theirs.relu() if cut else theirs, window)
    assert out.is_contiguous(memory_format=torch.contiguous_format if first else torch.channels_last)
    assert torch.equal(out, wanted)
    gradient = numbers(*wanted.shape, seed=2)
    (got,), (expected,) = torch.autograd.grad(out, mine, gradient), torch.autograd.grad(wanted, theirs, gradient)
    assert torch.equal(got, expected)


def test_a_rehearsal_compiles_each_form_of_a_kernel_once_and_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernels, "_compile", lambda device, kernel, *given: asked.append((kernel, *given)))
    x, geometry = numbers(4, 1, 6, 6), ConvolutionGeometry((3, 3), (1, 1), (0, 0), (1, 1))
    with kernels.rehearsal():
        for _ in range(2):
            convolve(x, numbers(2, 4, 1, 3, 3), None, geometry, False, "ieee")
    assert len(asked) == 2  # the filters' arrangement and the convolution itself
    out = convolve(x, numbers(2, 4, 1, 3, 3), None, geometry, False, "ieee")
    assert len(asked) == 2
    assert bool(out.isfinite().all())


def test_what_fails_to_compile_is_raised_when_the_rehearsal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernels, "_compile", refuse)
    geometry = ConvolutionGeometry((3, 3), (1, 1), (0, 0), (1, 1))
    with pytest.raises(RuntimeError, match="no such instruction"), kernels.rehearsal():
        convolve(numbers(4, 1, 6, 6), numbers(2, 4, 1, 3, 3), None, geometry, False, "ieee")
    assert kernels._rehearsed is None


_SEVERAL = torch.arange(1500) * 2**40 - 7
FOLDED: dict[str, int | Tensor] = {
    "a small integer": 5,
    "one whose product wraps": -(2**62),
    "one number for all": torch.tensor([11]),
    "a number each": _SEVERAL,
    "every second of a longer vector": _SEVERAL.repeat_interleave(2)[::2],
}


@pytest.mark.parametrize("case", FOLDED)
def test_keys_are_folded_as_step_by_step(case: str) -> None:
    key = randomness.keys(3, "kernel tests", 1, torch.arange(1500, device="cpu"))
    assert key.device.type == "cpu", f"keys of clients on the host lie on {key.device}"
    number = FOLDED[case]
    given = number if isinstance(number, int) else number.to(DEVICE)
    assert randomness._in_one_pass(key.to(DEVICE), given), "no kernel takes these, so that nothing was compared"
    got = randomness.fold_in(key.to(DEVICE), given).tolist()
    each = [number] * len(key) if isinstance(number, int) else number.expand(len(key)).tolist()
    wanted = [folded(*pair) for pair in zip(key.tolist(), each, strict=True)]
    differ = [at for at, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]]
    rows = [f"key {at}: {key[at]} with {each[at]}: {got[at]:#x} for {wanted[at]:#x}" for at in differ[:4]]
    assert not differ, f"{len(differ)} of {len(key)} keys differ on {DEVICE}:\n" + "\n".join(rows)


def folded(key: int, number: int) -> int:
    """A key with a number folded in, in Python's integers, which do not wrap."""

    def mixed(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    made = mixed(mixed((key + number * 0x9E3779B97F4A7C15) % 2**64) ^ 0xBF58476D1CE4E5B9)
    return made - 2**64 if made >= 2**63 else made


def test_dropout_draws_the_streams_own_integers() -> None:
    layer = StreamDropout(0.25, 3)
    key = randomness.keys(1, "dropout", 2, torch.arange(5, device="cpu")).to(DEVICE)
    key[3] = 0  # as in evaluation: nothing is dropped
    x = numbers(5, 3, 7, 11)
    constants = (randomness.GOLDEN, randomness.MIX_1, randomness.MIX_2)
    draw = DropoutRule(round(0.25 * 2**16) - 2**15, 1 / 0.75, constants)
    leaf = x.clone().requires_grad_()
    out = drop(leaf, randomness.fold_in(key, 3), key, draw)
    factors = layer.factors(key, x)
    assert torch.equal(out, x * factors)
    assert 0.15 < float((factors[:3] == 0).double().mean()) < 0.35
    assert torch.equal(torch.autograd.grad(out, leaf, x)[0], x * factors)
    assert torch.equal(layer.dropped(key, x.flatten(0, 1)), (x * factors).flatten(0, 1))


@pytest.mark.parametrize("samples", [3, 16, 50])
@pytest.mark.parametrize("parts", [1, 1000])
def test_dense_layers(samples: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_PROGRAMS", parts)
    rows, inside, outside = 2, 1100, 19
    whole = numbers(rows, 5 + inside * outside + outside)
    weight, bias = whole[:, 5 : 5 + inside * outside].view(rows, outside, inside), whole[:, 5 + inside * outside :]
    x = numbers(rows, samples, inside, seed=2).requires_grad_()
    wide = x.detach().double().requires_grad_()
    out = linear.apply(x, weight, bias, "ieee")
    wanted = torch.baddbmm(bias.double().unsqueeze(1), wide, weight.double().transpose(1, 2))
    assert apart(out, wanted) < FLOAT32
    gradient = numbers(rows, samples, outside, seed=3)
    (got,), (theirs,) = torch.autograd.grad(out, x, gradient), torch.autograd.grad(wanted, wide, gradient.double())
    assert apart(got, theirs) < FLOAT32
    rate = torch.tensor([[0.5], [0.25]])
    step = gradient.double() * rate.double().unsqueeze(-1)
    new_weight, new_bias = weight.double() - step.transpose(1, 2) @ wide.detach(), bias.double() - step.sum(1)
    before = whole[:, :5].clone()
    linear.descend_(weight, bias, x.detach(), gradient, rate, "ieee")
    assert apart(weight, new_weight) < FLOAT32
    assert apart(bias, new_bias) < FLOAT32
    assert torch.equal(whole[:, :5], before)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_rows_are_centred_scaled_and_split(parts: int) -> None:
    rows = numbers(11, 700)
    centre, scale = rows[4] * 0.9, 2.0 ** torch.arange(11)
    found = torch.full((parts, 12, 704), 7.0, dtype=torch.float16)
    split_centred(rows, centre, scale, found[:, :11, :700])
    high, low = matrix_units.split((rows - centre) * scale.unsqueeze(1))
    for part, wanted in zip(found, (high, low, high), strict=False):
        assert torch.equal(part[:11, :700], wanted)
    assert bool((found[:, 11:] == 7).all()) and bool((found[:, :, 700:] == 7).all())


def test_the_centre_is_added_last() -> None:
    sums, scale, share, centre = numbers(5, 300), numbers(5, seed=2), numbers(5, seed=3), numbers(300, seed=4)
    out = torch.full((5, 310), 7.0)
    add_centre(sums, scale, share, centre, out[:, 5:305])
    wanted = sums.double() * scale.double().unsqueeze(1) + share.double().unsqueeze(1) * centre.double()
    assert apart(out[:, 5:305], wanted) < FLOAT32
    assert bool((out[:, :5] == 7).all()) and bool((out[:, 305:] == 7).all())


def test_large_products_of_rows() -> None:
    rows, weights = numbers(9, 5000), numbers(4, 9, seed=2)
    centre = matrix_units.middle(rows[torch.arange(27) * 9 // 27]).double()
    z = rows.double() - centre
    products, with_centre, of_centre = matrix_units.centred_gram(rows)
    assert apart(products, z @ z.T) < CUT
    assert apart(with_centre, z @ centre) < CUT
    assert apart(of_centre, centre.square().sum()) < CUT
    assert apart(matrix_units.mixed(weights, rows), weights.double() @ rows.double()) < FLOAT32


MODELS: dict[str, tuple[int, ...]] = {"cnn_small": (1, 8, 8), "mlp": (1, 8, 8), "cnn_femnist": (1, 12, 12)}


@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_a_whole_model(model: str) -> None:
    with randomness.torch_stream(1, "kernel tests"):
        problem = Problem.of(models.build(model, MODELS[model], 10), device=DEVICE)
    rows, samples = 2, 3
    params = problem.start * torch.tensor([[1.0], [1.1]])
    x, y = numbers(rows, samples, *MODELS[model]), torch.tensor([[1, 4, 7], [0, 9, 2]])
    weight, rate = torch.full((rows, samples), 1 / samples), torch.tensor([[0.1], [0.3]])
    key = randomness.keys(1, "kernel tests", 1, torch.arange(rows, device="cpu")).to(DEVICE)

    def stepped(net: Any) -> Tensor:
        new = params.clone()
        Batch(net, problem.loss, x, y, weight, torch.ones(rows), key).descend_(new, rate)
        return new - params

    wanted = stepped(ModuleNet(problem.module, problem.layout))
    assert apart(stepped(StackedNet(problem.module, problem.layout)), wanted.double()) < 1e-5


def test_a_step_of_a_model_that_changes_its_layers_results_in_place() -> None:
    with randomness.torch_stream(1, "kernel tests"):
        module = nn.Sequential(
            nn.Linear(12, 9), nn.ReLU(inplace=True), nn.Linear(9, 7), nn.ReLU(inplace=True), nn.Linear(7, 4)
        )
    problem = Problem.of(module, device=DEVICE)
    params = problem.start * torch.tensor([[1.0], [1.1]])
    x, y = numbers(2, 3, 12), torch.tensor([[1, 3, 0], [0, 2, 2]])

    def stepped(net: Any) -> Tensor:
        new = params.clone()
        Batch(net, problem.loss, x, y, torch.full((2, 3), 1 / 3), torch.ones(2)).descend_(
            new, torch.tensor([[0.1], [0.3]])
        )
        return new - params

    wanted = stepped(ModuleNet(problem.module, problem.layout))
    assert apart(stepped(StackedNet(problem.module, problem.layout)), wanted.double()) < 1e-5


def test_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.usable(torch.zeros(2))
    assert not kernels.usable(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert not kernels.usable(torch.zeros(2, device="cpu"))


def test_precision_follows_the_switches() -> None:
    assert kernels.precision() == "tf32x3"
    for kind, wanted in (("float32", "tf32x3"), ("tf32", "tf32"), ("bf16", "bf16")):
        with matrix_units.rounded(kind):  # type: ignore[arg-type]
            assert kernels.precision() == wanted
    assert kernels.precision() == "tf32x3"
