"""Recurrent nets and attention: each row as PyTorch's own layer has it, forward and backward, on every net."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from coterie import models, randomness
from coterie.algorithms.base import Batch
from coterie.compute.nets.folded import FoldedNet
from coterie.compute.nets.row_net import ModuleNet, RowNet, VmapNet, agrees
from coterie.compute.nets.stacked import StackedNet
from coterie.models.batch_norm import RunningStatistics
from coterie.models.calls import call_with
from coterie.models.dropout import StreamDropout
from coterie.models.problem import LOSSES, Problem
from coterie.models.streams import use_streams

ROWS, SAMPLES, TIMES, WIDTH = 3, 4, 5, 6


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase, last: bool = False) -> None:
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        if self.last:
            _, state = self.layer(x)
            return (state[0] + state[1] if self.layer.mode == "LSTM" else state)[-1]
        out, _ = self.layer(x)
        return out if self.layer.batch_first else out.transpose(0, 1)


class Begun(nn.Module):
    """A recurrent layer whose first state comes from the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x[:, 0, :3].unsqueeze(0))[0]


class Attentive(nn.Module):
    """Attention from a sequence to another one, with its weights."""

    def __init__(self, cross: bool = False, **options: object) -> None:
        super().__init__()
        self.cross = cross
        self.attention = nn.MultiheadAttention(WIDTH, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        other = x.flip(1) * 0.5 if self.cross else x
        if not self.attention.batch_first:
            x, other = x.transpose(0, 1), other.transpose(0, 1)
        out, weights = self.attention(x, other, other)
        out = out if self.attention.batch_first else out.transpose(0, 1)
        return torch.cat([out, weights], -1)


class Causal(nn.Module):
    """Attention by PyTorch's function, with keys and values of fewer heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.others = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 2)).transpose(1, 2)
        key, value = self.others(x).chunk(2, -1)
        key, value = key.unflatten(-1, (2, 2)).transpose(1, 2), value.unflatten(-1, (2, 2)).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def encoder(**options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


class TimesFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.transpose(0, 1)).transpose(0, 1)


RECURRENT = {
    "lstm": Recurrent(nn.LSTM(WIDTH, 3, batch_first=True)),
    "lstm, last state": Recurrent(nn.LSTM(WIDTH, 3, num_layers=2, bidirectional=True), last=True),
    "lstm, deep": Recurrent(nn.LSTM(WIDTH, 3, num_layers=3, bias=False)),
    "lstm, both": Recurrent(nn.LSTM(WIDTH, 3, num_layers=2, bidirectional=True, batch_first=True)),
    "gru": Recurrent(nn.GRU(WIDTH, 3, batch_first=True)),
    "gru, deep": Recurrent(nn.GRU(WIDTH, 3, num_layers=2, bias=False, bidirectional=True)),
    "gru, begun": Begun(),
    "gru, last state": Recurrent(nn.GRU(WIDTH, 3), last=True),
    "rnn": Recurrent(nn.RNN(WIDTH, 3, num_layers=2, bidirectional=True, batch_first=True)),
    "rnn, relu": Recurrent(nn.RNN(WIDTH, 3, nonlinearity="relu", bias=False)),
}
ATTENTION = {
    "self": Attentive(batch_first=True),
    "times first": Attentive(bias=False),
    "cross": Attentive(cross=True, batch_first=True),
    "other widths": Attentive(cross=True, kdim=WIDTH, vdim=WIDTH, batch_first=True),
    "more keys": Attentive(add_bias_kv=True, add_zero_attn=True, batch_first=True),
    "function": Causal(),
    "encoder": encoder(batch_first=True),
    "encoder, norm first": encoder(batch_first=True, norm_first=True, activation="gelu", bias=False),
    "encoder, times first": TimesFirst(),
}


def drawn(*shape: int, number: int = 0) -> Tensor:
    return torch.from_numpy(randomness.stream(1, "families", number).normal(size=shape))


def nets_of(module: nn.Module) -> tuple[Problem, list[RowNet]]:
    problem = Problem.of(module, "regression", dtype=torch.float64)
    return problem, [kind(module, problem.layout) for kind in (StackedNet, VmapNet, ModuleNet)]


@pytest.mark.parametrize("module", [pytest.param(each, id=name) for name, each in (RECURRENT | ATTENTION).items()])
def test_each_row_is_pytorchs_own(module: nn.Module) -> None:
    plain = copy.deepcopy(module).double()
    problem, nets = nets_of(copy.deepcopy(module))
    params, x = 0.5 * drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, TIMES, WIDTH, number=1)
    wanted = []
    for row, samples in zip(params, x, strict=True):
        own = {name: value[0].clone().requires_grad_() for name, value in problem.layout.views(row[None]).items()}
        inputs = samples.clone().requires_grad_()
        out = torch.func.functional_call(plain, own, (inputs,))
        pull = drawn(*out.shape, number=2)
        found = torch.autograd.grad((out * pull).sum(), (*own.values(), inputs))
        gradient = problem.layout.row_of(dict(zip(own, found, strict=False)))
        wanted.append((out, gradient, found[-1]))
    for net in nets:
        p, s = params.clone().requires_grad_(), x.clone().requires_grad_()
        out = net.outputs(p, s)
        gradients = torch.autograd.grad((out * pull).sum(), (p, s))
        for got, each in zip((out, *gradients), zip(*wanted, strict=True), strict=True):
            torch.testing.assert_close(got, torch.stack(each), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("module", [pytest.param(each, id=name) for name, each in (RECURRENT | ATTENTION).items()])
def test_fused_step_is_a_step_along_the_gradient(module: nn.Module) -> None:
    problem, (stacked, *_, plain) = nets_of(copy.deepcopy(module))
    assert isinstance(stacked, StackedNet)
    params, x = 0.5 * drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, TIMES, WIDTH, number=1)
    weight = torch.full((ROWS, SAMPLES), 1 / SAMPLES, dtype=torch.float64)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.flatten(1).sin().sum(1) * targets

    rate = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64)
    moved = params.clone()
    targets = drawn(ROWS, SAMPLES, number=3)
    Batch(stacked, loss, x, targets, weight, weight.sum(1)).descend_(moved, rate)
    expected = params - rate * Batch(plain, loss, x, targets, weight, weight.sum(1)).grad(params)
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-11)


class Language(nn.Module):
    """Words in, words out, with one matrix for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=0)
        self.last = nn.Linear(4, 7)
        self.last.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x).mean(1))


