"""Recipes from beginning to end: stopped and continued, without data, with a part that fails, and cut short."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from coterie import api
from coterie.cli.app import app
from coterie.errors import ConfigError, DataError, Interrupted, UnknownName
from coterie.results import Result as RunResult
from coterie.runs.experiment import Experiment
from coterie.simulation.simulation import Simulation
from coterie.studies import recipes
from coterie.studies.recipes.runner import run_recipe
from tests.small_runs import Killed
from tests.studies.recipes.small_recipe import recipe, values

FILES = ("recipe.json", "recipe.md")


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def both_parts(**second: Any) -> list[dict[str, Any]]:
    """Two parts that are run in moments."""
    one = values()["parts"][0]
    plan = {**one["plan"], "grid": {"partition": ["natural", "iid"]}}
    two = {**one, "name": "two", "title": "Second", "plan": plan, "numbers": {}, "not_targets": [], "quick": None}
    return [one, {**two, **second}]


def call(*words: str, code: int = 0) -> Result:
    found = CliRunner(env={"COLUMNS": "80", "COTERIE_DATA": ""}).invoke(app, ["recipe", *words])
    if code == 0:
        assert found.exit_code == 0, found.output
    return found


def kept(folder: Path) -> list[Any]:
    """Give what a recipe wrote, but for how long it took."""
    found = json.loads((folder / "recipe.json").read_text())
    for part in found["parts"]:
        del part["seconds"]
    return [found, (folder / "recipe.md").read_text()]


def test_what_was_tuned_and_what_each_seed_gave_is_kept(tmp_path: Path) -> None:
    (one,) = both_parts()[:1]
    methods = [{**one["plan"]["methods"][0], "tune": {"lr": [1e-6, 0.1]}}, *one["plan"]["methods"][1:]]
    made = recipe(parts=[{**one, "plan": {**one["plan"], "methods": methods, "lr": None}, "quick": {"seeds": [1]}}])
    (part,) = recipes.plain(run_recipe(made, tmp_path, progress=False))["parts"]
    (tuned,) = part["tuning"]
    assert (tuned["method"], tuned["setting"], tuned["tried"]) == ("ours", "", [{"lr": 1e-6}, {"lr": 0.1}])
    edge = {1e-6: "least", 0.1: "greatest"}[tuned["chosen"]["lr"]]
    assert tuned["edges"] == [f"lr={tuned['chosen']['lr']} is the {edge} that was tried"]
    assert part["tuned"][0].endswith(tuned["edges"][0])
    assert part["methods"]["theirs"]["algorithm"] == "fedavg" and part["methods"]["theirs"]["settings"]["lr"] > 0
    assert "lr" not in part["methods"]["ours"]["settings"]
    for cell in part["cells"]:
        if cell["mean"] is not None:
            assert len(cell["each"]) == 2 and sum(cell["each"]) / 2 == pytest.approx(cell["mean"], rel=1e-12)
            assert abs(cell["each"][0] - cell["each"][1]) / 2**0.5 == pytest.approx(cell["std"], abs=1e-9)


def test_methods_are_tuned_by_the_model_that_the_part_names_where_they_have_it(tmp_path: Path) -> None:
    (one,) = both_parts()[:1]
    methods = [{**each, "tune": {"lr": [0.05, 0.1]}} for each in one["plan"]["methods"]]
    plan = {**one["plan"], "methods": methods, "lr": None, "seeds": [1]}
    made = recipe(parts=[{**one, "plan": plan, "quick": {"seeds": [1]}, "tuned_by": "global"}])
    (part,) = recipes.plain(run_recipe(made, tmp_path, progress=False))["parts"]
    assert part["tuned_by"] == "global" and len(part["runs"]) == 6
    for name, run in part["runs"].items():
        (folder,) = tmp_path.glob(f"**/runs/{name}")
        frame = RunResult(folder).metrics
        last = frame[(frame["split"] == "validation") & (frame["metric"] == "accuracy")]
        last = last[last["round"] == last["round"].max()].groupby("model")["value"].mean()
        # FedAMP and training alone have no global model.
        assert ("global" in last.index) == name.startswith("theirs")
        assert run["validation"] == pytest.approx(last.get("global", last["personal"]), rel=1e-12)
    with pytest.raises(ConfigError, match="tuned_by is 'cloud', but must be one of personal, global"):
        recipe(parts=[{**one, "tuned_by": "cloud"}])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(yaml.safe_dump(values(parts=both_parts()), sort_keys=False, allow_unicode=True))
    return str(path)


@pytest.fixture(scope="module")
def whole(file: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, call("run", file, "--out", str(out))


def test_a_whole_recipe(whole: tuple[Path, Result]) -> None:
    out, found = whole
    assert "FedAMP, Table 9: A small one" in found.stdout and "Criteria: 1 " in found.stdout
    assert "First, part 1 of 2: 6 runs" in found.stderr and f"recipe: {out}" in " ".join(found.stderr.split())
    # One account of the whole, over both parts.
    assert "small: one/ours-seed1 ended with " in found.stderr and "; 18 of 18 runs\n" in found.stderr
    text, made = (out / "recipe.md").read_text(), json.loads((out / "recipe.json").read_text())
    assert "## First" in text and "## Second" in text and "| partition=natural | ours |" in text
    # Cells are what the runs say, in percent: a mean over seeds of a mean over clients.
    runs = [api.load(out / "one" / "runs" / f"theirs-seed{seed}").summary for seed in (1, 10)]
    cell = next(c for c in made["parts"][0]["cells"] if (c["method"], c["reading"]) == ("theirs", "global"))
    assert cell["mean"] == pytest.approx(100 * sum(run["global"]["final"]["mean"] for run in runs) / 2)
    assert (out / "two" / "table.md").exists()


def test_stopped_and_started_again_it_ends_with_the_same_table(
    file: str, whole: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    played = 0
    play_round = Simulation.play_round

    def stopping(error: type[BaseException], after: int) -> Any:
        def instead(self: Simulation, *args: Any) -> Any:
            nonlocal played
            played += 1
            info = play_round(self, *args)
            if played == after:
                raise error
            return info

        return instead

    made = recipe(parts=both_parts())
    with monkeypatch.context() as patched, pytest.raises(Interrupted, match=r"1 of 6 runs .* with the same command"):
        patched.setattr(Simulation, "play_round", stopping(KeyboardInterrupt, 6))  # within the second run
        run_recipe(made, out, together=False, progress=False)
    assert not (out / "recipe.md").exists()
    played = 0
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Simulation, "play_round", stopping(Killed, 4 * 4 + 10))  # within the second part
        patched.setattr(Experiment, "keep", lambda self: None)
        run_recipe(made, out, together=False, progress=False)
    assert (out / "one" / "table.md").exists() and not (out / "two" / "table.md").exists()
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("*/runs/*/summary.json")}
    assert len(stamps) > 6
    call("run", file, "--out", str(out), "--quiet")
    assert kept(out) == kept(whole[0])
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}  # what was finished was not repeated


def test_options_cut_a_recipe_short(file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call("run", file, "--part", "one", "--rounds", "1", "--seeds", "3", "4", "5", "--out", str(out), "-q")
    (part,) = json.loads((out / "recipe.json").read_text())["parts"]
    assert (part["name"], part["rounds"], part["seeds"], part["device"]) == ("one", 1, [3, 4, 5], "cpu")
    assert not (out / "two").exists()
    quick = call("run", file, "--quick", "--out", str(tmp_path / "quick"))
    assert "the quick version" in quick.stdout and "Second" not in quick.stdout
    other = call("run", file, "--rounds", "2", "--part", "one", "--out", str(out), code=2)
    assert isinstance(other.exception, ConfigError) and "holds a comparison with another plan" in str(other.exception)


def test_a_figure_can_be_read_off_a_tables_runs(
    file: str, whole: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, figure = whole[0], tmp_path / "figure"
    monkeypatch.setattr(api, "run_config", lambda *_, **__: pytest.fail("ran again"))
    monkeypatch.setattr(api, "resume", lambda *_, **__: pytest.fail("ran again"))
    call("run", file, "--runs", str(table), "--out", str(figure), "-q")
    assert kept(figure) == kept(table) and {path.name for path in figure.iterdir()} == set(FILES)


def test_a_part_without_its_data_is_passed_over(tmp_path: Path) -> None:
    plan = {**values()["parts"][0]["plan"], "data": "emnist", "clients": 62}
    made = recipe(
        {"above": {"of": ["ours"], "than": ["alone"]}}, parts=both_parts(plan={**plan, "partition": "groups"})
    )
    told: list[str] = []
    found = run_recipe(made, tmp_path / "out", data_dir=tmp_path, progress=False, tell=told.append)
    assert "the data set 'emnist' needs the file" in found.parts[1].absent and not found.failures
    assert any(line.startswith("Second is passed over: the data set 'emnist'") for line in told)
    assert [finding.part for finding in found.verdicts[0].findings if finding.holds is None] == ["two"]
    assert "passed over: the data set" in recipes.markdown(found)
    with pytest.raises(DataError, match="nothing of small can be run: the data set 'emnist' needs"):
        run_recipe(made, tmp_path / "none", parts=["two"], data_dir=tmp_path, progress=False)


def test_a_part_that_fails_does_not_stop_the_others_but_shows_in_the_exit_code(tmp_path: Path) -> None:
    parts = both_parts()
    parts.reverse()
    plan = {**parts[0]["plan"], "partition": "pathological:2,least=100000,balanced=false", "grid": None}
    parts[0] |= {"plan": {key: value for key, value in plan.items() if value is not None}}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(values(parts=parts), sort_keys=False, allow_unicode=True))
    found = call("run", str(path), "--out", str(tmp_path / "out"), code=2)
    assert isinstance(found.exception, ConfigError) and str(found.exception).startswith("part 'two': ")
    made = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert [bool(part["failed"]) for part in made["parts"]] == [True, False] and made["parts"][1]["cells"]
    assert "failed: " in found.stdout


def test_criteria_do_not_change_the_exit_code(tmp_path: Path) -> None:
    wrong = {"name": "wrong", "says": "It is above itself.", "above": {"of": ["ours"], "than": ["ours"]}}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(values(parts=both_parts(), criteria=[wrong]), sort_keys=False, allow_unicode=True))
    found = call("run", str(path), "--part", "one", "--out", str(tmp_path / "out"))
    assert "Criteria: 1 fails" in found.stdout and found.exit_code == 0


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["run", "fedamp-table9"], UnknownName, "there is no recipe 'fedamp-table9': did you mean 'fedamp-table"),
        (["run", "fedamp-table1", "fedamp-table2"], ConfigError, "a recipe is run alone"),
        (["run", "fedamp-table3", "--part", "fmnst"], UnknownName, "part of fedamp-table3 called 'fmnst'"),
        (["run", "fedamp-table3", "--quick", "--part", "emnist"], ConfigError, "'emnist' has no quick version"),
        (["run", "fedamp-table3", "--rounds", "0", "--part", "mnist"], ConfigError, "rounds is 0, but must be"),
        (["run", "fedamp-table3", "--precision", "half"], ConfigError, "precision is 'half', but must be float32"),
        (["run", "fedamp-table3", "--seeds", "one"], ConfigError, "--seeds has 'one'"),
        (["show", "nothing"], UnknownName, "there is no recipe 'nothing'"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], error: type[Exception], said: str) -> None:
    found = call(*words, code=2)
    assert isinstance(found.exception, error) and said in str(found.exception)


def test_show_and_list(file: str) -> None:
    shown = " ".join(call("show", file).stdout.split())
    for words in (
        "FedAMP, Table 9: A small one",
        "Three methods.",
        "algorithm: fedamp, name: ours",
        "91.50±0.50",
        "70.00†",
        "Second (two) as First",
        "† not a target: It is a made-up number.",
        "- Ours is above the others.",
        "First, also when quick: above (of: ours; than: *)",
        "All of it: 18 runs, 72 rounds, 360 times a client trains",
    ):
        assert words in shown
    assert "The quick version: 3 runs, 6 rounds, 30 times a client trains" in call("show", file, "--quick").stdout
    listed = call("list").stdout
    assert all(name in listed for name in recipes.names())
