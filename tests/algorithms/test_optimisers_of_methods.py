"""Every method with every local optimiser that it takes: no row of its own takes the place of the optimiser's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.local_training import Optimiser
from coterie.errors import ConfigError
from coterie.rows import Rows
from tests.conformance_table import TABLE
from tests.support import classification, play, simulate, small_model

CHOICES: dict[str, dict[str, Any]] = {
    "adam": {"optimiser": "adam", "lr": 0.01},
    "momentum": {"momentum": 0.5},
    "both decays": {"weight_decay": 0.1, "lr_decay": 0.9},
}
NAMES = sorted(name for name in TABLE if "optimiser" in registry.get(name).model_fields)


def test_most_methods_have_the_choice() -> None:
    assert len(NAMES) > 15


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_optimiser_are_its_own(name: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TABLE[name].settings | CHOICES[choice]
    try:
        registry.make(name, settings)
    except ConfigError as error:  # SCAFFOLD's correction is made for plain SGD
        assert any(field in str(error) for field in CHOICES[choice])
        return
    before = Optimiser.update
    seen = 0

    def update(self: Optimiser, work: Rows, params: str, gradient: Tensor, prefix: str = "") -> Rows:
        nonlocal seen
        seen += 1
        known = {"lr": (len(gradient), 1), "adam count": (len(gradient), 1)}
        for rows in ("lr", *(("adam first", "adam second", "adam count") if self.kind == "adam" else ())):
            assert work[prefix + rows].shape == known.get(rows, gradient.shape), rows
        # Nobody but the optimiser writes them: a squared gradient's mean is never negative, a count never falls.
        if self.kind == "adam":
            assert bool((work[f"{prefix}adam second"] >= 0).all())
            assert bool((work[f"{prefix}adam count"] == work[f"{prefix}adam count"].round()).all())
            zero = work[f"{prefix}adam count"] == 0
            assert not bool((work[f"{prefix}adam first"] * zero).any())
        return before(self, work, params, gradient, prefix)

    monkeypatch.setattr(Optimiser, "update", update)
    ends = []
    for engine in ("loop", "batched"):
        simulation = simulate(
            name, classification(), small_model(), task="multiclass", engine=engine, settings=settings
        )
        play(simulation, 2)
        ends.append(simulation)
    for one, two in zip(*((end.server, end.clients.rows) for end in ends), strict=True):
        for key, value in one.items():
            if value.is_floating_point():
                torch.testing.assert_close(value, two[key], rtol=0, atol=1e-10)
    assert seen > 0 or choice != "adam"