def test_words_and_tied_weights() -> None:
    problem, nets = nets_of(Language())
    assert problem.layout.size == 7 * 4 + 7
    params = drawn(ROWS, problem.layout.size)
    x = torch.from_numpy(randomness.stream(1, "words").integers(0, 7, size=(ROWS, SAMPLES, TIMES)))
    y = x[:, :, 0]
    weight = torch.full((ROWS, SAMPLES), 1 / SAMPLES, dtype=torch.float64)
    rate = torch.full((ROWS, 1), 0.3, dtype=torch.float64)
    ends = []
    for net in nets:
        batch = Batch(net, LOSSES["cross_entropy"], x, y, weight, weight.sum(1))
        moved = params.clone()
        batch.descend_(moved, rate)
        ends.append((net.outputs(params, x), batch.grad(params), moved))
    # By hand: the mean of the words' vectors, times all words' vectors; the gradient reaches the matrix from both ends.
    table = params[0, : 7 * 4].view(7, 4).clone().requires_grad_()
    shift = params[0, 7 * 4 :]
    outputs = table.clone()[x[0]].mean(1) @ table.T + shift
    torch.testing.assert_close(ends[0][0][0], outputs.detach(), rtol=1e-12, atol=1e-12)
    for end in ends[:2]:
        for got, wanted in zip(end, ends[2], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


class Dropping(nn.Module):
    """Dropout in every form: layers, inside of layers, functions."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 3, num_layers=3, bidirectional=True, dropout=0.3)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.2)
        self.function = Causal()
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.before(x), 0.4, self.training)
        x = self.lstm(x.transpose(0, 1))[0]
        x = self.encoder(x).transpose(0, 1)
        query = self.function(x).unsqueeze(1)
        x = F.scaled_dot_product_attention(query, query, query, dropout_p=0.3)[:, 0]
        return self.last(F.dropout(x.mean(1), p=0.25))


def test_dropout_of_every_form_comes_from_streams() -> None:
    problem, nets = nets_of(Dropping())
    params, x = 0.5 * drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, TIMES, WIDTH, number=1)
    keys = randomness.keys(1, "dropout", 1, torch.arange(ROWS))
    ways = [net.outputs(params, x, keys) for net in nets]
    for net, got in zip(nets, ways, strict=True):
        torch.testing.assert_close(got, ways[-1], rtol=1e-11, atol=1e-12)
        assert net.uses_dropout
        assert torch.equal(net.outputs(params, x, keys), got)
        assert not torch.allclose(net.outputs(params, x, keys + 1), got)
        # A batch that is padded with further samples has the same masks for the first ones.
        torch.testing.assert_close(net.outputs(params, x[:, :2], keys), got[:, :2], rtol=1e-11, atol=1e-12)
    still = [net.outputs(params, x) for net in nets]
    plain = Dropping().double().eval()
    plain.forward = lambda x: _without_dropout(plain, x)  # type: ignore[method-assign]
    for row in range(ROWS):
        own = {name: value[0] for name, value in problem.layout.views(params[row : row + 1]).items()}
        wanted = torch.func.functional_call(plain, own, (x[row],))
        for got in still:
            torch.testing.assert_close(got[row], wanted, rtol=1e-10, atol=1e-11)


def _without_dropout(net: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = net.encoder(net.lstm(net.before(x).transpose(0, 1))[0]).transpose(0, 1)
    query = net.function(out).unsqueeze(1)
    return net.last(F.scaled_dot_product_attention(query, query, query)[:, 0].mean(1))


def test_dropout_keeps_means() -> None:
    """A dropped output is, over many streams, the output without dropout: here of a linear map of dropped inputs."""

    class Simple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.dropout(x, 0.5))

    problem, (stacked, *_) = nets_of(Simple())
    rows = 4000
    params = problem.start.expand(rows, -1)
    x = torch.ones(rows, 1, 4, dtype=torch.float64)
    got = stacked.outputs(params, x, randomness.keys(2, "dropout", 1, torch.arange(rows)))
    spread = float(problem.start.norm()) / rows**0.5  # of the mean: each factor is 0 or 2, with deviation 1
    assert abs(float(got.mean() - problem.start.sum())) < 5 * spread
    assert len(got.unique()) == 16


@pytest.mark.parametrize("bias", [True, False])
def test_the_fused_step_of_a_layer_with_one_output(bias: bool) -> None:
    _, (stacked, _, plain) = nets_of(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 1, bias=bias)))
    assert agrees(stacked, plain, drawn(2, 3, WIDTH), 1e-10, training=True)


class Named(nn.Module):
    """Gives layers and functions what they work on by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.MaxPool2d(2)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(input=self.conv(input=x.unsqueeze(1)))
        return self.head(input=self.drop(input=torch.flatten(input=self.pool(input=F.relu(input=x)), start_dim=1)))


def test_what_enters_a_layer_may_be_given_by_its_name() -> None:
    x, key = drawn(ROWS, SAMPLES, TIMES, WIDTH), randomness.keys(1, "dropout", 1, torch.arange(ROWS))
    problem = Problem.of(Named(), "regression", dtype=torch.float64, sample=x[0])
    models.check(problem.module, x[0])
    nets = [kind(problem.module, problem.layout) for kind in (StackedNet, FoldedNet, VmapNet, ModuleNet)]
    params, weight = drawn(ROWS, problem.layout.size), torch.full((ROWS, SAMPLES), 0.25, dtype=torch.float64)
    passes = [RunningStatistics(problem.running.expand(ROWS, -1), weight) for _ in nets]
    outputs = [net.outputs(params, x, key, known) for net, known in zip(nets, passes, strict=True)]
    for got, known in zip(outputs, passes, strict=True):
        torch.testing.assert_close(got, outputs[-1], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(known.new, passes[-1].new, rtol=1e-11, atol=1e-12)


class InPlace(nn.Module):
    """Changes what linear layers gave it, which PyTorch allows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(WIDTH, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(x), inplace=True)
        return self.three(torch.relu_(self.two(x))).mul_(2)


def test_the_fused_step_of_a_model_that_works_in_place() -> None:
    problem, nets = nets_of(InPlace())
    params, x = 0.5 * drawn(ROWS, problem.layout.size), drawn(ROWS, SAMPLES, WIDTH, number=1)

    def losses(outputs: Tensor) -> Tensor:
        return outputs.square().flatten(1).sum(1)

    leaf = params.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(losses(nets[-1].outputs(leaf, x)).sum(), leaf)
    moved, still = params.clone(), torch.ones(ROWS, SAMPLES, dtype=torch.float64)
    batch = Batch(nets[0], lambda outputs, _: outputs.sum(-1), x, still, still, still[:, 0])
    nets[0].descend_(moved, torch.ones(ROWS, 1, dtype=torch.float64), batch, losses)
    torch.testing.assert_close(params - moved, wanted, rtol=1e-10, atol=1e-12)


class HalfTrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.fixed(x)
        return self.head(x)


def test_a_net_that_trains_what_the_model_does_not_is_found_out() -> None:
    _, (stacked, vectorised, plain) = nets_of(HalfTrained())
    x = drawn(2, 3, WIDTH)
    assert agrees(stacked, plain, x, 1e-4) and not agrees(stacked, plain, x, 1e-4, training=True)
    assert agrees(vectorised, plain, x, 1e-4, training=True)


def test_dropout_where_times_are_first_belongs_to_samples() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.head = nn.Dropout(0.5), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(x.transpose(0, 1)).sum(0))

    x = drawn(ROWS, SAMPLES, TIMES, WIDTH)
    problem = Problem.of(Turned(), "regression", dtype=torch.float64, sample=x[0])
    key = randomness.keys(1, "families", 0, torch.arange(ROWS))
    for kind in (StackedNet, VmapNet, ModuleNet):
        net = kind(problem.module, problem.layout)
        params = problem.start.expand(ROWS, -1)
        whole = net.outputs(params, x, key)
        torch.testing.assert_close(net.outputs(params, x[:, :2], key), whole[:, :2], rtol=1e-12, atol=1e-12)
        if kind is StackedNet:
            wanted = whole
        torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_of_a_packed_sequence(kind: type[nn.RNNBase]) -> None:
    layer = kind(WIDTH, 3, num_layers=3, bidirectional=True, dropout=0.4, batch_first=True).double().eval()
    ours = nn.Sequential(copy.deepcopy(layer))
    use_streams(ours)
    x = pack_padded_sequence(drawn(4, 5, WIDTH), torch.tensor([3, 5, 1, 4]), batch_first=True, enforce_sorted=False)
    plain, wanted = ours(x)[0].data, layer(x)[0].data  # without a key nothing is dropped
    assert torch.equal(plain, wanted)
    with torch.no_grad():
        for each in ours.modules():
            if isinstance(each, StreamDropout):
                each.key = torch.ones((), dtype=torch.int64)
        assert not torch.equal(ours(x)[0].data, wanted)


def test_a_layer_with_two_names_is_given_back_its_own_parameters() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(shared, nn.Tanh(), nn.Sequential(shared))
    own = shared.weight
    given = {name: value + 1 for name, value in module.named_parameters()}
    once = copy.deepcopy(module)
    once.load_state_dict(given, strict=False)
    x = drawn(2, WIDTH).float()
    assert torch.equal(call_with(module, given, (x,)), once(x))
    assert shared.weight is own


def test_what_a_models_own_train_keeps_in_evaluation_stays_there() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
            self.head = nn.Linear(4, 3)

        def train(self, mode: bool = True) -> Kept:
            super().train(mode)
            self.body.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    problem, nets = nets_of(Kept())
    assert not problem.statistics.size
    assert not any(net.uses_dropout for net in nets)


def test_a_complex_buffer_keeps_its_imaginary_part() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("turn", torch.tensor([1 + 2j, 3 - 1j]))
    problem = Problem.of(module, "regression", dtype=torch.float64)
    assert torch.equal(problem.module.turn, torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
