"""What a report shows: each section if the runs have it, and the runs under names that tell them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from coterie import api
from coterie.config import from_yaml
from coterie.errors import RunFolderError
from coterie.results import Result
from coterie.results.figures import HeatMap, Line, Panels
from coterie.results.labels import lines_of
from coterie.results.report import tables
from coterie.results.report.elements import Chart, Plot, Section
from coterie.results.report.sections import sections
from coterie.results.report.sources import read_runs
from coterie.runs.storage.atomic_files import read_json, write_json
from tests.results.report.folders import GROUPS, weights_of, write_run

ALWAYS = ["summary", "curves", "clients", "fairness"]


def made(*paths: Path) -> dict[str, Section]:
    return {section.key: section for section in sections(read_runs(paths))}


def plots(section: Section) -> dict[str, list[Chart]]:
    return {part.key: [each.chart for each in part.variants] for part in section.parts if isinstance(part, Plot)}


def markup(section: Section) -> str:
    return "\n".join(part.text for part in section.parts if not isinstance(part, Plot))


@pytest.mark.parametrize(
    ("has", "keys"),
    [
        ({"weights": False}, ["shares", "costs"]),
        ({}, ["weights", "shares", "costs"]),
        ({"matrix": True}, ["weights", "others", "shares", "costs"]),
        ({"shares": False, "weights": False, "federated": True}, ["costs", "events"]),
        ({"shares": False}, ["weights", "costs"]),
    ],
)
def test_a_section_is_there_if_the_run_has_it(has: dict[str, Any], keys: list[str], tmp_path: Path) -> None:
    found = made(write_run(tmp_path / "run", **has).path)
    assert list(found) == [*ALWAYS, *keys, "repeat"]
    assert all(section.parts for section in found.values())


def test_without_bytes_there_is_no_plot_of_them(tmp_path: Path) -> None:
    costs = made(write_run(tmp_path / "run", "local", traffic=False, weights=False).path)["costs"]
    assert list(plots(costs)) == ["seconds"]


def test_robustness_needs_two_fractions_of_one_method(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", "fedavg", level=0.6).path
    two = write_run(tmp_path / "b", "fedavg", level=0.2, attack="gaussian:0.34").path
    other = write_run(tmp_path / "c", "fedprox", attack="gaussian:0.5").path
    assert "robustness" not in made(one, other)
    ((chart,),) = plots(made(one, two, other)["robustness"]).values()
    assert isinstance(chart, Panels)
    assert [panel.title for panel in chart.panels] == ["gaussian, personal model", "gaussian, global model"]
    (series,) = chart.panels[0].series
    honest = [client for client, role in enumerate(Result(two).shares["role"]) if role == "honest"]
    assert series.name == "FedAvg" and len(honest) == 4
    np.testing.assert_array_equal(series.x, [0.0, 0.34])
    last = Result(two).metrics.query("round == 3 and split == 'test' and metric == 'accuracy' and model == 'personal'")
    assert series.y[1] == pytest.approx(last[last["client"].isin(honest)]["value"].mean())


def test_seeds_of_one_setting_are_one_line_and_settings_are_not(tmp_path: Path) -> None:
    results = [
        write_run(tmp_path / "a", seed=1),
        write_run(tmp_path / "b", seed=2, matrix=True),
        write_run(tmp_path / "c", seed=1, partition="iid"),
        write_run(tmp_path / "d", seed=1, settings={"p": 0.25}),
        write_run(tmp_path / "e", "local", seed=1),
        write_run(tmp_path / "f", "local", seed=1),
    ]
    half, quarter = "FedACS (p=0.5)", "FedACS (p=0.25)"
    dirichlet = "partition=dirichlet:0.5"
    assert lines_of(results) == [
        Line(half, dirichlet),
        Line(half, dirichlet),  # that only one has a matrix does not tell them apart
        Line(half, "partition=iid"),
        Line(quarter, dirichlet),
        Line("Local", f"{dirichlet}, e"),
        Line("Local", f"{dirichlet}, f"),
    ]
    assert lines_of(results[:2]) == [Line("FedACS"), Line("FedACS")]


def test_beyond_eight_lines_every_setting_has_its_own_chart(tmp_path: Path) -> None:
    methods, partitions = ("fedacs", "fedamp", "local"), ("iid", "dirichlet:0.1", "dirichlet:0.5")
    paths = {
        (method, partition): write_run(tmp_path / f"{method}{number}", method, weights=False, partition=partition).path
        for number, partition in enumerate(partitions)
        for method in methods
    }
    together = made(*list(paths.values())[:8])["curves"]
    assert len(plots(together)["curves-accuracy"]) == 1
    (plot, _) = made(*paths.values())["curves"].parts
    assert isinstance(plot, Plot) and plot.choice == "Setting"
    assert [variant.label for variant in plot.variants] == [f"partition={name}" for name in partitions]
    for partition, variant in zip(partitions, plot.variants, strict=True):
        assert isinstance(variant.chart, Panels)
        assert [series.name for series in variant.chart.panels[0].series] == ["FedACS", "FedAMP", "Local"]
        frame = Result(paths["fedamp", partition]).metrics.query("model == 'personal' and metric == 'accuracy'")
        means = frame[frame["split"] == "test"].groupby("round")["value"].mean()
        np.testing.assert_allclose(variant.chart.panels[0].series[1].y, means)
    colours = [[series.style.colour for series in each.chart.panels[0].series] for each in plot.variants]  # type: ignore[union-attr]
    assert colours[0] == colours[1] == colours[2]


def test_bands_are_over_the_seeds_of_the_folders(tmp_path: Path) -> None:
    results = [write_run(tmp_path / str(seed), seed=seed, level=level) for seed, level in ((1, 0.2), (2, 0.6))]
    (chart,) = plots(made(*(result.path for result in results))["curves"])["curves-accuracy"]
    assert isinstance(chart, Panels)
    (series,) = chart.panels[0].series
    means = []
    for result in results:
        frame = result.metrics.query("model == 'personal' and split == 'test' and metric == 'accuracy' and round == 3")
        means.append(frame["value"].mean())
    assert series.y[2] == pytest.approx(np.mean(means))
    assert series.spread is not None
    assert series.spread[2] == pytest.approx(np.std(means, ddof=1))


def test_the_heat_map_is_in_group_order_for_every_recorded_round(tmp_path: Path) -> None:
    ((chart,),) = plots(made(write_run(tmp_path / "run").path)["weights"]).values()
    assert isinstance(chart, HeatMap)
    order = np.lexsort((np.arange(len(GROUPS)), GROUPS))
    assert [number for number, _ in chart.frames] == [1, 2, 3]
    for number, values in chart.frames:
        np.testing.assert_allclose(values, weights_of(number)[order][:, order], rtol=1e-6)


def test_one_chart_of_who_has_what_if_all_runs_had_the_same(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", "fedacs").path
    other = write_run(tmp_path / "b", "local").path  # another draw
    assert len(plots(made(one)["shares"])["shares"]) == 1
    assert len(plots(made(one, other)["shares"])["shares"]) == 2
    bare = write_run(tmp_path / "c", classes=()).path
    (plot,) = made(bare)["shares"].parts
    assert isinstance(plot, Plot) and plot.title == "Training samples by client"
    shares = Result(one).shares
    shares.to_parquet(other / "shares.parquet", index=False)
    assert len(plots(made(one, other)["shares"])["shares"]) == 1


def test_the_best_of_each_model_is_bold_and_unfinished_runs_are_named(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", level=0.8).path
    bad = write_run(tmp_path / "bad", "local", level=0.1, models=("personal",), finish=False).path
    summary = markup(made(good, bad)["summary"])
    assert summary.count("<b>") == 1
    mean = Result(good).summary["personal"]["final"]["mean"]
    assert f"<b>{mean:.4f}</b>" in summary
    assert "bad is not finished: round 3 of 3" in summary


def test_a_run_that_has_recorded_nothing_is_named_and_left_out(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one").path
    empty = write_run(tmp_path / "empty", models=(), traffic=False, weights=False, finish=False).path
    found = read_runs([one, empty])
    assert len(found.runs.results) == 1 and "has recorded nothing yet" in found.left_out[0]
    with pytest.raises(RunFolderError, match="there is nothing to report: empty"):
        read_runs([empty])


def test_a_comparison_stands_for_its_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "cmp/runs/b-seed1", "local")
    write_run(tmp_path / "cmp/runs/a-seed1")
    planned = {"a-seed1": {}, "b-seed1": {}, "c-seed1": {}, "d-seed1": {}}
    (tmp_path / "cmp/plan.yaml").write_text(yaml.safe_dump({"methods": [], "runs": planned}, sort_keys=False))
    (tmp_path / "cmp/diverged.json").write_text(json.dumps({"d-seed1": "round 3: the model is no longer finite"}))
    found = read_runs([tmp_path / "cmp", tmp_path / "cmp/runs/a-seed1"])
    assert [result.path.name for result in found.runs.results] == ["a-seed1", "b-seed1"]
    assert found.left_out == [
        "d-seed1 diverged: round 3: the model is no longer finite",
        "cmp: 2 of 4 planned runs have not been begun",
    ]
    # A recipe's folder holds a comparison for each of its parts.
    assert [result.path.name for result in read_runs([tmp_path]).runs.results] == ["a-seed1", "b-seed1"]


def test_lines_have_the_names_of_the_plan(tmp_path: Path) -> None:
    for number, (name, prox) in enumerate((("near", 1.0), ("far", 0.1))):
        for seed in (1, 10):
            write_run(
                tmp_path / f"cmp/runs/{name}-seed{seed}", "fedamp", seed, settings={"prox": prox}, level=0.1 * number
            )
    alone = write_run(tmp_path / "alone", "local").path
    runs = [f"{name}-seed{seed}" for name in ("near", "far") for seed in (1, 10)]
    plan = {"called": {run: run.partition("-")[0] for run in runs}, "runs": {run: {} for run in runs}}
    (tmp_path / "cmp/plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    found = read_runs([tmp_path / "cmp", alone]).runs
    assert [line.name for line in found.lines] == ["near", "near", "far", "far", "Local"]
    # Of a plan from before names were kept, what tells runs apart is said.
    (tmp_path / "cmp/plan.yaml").write_text(yaml.safe_dump({"runs": plan["runs"]}, sort_keys=False))
    old = read_runs([tmp_path / "cmp"]).runs
    assert [line.name for line in old.lines] == ["FedAMP (prox=1.0)"] * 2 + ["FedAMP (prox=0.1)"] * 2


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"there is no run in .*nowhere"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(RunFolderError, match=r"neither a run's folder nor a comparison's: it holds no config\.yaml"):
        read_runs([tmp_path])


def test_the_configuration_that_is_shown_repeats_the_run(tmp_path: Path) -> None:
    result = api.run(
        "fedacs",
        out=tmp_path / "run",
        data="synthetic:clients=4,samples=14,features=5,classes=3",
        partition="natural",
        clients=4,
        rounds=2,
        model="linear",
        progress=False,
    )
    found = read_runs([result.path])
    (shown,) = tables.repeat(found)
    command = tables.command(result.config, result.path, {}, federated=False)
    assert command.split() == ["coterie", "run", str(result.path / "config.yaml"), "--out", "run-again"]
    assert "config.yaml" in shown.text
    again = api.run_config(from_yaml(result.path / "config.yaml"), out=tmp_path / "again", progress=False)
    assert (tmp_path / "again/metrics.parquet").read_bytes() == (result.path / "metrics.parquet").read_bytes()
    assert again.config == result.config


def test_what_runs_share_and_in_what_they_differ_is_all_there_is(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a").path, write_run(tmp_path / "b", "local", seed=2).path]
    common, differ, *each = (part.text for part in tables.repeat(read_runs(paths)))
    for name, value in Result(paths[0]).config.items():
        if name in ("algorithm", "seed"):
            assert f'<th scope="col">{name}</th>' in differ and f"\n{name}:" not in common
        elif name != "settings":
            assert f"{name}:" in common, (name, value)
    assert "p=0.5" in differ and "lr: 0.05" in common
    assert len(each) == 2 and all("<details>" in text for text in each)


def test_a_federation_is_repeated_by_its_own_command(tmp_path: Path) -> None:
    result = write_run(tmp_path / "run", "fedavg", shares=False, weights=False, federated=True, settings={"lr": 0.25})
    command = tables.command(result.config, result.path, {}, federated=True)
    assert command.startswith("coterie federate run DIR fedavg --rounds 3 --participation 1.0 --eval-every 1 ")
    assert "--set lr=0.25" in command
    found = made(result.path)
    assert "no answer within 5 s" in markup(found["events"])
    # Messages of 1 MB in each of three rounds, half as much again on the wire.
    assert "up with overhead" in markup(found["costs"]) and '<td class="number">4.5 MB</td>' in markup(found["costs"])
    simulated = made(write_run(tmp_path / "other").path)["costs"]
    assert "overhead" not in markup(simulated)


def test_a_method_of_the_users_has_the_title_that_its_run_recorded(tmp_path: Path) -> None:
    source = Path(api.__file__).with_name("algorithms") / "local.py"
    mine = tmp_path / "mine.py"
    mine.write_text(source.read_text().replace('"local"', '"mine"').replace('"Local"', '"Mine & <Yours>"'))
    result = write_run(tmp_path / "run", str(mine), weights=False)
    summary = read_json(result.path / "summary.json") | {"algorithm": "mine_as_recorded"}
    write_json(result.path / "summary.json", {**summary, "title": "Mine & <Yours>"})
    mine.unlink()  # looking at a run runs no code, wherever it is
    assert lines_of([Result(result.path)]) == [Line("Mine & <Yours>")]
    assert Result(result.path).table().title.startswith("Mine & <Yours>, test accuracy")
    assert "Mine &amp; &lt;Yours&gt;" in markup(made(result.path)["summary"])
    write_json(result.path / "summary.json", summary)
    assert lines_of([Result(result.path)]) == [Line("mine_as_recorded")]
    assert Result(result.path).table().title.startswith("mine_as_recorded, test accuracy")


def test_a_plan_that_calls_a_method_by_its_name_shows_its_title(tmp_path: Path) -> None:
    results = [write_run(tmp_path / str(seed), "fedavg_ft", seed) for seed in (1, 2)]
    assert lines_of(results, names=["fedavg_ft", "tuned"]) == [Line("FedAvg-FT"), Line("tuned")]
