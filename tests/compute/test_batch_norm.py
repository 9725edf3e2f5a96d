"""BatchNorm: each row as PyTorch's own layer has it on the samples that count, forward, backward and afterwards."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

from coterie import randomness
from coterie.algorithms import registry
from coterie.algorithms.base import Batch
from coterie.algorithms.running_statistics import KeptStatistics, MeasuredNet
from coterie.compute.nets.row_net import ModuleNet, RowNet, VmapNet
from coterie.compute.nets.stacked import StackedNet
from coterie.compute.single_values import refuse_single_values
from coterie.errors import ConfigError
from coterie.models.batch_norm import RunningStatistics, statistics_state
from coterie.models.problem import Problem
from tests.support import DEVICE, classification, simulate

ROWS, SAMPLES = 3, 6
REAL = (6, 4, 5)  # how many samples of each row count; the others are padding


class Cut(nn.Module):
    """A sequence whose steps are normalised one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, 4)).view(x.shape)


class Own(nn.Module):
    """A layer with a parameter of its own around one that normalises: it is vectorised, not stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.slope)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.last = nn.Linear(4, 4), Own(), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.own(self.first(x)).tanh())


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.map(self.norm(x)))


class Outside(nn.Module):
    """A parameter outside of layers: the whole model is vectorised."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.norm = nn.Parameter(torch.ones(4)), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.shift


MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()), (4,)),
    "1d, places": (nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3)), (2, 5)),
    "2d": (nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(inplace=True)), (2, 4, 5)),
    "2d, large": (nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)), (2, 14, 14)),
    "3d": (nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2)), (1, 3, 3, 4)),
    "cumulative": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None)), (4,)),
    "large eps": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, eps=0.5, momentum=0.7)), (4,)),
    "no affine": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)), (4,)),
    "steps of a sequence": (Cut(), (5, 4)),
    "inside of another layer": (Around(), (4,)),
    "called twice": (Twice(), (4,)),
    "parameters outside": (Outside(), (4,)),
}
CASES = [pytest.param(*each, id=name) for name, each in MODULES.items()]


def drawn(*shape: int, number: int = 0) -> Tensor:
    return torch.from_numpy(randomness.stream(1, "batch norm", number).normal(size=shape)).to(DEVICE)


def nets_of(problem: Problem) -> list[RowNet]:
    kinds: list[type[RowNet]] = [VmapNet, ModuleNet]
    if not isinstance(problem.module, Outside):
        kinds.insert(0, StackedNet)
    return [kind(problem.module, problem.layout) for kind in kinds]


def weights() -> Tensor:
    counted = torch.arange(SAMPLES, device=DEVICE) < torch.tensor(REAL, device=DEVICE).unsqueeze(1)
    return counted.double() / counted.sum(1, keepdim=True)


def begun(problem: Problem) -> Tensor:
    """Other running statistics for every row, of batches 3, 4 and 5."""
    rows = (0.5 + drawn(ROWS, problem.statistics.size, number=3).abs()).clone()
    for name, view in problem.statistics.views(rows).items():
        if name.endswith("num_batches_tracked"):
            view.copy_(torch.arange(3.0, 3.0 + ROWS))
    return rows


def plain_row(module: nn.Module, problem: Problem, row: Tensor, running: Tensor) -> nn.Module:
    plain = copy.deepcopy(module).double().to(DEVICE)
    state = problem.layout.state_dict(row) | statistics_state(problem.module, running)
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize(("module", "shape"), CASES)
def test_each_row_trains_as_pytorchs_own(module: nn.Module, shape: tuple[int, ...]) -> None:
    problem = Problem.of(copy.deepcopy(module), "regression", dtype=torch.float64, device=DEVICE)
    params, x = 0.5 + drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, *shape, number=1)
    running, weight = begun(problem), weights()
    for net in nets_of(problem):
        p, s = params.clone().requires_grad_(), x.clone().requires_grad_()
        known = RunningStatistics(running, weight)
        out = net.outputs(p, s, None, known)
        assert known.new is not None
        counted = (weight > 0).view(ROWS, SAMPLES, *(1,) * (out.dim() - 2))
        pull = drawn(*out.shape, number=2) * counted
        gradients = torch.autograd.grad((out * pull).sum(), (p, s))
        for row in range(ROWS):
            plain, inputs = plain_row(module, problem, params[row], running[row]), x[row, : REAL[row]].clone()
            inputs.requires_grad_()
            wanted = plain.train()(inputs)
            (wanted * pull[row, : REAL[row]]).sum().backward()
            torch.testing.assert_close(out[row, : REAL[row]], wanted, rtol=1e-10, atol=1e-11)
            found = {name: value.grad for name, value in plain.named_parameters()}
            torch.testing.assert_close(gradients[0][row], problem.layout.row_of(found), rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(gradients[1][row, : REAL[row]], inputs.grad, rtol=1e-10, atol=1e-11)
            assert not gradients[1][row, REAL[row] :].any()
            after = statistics_state(problem.module, known.new[row])
            for name, value in after.items():
                torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("module", "shape"), CASES)
