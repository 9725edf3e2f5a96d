"""The catalogue: names, exact sizes, options, refusals, and the user's own modules."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coterie import models
from coterie.errors import ConfigError, ModelError, UnknownName

# Layer by layer: conv = channels in * channels out * kernel**2 + biases, fc = in * out + biases.
COUNTS = [
    ("linear", (1, 28, 28), 10, 784 * 10 + 10, 7_850),
    ("mlp", (1, 28, 28), 10, 784 * 200 + 200 + 200 * 10 + 10, 159_010),
    ("mlp:hidden=128-64", (1, 28, 28), 10, 784 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10, 109_386),
    ("mlp2", (1, 28, 28), 10, 784 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10, 109_386),
    ("mlp_fedpg", (1, 28, 28), 10, 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10, 199_210),
    ("cnn_cifar_flame", (3, 32, 32), 10, 3 * 16 * 9 + 16 + 16 * 32 * 9 + 32 + 2048 * 128 + 128 + 1290, 268_650),
    ("cnn_mmnist", (3, 64, 64), 6, 3 * 32 * 9 + 32 + 32 * 16 * 9 + 16 + 3136 * 64 + 64 + 64 * 6 + 6, 206_678),
    ("cnn_femnist", (1, 28, 28), 62, 32 * 49 + 32 + 32 * 64 * 9 + 64 + 3136 * 62 + 62, 214_590),
    ("cnn_femnist", (1, 28, 28), 10, 32 * 49 + 32 + 32 * 64 * 9 + 64 + 3136 * 10 + 10, 51_466),
    ("cnn_femnist:head=62", (1, 28, 28), 10, 32 * 49 + 32 + 32 * 64 * 9 + 64 + 3136 * 62 + 62, 214_590),
    ("cnn_mcmahan", (1, 28, 28), 10, 32 * 25 + 32 + 32 * 64 * 25 + 64 + 3136 * 512 + 512 + 5130, 1_663_370),
    ("cnn_mcmahan", (1, 28, 28), 62, 32 * 25 + 32 + 32 * 64 * 25 + 64 + 3136 * 512 + 512 + 513 * 62, 1_690_046),
    (
        "cnn_cifar_fedpg",
        (3, 32, 32),
        10,
        3 * 64 * 25 + 64 + 64 * 64 * 25 + 64 + 1600 * 384 + 384 + 384 * 192 + 192 + 1930,
        797_962,
    ),
    ("cnn_pfl", (3, 32, 32), 10, 3 * 32 * 9 + 32 + 32 * 64 * 9 + 64 + 12544 * 128 + 128 + 1290, 1_626_442),
    ("cnn_pfllib", (1, 28, 28), 10, 32 * 25 + 32 + 32 * 64 * 25 + 64 + 1024 * 512 + 512 + 5130, 582_026),
    ("cnn_small", (1, 8, 8), 10, 9 * 16 + 16 + 16 * 32 * 9 + 32 + 512 * 64 + 64 + 650, 38_282),
    ("nfresnet18_fedpg", (3, 32, 32), 100, None, 189_844),
    ("nfresnet18_full", (3, 32, 32), 100, None, 11_215_332),
    ("resnet18_gn", (3, 32, 32), 100, None, 11_227_812),
    ("resnet18_gn:stem=torchvision", (3, 32, 32), 100, None, 11_227_812),
    ("resnet18_gn:stem=3x3", (3, 32, 32), 100, None, 11_220_132),
]


def count(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def on_meta(name: str, shape: tuple[int, ...], outputs: int, **options: object) -> nn.Module:
    with torch.device("meta"):
        return models.build(name, shape, outputs, **options)


@pytest.mark.parametrize(("name", "shape", "outputs", "derived", "published"), COUNTS)
def test_parameter_counts_are_the_papers(name, shape, outputs, derived, published):
    assert derived in (None, published)
    assert count(on_meta(name, shape, outputs)) == published


def test_every_model_has_a_count_here():
    assert {name.partition(":")[0] for name, *_ in COUNTS} == set(models.names())


def test_residual_counts_layer_by_layer():
    def nf(inputs: int, outputs: int, kernel: int) -> int:
        return inputs * outputs * kernel**2 + outputs  # a gain for each filter, no bias

    def stages(widths: tuple[int, ...]) -> int:
        total, channels = nf(3, 64, 3), 64
        for stage, width in enumerate(widths):
            total += nf(channels, width, 3) + 3 * nf(width, width, 3)
            total += nf(channels, width, 1) if channels != width or stage > 0 else 0
            channels = width
        return total + channels * 100 + 100

    assert stages((16, 32, 64)) == 189_844
    assert stages((64, 128, 256, 512)) == 11_215_332
    # Group normalisation has two numbers a channel where scaled standardisation has one gain; 4,800 channels.
    channels = 64 + 4 * 64 + (5 * 128) + (5 * 256) + (5 * 512)
    assert channels == 4_800
    assert 11_215_332 + channels == 11_220_132
    assert 11_220_132 + 3 * 64 * (49 - 9) == 11_227_812


def test_describe_counts_without_touching_random_state():
    before = torch.get_rng_state()
    described = {entry.name: entry for entry in models.describe()}
    assert torch.equal(before, torch.get_rng_state())
    assert tuple(described) == models.names()
    for name, shape, outputs, _, published in COUNTS:
        entry = described.get(name)
        if entry is not None and (entry.input_shape, entry.outputs) == (shape, outputs):
            assert entry.parameters == published
    assert described["mlp"].options == {"hidden": "200"}
    assert all(entry.layers and entry.source for entry in described.values())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 30), st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_mlp_of_any_widths(widths, features, outputs):
    sizes = [features, *widths, outputs]
    expected = sum((a + 1) * b for a, b in itertools.pairwise(sizes))
    text = "-".join(map(str, widths))
    assert count(on_meta(f"mlp:hidden={text}", (features,), outputs)) == expected
    assert count(on_meta("mlp", (features,), outputs, hidden=text)) == expected


def test_given_options_win_over_those_in_the_name():
    assert on_meta("mlp:hidden=7", (4,), 2, hidden=3).head.in_features == 3


@pytest.mark.parametrize("name", ["resnet", "mpl", "", "Linear"])
def test_unknown_model(name):
    with pytest.raises(UnknownName, match="there is no model"):
        models.build(name, (1, 28, 28), 10)


def test_unknown_model_says_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'cnn_mcmahan'"):
        models.build("cnn_mcmahn", (1, 28, 28), 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlp:width=3", "no option of model 'mlp' called 'width'"),
        ("linear:hidden=3", "model 'linear' takes no options"),
        ("mlp:hidden", "must be key=value"),
        ("mlp:hidden=3,hidden=4", "each key once"),
        ("mlp:hidden=3-0", "positive widths"),
        ("mlp:hidden=", "positive widths"),
        ("mlp:hidden=-3", "positive widths"),
        ("cnn_femnist:head=many", "head='many' of model 'cnn_femnist'"),
        ("cnn_femnist:head=9", "at least the task's 10 outputs"),
        ("resnet18_gn:stem=5x5", "stem='5x5' of model 'resnet18_gn'.*'torchvision' or '3x3'"),
        ("nfresnet18_fedpg:beta=2", "beta='2'"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        models.build(name, (1, 28, 28), 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in models.names() if name.startswith(("cnn", "nf", "resnet"))])
@pytest.mark.parametrize("shape", [(784,), (28, 28), (1, 1, 28, 28)])
def test_images_are_asked_for(name, shape):
    with pytest.raises(ModelError, match="takes images of shape"):
        on_meta(name, shape, 10)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("cnn_cifar_fedpg", (3, 13, 32), "5x5 convolution meets a map of only 4x14"),
        ("cnn_pfllib", (1, 8, 8), "5x5 convolution meets a map of only 2x2"),
        ("cnn_pfl", (3, 4, 4), "3x3 convolution meets a map of only 2x2"),
        ("cnn_pfl", (3, 5, 5), "2x2 pooling meets a map of only 1x1"),
        ("cnn_mmnist", (3, 4, 4), "3x3 convolution meets a map of only 1x1"),
        ("linear", (), "every axis must be at least 1"),
        ("mlp", (3, 0), "every axis must be at least 1"),
    ],
)
def test_inputs_that_do_not_fit(name, shape, message):
    with pytest.raises(ModelError, match=message):
        on_meta(name, shape, 10)


@pytest.mark.parametrize("name", models.names())
def test_no_outputs(name):
    shape = (3, 64, 64)
    with pytest.raises(ModelError, match="at least one output, not 0"):
        on_meta(name, shape, 0)


USER_MODULE = """
import torch
from torch import nn

