"""A model for a client that was in no run: what the method's mathematics says, from the run's folder alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from coterie import api
from coterie.cli.app import app
from coterie.config import from_mapping
from coterie.data.hospitals import draw_hospitals
from coterie.errors import ConfigError, CoterieError, CoterieWarning, DataError, RunFolderError
from coterie.results.export import export, personalize, predict
from tests.results.test_export import code_of
from tests.small_runs import config_of

LR = 0.3
NEW = "Brookside"
ONE_STEP = {"lr": LR, "batch_size": 0, "local_epochs": 1}


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Runs of all hospitals but one, moved to another place, their table deleted; and the table of the last one."""
    folder = tmp_path_factory.mktemp("hospitals")
    table = draw_hospitals(1500)
    new = folder / "new.csv"
    table[table["hospital"] == NEW].to_csv(new, index=False)
    made: dict[str, Path] = {}

    def of(algorithm: str, settings: dict[str, Any], **more: Any) -> tuple[Path, Path]:
        name = hashlib.sha256(repr((algorithm, settings, more)).encode()).hexdigest()[:10]
        if name not in made:
            data = folder / f"{name}.csv"
            table[table["hospital"] != NEW].to_csv(data, index=False)
            config = {
                "algorithm": algorithm,
                "data": f"table:{data},label=readmitted,client=hospital,task=binary",
                "settings": settings,
                "rounds": 3,
                "model": "mlp:hidden=4",
                "validation": 0.0,
                "dtype": "float64",
                "threads": 1,
                **more,
            }
            run = folder / f"run-{name}"
            api.run_config(from_mapping(config), out=run, progress=False)
            data.unlink()
            made[name] = Path(shutil.move(run, folder / f"moved-{name}"))
        return made[name], new

    return of


def state(folder: Path, number: int | None = None) -> dict[str, torch.Tensor]:
    about = json.loads((folder / "model.json").read_text())
    entry = about["clients"][0] if number is None else about["clients"][number]
    return load_file(folder / entry["file"])


def one_step(folder: Path, start: dict[str, torch.Tensor], rows: Path) -> dict[str, torch.Tensor]:
    """One full-batch step from given parameters, by PyTorch itself, on a file's rows as the folder prepares them."""
    model = code_of(folder).load(None, folder)
    columns = code_of(folder).read_table(rows)
    x = model.prepare(model.features(columns))
    y = torch.tensor([float(text == "yes") for text in columns["readmitted"]], dtype=torch.float64)
    network = model.network
    network.load_state_dict(start)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(network(x).squeeze(1), y)
    loss.backward()
    return {name: (value - LR * value.grad).detach() for name, value in network.named_parameters()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["fedacs", "fedamp"])
