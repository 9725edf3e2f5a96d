"""Many recipes side by side: what is split by seeds and put together again is what one command gives."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from coterie.errors import ConfigError
from coterie.studies import recipes
from coterie.studies.recipes.checks import parse
from tests.studies.recipes.small_recipe import values

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks/run_recipes.py"
RECIPE = recipes.load("fedpg-table2")
OVER = {"rounds": 2, "eval_every": 1, "clients": 6}


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    place = importlib.util.spec_from_file_location(path.stem, path)
    assert place is not None and place.loader is not None
    program = importlib.util.module_from_spec(place)
    monkeypatch.setitem(sys.modules, path.stem, program)  # dataclasses look their module up
    place.loader.exec_module(program)
    return program


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded(PROGRAM, monkeypatch)


def jobs_file(folder: Path, *jobs: dict[str, Any]) -> Path:
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump({"defaults": {"device": "cpu"}, "jobs": list(jobs)}))
    return path


def listed(driver: ModuleType, folder: Path, *jobs: dict[str, Any]) -> list[Any]:
    found = driver.read_jobs(jobs_file(folder, *jobs))
    (folder / "jobs.json").write_text(json.dumps({"jobs": [driver.asdict(job) for job in found]}))
    assert driver._again(folder) == found
    return list(found)


def test_seeds_that_were_run_apart_give_what_one_command_gives(driver: ModuleType, tmp_path: Path) -> None:
    # flame-figure3 and flame-figure8 are read off these runs.
    entry = {"recipe": "flame-table3-hybrid", "quick": True, "split": "seeds", "over": OVER}
    jobs = listed(driver, tmp_path, entry)
    assert [job.seeds for job in jobs] == [(1,), (10,)] and len({job.name for job in jobs}) == 2
    for job in jobs:
        assert driver.play(job, tmp_path) == 0
    assert driver.gather(jobs, tmp_path, tmp_path / "results") == 0
    for name in ("flame-table3-hybrid", "flame-figure3", "flame-figure8"):
        recipe = recipes.load(name)
        whole = recipes.run_recipe(
            recipe,
            tmp_path / "whole",
            quick=True,
            parts=["mnist"],
            over={**OVER, "seeds": [1, 10]},
            progress=False,
        )
        found = json.loads((tmp_path / f"results/{name}-quick.json").read_text())
        expected = json.loads(json.dumps(recipes.plain(whole)))
        one, other = ({(c["method"], c["reading"]): c for c in each["parts"][0]["cells"]} for each in (found, expected))
        assert one.keys() == other.keys() and found["parts"][0]["seeds"] == [1, 10]
        for cell in one:  # runs that play together in other groups differ in how sums are rounded
            assert one[cell]["each"] == pytest.approx(other[cell]["each"], rel=1e-3, abs=1e-6)
        states = [[verdict["status"] for verdict in each["criteria"]] for each in (found, expected)]
        assert states[0] == states[1]


def test_runs_of_several_recipes_play_together_and_give_what_each_recipe_gives(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("flame-figure9", "flame-figure10")
    over = {**OVER, "seeds": [1]}
    entries = [{"recipe": name, "quick": True, "together": "digits", "over": over} for name in names]
    (tmp_path / "work").mkdir()
    jobs = listed(driver, tmp_path / "work", *entries)
    (leader,) = driver._leaders(jobs)
    assert leader.name == "together-digits" and [job.together for job in jobs] == ["digits", "digits"]
    met: list[int] = []
    together = driver.run_together

    def counted(runs: Any, *args: Any, **more: Any) -> Any:
        met.append(len(runs))
        return together(runs, *args, **more)

    monkeypatch.setattr(driver, "run_together", counted)
    given = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "results"), "--processes", "1", "--no-mps"]
    assert driver.main(["--play-together", "digits", *given]) == 0
    assert met == [6]  # three of either recipe
    assert driver._ending(tmp_path / "work", leader.name).exists(), "in its last rounds it said so"
    for job in jobs:
        assert driver.gather([job], tmp_path / "work", tmp_path / "results") == 0
    for name in names:
        whole = recipes.run_recipe(
            recipes.load(name), tmp_path / name, quick=True, parts=["mnist"], over=over, progress=False
        )
        found = json.loads((tmp_path / f"results/{name}-quick.json").read_text())
        for got, wanted in zip(found["parts"][0]["cells"], recipes.plain(whole)["parts"][0]["cells"], strict=True):
            assert got["each"] == pytest.approx(wanted["each"], rel=1e-3, abs=1e-6)
    # What is finished is not played again, whoever asks.
    met.clear()
    assert driver.main([str(jobs_file(tmp_path, *entries)), *given]) == 0
    assert met == [] and "1 of 1 jobs are finished" in (tmp_path / "work/log.txt").read_text()


def test_of_a_recipe_that_was_stopped_the_seeds_that_are_complete_are_read(driver: ModuleType, tmp_path: Path) -> None:
    entry = {"recipe": "flame-figure9", "quick": True, "split": "seeds", "over": OVER}
    first, second = listed(driver, tmp_path, entry)
    for job in (first, second):
        driver.play(job, tmp_path)
    folder = tmp_path / "jobs" / second.name / second.part / "runs"
    for summary in folder.glob("*/summary.json"):
        summary.unlink()  # the second seed's runs are not finished
    for run in folder.glob("*/checkpoint"):
        driver.shutil.rmtree(run)  # as the driver does with those of finished runs
    driver.gather([first, second], tmp_path, tmp_path / "results")
    found = json.loads((tmp_path / "results/flame-figure9-quick.json").read_text())
    assert found["parts"][0]["seeds"] == [first.seeds[0]] and found["parts"][0]["cells"]


def test_some_methods_are_read_alone_and_nothing_is_said_of_all(driver: ModuleType, tmp_path: Path) -> None:
    some = {"methods": ["FedPG", "M1"], "split": ["seeds", "methods"], "over": {**OVER, "seeds": [1]}}
    jobs = listed(driver, tmp_path, {"recipe": "fedpg-table2", "quick": True, **some})
    assert [job.methods for job in jobs] == [("FedPG",), ("M1",)]
    for job in jobs:
        driver.play(job, tmp_path)
    driver.gather(jobs, tmp_path, tmp_path / "results")
    found = json.loads((tmp_path / "results/fedpg-table2-quick.json").read_text())
    assert set(found["parts"][0]["methods"]) == {"FedPG", "M1"}
    assert {cell["method"] for cell in found["parts"][0]["cells"] if cell["mean"] is not None} == {"FedPG", "M1"}
    about = {verdict.name: {a.method for t in verdict.terms for a in t.cells} for verdict in RECIPE.criteria}
    for verdict in found["criteria"]:
        if about[verdict["name"]] - {"FedPG", "M1"} and verdict["status"] != "left out":
            assert verdict["status"] == "open"


def test_commands_stand_beside_recipes_and_the_deadline_stops_them(driver: ModuleType, tmp_path: Path) -> None:
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    jobs = [
        {"name": "one", "command": ["{python}", "-c", write, "{work}/one.txt", "kept"], "files": ["{work}/on*.txt"]},
        {"name": "bad", "command": ["{python}", "-c", "raise SystemExit('it broke')"], "seconds": 90},
        {"name": "long", "command": ["{python}", "-c", "import time; time.sleep(600)"], "priority": 7},
        {"name": "never", "command": ["{python}", "-c", "pass"], "priority": 8},
        {"name": "lacking", "command": ["{python}", "-c", "pass"], "priority": 1, "needs": str(tmp_path / "missing")},
    ]
    work, began, asked = tmp_path / "work", time.monotonic(), signal.getsignal(signal.SIGTERM)
    arguments = [str(jobs_file(tmp_path, *jobs)), "--work", str(work), "--processes", "1", "--deadline", "5"]
    assert driver.main([*arguments, "--grace", "1"]) == 1
    assert time.monotonic() - began < 60
    assert signal.getsignal(signal.SIGTERM) == asked, "signals are the caller's again"
    assert (work / "results/one/one.txt").read_text() == "kept"
    log = (work / "results/log.txt").read_text()
    assert log.index("bad begins") < log.index("one begins"), "the longest comes first"
    assert "bad failed with 1: it broke" in log and "long was stopped" in log and "never was not begun" in log
    assert "lacking was not begun" in log, "what it needs never came"
    (work / "one.txt").unlink()
    assert driver.main([*arguments, "--grace", "1"]) == 1
    assert not (work / "one.txt").exists(), "what is finished is not run again"


def test_the_next_process_begins_when_the_one_before_is_ending(driver: ModuleType, tmp_path: Path) -> None:
    wait = """import pathlib, sys, time