class Takes(nn.Module):
    def __init__(self, input_shape, outputs, width=5):
        super().__init__()
        self.shape, self.layer = input_shape, nn.Linear(width, outputs)

class OnlyOutputs(nn.Module):
    def __init__(self, *, outputs):
        super().__init__()
        self.layer = nn.Linear(2, outputs)

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 4)

class Needy(nn.Module):
    def __init__(self, depth):
        super().__init__()

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        raise RuntimeError("no weights today")

def anything(**given):
    return nn.Linear(1 + len(given), given.get("width", 3))

def nothing():
    return "a string"

instance = nn.Linear(2, 2)
number = 3
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    (tmp_path / "theirs_for_test.py").write_text(USER_MODULE)
    (tmp_path / "broken_for_test.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "import:theirs_for_test"


def test_users_module_gets_what_it_names(user):
    made = models.build(f"{user}:Takes", (1, 8, 8), 3)
    assert made.shape == (1, 8, 8)
    assert tuple(made.layer.weight.shape) == (3, 5)
    assert models.build(f"{user}:Takes:width=7", (1,), 3).layer.in_features == 7
    assert models.build(f"{user}:Takes", (1,), 3, width=9).layer.in_features == 9
    assert models.build(f"{user}:OnlyOutputs", (1,), 6).layer.out_features == 6
    assert models.build(f"{user}:Plain", (1,), 6).layer.out_features == 4
    assert str(models.build(f"{user}:anything", (1,), 6)) == str(nn.Linear(1, 3))
    assert str(models.build(f"{user}:anything", (1,), 6, width=5)) == str(nn.Linear(2, 5))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (":Absent", "'Absent' is missing"),
        (":number", "'number' is a int"),
        (":instance", "'instance' is a Linear; it must be a class or function"),
        (":Needy", "cannot be called with no arguments.*depth"),
        (":Plain:width=3", "cannot be called with width=3"),
        (":Broken", "cannot be made: RuntimeError: no weights today"),
        (":nothing", "made a str, not an nn.Module"),
        ("_not_there:Net", "cannot be imported.*PYTHONPATH"),
    ],
)
def test_users_module_refused(user, target, message):
    with pytest.raises(ModelError, match=message):
        models.build(user + target, (1,), 2)


@pytest.mark.parametrize("name", ["import:", "import:torch.nn", "import::Linear"])
def test_import_path_is_malformed(name):
    with pytest.raises(ConfigError, match=r"must read import:package\.module:Class"):
        models.build(name, (1,), 2)


def test_module_that_fails_on_import(user):
    with pytest.raises(ModelError, match="the module was found, but raised ZeroDivisionError"):
        models.build("import:broken_for_test:Net", (1,), 2)


@pytest.mark.parametrize(
    ("text", "value"), [("false", False), ("True", True), ("none", None), ("2", 2), ("relu", "relu")]
)
def test_options_of_ones_own_model_are_values(text, value, tmp_path, monkeypatch):
    (tmp_path / "optional_for_test.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Linear):\n"
        "    def __init__(self, given):\n        super().__init__(1, 1)\n        self.given = given\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert models.build(f"import:optional_for_test:Net:given={text}", (1,), 2).given == value
