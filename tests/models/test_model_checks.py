"""Modules that cannot be trained as rows are refused, with what to use instead."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

from coterie import models
from coterie.errors import ModelError
from coterie.models import checks

SHAPES = {entry.name: entry.input_shape for entry in models.describe()}


class OwnAttention(nn.MultiheadAttention):
    """Who knows what it does."""


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


def test_functional_dropout_is_ours_to_draw():
    class Dropping(nn.Linear):
        def forward(self, x):
            return F.dropout(super().forward(x), training=self.training)

    models.check(Dropping(3, 2), torch.ones(5, 3))


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