(pathlib.Path(sys.argv[1]) / "jobs/first.ending").touch()
until = time.monotonic() + 60
while not (pathlib.Path(sys.argv[1]) / "second").exists():
    assert time.monotonic() < until, "nobody began"
    time.sleep(0.05)
"""
    write = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'second').touch()"
    jobs = [
        {"name": "first", "command": ["{python}", "-c", wait, "{work}"], "priority": 1},
        {"name": "second", "command": ["{python}", "-c", write, "{work}"], "priority": 2},
    ]
    given = [str(jobs_file(tmp_path, *jobs)), "--work", str(tmp_path / "work"), "--processes", "1", "--no-mps"]
    assert driver.main([*given, "--early"]) == 0


def test_each_process_is_told_its_share_of_the_gpu(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"  # one that starts, on a machine where the GPU does not answer it
    control.write_text(f'#!/bin/sh\n[ -z "$1" ] && cat >> {tmp_path}/told\nexit 0\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(driver.sys, "executable", "/bin/false")
    with driver.shared_gpu(tmp_path, True) as said:
        assert "does not work" in said and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert (tmp_path / "told").read_text() == "quit\n" and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    monkeypatch.undo()
    show = "import os, sys; open(sys.argv[1], 'w').write(os.environ['COTERIE_GPU_SHARE'])"
    jobs = [
        {"name": name, "command": ["{python}", "-c", show, f"{{work}}/{name}"], "slots": slots}
        for name, slots in (("one", 1), ("two", 2), ("nine", 9))
    ]
    work = tmp_path / "work"
    assert driver.main([str(jobs_file(tmp_path, *jobs)), "--work", str(work), "--processes", "4", "--no-mps"]) == 0
    shares = {name: float((work / name).read_text()) for name in ("one", "two", "nine")}
    assert shares == pytest.approx({"one": 0.9 / 4, "two": 0.9 / 2, "nine": 0.9})


def test_a_list_of_jobs_that_is_wrong_is_refused(driver: ModuleType, tmp_path: Path) -> None:
    for jobs, sentence in (
        ([{"recipe": "flame-figure9", "part": "mnist"}], "has part, but may have"),
        ([{"command": ["true"]}], "must have recipe, or name and command"),
        ([{"recipe": "flame-figure9"}, {"recipe": "flame-figure9"}], "are there twice"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            driver.read_jobs(jobs_file(tmp_path, *jobs))


@pytest.mark.parametrize("path", sorted((PROGRAM.parent / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_lists_of_jobs_that_are_kept_can_be_played(
    path: Path, driver: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert driver.main([str(path), "--work", str(tmp_path), "--list"]) == 0
    jobs, printed = driver.read_jobs(path), capsys.readouterr().out
    for name in {job.name for job in jobs if not job.together} | {
        f"together-{job.together}" for job in jobs if job.together
    }:
        assert printed.count(f"  {name}\n") == 1


def test_help_says_what_a_job_is(driver: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        driver.main(["--help"])
    assert "split: seeds" in capsys.readouterr().out


def test_parts_that_were_run_apart_are_joined_as_if_they_had_been_run_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    program = loaded(PROGRAM.with_name("join_results.py"), monkeypatch)
    whole = PROGRAM.parents[1] / "results/recipes/flame-figure8.json"
    values, text = json.loads(whole.read_text()), whole.with_suffix(".md").read_text()
    blocks = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    folders = [tmp_path / part["name"] for part in values["parts"]]
    for number, folder in enumerate(folders):
        folder.mkdir()
        alone = {**values, "parts": [values["parts"][number]], "criteria": []}
        (folder / whole.name).write_text(json.dumps(alone))
        (folder / whole.with_suffix(".md").name).write_text(blocks[0] + blocks[number + 1])
    assert len(folders) > 1
    for folder in reversed(folders):
        assert program.main([str(folder), str(tmp_path)]) == 0
    assert json.loads((tmp_path / whole.name).read_text()) == values
    assert (tmp_path / whole.with_suffix(".md").name).read_text() == text
    # Of a part that is there twice the one with fewer seeds does not count, the one with more does.
    first = {name: value for name, value in values["parts"][0].items() if name != "methods"}  # as older files are
    for seeds, counts in (([1, 10], False), ([*first["seeds"], 7], True)):
        (folders[0] / whole.name).write_text(json.dumps({**values, "parts": [{**first, "seeds": seeds}]}))
        program.main([str(folders[0]), str(tmp_path)])
        found = json.loads((tmp_path / whole.name).read_text())["parts"]
        assert [part["name"] for part in found] == [part["name"] for part in values["parts"]]
        assert (found[0]["seeds"] == seeds) is counts


def test_seeds_and_methods_that_were_run_apart_are_joined_run_by_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files: one seed of all, the other of two methods, the other of the third. Together they are the whole."""
    monkeypatch.syspath_prepend(PROGRAM.parent)
    program = loaded(PROGRAM.with_name("join_results.py"), monkeypatch)
    made = values()
    part = made["parts"][0]
    part["plan"]["methods"][1] |= {"tune": {"lr": [0.01, 0.5]}}
    part["readings"]["ahead"] = {"paired": "ahead", "against": "alone"}
    part["numbers"] = {"readings": ["personal"], "rows": {"ours": [91.5]}}
    del made["parts"][1], part["not_targets"]
    small = parse(made, "small")
    monkeypatch.setattr(program.recipes, "load", lambda name: small)
    blocks = {
        "seed": (["ours", "theirs", "alone"], [1]),
        "some": (["ours", "theirs"], [10]),
        "rest": (["alone"], [10]),
        "whole": (["ours", "theirs", "alone"], [1, 10]),
    }
    for name, (methods, seeds) in blocks.items():
        over = recipes.narrowed(small.parts[0], methods, seeds)
        outcome = recipes.run_recipe(
            small, tmp_path / f"runs-{name}", parts=["one"], over=over, together=False, progress=False
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / "small.json").write_text(json.dumps(recipes.plain(outcome)))
        (tmp_path / name / "small.md").write_text(recipes.markdown(outcome))
    wanted = json.loads((tmp_path / "whole/small.json").read_text())
    for order in (("seed", "some", "rest"), ("rest", "seed", "some", "seed")):
        to = tmp_path / f"joined-{len(order)}"
        to.mkdir()
        for name in order:
            assert program.main([str(tmp_path / name), str(to)]) == 0
        found = json.loads((to / "small.json").read_text())
        for each in (found, wanted):
            each["parts"][0]["seconds"] = 0
        assert found == wanted
        assert (to / "small.md").read_text().split() == (tmp_path / "whole/small.md").read_text().split()
    # After the first two files only two methods have both seeds: these are read, and of all methods nothing is said.
    half = tmp_path / "half"
    half.mkdir()
    for name in ("seed", "some"):
        program.main([str(tmp_path / name), str(half)])
    found = json.loads((half / "small.json").read_text())
    assert set(found["parts"][0]["methods"]) == {"ours", "theirs"} and found["parts"][0]["seeds"] == [1, 10]
    assert len(found["parts"][0]["runs"]) == 2 + 2 * 2 + 1, "the third method's seed is kept all the same"
    assert [each["status"] for each in found["criteria"]] == ["open"]
    # Other rounds are another experiment: the longer one counts.
    other = json.loads((tmp_path / "rest/small.json").read_text())
    other["parts"][0]["rounds"] = 3
    (tmp_path / "rest/small.json").write_text(json.dumps(other))
    program.main([str(tmp_path / "rest"), str(half)])
    assert json.loads((half / "small.json").read_text())["parts"] == found["parts"]


