"""Silos agree on a schema: what each tells, what follows from it, and what stands against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from typer.testing import CliRunner

from coterie.api import run
from coterie.cli.app import app
from coterie.config import from_mapping
from coterie.data.bounded_statistics import BoundedColumns
from coterie.data.dataset import Preparation
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.federation import agreement
from coterie.federation.node import Node
from coterie.federation.party_data import load_own
from coterie.federation.plan import Plan
from coterie.federation.server import serve
from coterie.federation.statement import Statement
from coterie.runs.population import make_population
from coterie.simulation.privacy import Privacy, Protection
from tests.federation.grid import Local, LocalGrid, equal, metrics_of, node_rows, states

SILOS = {"east": 60, "north": 80, "south": 70}
FEDERATION = {
    "name": "hospitals",
    "members": [{"name": name} for name in SILOS],
    "model": "linear",
    "seed": 4,
    "data": {"task": "binary"},
}
TABLE = "table:path=patients.csv,label=ill"


def frames() -> dict[str, pd.DataFrame]:
    """Tables of three silos: one has gaps, each has a ward of its own, and one never sees a date before 2020."""
    drawn = np.random.default_rng(8)
    out = {}
    for place, (name, count) in enumerate(SILOS.items()):
        age = np.round(drawn.normal(50 + 5 * place, 12, size=count), 1)
        frame = pd.DataFrame({"age": age, "dose": drawn.normal(1e6, 0.5, size=count)})
        frame["ward"] = drawn.choice(["a", "b", f"only-{name}"], size=count)
        frame["seen"] = pd.Timestamp("2020-01-01") + pd.to_timedelta(drawn.integers(0, 900, size=count), unit="D")
        frame["ill"] = (frame["age"] + drawn.normal(0, 8, size=count) > 55).astype(int)
        if name == "north":
            frame.loc[drawn.choice(count, size=20, replace=False), "age"] = np.nan
        out[name] = frame
    return out


def folders(home: Path, tables: dict[str, pd.DataFrame], source: str = TABLE, **more: Any) -> dict[str, Path]:
    out = {}
    for name, frame in tables.items():
        folder = home / name
        folder.mkdir(parents=True)
        frame.to_csv(folder / "patients.csv", index=False)
        (folder / "federation.yaml").write_text(yaml.safe_dump(FEDERATION | more))
        (folder / "node.yaml").write_text(yaml.safe_dump({"member": name, "data": source, "server": "here:1"}))
        out[name] = folder
    return out


def do(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["federate", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def tell(home: Path, places: dict[str, Path]) -> list[Path]:
    for name, folder in places.items():
        do("describe", folder, "--out", home / f"{name}.yaml")
    return [home / f"{name}.yaml" for name in places]


def agreed(home: Path, places: dict[str, Path], **more: Any) -> agreement.Agreement:
    """Have silos agree, and give everybody the file."""
    do("agree", *reversed(tell(home, places)), "--out", home / "schema.yaml")
    for folder in places.values():
        (folder / "federation.yaml").write_text(yaml.safe_dump({**FEDERATION, "data": "schema.yaml", **more}))
        (folder / "schema.yaml").write_text((home / "schema.yaml").read_text())
    return agreement.read(places["east"] / "federation.yaml")


def pooled(home: Path, tables: dict[str, pd.DataFrame], columns: Path | None = None) -> dict[str, Any]:
    whole = pd.concat([frame.assign(clinic=name) for name, frame in tables.items()])
    whole.to_csv(home / "all.csv", index=False)
    text = f"table:{home / 'all.csv'},label=ill,client=clinic,task=binary" + (f",columns={columns}" if columns else "")
    own = {"model": "linear", "seed": 4, "test_fraction": 0.2, "engine": "loop", "threads": 1}
    return {"data": text, **own}


@pytest.mark.parametrize("algorithm", ["fedacs", "local"])
def test_a_federation_over_the_agreed_schema_is_the_simulation_bit_for_bit(tmp_path: Path, algorithm: str) -> None:
    """`local` too, which scales by each silo's own statistics whatever was agreed on."""
    tables = frames()
    places = folders(tmp_path / "silos", tables)
    found = agreed(tmp_path, places)
    assert [each for each in found.data.columns if each.startswith("ward")] == [
        *("ward=a", "ward=b", "ward=only-east", "ward=only-north", "ward=only-south")
    ]
    datasets = [load_own(TABLE, folder, found) for folder in places.values()]
    nodes = {client: Node(found, client, datasets[client], tmp_path / f"node-{client}") for client in range(3)}
    local = Local(found, LocalGrid(nodes), tmp_path, datasets)
    federated = serve(found, local.grid, Plan(algorithm=algorithm, rounds=2), tmp_path / "run")
    other = tmp_path / "simulation"
    run(algorithm, rounds=2, out=other, progress=False, **pooled(tmp_path, tables))
    server, clients = states(other)
    equal(states(federated)[0], server)
    for client in range(3):
        mine = {name: value[client : client + 1] for name, value in clients.items()}
        equal(node_rows(local, client, federated), mine)
    pd.testing.assert_frame_equal(metrics_of(federated), metrics_of(other), check_exact=True)


