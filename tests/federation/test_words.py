"""Whole numbers stay whole numbers between machines: models that look words up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from coterie.api import run
from coterie.data import Dataset
from coterie.errors import DataError
from coterie.federation.agreement import Schema
from coterie.federation.node import Node
from coterie.federation.party_data import load_own
from coterie.federation.plan import Plan
from coterie.federation.resident import Means
from coterie.federation.server import serve
from coterie.results import Result
from tests.federation.grid import Local, LocalGrid, combined, make_agreement, parts, states

SCHEMA = {"task": "multiclass", "input_shape": (64,), "classes": tuple("0123456789")}


class Reader(nn.Module):
    """The mean of the words' vectors, and a linear layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.vectors, self.head = nn.Embedding(17, 6), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.vectors(x).mean(1))
        return out


def in_words() -> list[Dataset]:
    """Digits as texts of 64 words: the shades of their pixels, 0 to 16."""
    return [replace(each, x=each.x.flatten(1).to(torch.int64).clamp(max=16)) for each in parts(3)]


def test_a_federation_on_words_is_a_simulation_on_words(tmp_path: Path) -> None:
    model = "import:tests.federation.test_words:Reader"
    agreement = make_agreement(3, data=Schema(**SCHEMA, words=True), model=model)
    datasets = in_words()
    means = Means(allow=(model,))
    nodes = {k: Node(agreement, k, datasets[k], tmp_path / f"{k}", means=means) for k in range(3)}
    local = Local(agreement, LocalGrid(nodes), tmp_path, datasets)
    serve(agreement, local.grid, Plan(algorithm="fedavg", rounds=2), tmp_path / "run")
    settings = combined(local, tmp_path / "all")
    settings["data"] += ",words=true"
    run("fedavg", out=tmp_path / "simulation", progress=False, rounds=2, **settings)
    ours, theirs = (states(tmp_path / name)[0] for name in ("run", "simulation"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    batched = run("fedavg", out=tmp_path / "b", progress=False, rounds=2, **{**settings, "engine": "batched"})
    loop = Result(tmp_path / "simulation").metrics["value"].to_numpy()
    torch.testing.assert_close(
        torch.from_numpy(batched.metrics["value"].to_numpy().copy()),
        torch.from_numpy(loop.copy()),
        rtol=1e-4,
        atol=1e-5,
    )


def test_words_that_nobody_agreed_on_are_refused(tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "words.npz", x=in_words()[0].x.numpy(), y=in_words()[0].y.numpy())
    for words, said in (
        (True, "numbers, but federation.yaml agrees on words: true"),
        (False, "whole numbers (of words)"),
    ):
        agreement = make_agreement(3, data=Schema(**SCHEMA, words=words))
        source = f"npz:{tmp_path / 'words.npz'},words={str(not words).lower()}"
        with pytest.raises(DataError) as told:
            load_own(source, tmp_path, agreement)
        assert said in str(told.value)
    assert load_own(
        f"npz:{tmp_path / 'words.npz'},words=true", tmp_path, make_agreement(3, data=Schema(**SCHEMA, words=True))
    )
    with pytest.raises(ValueError, match="words are neither columns of a table nor scaled"):
        Schema(**SCHEMA, words=True, mean=(0.5,))