def test_it_begins_at_the_mean_of_the_runs_models(
    algorithm: str, hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    run, new = hospitals(algorithm, ONE_STEP | {"newcomers": "mean"})
    before = digest(run)
    everyone = export(run, tmp_path / "everyone")
    models = [state(tmp_path / "everyone", number) for number in range(len(everyone.about["clients"]))]
    assert len(models) == 11
    mean = {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}
    made = personalize(run, new, tmp_path / "mine", test_fraction=0)
    assert_same(state(made.folder), one_step(made.folder, mean, new))
    assert digest(run) == before
    (entry,) = made.about["clients"]
    assert (entry["client"], entry["name"], entry["test"]) == (11, NEW, {})
    assert entry["samples"] == {"train": len(pd.read_csv(new)), "validation": 0, "test": 0}


@pytest.mark.parametrize("algorithm", ["flame", "ditto"])
def test_it_begins_at_the_global_model(
    algorithm: str, hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    run, new = hospitals(algorithm, ONE_STEP | {"lam": 0.4, "newcomers": "global"})
    export(run, tmp_path / "global", best="global")
    made = personalize(run, new, tmp_path / "mine", test_fraction=0)
    assert_same(state(made.folder), one_step(made.folder, state(tmp_path / "global"), new))


def test_a_method_may_keep_something_only_where_clients_are_few(tmp_path: Path) -> None:
    """FedPG keeps inner products of nine clients with 18 parameters, and none with a tenth client."""
    clients = np.arange(180) % 9
    table = pd.DataFrame(np.sin(np.arange(180 * 8.0)).reshape(180, 8), columns=[f"f{place}" for place in range(8)])
    table["who"] = [f"h{client}" for client in clients]
    table["y"] = np.where(table["f0"] > 0, "yes", "no")
    table.to_csv(tmp_path / "all.csv", index=False)
    table[clients == 0].assign(who="new").to_csv(tmp_path / "new.csv", index=False)
    values = {"data": f"table:{tmp_path / 'all.csv'},label=y,client=who,task=multiclass", "model": "linear"}
    config = {**values, "algorithm": "fedpg", "rounds": 2, "threads": 1, "validation": 0.0}
    api.run_config(from_mapping(config), out=tmp_path / "run", progress=False)
    made = personalize(tmp_path / "run", tmp_path / "new.csv", tmp_path / "mine", test_fraction=0)
    assert sum(value.numel() for value in state(made.folder).values()) == 18
    assert made.about["clients"][0]["name"] == "new"


def test_what_is_measured_is_measured_on_rows_that_it_did_not_train_on(
    hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """Rows that are told apart by their order: which are left out is seen by what training on the rest gives."""
    run, new = hospitals("fedacs", ONE_STEP)
    made = personalize(run, new, tmp_path / "mine", test_fraction=0.25)
    (entry,) = made.about["clients"]
    count = len(pd.read_csv(new))
    assert entry["samples"] == {"train": count - round(count / 4), "validation": 0, "test": round(count / 4)}
    from coterie import randomness

    left_out = randomness.stream(1, "partition: split", client=11).permutation(count)[: round(count / 4)]
    table = pd.read_csv(new)
    table.iloc[left_out].to_csv(tmp_path / "test.csv", index=False)
    table.drop(index=left_out).to_csv(tmp_path / "train.csv", index=False)
    right = predict(made.folder, tmp_path / "test.csv")["predicted"].to_numpy() == table["readmitted"].iloc[left_out]
    assert entry["test"]["accuracy"] == pytest.approx(right.mean(), abs=1e-12)
    whole = personalize(run, tmp_path / "train.csv", tmp_path / "whole", test_fraction=0)
    assert_same(state(made.folder), state(whole.folder))


def test_where_clients_scale_their_own_the_newcomer_does(
    hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    run, new = hospitals("fedacs", ONE_STEP, scope="local")
    made = personalize(run, new, tmp_path / "mine", test_fraction=0)
    scaling = made.about["clients"][0]["scaling"]
    place = made.about["features"].index("age")
    age = pd.read_csv(new)["age"].to_numpy(np.float64)
    assert scaling["mean"][place] == pytest.approx(age.mean(), rel=1e-6)
    assert scaling["std"][place] == pytest.approx(age.std(), rel=1e-6)
    assert made.about["scaling"]["mean"][place] != pytest.approx(age.mean(), rel=1e-3)


@pytest.mark.parametrize(
    "name",
    ["local", "fedavg_ft", "scaffold", "fedfomo", "fedpg", "fedrod", "splitgp", "apfl", "admm_lp_proj", "fedrep"],
)
def test_every_kind_of_state_takes_one_more_client(name: str, tmp_path: Path) -> None:
    """Other data than tables, and states of all shapes: a matrix of clients against clients, duals, heads."""
    model = "mlp:hidden=5-4" if name == "splitgp" else "mlp:hidden=5"
    run = tmp_path / "run"
    api.run_config(config_of(name, rounds=2, threads=1, model=model), out=run, progress=False)
    draw = np.random.default_rng(3)
    x, y = draw.normal(size=(12, 6)).astype(np.float32), draw.integers(0, 3, 12)
    np.savez(tmp_path / "new.npz", x=x, y=y)
    made = personalize(run, tmp_path / "new.npz", tmp_path / "mine", name="the new one", rounds=2)
    (entry,) = made.about["clients"]
    assert entry["client"] == 5 and entry["name"] == "the new one" and 0 <= entry["test"]["accuracy"] <= 1
    np.save(tmp_path / "x.npy", x)
    assert len(predict(made.folder, tmp_path / "x.npy")) == 12


def test_the_command(hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    run, new = hospitals("fedacs", ONE_STEP)
    words = ["personalize", str(run), "--data", str(new), "--out", str(tmp_path / "mine"), "--name", "ours"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "mine"), str(new), "--out", str(tmp_path / "s.csv")])
    assert done.exit_code == 0 and len(pd.read_csv(tmp_path / "s.csv")) == len(pd.read_csv(new))


def test_what_does_not_fit_is_one_sentence(hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    run, new = hospitals("fedacs", ONE_STEP)
    table = pd.read_csv(new)

    def refused(kind: type[CoterieError], says: str, rows: pd.DataFrame | None = None, **more: Any) -> None:
        path = tmp_path / more.pop("file", "rows.csv")
        if rows is not None:
            rows.to_csv(path, index=False)
        with pytest.raises(kind, match=says):
            personalize(run, path, tmp_path / "mine", **more)
        assert not (tmp_path / "mine").exists()

    refused(DataError, "there is no file", file="nowhere.csv")
    refused(ConfigError, r"must end in \.csv, \.parquet, \.npz", file="rows.txt")
    refused(
        DataError, "2 problems: there is no column 'age'; there is no column 'sex'", table.drop(columns=["age", "sex"])
    )
    refused(DataError, "no column 'readmitted'", table.drop(columns="readmitted"))
    refused(DataError, "the class 'perhaps', but the run knows no, yes", table.assign(readmitted="perhaps"))
    refused(DataError, "rows have no label", table.assign(readmitted=None))
    others = table.assign(hospital=["one", "two"] * (len(table) // 2) + ["one"] * (len(table) % 2))
    refused(DataError, "rows of 2 clients, such as 'one' and 'two'", others)
    refused(DataError, r"too few samples \(1\)", table.head(1))
    refused(DataError, "which is no number", table.assign(age="old"))
    refused(ConfigError, "rounds is 0, but must be at least 1", table, rounds=0)
    refused(ConfigError, "test_fraction is 1, but must be from 0 to below 1", table, test_fraction=1.0)
    refused(ConfigError, "test_fraction is nan, but must be from 0 to below 1", table, test_fraction=float("nan"))
    refused(DataError, "'ward' has a gap in row 0, but none are allowed there: fill it", table.assign(ward=None))
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 3), np.float32), y=np.zeros(4, np.int64))
    refused(DataError, r"shape \[3\]", file="x.npz")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(RunFolderError, match="is there already"):
        personalize(run, new, tmp_path / "there")


def test_categories_that_the_run_does_not_know_are_named(
    hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    run, new = hospitals("fedacs", ONE_STEP)
    table, path = pd.read_csv(new), tmp_path / "rows.csv"
    wards = ["hospice", "burns", "hospice", "garden", "street"]
    table.assign(ward=wards + table["ward"].tolist()[5:], sex=["diverse", *table["sex"].tolist()[1:]]).to_csv(path)
    with pytest.warns(CoterieWarning) as told:
        personalize(run, path, tmp_path / "mine")
    counts = ", which counts as none of the known categories there"
    assert [str(one.message).removeprefix(f"{path}: ").removesuffix(counts) for one in told] == [
        "column 'sex' has 'diverse' in one row",
        "column 'ward' has 'hospice', 'burns', 'garden' and more in 5 rows",
    ]


def test_samples_that_no_model_can_train_on_are_one_sentence(
    hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    run, new = hospitals("fedacs", {"lr": LR}, dtype="float32", model="mlp:hidden=32")
    pd.read_csv(new).assign(systolic=1e30).to_csv(tmp_path / "far.csv", index=False)
    with pytest.raises(DataError, match=r"NaN or infinite on the samples in .*far\.csv: look for numbers that are far"):
        personalize(run, tmp_path / "far.csv", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_method_without_personal_models_says_what_to_do(tmp_path: Path) -> None:
    api.run_config(config_of("fedsgd", rounds=1, threads=1), out=tmp_path / "run", progress=False)
    with pytest.raises(ConfigError, match="makes no personal models: use coterie export"):
        personalize(tmp_path / "run", tmp_path / "new.npz", tmp_path / "mine")


def test_one_class_alone_is_enough(hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    run, new = hospitals("fedacs", ONE_STEP)
    table = pd.read_csv(new)
    table[table["readmitted"] == "no"].to_csv(tmp_path / "no.csv", index=False)
    made = personalize(run, tmp_path / "no.csv", tmp_path / "mine")
    assert made.about["classes"] == ["no", "yes"]


def test_few_rows_are_enough_where_none_are_to_be_tested_on(
    hospitals: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    run, new = hospitals("fedacs", {**ONE_STEP, "newcomers": "mean"})
    pd.read_csv(new).iloc[:1].to_csv(tmp_path / "one.csv", index=False)
    with pytest.raises(
        DataError, match=r"too few samples \(1\): .* train on and to test on \(--test-fraction 0 for none"
    ):
        personalize(run, tmp_path / "one.csv", tmp_path / "model")
    found = personalize(run, tmp_path / "one.csv", tmp_path / "model", test_fraction=0)
    assert found.about["clients"][0]["samples"] == {"train": 1, "validation": 0, "test": 0}
    assert len(predict(tmp_path / "model", new)) == len(pd.read_csv(new))