def test_statistics_are_the_pooled_ones_of_training_rows(tmp_path: Path) -> None:
    """By the definition of mean and deviation over all training rows, gaps filled with the mean."""
    tables = frames()
    schema = agreed(tmp_path, folders(tmp_path / "silos", tables)).data
    train = make_population(from_mapping({"algorithm": "fedavg", **pooled(tmp_path, tables)})).shares.train.flat
    rows = pd.read_csv(tmp_path / "all.csv", parse_dates=["seen"]).iloc[np.sort(train.numpy())]
    days = (rows["seen"] - pd.Timestamp(0)) / pd.Timedelta(days=1)
    for name, values in (("age", rows["age"]), ("dose", rows["dose"]), ("seen", days)):
        exact = values.to_numpy().astype(np.float32).astype(np.float64)  # samples are float32
        filled = np.where(np.isnan(exact), np.nanmean(exact), exact)
        at = schema.columns.index(name)
        assert schema.mean[at] == pytest.approx(filled.mean(), rel=1e-12)
        # The mean of dose is two million times its deviation: the naive formula of sums of squares has no digit left.
        assert schema.std[at] == pytest.approx(filled.std(), rel=1e-9)
        if name == "age":
            assert schema.fill[at] == pytest.approx(np.nanmean(exact), rel=1e-12)
    assert schema.mean[schema.columns.index("ward=a")] == 0.0 and schema.std[schema.columns.index("ward=a")] == 1.0


def test_a_statement_tells_sums_and_no_sample(tmp_path: Path) -> None:
    tables = frames()
    (file, *_) = tell(tmp_path, folders(tmp_path / "silos", {"east": tables["east"]}))
    told = Statement.read(file)
    assert told.rows == 43 and set(told.exact) == {"age", "dose", "seen"}  # 60 - 12 to test - 5 to choose by
    assert set(yaml.safe_load(file.read_text())) == {
        *("version", "member", "place", "seed", "validation", "test_fraction", "task", "input_shape", "label"),
        *("classes", "table", "rows", "exact"),
    }
    changed = tables["east"].copy()
    test = load_test_rows(tmp_path)
    changed.loc[test, "age"] += 1000
    (again, *_) = tell(tmp_path / "other", folders(tmp_path / "other" / "silos", {"east": changed}))
    assert Statement.read(again).exact == told.exact  # no test row is in it


def load_test_rows(home: Path) -> list[int]:
    from coterie import randomness

    order = randomness.stream(4, "partition: split", client=0).permutation(np.arange(60))
    return [int(row) for row in order[:12]]


def mend(frame: pd.DataFrame, how: str) -> pd.DataFrame:
    if how == "kind":
        return frame.assign(age=frame["age"].map(lambda value: f"about {value // 30}"))
    if how == "absent":
        return frame.drop(columns="dose")
    if how == "classes":
        return frame.assign(ill=frame["ill"].map({0: "no", 1: "yes"}))
    return frame.rename(columns={"ill": "result"})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kind", "column 'age' is a number at east, north, but a category at south"),
        ("absent", "column 'dose' is at east, north, but not at south: give drop=dose where it is"),
        ("classes", "class names are numbers at east, north, but texts at south"),
        ("label", "the label is 'ill' at east, north, but 'result' at south"),
    ],
)
def test_disagreements_are_shown(tmp_path: Path, how: str, says: str) -> None:
    tables = frames()
    tables["south"] = mend(tables["south"], how)
    places = folders(tmp_path / "silos", tables)
    if how == "label":
        node = places["south"] / "node.yaml"
        node.write_text(node.read_text().replace("label=ill", "label=result"))
    runner = CliRunner()
    with pytest.raises(DataError, match=r"there is no schema for all: 1 disagreement"):
        runner.invoke(
            app,
            ["federate", "agree", *map(str, tell(tmp_path, places)), "--out", str(tmp_path / "schema.yaml")],
            catch_exceptions=False,
        )
    from coterie.federation.agreeing import Disagreement, agree

    with pytest.raises(Disagreement) as told:
        agree([Statement.read(tmp_path / f"{name}.yaml") for name in SILOS])
    assert len(told.value.sentences) == 1 and says in told.value.sentences[0]
    assert not (tmp_path / "schema.yaml").exists()


