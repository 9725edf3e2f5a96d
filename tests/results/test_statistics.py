"""What several runs say together, against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from coterie.errors import ConfigError, RunFolderError
from coterie.results import Result, collaboration, over_seeds, summarise, wilcoxon
from coterie.runs import launch
from coterie.runs.storage import RunFolder
from tests.runs.test_resume import config_of, finish

CLIENTS = 8
BASE = {"algorithm": "fedacs", "seed": 1, "data": "digits", "partition": "iid", "clients": CLIENTS, "threads": 1}


def stored(
    path: Path,
    scores: list[list[float]],
    validation: list[list[float]] | None = None,
    roles: dict[int, str] | None = None,
    groups: list[int] | None = None,
    weights: np.ndarray | None = None,
    **config: Any,
) -> Result:
    """A run whose clients had these scores, round by round."""
    honest = [client for client in range(CLIENTS) if (roles or {}).get(client, "honest") == "honest"]
    with RunFolder.create(path, BASE | config) as run:
        shares: dict[str, Any] = {"client": range(CLIENTS)}
        shares["role"] = [(roles or {}).get(client, "honest") for client in range(CLIENTS)]
        run.write_shares(pd.DataFrame(shares | ({} if groups is None else {"group": groups})))
        for number, values in enumerate(scores, 1):
            run.metrics.append(number, "personal", "test", "accuracy", values, range(CLIENTS))
            if validation is not None:
                run.metrics.append(number, "personal", "validation", "accuracy", validation[number - 1], range(CLIENTS))
            if weights is not None:
                run.collaboration_weights.append(number, weights, range(CLIENTS))
        facts = {"algorithm": "fedacs", "seed": (BASE | config)["seed"], "rounds": len(scores), "seconds": 1.0}
        run.finish(summarise(run.metrics.read(), clients=honest, **facts))
    return Result(path)


# Differences 1..8 hundredths, the two smallest of them negative: rank sums 3 and 33.
GAPS = [-0.01, -0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08]
LOW = [0.5] * CLIENTS
HIGH = [0.5 + gap for gap in GAPS]


def test_mean_and_deviation_over_seeds(tmp_path: Path) -> None:
    runs = [
        stored(tmp_path / str(seed), [[0.1] * CLIENTS, [value] * CLIENTS], seed=seed, threads=seed)
        for seed, value in ((1, 0.5), (10, 0.6), (100, 0.8))
    ]
    found = over_seeds(runs)
    # Mean 19/30; squared deviations 16 + 1 + 25 of (1/30)², over two.
    assert found.seeds == 3 and found.mean == pytest.approx(19 / 30)
    assert found.std == pytest.approx(math.sqrt(42 / 2) / 30)
    assert math.isnan(over_seeds(runs[:1]).std)


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    one = stored(tmp_path / "one", [LOW])
    other = stored(tmp_path / "other", [LOW], seed=2, partition="shards")
    with pytest.raises(ConfigError, match=r"partition is 'iid' in .*one and 'shards' in .*other"):
        over_seeds([one, other])
    with pytest.raises(ConfigError, match="the seeds 1, 1: each must be there once"):
        over_seeds([one, stored(tmp_path / "again", [LOW])])
    with pytest.raises(ConfigError, match="at least one run"):
        over_seeds([])
    with pytest.raises(ConfigError, match="no personal model at its best round"):
        over_seeds([one], at="best")
    with pytest.raises(ConfigError, match="no global model at its final round"):
        over_seeds([one], model="global")
    with pytest.raises(ConfigError, match=r"seed is 1 in .* and 2 in"):
        wilcoxon(one, stored(tmp_path / "two", [LOW], seed=2), at="final")


def test_how_runs_are_computed_and_recorded_does_not_keep_them_apart(tmp_path: Path) -> None:
    one = stored(tmp_path / "one", [LOW], keep="device", scratch=None, matrix=False, checkpoint_every=1, eval_every=1)
    other = stored(
        tmp_path / "two", [LOW], seed=2, keep="disk", scratch="x", matrix=True, checkpoint_every=2, eval_every=1
    )
    assert over_seeds([one, other]).seeds == 2
    with pytest.raises(ConfigError, match=r"eval_every is 1 in .*one and 5 in .*three"):  # the best of fewer rounds
        over_seeds([one, stored(tmp_path / "three", [LOW], seed=3, eval_every=5)])


def test_wilcoxon_by_client(tmp_path: Path) -> None:
    first, second = stored(tmp_path / "a", [HIGH]), stored(tmp_path / "b", [LOW], algorithm="local")
    found = wilcoxon(first, second, at="final")
    # Of the 2^8 ways to give eight ranks signs, 5 have a negative sum of at most 3: {}, {1}, {2}, {3}, {1, 2}.
    assert (found.clients, found.ties, found.statistic) == (8, 0, 3.0)
    assert found.pvalue == pytest.approx(2 * 5 / 2**8)
    assert found.median_difference == pytest.approx(0.045)
    assert wilcoxon(second, first, at="final").median_difference == pytest.approx(-0.045)
    assert found.pvalue == pytest.approx(stats.wilcoxon(GAPS).pvalue)


def test_each_run_is_taken_at_its_own_best_round(tmp_path: Path) -> None:
    good, bad = [0.9] * CLIENTS, [0.1] * CLIENTS
    first = stored(tmp_path / "a", [bad, HIGH, good], validation=[bad, good, bad])
    second = stored(tmp_path / "b", [LOW, bad, bad], validation=[good, bad, bad], algorithm="local")
    assert wilcoxon(first, second).pvalue == pytest.approx(2 * 5 / 2**8)
    oracle = wilcoxon(first, second, at="best_oracle")
    assert oracle.median_difference == pytest.approx(0.4) and oracle.pvalue == pytest.approx(2 / 2**8)
    with pytest.raises(ConfigError, match="no validation data"):
        wilcoxon(first, stored(tmp_path / "c", [LOW]))


def test_attackers_are_left_out(tmp_path: Path) -> None:
    first = stored(tmp_path / "a", [HIGH], roles={0: "attacker"})
    second = stored(tmp_path / "b", [LOW], roles={1: "attacker"}, algorithm="local")
    found = wilcoxon(first, second, at="final")
    # Without the two negative differences all six are positive: one of 2^6 ways each side.
    assert found.clients == 6 and found.pvalue == pytest.approx(2 / 2**6)


def test_block_contrast_of_recorded_weights(tmp_path: Path) -> None:
    groups = [0, 0, 1, 1, 1, 0, 0, 1]
    same = np.equal.outer(groups, groups)
    weights = np.where(same, 0.2, 0.05)
    np.fill_diagonal(weights, 9.0)
    result = stored(tmp_path / "run", [LOW, LOW], groups=groups, weights=weights)
    found = collaboration(result)
    assert (found.contrast, found.recovery) == (pytest.approx(4.0), 1.0)
    assert (found.round, found.clients) == (2, 8) and collaboration(result, 1).round == 1


def test_without_groups_or_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no known groups: the partition 'iid' of 'digits' gives none"):
        collaboration(stored(tmp_path / "a", [LOW]))
    with pytest.raises(RunFolderError, match="holds no collaboration weights"):
        collaboration(stored(tmp_path / "b", [LOW], groups=[0, 1] * 4))


def test_a_real_run_finds_its_groups(tmp_path: Path) -> None:
    # Two groups with classes of their own: FedACS listens to the more similar half, which is the own group.
    config = config_of(
        "fedacs",
        data="digits",
        partition="groups:2,dominating=1",
        clients=8,
        model="linear",
        rounds=6,
        participation=1.0,
        settings={"p": 0.5, "lr": 0.1},
    )
    result = finish(launch.begin(config, tmp_path / "run"))
    found = collaboration(result)
    assert found.clients == 8 and found.contrast > 1.5 and found.recovery == 1.0


def test_a_damaged_or_missing_table_of_shares(tmp_path: Path) -> None:
    result = stored(tmp_path / "run", [LOW])
    (tmp_path / "run" / "shares.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(RunFolderError, match=r"shares.parquet is damaged"):
        _ = result.shares
    (tmp_path / "run" / "shares.parquet").unlink()
    with pytest.raises(RunFolderError, match=r"does not say what its clients hold"):
        _ = Result(tmp_path / "run").shares
