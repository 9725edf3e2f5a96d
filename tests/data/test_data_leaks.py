"""What scales inputs comes from training samples, of those clients alone that the scope names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import StandardScaler

import coterie
from coterie.compute.samples import Samples
from coterie.config import from_mapping
from coterie.errors import ConfigError
from coterie.runs.population import Population, make_population

SIZES = {"east": 20, "north": 30, "west": 40}


def draw() -> pd.DataFrame:
    drawn = np.random.default_rng(3)
    frame = pd.DataFrame({"clinic": np.repeat(list(SIZES), list(SIZES.values()))})
    frame["age"] = drawn.normal(50, 10, size=90).astype(np.float32)
    frame["year"] = drawn.normal(2000, 0.5, size=90).astype(np.float32)
    frame["ill"] = (frame["age"] + drawn.normal(0, 10, size=90) > 50).astype(int)
    return frame


def population(folder: Path, frame: pd.DataFrame, algorithm: str = "fedavg", **what: object) -> Population:
    frame.to_csv(folder / "h.csv", index=False)
    text = f"table:{folder / 'h.csv'},label=ill,client=clinic,task=binary"
    return make_population(from_mapping({"algorithm": algorithm, "data": text, "dtype": "float64", **what}))


def scaled(found: Population) -> torch.Tensor:
    return Samples.of(found.dataset, found.shares, seed=1, dtype=torch.float64, own=found.own).x


def test_federated_statistics_are_those_of_all_training_rows(tmp_path: Path) -> None:
    frame = draw()
    found = population(tmp_path, frame)
    values = frame[["age", "year"]].to_numpy(np.float64)
    scaler = StandardScaler().fit(values[found.shares.train.flat.numpy()])
    np.testing.assert_allclose(scaled(found).numpy(), scaler.transform(values), rtol=0, atol=1e-9)


def test_local_statistics_are_those_of_each_clients_training_rows(tmp_path: Path) -> None:
    frame = draw()
    found = population(tmp_path, frame, scope="local")
    values, shares = frame[["age", "year"]].to_numpy(np.float64), found.shares
    for client in range(3):
        scaler = StandardScaler().fit(values[shares.train[client].numpy()])
        mine = torch.cat([part[client] for part in (shares.train, shares.validation, shares.test)])
        np.testing.assert_allclose(scaled(found)[mine].numpy(), scaler.transform(values[mine]), rtol=0, atol=1e-9)


def test_pooled_statistics_are_those_of_all_rows(tmp_path: Path) -> None:
    frame = draw()
    values = frame[["age", "year"]].to_numpy(np.float64)
    found = scaled(population(tmp_path, frame, scope="pooled"))
    np.testing.assert_allclose(found.numpy(), StandardScaler().fit_transform(values), rtol=0, atol=1e-9)


def run(folder: Path, frame: pd.DataFrame, algorithm: str, name: str, **what: object) -> pd.DataFrame:
    path = folder / f"{name}.csv"
    frame.to_csv(path, index=False)
    text = f"table:{path},label=ill,client=clinic,task=binary"
    return coterie.run(
        algorithm, data=text, model="linear", rounds=2, eval_train=True, out=folder / name, progress=False, **what
    ).metrics


def test_nothing_of_another_client_and_no_test_row_reaches_local(tmp_path: Path) -> None:
    frame = draw()
    before = run(tmp_path, frame, "local", "before")
    others = frame.copy()
    others.loc[others["clinic"] != "north", "age"] *= 3
    after = run(tmp_path, others, "local", "others")
    north = before["client"] == 1
    pd.testing.assert_frame_equal(before[north], after[after["client"] == 1])
    assert not before[~north].equals(after[~north])  # the change is one that is seen where it may be
    tested = frame.copy()
    tested.loc[population(tmp_path, frame).shares.test.flat.numpy(), "age"] += 40
    after = run(tmp_path, tested, "local", "tested")
    trained = before["split"].isin(["train", "validation"])
    pd.testing.assert_frame_equal(before[trained], after[trained])
    assert not before[before["split"] == "test"].equals(after[after["split"] == "test"])


@pytest.mark.parametrize(("scope", "leaks"), [("federated", False), ("local", False), ("pooled", True)])
def test_no_test_row_reaches_a_federated_model(tmp_path: Path, scope: str, leaks: bool) -> None:
    frame = draw()
    before = run(tmp_path, frame, "fedavg", "before", scope=scope)
    frame.loc[population(tmp_path, frame).shares.test.flat.numpy(), "age"] += 40
    after = run(tmp_path, frame, "fedavg", "after", scope=scope)
    trained = before["split"].isin(["train", "validation"])
    assert before[trained].equals(after[trained]) is not leaks


def test_local_takes_its_own_statistics_whatever_the_scope(tmp_path: Path) -> None:
    assert population(tmp_path, draw(), "local", scope="pooled").own
    assert not population(tmp_path, draw(), "fedavg", scope="pooled").own


def test_an_export_has_the_clients_own_statistics(tmp_path: Path) -> None:
    frame = draw()
    run(tmp_path, frame, "local", "run")
    from coterie.results.export import export

    about = export(tmp_path / "run", tmp_path / "m", clients="west").about["clients"][0]["scaling"]
    west = frame["age"].to_numpy(np.float64)[population(tmp_path, frame).shares.train[2].numpy()]
    assert about["mean"][0] == pytest.approx(west.mean()) and about["std"][0] == pytest.approx(west.std())


def test_samples_that_clients_share_cannot_be_scaled_by_each(tmp_path: Path) -> None:
    found = population(tmp_path, draw(), "local")
    twice = type(found.shares.test)(found.shares.train.flat, found.shares.train.offsets)
    from dataclasses import replace

    with pytest.raises(ConfigError, match="clients share samples"):
        scaled(replace(found, shares=replace(found.shares, test=twice)))
