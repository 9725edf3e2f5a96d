"""What the tests of sharded runs share: where their processes run, and when two runs are the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.results import Result
from tests.small_runs import last_state

ROOT = Path(__file__).resolve().parents[2]
COUNT = 2


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("COTERIE", "TORCHELASTIC"))}
    here = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}  # whatever the machine's name stands for
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"} | here


def assert_close(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert list(one) == list(two)
    for name, value in one.items():
        assert value.dtype == two[name].dtype and value.shape == two[name].shape, name
        if value.is_floating_point():
            torch.testing.assert_close(two[name], value, rtol=1e-10, atol=1e-10, equal_nan=True, msg=name)
        else:
            assert torch.equal(value, two[name]), name


def assert_same_run(one: Path, two: Path) -> None:
    """States, metrics, answers, weights and matrices of two runs, to 1e-10."""
    first, second = last_state(one), last_state(two)
    assert first.round == second.round and first.extra == second.extra
    assert_close(first.server, second.server)
    assert_close(first.clients, second.clients)
    results = Result(one), Result(two)
    tables = [result.metrics for result in results]
    keys = ["round", "client", "model", "split", "metric"]
    assert tables[0][keys].astype(str).equals(tables[1][keys].astype(str))
    np.testing.assert_allclose(tables[0]["value"], tables[1]["value"], rtol=1e-10, atol=1e-10)
    assert results[0].weight_rounds == results[1].weight_rounds
    for number in results[0].weight_rounds:
        np.testing.assert_allclose(*(result.weights(number) for result in results), rtol=1e-10, atol=1e-10)
    shares = [result.shares for result in results]
    assert shares[0].equals(shares[1])
    answers = [result.answers for result in results]
    if answers[0] is None or answers[1] is None:
        assert answers[0] is answers[1]
    else:
        known = ["round", "model", "client"]
        assert answers[0][known].equals(answers[1][known])
        np.testing.assert_allclose(answers[0]["answer"], answers[1]["answer"], rtol=1e-6)  # float32
