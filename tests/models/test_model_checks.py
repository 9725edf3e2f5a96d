"""Modules that cannot be trained as rows are refused, with what to use instead."""

from __future__ import annotations

import importlib
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.checkpoint import checkpoint

from coterie import models, randomness
from coterie.errors import ModelError
from coterie.models import checks

SHAPES = {entry.name: entry.input_shape for entry in models.describe()}


class OwnAttention(nn.MultiheadAttention):
    """Who knows what it does."""


@pytest.mark.filterwarnings("ignore")
def test_weights_that_a_hook_computes():
    with pytest.raises(ModelError, match=r"use torch.nn.utils.parametrizations.weight_norm"):
        models.check(wrapped(old_weight_norm(nn.Linear(4, 4))))


@pytest.mark.filterwarnings("ignore")
def test_torchscript():
    with pytest.raises(ModelError, match="compiled by TorchScript"):
        models.check(wrapped(torch.jit.script(nn.Linear(4, 4))))


def wrapped(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4), layer))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.SyncBatchNorm(4), r"layer '1.1' \(SyncBatchNorm\).*use nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d"),
        (nn.BatchNorm1d(4, affine=False, track_running_stats=False), "evaluation.*set track_running_stats=True"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "track_running_stats=False"),
        (nn.Dropout1d(), "use nn.Dropout"),
        (nn.Dropout2d(), "use nn.Dropout"),
        (nn.Dropout3d(), "use nn.Dropout"),
        (nn.AlphaDropout(), "use nn.Dropout"),
        (nn.FeatureAlphaDropout(), "use nn.Dropout"),
        (nn.RReLU(), "use nn.LeakyReLU"),
        (nn.FractionalMaxPool2d(2, 2), "use nn.MaxPool2d"),
        (OwnAttention(4, 2, dropout=0.1), "dropout=0.1"),
        (nn.LSTM(4, 4, proj_size=2), "proj_size=0"),
        (nn.Embedding(3, 4, max_norm=1.0), "max_norm=None"),
        (nn.Embedding(3, 4, sparse=True), "sparse=False"),
        (nn.Embedding(3, 4, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
        (old_spectral_norm(nn.Linear(4, 4)), "spectral normalisation"),
        (parametrizations.spectral_norm(nn.Linear(4, 4)), "spectral normalisation"),
        (nn.LazyLinear(4), "without a shape yet"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_refused_by_type(layer, message):
    with pytest.raises(ModelError, match=message) as caught:
        models.check(wrapped(layer))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.InstanceNorm1d(4),
        nn.LSTM(4, 4),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(4, 4, num_layers=2, dropout=0.3),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.Embedding(3, 4),
        nn.PReLU(),
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm3d(4, affine=False),
        parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_accepted_by_type(layer):
    models.check(wrapped(layer))


@pytest.mark.parametrize("name", models.names())
def test_our_own_models_pass(name):
    shape = SHAPES[name]
    net = models.build(name, shape, 10).train()
    models.check(net, torch.zeros(2, *shape))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return self.layer(x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) + torch.rand(2)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Total(nn.Linear):
    def forward(self, x):
        return super().forward(x).sum(0)


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Changing(nn.Linear):
    def forward(self, x):
        x += 1
        return super().forward(x)


class Shrinking(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class Hidden(nn.Module):
    """What a probe that looks at outputs alone does not see."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer, self.before, self.passes = what, nn.Linear(3, 2), nn.Linear(3, 3), 0
        self.own = [self.before.weight]

    def forward(self, x):
        out = self.layer(x)
        match self.what:
            case "seldom":
                return out + 1 if torch.rand(()) < 1e-9 else out
            case "numpy":
                return out + 1 if importlib.import_module("numpy.random").rand() < 1e-9 else out
            case "python":
                return out + 1 if importlib.import_module("random").random() < 1e-9 else out
            case "pairs":
                return out + out.view(-1, 2, 2).flip(1).flatten(0, 1) if len(out) % 2 == 0 else out
            case "first":
                return out - out[:1]
            case "running sum":
                return out.cumsum(0)
            case "bound":
                self.layer.weight.data.clamp_(-9, 9)
            case "spoilt":
                return torch.sigmoid(out).mul_(2)
            case "again":
                return self.layer(checkpoint(lambda v: torch.tanh(self.before(v)), x, use_reentrant=False))
            case "reentrant":
                return self.layer(checkpoint(lambda v: torch.tanh(self.before(v)), x, use_reentrant=True))
            case "reentrant later":
                return checkpoint(self.layer, torch.tanh(self.before(x)), use_reentrant=True)
            case "whole numbers":
                return out.round().long()
            case "complex":
                return torch.complex(out, out)
            case "beside":
                return self.layer(torch.tanh(x @ self.own[0].T))
            case "untrained":
                return out.detach()
            case "undefined":
                return out * float("nan")
            case "counts":
                self.passes += 1
                return out * self.passes
            case "times first":
                return F.dropout(torch.stack([out, out]), 0.5)[1]
        return out


@pytest.mark.parametrize(
    ("what", "message"),
    [
        *((what, "forward draws random numbers of its own; use nn.Dropout") for what in ("seldom", "numpy", "python")),
        *((what, "depends on the other samples") for what in ("pairs", "first", "running sum")),
        ("bound", "parameter 'layer.weight' changes in forward"),
        ("spoilt", "changes in place what its gradient needs"),
        ("again", "other parameters than those it is called with, as torch.utils.checkpoint"),
        ("reentrant", "checkpoint, which trains none of what it is given .*leave checkpointing out"),
        ("reentrant later", "checkpoint, which trains none of what it is given"),
        ("whole numbers", "outputs of type int64; give scores that are floats"),
        ("complex", "outputs of type complex64; give scores that are floats"),
        ("beside", "take parameters from the module itself"),
        ("untrained", "no parameter that is trained"),
        ("undefined", "gives NaN"),
        ("counts", "keep nothing from one pass for the next"),
        ("times first", "dropout meets a tensor whose first axis is not the sample"),
    ],
)
def test_what_outputs_do_not_show_is_refused(what, message):
    module, states = Hidden(what), randomness.generator_states(torch.device("cpu"))
    with pytest.raises(ModelError, match=message):
        models.check(module, torch.sin(torch.arange(12.0)).view(4, 3))
    assert randomness.generator_states(torch.device("cpu")) == states


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Centred(3, 2), "depends on the other samples of the batch; compute each sample by itself"),
        (Changing(3, 2), "changes its inputs in place; work on a new tensor"),
        (Shrinking(3, 2), "parameter 'weight' changes in forward"),
        (Counter(), "buffer 'seen' changes in forward"),
        (Noisy(), "draws random numbers of its own; use nn.Dropout"),
        (Pair(3, 2), "gives a tuple"),
        (Total(3, 2), r"outputs of shape \(2,\) for 5 samples"),
    ],
)
def test_refused_by_running_it(module, message):
    models.check(module)
    random_state, state = torch.get_rng_state(), {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(ModelError, match=message):
        models.check(module, torch.arange(15.0).view(5, 3))
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


class Preparing(nn.Linear):
    """What can be done to samples as they are, and not to samples with a gradient."""

    def forward(self, x):
        twice = torch.mul(x, 2.0, out=torch.empty_like(x))
        return super().forward(twice + torch.from_numpy(np.tanh(x.numpy())))


def test_samples_may_be_prepared_in_ways_that_have_no_gradient():
    models.check(Preparing(3, 2), torch.arange(15.0).view(5, 3))


def test_functional_dropout_is_ours_to_draw():
    class Dropping(nn.Linear):
        def forward(self, x):
            return F.dropout(super().forward(x), training=self.training)

    models.check(Dropping(3, 2), torch.ones(5, 3))


@pytest.mark.parametrize("attends", [False, True], ids=["F.dropout", "attention"])
def test_what_drops_in_evaluation_too_is_refused(attends: bool) -> None:
    class Dropping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = super().forward(x)
            if not attends:
                return F.dropout(made, 0.2)
            parts = made.unsqueeze(-1)
            return F.scaled_dot_product_attention(parts, parts, parts, dropout_p=0.1).squeeze(-1)

    with pytest.raises(ModelError, match=r"drops in evaluation too.*write F\.dropout\(x, p, self\.training\)"):
        models.check(Dropping(3, 2), torch.rand(5, 3))


def test_dropout_and_mode_are_left_as_they_are():
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
    models.check(module, torch.ones(2, 3))
    assert module[1].p == 0.5
    assert not module.training


def test_a_gpus_tf32_is_off_while_a_model_is_tried_and_as_before_afterwards() -> None:
    seen: list[tuple[bool, bool]] = []

    class Watching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
            return super().forward(x)

    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        checks.check(Watching(3, 2), torch.ones(4, 3))
        after = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[1]
    assert set(seen) == {(False, False)}
    assert after == (before[0], True)


class Pairs(nn.Module):
    """Normalises two values of each sample: side by side, or all first ones before all second ones."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.norm, self.layer, self.beside = nn.BatchNorm1d(4), nn.Linear(4, 3), beside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.beside:
            return self.layer(self.norm(torch.stack([x, x.tanh()], 1).flatten(0, 1)).unflatten(0, (-1, 2)).sum(1))
        one, two = self.norm(torch.cat([x, x.tanh()])).chunk(2)
        return self.layer(one + two)


def test_batch_norm_must_meet_the_values_of_a_sample_side_by_side() -> None:
    sample = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    models.check(Pairs(beside=True), sample)
    with pytest.raises(ModelError, match="do not lie side by side"):
        models.check(Pairs(beside=False), sample)


def test_what_other_threads_draw_is_not_held_against_a_model() -> None:
    stop, layer = threading.Event(), wrapped(nn.Linear(4, 4))

    def draw() -> None:
        while not stop.is_set():
            torch.rand(1)

    thread = threading.Thread(target=draw)
    with randomness.generators_kept(torch.device("cpu")):
        thread.start()
        try:
            for _ in range(30):
                models.check(layer, torch.randn(6, 4))
        finally:
            stop.set()
            thread.join()