def test_several_disagreements_are_all_shown(tmp_path: Path) -> None:
    from coterie.federation.agreeing import Disagreement, agree

    tables = frames()
    tables["south"] = mend(mend(tables["south"], "kind"), "absent")
    files = tell(tmp_path, folders(tmp_path / "silos", tables))
    one = Statement.read(files[0])
    with pytest.raises(Disagreement) as told:
        agree([one.model_copy(update={"seed": 9, "task": "multiclass"}), *map(Statement.read, files[1:])])
    assert len(told.value.sentences) == 4
    with pytest.raises(Disagreement, match="there must be one of each, from 0 on"):
        agree([Statement.read(files[0]), Statement.read(files[2])])


def test_who_changed_the_split_since_is_told(tmp_path: Path) -> None:
    places = folders(tmp_path / "silos", frames())
    with pytest.raises(ConfigError, match=r"seed is 5, but data has statistics of samples that were split with 4"):
        agreed(tmp_path, places, seed=5)
    file = places["east"] / "federation.yaml"
    file.write_text(yaml.safe_dump({**FEDERATION, "data": "schema.yaml", "members": FEDERATION["members"][:2]}))
    with pytest.raises(ConfigError, match="members are east, north, but data has statistics that east, north, south"):
        agreement.read(file)


def test_columns_alone_are_united(tmp_path: Path) -> None:
    from coterie.data.table_schema import TableSchema

    files = []
    for name, frame in frames().items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        files.append(tmp_path / f"{name}-columns.yaml")
        text = f"table:{tmp_path / name}.csv,label=ill"
        CliRunner().invoke(app, ["data", "describe", text, "--write", str(files[-1])], catch_exceptions=False)
    do("agree", *files, "--out", tmp_path / "columns.yaml")
    columns = TableSchema.read(tmp_path / "columns.yaml").columns
    assert columns["ward"].categories == ("a", "b", "only-east", "only-north", "only-south")
    assert (columns["age"].gaps, columns["dose"].gaps) == ("mean", "none")  # gaps at one are gaps of all


# --- with noise ---------------------------------------------------------------------------------------------------

PRIVATE = {
    "data": {"task": "binary", "classes": ["0", "1"]},
    "privacy": {"clip": 0.7, "noise": 0.0, "delta": 1e-5},
}
COLUMNS = {
    "age": {"kind": "number", "gaps": "mean", "bounds": [0, 100]},
    "dose": {"kind": "number", "bounds": [999_990, 1_000_010]},
    "ward": {"kind": "category", "categories": ["a", "b", "only-east", "only-north", "only-south"]},
    "seen": {"kind": "date", "bounds": ["2020-01-01", "2023-01-01"]},
}


def private(home: Path, noise: float = 0.0) -> dict[str, Path]:
    places = folders(
        home / "silos",
        frames(),
        f"{TABLE},columns=columns.yaml",
        **(PRIVATE | {"privacy": PRIVATE["privacy"] | {"noise": noise}}),
    )
    for folder in places.values():
        (folder / "columns.yaml").write_text(yaml.safe_dump({"columns": COLUMNS}, sort_keys=False))
    return places


def test_with_privacy_the_arithmetic_is_the_simulations_too(tmp_path: Path) -> None:
    """Without noise both are deterministic: each client counts the same, whatever it has."""
    places = private(tmp_path)
    schema = agreed(tmp_path, places).data
    settings = pooled(tmp_path, frames(), places["east"] / "columns.yaml")
    found = make_population(from_mapping({"algorithm": "fedavg", "privacy": "clip=0.7,noise=0", **settings})).dataset
    assert (found.features, found.mean, found.std, found.fill) == (
        schema.columns,
        schema.mean,
        schema.std,
        schema.fill,
    )
    shares = make_population(from_mapping({"algorithm": "fedavg", **settings})).shares.train
    whole = pd.read_csv(tmp_path / "all.csv")["dose"].to_numpy().astype(np.float32).astype(np.float64)
    each = [whole[shares[client].numpy()] for client in range(3)]
    mean = np.mean([one.mean() for one in each])
    deviation = np.sqrt(np.mean([np.square(one - mean).mean() for one in each]))
    at = schema.columns.index("dose")
    assert schema.mean[at] == pytest.approx(mean, rel=1e-12) and schema.std[at] == pytest.approx(deviation, rel=1e-6)


def test_no_samples_tell_more_than_the_radius_and_some_tell_as_much() -> None:
    """Sensitivity: 1 + 1/4 of each column and 1/4 of one with gaps, all at once where all values are at a bound."""
    columns = BoundedColumns(Preparation((True, True), ("mean", ""), ((0.0, 10.0), (-5.0, 5.0))))
    assert columns.radius == pytest.approx(np.sqrt(2 * 1.25 + 0.25), rel=1e-15)
    drawn = np.random.default_rng(0)
    longest = 0.0
    for _ in range(200):
        x = torch.from_numpy(drawn.normal(0, 10 ** drawn.uniform(-2, 4), size=(drawn.integers(1, 40), 2)))
        x[torch.from_numpy(drawn.random(len(x)) < drawn.random()), 0] = torch.nan
        longest = max(longest, float(columns.told(x.float()).norm()))
    assert 0.5 * columns.radius < longest <= columns.radius * (1 + 1e-12)
    assert float(columns.told(torch.full((7, 2), 1e30)).norm()) == pytest.approx(columns.radius, rel=1e-12)