def test_what_is_said_of_all_methods_stays_open_where_one_of_them_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    program = loaded(PROGRAM.with_name("join_results.py"), monkeypatch)
    whole = PROGRAM.parents[1] / "results/recipes/fedamp-table3.json"
    statuses = []
    for left_out in ("", "FedAvg-FT"):
        new = tmp_path / f"without-{left_out}"
        new.mkdir()
        values = json.loads(whole.read_text())
        for part in values["parts"]:
            part["cells"] = [cell for cell in part["cells"] if cell["method"] != left_out]
        (new / whole.name).write_text(json.dumps(values))
        (new / whole.with_suffix(".md").name).write_text(whole.with_suffix(".md").read_text())
        (tmp_path / f"joined-{left_out}").mkdir()
        assert program.main([str(new), str(tmp_path / f"joined-{left_out}")]) == 0
        found = json.loads((tmp_path / f"joined-{left_out}" / whole.name).read_text())["criteria"]
        statuses += [each["status"] for each in found if each["name"] == "message-passing-above-all"]
    assert statuses == ["fails", "open"]
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong/fedamp-table9.json").write_text("{}")
    with pytest.raises(SystemExit):
        program.main([str(tmp_path / "wrong"), str(tmp_path)])
    assert "there is no recipe 'fedamp-table9'" in capsys.readouterr().err
