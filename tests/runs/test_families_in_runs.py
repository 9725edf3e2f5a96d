"""Recurrent nets and transformers in whole runs: engines agree, a stopped run ends the same, words stay words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import randomness
from coterie.config import from_mapping
from coterie.errors import ConfigError, DataError, ModelError
from coterie.results import Result
from coterie.runs import launch
from tests.conformance_table import TABLE
from tests.small_runs import Killed, assert_same_end, finish, stop

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    def __init__(self, outputs, kind="LSTM"):
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=0)
        self.body = getattr(nn, kind)(4, 3, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, outputs)

    def forward(self, x):
        out, _ = self.body(self.words(x))
        return self.head(F.dropout(out[:, -1], 0.1, self.training))


class Measured(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.body, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, outputs)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, outputs, places=False):
        super().__init__()
        self.words = nn.Embedding(9, 4)
        if places:  # parameters outside of layers: by vmap
            self.places = nn.Parameter(0.1 * torch.ones(1, 6, 4))
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(4, outputs)

    def forward(self, x):
        x = self.words(x)
        if hasattr(self, "places"):
            x = x + self.places
        return self.head(self.body(x).mean(1))


class Parted(nn.Module):
    split = 1  # layers of the body that SplitGP leaves to the clients

    def __init__(self, outputs):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, 5), nn.ReLU())
        self.head = nn.Linear(5, outputs)

    def forward(self, x):
        return self.head(self.body(x))


class Branching(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.head = nn.Linear(4, outputs)

    def forward(self, x):
        x = self.words(x).mean(1)
        return self.head(x if float(x.detach().sum()) > 1e9 else 2 * x)


class Pair(Branching):
    def forward(self, x):
        return self.head(self.words(x).mean(1)), x


class Dense(nn.Linear):
    def __init__(self, outputs, device="cpu"):
        super().__init__(6, outputs, device=device)


class Centred(Branching):
    def forward(self, x):
        x = self.words(x).mean(1)
        return self.head(x - x.mean(0))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    (tmp_path / "coterie_families.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    draw = randomness.stream(1, "words")
    x = draw.integers(0, 9, size=(70, 6))
    clients = np.repeat(np.arange(5), [8, 11, 14, 17, 20])
    np.savez(tmp_path / "words.npz", x=x, y=(x[:, -1] + x[:, 0]) % 3, client=clients)


def config_of(tmp_path: Path, model: str, algorithm: str = "fedavg", **more: Any) -> Any:
    return from_mapping(
        {
            "algorithm": algorithm,
            "settings": TABLE[algorithm].settings,
            "data": f"npz:{tmp_path / 'words.npz'},words=true",
            "partition": "natural",
            "clients": 5,
            "rounds": 3,
            "participation": 0.6,
            "checkpoint_every": 2,
            "device": os.environ.get("COTERIE_TEST_DEVICE", "cpu"),
            "model": f"import:coterie_families:{model}",
            **more,
        }
    )


@pytest.mark.parametrize(
    ("model", "kernel", "algorithm"),
    [
        *(
            (model, "stacked", algorithm)
            for model in ("Recurrent", "Recurrent:kind=GRU", "Transformer")
            for algorithm in ("fedavg", "fedacs", "fedamp", "flame", "fedpg", "ditto", "apfl", "scaffold")
        ),
        ("Recurrent:kind=RNN", "stacked", "fedacs"),
        ("Recurrent:kind=RNN", "stacked", "fedpg"),
        ("Transformer:places=true", "vmap", "fedacs"),
        ("Transformer:places=true", "vmap", "fedpg"),
        *(("Parted", "stacked", algorithm) for algorithm in ("fedrep", "fedrod", "splitgp")),
    ],
)
def test_engines_agree(model: str, kernel: str, algorithm: str, tmp_path: Path) -> None:
    ends = []
    for engine in ("loop", "batched"):
        playing = launch.begin(config_of(tmp_path, model, algorithm, engine=engine, dtype="float64"), tmp_path / engine)
        if engine == "batched":
            assert playing.parts.engine.choices["kernel"] == kernel
        finish(playing)
        ends.append(Result(tmp_path / engine).metrics["value"])
    assert (ends[0] - ends[1]).abs().max() < 1e-10
    assert ends[0].nunique() > 5


@pytest.mark.parametrize("model", ["Recurrent", "Transformer"])
def test_stopped_and_resumed_ends_the_same(model: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, model, "fedacs", rounds=5)
    finish(launch.begin(config, tmp_path / "whole"))
    stop(launch.begin(config, tmp_path / "cut"), "in a round", 3)
    stop(launch.resume(tmp_path / "cut"), "in evaluation", 5, Killed)
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("Branching", {}, r"Branching cannot be run for several clients at once \(.*\): use --engine loop"),
        ("Centred", {}, "depends on the other samples of the batch"),
        ("Centred", {"engine": "loop"}, "depends on the other samples of the batch"),
        ("Recurrent:kind=Nothing", {}, "cannot be made"),
        (
            "Pair",
            {},
            r"^model 'import:.*:Pair': forward gives a tuple; it must give one tensor, or have it as \.logits",
        ),
        (
            "Dense",
            {},
            r"^model '.*' fails on numbers of words of shape \(6,\) .*: a model of words looks them up first",
        ),
        ("Dense:device=meta", {}, r"^model '.*': .* has parameters without values"),
        ("Pair", {"data": "synthetic:clients=5,features=6,classes=3"}, r"it looks words up, but .* with words=true"),
    ],
)
def test_a_refused_run_leaves_no_folder(model: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        launch.begin(config_of(tmp_path, model, **more), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_word_that_is_rare_is_looked_up_before_the_first_round(engine: str, tmp_path: Path) -> None:
    """In one sample of the last client's: training would have come to it in the middle of a round, or evaluation."""
    with np.load(tmp_path / "words.npz") as found:
        arrays = dict(found)
    arrays["x"][-1, 2] = 9
    np.savez(tmp_path / "words.npz", **arrays)
    words = "the largest number of a word is 9, so an nn.Embedding of words needs 10 entries"
    with pytest.raises(ModelError, match=words):
        launch.begin(config_of(tmp_path, "Parted", engine=engine), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_measurements_over_time_are_series_and_no_images(tmp_path: Path) -> None:
    draw = randomness.stream(1, "series")
    x = draw.normal(size=(60, 7, 2)).astype(np.float32)
    np.savez(tmp_path / "series.npz", x=x, y=(x[:, :, 0].sum(1) > 0).astype(int), client=np.arange(60) % 5)
    data = f"npz:{tmp_path / 'series.npz'}"
    with pytest.raises(ModelError, match=r"fails on inputs of shape \(1, 7, 2\) .* is read with series=true"):
        launch.begin(config_of(tmp_path, "Measured", data=data), tmp_path / "run")
    ends = []
    for engine in ("loop", "batched"):
        config = config_of(tmp_path, "Measured", data=f"{data},series=true", engine=engine, dtype="float64")
        ends.append(finish(launch.begin(config, tmp_path / engine)).metrics["value"])
    assert (ends[0] - ends[1]).abs().max() < 1e-10 and ends[0].nunique() > 5


def test_the_named_engine_runs_it(tmp_path: Path) -> None:
    assert finish(launch.begin(config_of(tmp_path, "Branching", engine="loop"), tmp_path / "run")).summary


def test_words_take_no_noise(tmp_path: Path) -> None:
    with pytest.raises((DataError, ConfigError), match="no noise can be added"):
        launch.begin(config_of(tmp_path, "Transformer", partition="quality"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