def test_noise_is_what_is_stated() -> None:
    """In units of what is told, noise · R: over 3000 clients its deviation is known to 4 %, three deviations of it."""
    preparation = Preparation((True, True), (), ((0.0, 1.0), (0.0, 1.0)))
    from coterie.data import Dataset
    from coterie.runs.population import noisy_constants

    x = torch.full((3000, 2), 0.5)
    whole = Dataset("x", x, torch.zeros(3000), 3000, "regression", (), (0.0, 0.0), (1.0, 1.0), preparation=preparation)
    protection = Protection(Privacy(clip=0.3, noise=0.01), 1, 3000)
    found = noisy_constants(whole, list(torch.arange(3000).split(1)), protection, torch.arange(3000))
    columns = BoundedColumns(preparation)
    size = 0.3 / columns.radius
    told = torch.stack([columns.told(row[None]) for row in x]) * size
    again = Protection(Privacy(clip=0.3, noise=0.01), 1, 3000)
    sent = again({"statistics": told}, {}, {"statistics": None}, torch.arange(3000), ("statistics", 0))["statistics"]
    deviation = float(((sent - told) / size).std())
    assert deviation == pytest.approx(0.01 * columns.radius, rel=0.04)
    # first is 2 · mean − 1, and the mean of 3000 noisy ones is off by noise · R / √3000: five times that is not seen.
    assert abs(found.mean[0] - 0.5) < 5 * 0.01 * columns.radius / np.sqrt(3000) / 2
    assert int(protection.replies.min()) == int(protection.replies.max()) == 1


def test_what_is_told_with_noise_is_counted_as_a_reply(tmp_path: Path) -> None:
    places = private(tmp_path, noise=8.0)
    (file, *_) = tell(tmp_path, {"east": places["east"]})
    told = Statement.read(file)
    assert told.privacy is not None and told.rows is None and not told.exact
    assert told.privacy.epsilon == pytest.approx(Privacy(clip=0.7, noise=8.0).epsilon(1), rel=1e-12)
    counted = yaml.safe_load((places["east"] / "privacy.json").read_text())["replies"]
    assert counted == {"statistics": {"8.0": 1}}
    other = BoundedColumns(Preparation((True,) * 3, ("mean", "", ""), ((0.0, 1.0),) * 3)).radius
    away = [abs(each.first) for each in told.noisy.values()]
    assert max(away) > 1  # of the order of 8 · R, where |first| ≤ 1 without noise
    assert max(away) < 6 * 8 * other


def test_a_simulation_counts_what_statistics_cost(tmp_path: Path) -> None:
    places = private(tmp_path)
    settings = pooled(tmp_path, frames(), places["east"] / "columns.yaml")
    found = run("fedavg", rounds=2, out=tmp_path / "r", progress=False, privacy="clip=0.5,noise=6", **settings)
    spent = found.metrics.query("metric == 'epsilon'").sort_values("round")["value"].tolist()
    assert spent == [pytest.approx(Privacy(clip=0.5, noise=6).epsilon(count), rel=1e-9) for count in (2, 3)]
    with pytest.raises(ConfigError, match=r"column 'age' has no bounds, without which"):
        run(
            "fedavg",
            rounds=1,
            out=tmp_path / "s",
            progress=False,
            privacy="clip=0.5,noise=6",
            **pooled(tmp_path, frames()),
        )


def test_under_privacy_nothing_is_read_off_the_samples(tmp_path: Path) -> None:
    places = private(tmp_path)
    node = places["east"] / "node.yaml"
    written = node.read_text()
    node.write_text(written.replace(",columns=columns.yaml", ""))
    with pytest.raises(ConfigError, match="must not be read off the samples: agree on a file for columns="):
        do("describe", places["east"], "--out", tmp_path / "east.yaml")
    node.write_text(written)
    file = places["east"] / "federation.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "data": {"task": "binary"}}))
    with pytest.raises(ConfigError, match="does not name the classes under data"):
        do("describe", places["east"], "--out", tmp_path / "east.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version: 1", "statement"),
        ("nonsense: 2", "has no parameter 'nonsense'"),
        ("[1, 2]", "must hold settings by name"),
        ("member: x\nplace: -1", "place is -1"),
    ],
)
def test_a_file_that_is_no_statement(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(CoterieError, match=says):
        do("agree", tmp_path / "a.yaml", "--out", tmp_path / "schema.yaml")
