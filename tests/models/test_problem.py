"""Problems: losses against PyTorch's own, and dropout whose masks are a function of the client and the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.compute.nets.row_net import ModuleNet, RowNet, VmapNet
from coterie.compute.nets.stacked import StackedNet
from coterie.errors import ConfigError, ModelError, UnknownName
from coterie.models import Network
from coterie.models.dropout import StreamDropout
from coterie.models.problem import LOSSES, Problem
from coterie.randomness import fold_in, keys, stream, torch_stream

NETS: dict[str, Callable[..., RowNet]] = {"module": ModuleNet, "vmap": VmapNet, "stacked": StackedNet}


def some(*shape: int, purpose: str = "x") -> Tensor:
    return torch.from_numpy(stream(3, f"problems {purpose}").normal(size=shape))


# Losses


def test_cross_entropy_is_torchs() -> None:
    outputs, y = 5 * some(9, 4), torch.arange(9) % 4
    got = LOSSES["cross_entropy"](outputs, y)
    wanted = outputs.logsumexp(1) - outputs.gather(1, y.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got.mean(), nn.CrossEntropyLoss()(outputs, y), rtol=1e-14, atol=0)


@pytest.mark.parametrize("width", [(), (1,)])
def test_the_binary_loss_is_torchs(width: tuple[int, ...]) -> None:
    outputs, y = 5 * some(9, *width), torch.arange(9) % 2
    got = LOSSES["binary"](outputs, y)
    wanted = torch.log1p(torch.exp(-outputs.flatten() * (2 * y - 1)))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got.mean(), nn.BCEWithLogitsLoss()(outputs.flatten(), y.double()), rtol=1e-14, atol=0)


@pytest.mark.parametrize("width", [(), (1,)])
def test_the_squared_error_is_half_so_that_its_gradient_is_the_residual(width: tuple[int, ...]) -> None:
    outputs, y = some(9, *width).requires_grad_(), some(9, purpose="y")
    got = LOSSES["squared_error"](outputs, y)
    torch.testing.assert_close(got.mean(), 0.5 * nn.MSELoss()(outputs.flatten(), y), rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(got.sum(), outputs)
    torch.testing.assert_close(gradient.flatten(), outputs.detach().flatten() - y, rtol=1e-14, atol=1e-15)


# Problems


@pytest.mark.parametrize(
    ("task", "loss", "metrics"),
    [
        ("multiclass", "cross_entropy", ("accuracy",)),
        ("binary", "binary", ("accuracy",)),
        ("regression", "squared_error", ("rmse",)),
    ],
)
def test_a_task_decides_loss_and_metric(task: str, loss: str, metrics: tuple[str, ...]) -> None:
    problem = Problem.of(nn.Linear(3, 2), task)
    assert problem.loss is LOSSES[loss] and problem.metrics == metrics
    other = Problem.of(nn.Linear(3, 2), task, loss="binary", metrics=("auc", "accuracy"))
    assert other.loss is LOSSES["binary"] and other.metrics == ("auc", "accuracy")


def test_a_loss_of_the_users_own() -> None:
    def absolute(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.squeeze(-1) - y).abs()

    assert Problem.of(nn.Linear(3, 1), "regression", loss=absolute).loss is absolute


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranking"):
        Problem.of(nn.Linear(3, 1), "ranking")
    with pytest.raises(UnknownName, match="squared_error"):
        Problem.of(nn.Linear(3, 1), "regression", loss="squared_eror")
    with pytest.raises(ModelError, match="nothing to learn"):
        Problem.of(nn.Flatten())


def test_the_initial_row_holds_the_trainable_parameters_in_the_wanted_type() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    wanted = torch.cat([value.detach().flatten() for value in module[1].parameters()]).double()
    problem = Problem.of(module, dtype=torch.float64)
    assert problem.start.dtype == torch.float64 and torch.equal(problem.start, wanted)
    assert problem.layout.size == 6 and problem.layout.names == ("1.weight", "1.bias")
    assert {value.dtype for value in module.parameters()} == {torch.float64}


def test_children_are_the_models_parts() -> None:
    module = Network(nn.Sequential(nn.Linear(4, 3)), nn.Linear(3, 2), split=1)
    layout = Problem.of(module).layout
    assert layout.columns("body").spans == ((0, 15),) and layout.columns("head").spans == ((15, 23),)


# Dropout


def dropping(p: float = 0.5) -> nn.Module:
    """Two layers of dropout, one of them nested, about activations of different shapes."""
    with torch_stream(6, "dropping"):
        conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(p), nn.Flatten())
        return nn.Sequential(conv, nn.Linear(4 * 16, 8), nn.Dropout(p), nn.Linear(8, 3))


def test_dropout_layers_are_replaced_and_numbered() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), nn.Dropout(0.0), nn.Dropout(0.4))
    Problem.of(module)
    layers = [layer for layer in module.modules() if isinstance(layer, StreamDropout)]
    assert sorted(layer.p for layer in layers) == [0.0, 0.1, 0.4]
    assert len({layer.number for layer in layers}) == 3
    assert torch.equal(module[1](torch.ones(2)), torch.ones(2))
    assert not any(isinstance(layer, nn.Dropout) for layer in module.modules())


def test_evaluation_has_no_dropout() -> None:
    x = some(2, 5, 1, 6, 6)
    plain = dropping().double().eval()
    with torch.no_grad():
        wanted = torch.stack([plain(x[0]), plain(x[1])])
    problem = Problem.of(dropping(), dtype=torch.float64)
    rows = problem.start.expand(2, -1)
    for name, kind in NETS.items():
        got = kind(problem.module, problem.layout).outputs(rows, x)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_masks_are_equal_on_all_nets(p: float) -> None:
    problem = Problem.of(dropping(p), dtype=torch.float64)
    x, key = some(3, 5, 1, 6, 6), keys(1, "dropout", 2, torch.tensor([0, 4, 9]))
    rows = problem.start + 0.1 * some(3, len(problem.start), purpose="rows")
    outputs = {name: kind(problem.module, problem.layout).outputs(rows, x, key) for name, kind in NETS.items()}
    evaluated = ModuleNet(problem.module, problem.layout).outputs(rows, x)
    assert float((outputs["module"] - evaluated).abs().min(2).values.max()) > 1e-3
    for name in ("vmap", "stacked"):
        torch.testing.assert_close(outputs[name], outputs["module"], rtol=1e-12, atol=1e-13, msg=name)
    # A row's masks depend on its own key alone.
    for row in range(3):
        one = slice(row, row + 1)
        alone = StackedNet(problem.module, problem.layout).outputs(rows[one], x[one], key[one])
        torch.testing.assert_close(alone, outputs["module"][one], rtol=1e-12, atol=1e-13)


def factors(key: Tensor, *shape: int, p: float = 0.3, number: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return StreamDropout(p, number).factors(key, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mean_is_preserved(p: float) -> None:
    # Factors are 0 or 1/(1-p) with mean 1 and variance p/(1-p): five standard deviations of a mean of 200,000.
    key = keys(2, "dropout", 0, torch.arange(100))
    made = factors(key, 100, 20, 100, p=p)
    values = made.unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / (1 - p)], dtype=torch.float64), rtol=1e-15, atol=0)
    assert abs(float(made.mean()) - 1) <= 5 * (p / (1 - p) / made.numel()) ** 0.5
    # So it is for each sample and for each feature: 2,000 and 10,000 factors each, the largest of 120 deviations.
    for axis in (1, 2):
        other = tuple(place for place in range(3) if place != axis)
        deviation = (made.mean(other) - 1).abs().max()
        assert float(deviation) <= 6 * (p / (1 - p) / (made.numel() / made.shape[axis])) ** 0.5


def test_layers_steps_and_clients_have_masks_of_their_own() -> None:
    key = keys(2, "dropout", 0, torch.tensor([7]))
    base = factors(key, 1, 30, 40)
    others = {
        "layer": factors(key, 1, 30, 40, number=1),
        "step": factors(fold_in(key, 1), 1, 30, 40),
        "client": factors(keys(2, "dropout", 0, torch.tensor([8])), 1, 30, 40),
        "round": factors(keys(2, "dropout", 1, torch.tensor([7])), 1, 30, 40),
        "sample": base.roll(1, 1),
    }
    # Two independent masks agree where both drop or both keep: 0.3² + 0.7² = 0.58 of 1200, five standard deviations.
    for name, other in others.items():
        agree = float(((base > 0) == (other > 0)).double().mean())
        assert abs(agree - 0.58) <= 5 * (0.58 * 0.42 / 1200) ** 0.5, name


def test_masks_do_not_depend_on_padding_or_type() -> None:
    key = keys(2, "dropout", 0, torch.tensor([3, 5]))
    base = factors(key, 2, 4, 6)
    assert torch.equal(factors(key, 2, 9, 6)[:, :4], base)  # a batch padded at its end
    assert torch.equal(factors(key, 2, 4, 6, dtype=torch.float32) > 0, base > 0)
    assert factors(key, 2, 4, 6, dtype=torch.float32).dtype == torch.float32


def test_an_idle_key_drops_nothing() -> None:
    assert bool((factors(torch.zeros((), dtype=torch.int64), 5, 3) == 1).all())
    layer, x = StreamDropout(0.5, 0), some(4, 3)
    assert torch.equal(layer(x), x)
    assert "key" not in layer.state_dict()


def test_gradients_are_masked_like_the_activations() -> None:
    layer, x = StreamDropout(0.4, 2), some(6, 7).requires_grad_()
    layer.key = keys(3, "dropout", 0, torch.tensor(1))
    made = layer(x)
    (gradient,) = torch.autograd.grad(made.sum(), x)
    assert torch.equal(gradient, layer.factors(layer.key, x.detach()))
    assert torch.equal(made.detach(), x.detach() * gradient)


def test_dropout_of_one_row_is_plain_dropout_with_that_mask() -> None:
    # The whole forward by hand, from the two layers' factors.
    problem = Problem.of(dropping(0.5), dtype=torch.float64)
    layers = dict(problem.module.named_modules())
    first, second = layers["0.2"], layers["2"]
    assert isinstance(first, StreamDropout) and isinstance(second, StreamDropout)
    x, key = some(1, 5, 1, 6, 6), keys(1, "dropout", 2, torch.tensor([4]))
    views = problem.layout.views(problem.start)
    z = F.conv2d(x[0], views["0.0.weight"], views["0.0.bias"]).relu()
    z = (z * first.factors(key[0], z)).flatten(1)
    z = F.linear(z, views["1.weight"], views["1.bias"])
    z = z * second.factors(key[0], z)
    wanted = F.linear(z, views["3.weight"], views["3.bias"])
    got = ModuleNet(problem.module, problem.layout).outputs(problem.start.unsqueeze(0), x, key)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