def test_each_row_evaluates_as_pytorchs_own(module: nn.Module, shape: tuple[int, ...]) -> None:
    problem = Problem.of(copy.deepcopy(module), "regression", dtype=torch.float64, device=DEVICE)
    params, x, running = drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, *shape, number=1), begun(problem)
    for net in nets_of(problem):
        known = RunningStatistics(running)
        out = net.outputs(params, x, None, known)
        assert known.new is None
        for row in range(ROWS):
            plain = plain_row(module, problem, params[row], running[row]).eval()
            torch.testing.assert_close(out[row], plain(x[row]), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("module", "shape"), CASES)
def test_frozen_layers_normalise_by_what_they_were_built_with(module: nn.Module, shape: tuple[int, ...]) -> None:
    module = copy.deepcopy(module)
    for number, buffer in enumerate(module.buffers()):
        if buffer.is_floating_point():
            buffer.copy_(0.5 + drawn(*buffer.shape, number=10 + number).abs())
    problem = Problem.of(copy.deepcopy(module), "regression", dtype=torch.float64, device=DEVICE, buffers="frozen")
    assert problem.statistics.size == 0
    params, x = drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, *shape, number=1)
    for net in nets_of(problem):
        p = params.clone().requires_grad_()
        out = net.outputs(p, x)
        (gradient,) = torch.autograd.grad((out * (pull := drawn(*out.shape, number=2))).sum(), p)
        for row in range(ROWS):
            plain = copy.deepcopy(module).double().to(DEVICE).eval()
            plain.load_state_dict(problem.layout.state_dict(params[row]), strict=False)
            wanted = plain(x[row])
            (wanted * pull[row]).sum().backward()
            torch.testing.assert_close(out[row], wanted, rtol=1e-10, atol=1e-11)
            found = {name: value.grad for name, value in plain.named_parameters()}
            torch.testing.assert_close(gradient[row], problem.layout.row_of(found), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("module", "shape"), CASES[:-1])
def test_fused_step_is_a_step_along_the_gradient(module: nn.Module, shape: tuple[int, ...]) -> None:
    problem = Problem.of(copy.deepcopy(module), "regression", dtype=torch.float64, device=DEVICE)
    stacked, plain = nets_of(problem)[0], nets_of(problem)[-1]
    assert isinstance(stacked, StackedNet)
    params, x, weight = drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, *shape, number=1), weights()
    targets = drawn(ROWS, SAMPLES, number=4)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.flatten(1).sin().sum(1) * targets

    rate, moved = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64, device=DEVICE), params.clone()
    kept = [KeptStatistics({"": begun(problem)}, weight) for _ in range(2)]
    batches = [
        Batch(MeasuredNet(net, own), loss, x, targets, weight, weight.sum(1))
        for net, own in zip((stacked, plain), kept, strict=True)
    ]
    batches[0].descend_(moved, rate)
    torch.testing.assert_close(moved, params - rate * batches[1].grad(params), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(kept[0].rows[""], kept[1].rows[""], rtol=1e-12, atol=1e-12)
    assert bool((kept[0].rows[""] != begun(problem)).any())


def test_a_layer_whose_gain_is_not_trained() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    module[1].weight.requires_grad_(False).copy_(torch.tensor([1.0, 2.0, 3.0]))
    problem = Problem.of(module, "regression", dtype=torch.float64, device=DEVICE)
    assert "1.weight" not in problem.layout.names
    params, x, weight = drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, 4, number=1), weights()
    stacked, *others = (
        net.outputs(params, x, None, RunningStatistics(begun(problem), weight)) for net in nets_of(problem)
    )
    for other in others:
        torch.testing.assert_close(stacked[weight > 0], other[weight > 0], rtol=1e-11, atol=1e-12)
    # Each channel has the mean 0 and, but for eps, the gain for its standard deviation.
    spread = stacked[0].std(0, correction=0)
    torch.testing.assert_close(
        spread, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=DEVICE), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_layer_that_sees_pieces_of_a_sample_can_normalise_one_sample(pieces: int) -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6 // pieces)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x.reshape(len(x) * pieces, -1)).view(len(x), -1))

    engine = simulate("fedavg", classification(), Cut(), task="multiclass").engine
    tasks = registry.make("fedavg", {"batch_size": 4}).tasks().values()  # clients of 5, 9, ... samples
    with contextlib.nullcontext() if pieces > 1 else pytest.raises(ConfigError, match="one value by itself"):
        refuse_single_values(engine, tasks)
