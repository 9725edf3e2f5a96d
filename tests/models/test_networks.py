"""Every model: body and head, tracing, and many rows at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie import models
from coterie.errors import ModelError
from coterie.randomness import torch_stream
from coterie.rows import Layout

# The largest models are tried on smaller images: what is tested does not depend on the image's size.
SMALL = {"nfresnet18_full": (3, 16, 16), "resnet18_gn": (3, 32, 32), "resnet18_gn:stem=3x3": (3, 8, 8)}
SHAPES = {entry.name: entry.input_shape for entry in models.describe()}
VARIANTS = [*models.names(), "mlp:hidden=32-16-8", "nfresnet18_fedpg:beta=predicted", "resnet18_gn:stem=3x3"]


def shape_of(name: str) -> tuple[int, ...]:
    return SMALL.get(name, SHAPES[name.partition(":")[0]])


def built(name: str, seed: int, outputs: int = 5) -> models.Network:
    with torch_stream(seed, "init"):
        made = models.build(name, shape_of(name), outputs)
    assert isinstance(made, models.Network)
    return made.double().eval()


def batch(name: str, seed: int, samples: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, *shape_of(name), dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", VARIANTS)
def test_body_head_and_split(name):
    net, x = built(name, 1), batch(name, 1)
    assert [child for child, _ in net.named_children()] == ["body", "head"]
    assert isinstance(net.body, nn.Sequential)
    assert isinstance(net.head, nn.Linear)
    assert all(key.startswith(("body.", "head.")) for key, _ in net.named_parameters())
    assert not list(net.buffers())
    with torch.no_grad():
        out = net(x)
        torch.testing.assert_close(out, net.head(net.body(x)), rtol=0, atol=0)
        split = net.head(net.body[net.split :](net.body[: net.split](x)))
        torch.testing.assert_close(out, split, rtol=0, atol=0)
    assert out.shape == (2, 5)
    # Both halves of a split model have something to train; the body of a linear model has nothing to split.
    if name != "linear":
        assert sum(value.numel() for value in net.body[: net.split].parameters()) > 0
    assert 0 < net.split <= len(net.body)


@pytest.mark.parametrize("name", VARIANTS)
def test_layout_finds_head_and_body(name):
    with torch.device("meta"):
        net = models.build(name, shape_of(name), 5)
    layout = Layout.of(net, {"head": ["head"], "body": ["body"]})
    assert layout.columns("head").size == 5 * (net.head.in_features + 1)
    assert layout.columns("head").spans[0][1] == layout.size
    if name != "linear":
        assert layout.columns("body").size + layout.columns("head").size == layout.size


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_at_once_equal_one_by_one_and_the_trace(name):
    nets = [built(name, seed) for seed in (1, 2)]
    inputs = torch.stack([batch(name, seed) for seed in (3, 4)])
    with torch.no_grad():
        separate = torch.stack([net(x) for net, x in zip(nets, inputs, strict=True)])
        assert not torch.allclose(separate[0], separate[1])
        stacked = {
            key: torch.stack([value, dict(nets[1].named_parameters())[key]])
            for key, value in nets[0].named_parameters()
        }
        together = vmap(lambda params, x: functional_call(nets[0], params, (x,)))(stacked, inputs)
        torch.testing.assert_close(together, separate, rtol=1e-10, atol=1e-12)
        traced = torch.fx.symbolic_trace(nets[0])
        torch.testing.assert_close(traced(inputs[0]), separate[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.partition(":")[0] not in SMALL])
def test_gradients_of_rows_equal_autograd(name):
    net, x = built(name, 1), batch(name, 1).unsqueeze(0)
    params = {key: value.detach() for key, value in net.named_parameters()}
    stacked = {key: torch.stack([value, 0.5 * value]) for key, value in params.items()}

    def loss(given: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(net, given, (inputs,)).square().mean()

    rows = vmap(grad(loss))(stacked, x.expand(2, *x.shape[1:]))
    for row, scale in enumerate((1.0, 0.5)):
        leaves = {key: (scale * value).requires_grad_() for key, value in params.items()}
        wanted = torch.autograd.grad(loss(leaves, x[0]), list(leaves.values()))
        for key, value in zip(leaves, wanted, strict=True):
            torch.testing.assert_close(rows[key][row], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_same_stream_same_start(name):
    with torch_stream(7, "init"):
        first = models.build(name, shape_of(name), 5)
    with torch_stream(7, "init"):
        second = models.build(name, shape_of(name), 5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "rates"),
    [("cnn_mmnist", [0.2]), ("cnn_cifar_fedpg", [0.2, 0.5]), ("cnn_pfl", [0.25, 0.5]), ("cnn_mcmahan", [])],
)
def test_dropout_is_plain_and_where_the_paper_has_it(name, rates):
    with torch.device("meta"):
        net = models.build(name, shape_of(name), 5)
    assert [layer.p for layer in net.modules() if type(layer) is nn.Dropout] == rates


def test_mlp_by_hand():
    net = models.build("mlp:hidden=2", (2,), 1).double()
    with torch.no_grad():
        net.body[1].weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 0.0]]))
        net.body[1].bias.copy_(torch.tensor([0.5, -5.0]))
        net.head.weight.copy_(torch.tensor([[3.0, 4.0]]))
        net.head.bias.copy_(torch.tensor([-1.0]))
        # (3, 1): hidden relu(2.5, 1) -> 7.5 + 4 - 1; (0, 2): relu(-1.5, -5) = 0 -> -1
        out = net(torch.tensor([[3.0, 1.0], [0.0, 2.0]], dtype=torch.float64))
    assert out.flatten().tolist() == [10.5, -1.0]


def test_split_is_checked():
    with pytest.raises(ModelError, match="split=4 must be between 0 and the body's 1 layers"):
        models.Network(nn.Sequential(nn.Flatten()), nn.Linear(2, 2), split=4)
