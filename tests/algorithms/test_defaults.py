"""Every method, with its own defaults, as a user first runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie import api
from coterie.algorithms import registry


@pytest.mark.parametrize("name", registry.names())
def test_ends_above_chance_with_its_defaults(name: str, tmp_path: Path) -> None:
    # Ten classes, very unequal clients: 0.3 is well above guessing and above always naming a client's largest class.
    result = api.run(
        name,
        data="digits",
        partition="dirichlet:0.5",
        clients=10,
        rounds=15,
        eval_every=15,
        checkpoint_every=15,
        threads=1,
        out=tmp_path / name,
        progress=False,
    )
    method = registry.get(name)
    for model, has in (("personal", method.has_personal), ("global", method.has_global)):
        summary = result.summary[model]
        assert (summary is not None) == has
        if has and not (model == "global" and method.derived_global):
            assert summary["final"]["mean"] > 0.3, f"{name} {model}"
