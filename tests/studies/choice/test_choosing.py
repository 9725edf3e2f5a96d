"""Choosing a method: the right answer on clients whose answer is known, stopped anywhere, and by validation alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from torch import Tensor
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.config import from_yaml
from coterie.data.table import TableSource
from coterie.errors import ConfigError, CoterieError, Interrupted, RunFolderError
from coterie.evaluation import better_than_reference
from coterie.federation.plan import of_experiment
from coterie.randomness import stream
from coterie.results import ClientGains, Result
from coterie.runs.experiment import Experiment
from coterie.simulation.simulation import Simulation
from coterie.studies.choice import Budget, Choice, choose, make_candidates, words
from coterie.studies.choice import decision as decision_module
from coterie.studies.choice import stages as stages_module
from coterie.studies.choice.page import yaml_text
from coterie.studies.choice.stages import Stage, StagePlayer, read_stages
from coterie.studies.choice.validation import Contender, ScoreReader, ValidationScores, read_scores
from coterie.studies.comparison import compare, make_plan
from coterie.studies.progress import StudyProgress
from tests.small_runs import Killed

GROUPED: dict[str, Any] = {"data": "synthetic", "partition": "natural", "clients": 30, "model": "linear"}
ALIKE: dict[str, Any] = {
    "data": "synthetic:clients=10,groups=1,variation=0.0,samples=50",
    "partition": "natural",
    "clients": 10,
    "model": "linear",
}
PLENTY: dict[str, Any] = {
    "data": "synthetic:clients=6,groups=6,samples=600,features=10,noise=0.05",
    "partition": "natural",
    "clients": 6,
    "model": "linear",
}
METHODS = ["fedavg", "fedavg_ft", "fedacs"]
QUICK: dict[str, Any] = {"methods": METHODS, "tune": {"lr": [0.1, 0.3]}, "threads": 1, "progress": False}
TINY: dict[str, Any] = {
    **{"data": "synthetic:clients=4,samples=30,features=5,classes=2", "partition": "natural", "clients": 4},
    **{"model": "linear", "rounds": 6, "local_epochs": 1, **QUICK},
}


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Choice:
    return choose(**GROUPED, **QUICK, rounds=18, out=tmp_path_factory.mktemp("grouped") / "choice")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Choice:
    return choose(**TINY, out=tmp_path_factory.mktemp("tiny") / "choice")


# ---------------------------------------------------------------------------------------- clients whose answer is known


def test_on_grouped_clients_it_finds_fedacs_and_is_as_good_as_the_whole_grid(grouped: Choice, tmp_path: Path) -> None:
    """All clients see inputs of one law and groups label them differently: who weighs clients finds the groups."""
    assert grouped.federate and grouped.method == "fedacs" and grouped.decision.model == "personal"
    assert grouped.sure > 0.95 and grouped.decision.pvalue < 0.01
    gain, low, high = grouped.gain
    assert 0 < low < gain < high
    shared = {name: value for name, value in QUICK.items() if name in ("tune", "threads")}
    plan = make_plan({**GROUPED, **shared, "methods": METHODS, "rounds": 18, "validation": 0.25, "eval_every": 18})
    best = max(row.scores["personal"].mean for row in compare(plan, tmp_path / "grid", progress=False).rows)
    spread = np.sqrt(0.25 / (30 * 12))  # of a mean over 360 test samples, at most
    assert grouped.decision.best.test >= best - spread


def test_on_other_grouped_clients_it_finds_fedacs_too(tmp_path: Path) -> None:
    found = choose(**GROUPED, **QUICK, rounds=18, seed=2, out=tmp_path / "choice")
    assert found.federate and found.method == "fedacs" and found.decision.model == "personal" and found.gain[1] > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_on_clients_that_are_alike_one_model_for_all_is_not_beaten(seed: int, tmp_path: Path) -> None:
    found = choose(**ALIKE, **QUICK, rounds=12, seed=seed, out=tmp_path / "choice")
    assert found.federate and found.gain[1] > 0
    runs = {run.name: Result(run) for run in (found.path / "runs").iterdir()}
    scores = read_scores(runs)
    chosen = scores.best({found.decision.best.run})
    plain = scores.best({name for name, run in runs.items() if run.config["algorithm"] in ("fedavg", "fedavg_ft")})
    assert chosen is not None and plain is not None
    if plain != chosen:
        ahead = scores.units[:, [scores.place(chosen)]] - scores.units[:, [scores.place(plain)]]
        assert better_than_reference(ahead, scores.strata, stream(1, "test")).pvalues[0] > 0.05


@pytest.mark.parametrize("seed", [1, 2])
def test_on_clients_with_plenty_of_their_own_it_says_train_alone(seed: int, tmp_path: Path) -> None:
    """Each labels with a teacher of its own, and has 360 samples for 10 × 4 numbers: nobody has anything to learn."""
    found = choose(**PLENTY, **QUICK, rounds=12, seed=seed, out=tmp_path / "choice")
    assert not found.federate and found.method == "local"
    assert found.sentences()[0] == "Train alone."
    assert found.decision.pvalue >= 0.05 and found.decision.validation_pvalue >= 0.05
    config = from_yaml(found.file)
    assert config.algorithm == "local" and config.rounds == found.decision.alone.round <= 12
    assert found.decision.best.run != found.decision.alone.run  # what was best of the others is told all the same
    assert len(found.clients) == 6


def test_where_a_third_takes_part_who_trains_alone_trains_in_every_round(tmp_path: Path) -> None:
    """The answer is that of clients with plenty of their own: nobody has to wait for others to train alone."""
    found = choose(**PLENTY, **QUICK, rounds=12, participation=0.34, out=tmp_path / "choice")
    assert not found.federate and found.config["participation"] == 1
    assert found.decision.alone.test > 0.9
    assert "of which it takes part in 34 %" in found.sentences()[-1]  # what the best of the others would cost


# -------------------------------------------------------------------------------------------------- by validation alone


def test_nothing_but_validation_samples_decides_who_stays(tiny: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage's ranking, made again of runs from which all test samples and later rounds were taken."""
    answers_after = Result.answers_after

    def validation_alone(self: Result, round_number: int, split: str = "test") -> pd.DataFrame | None:
        assert split == "validation"
        return answers_after(self, round_number, split)

    monkeypatch.setattr(Result, "answers_after", validation_alone)
    for stage in tiny.stages:
        results = {run: Result(tiny.path / "runs" / run) for run in stage.runs}
        for result in results.values():
            frame = result.metrics
            result.__dict__["metrics"] = frame[(frame["split"] == "validation") & (frame["round"] <= stage.rounds)]
        assert tuple(read_scores(results).ranking()) == stage.ranking


def scores_of(units: np.ndarray[Any, Any], *contenders: tuple[str, int, float]) -> ValidationScores:
    """Scores on samples of one client: a column for each run, round and loss."""
    found = tuple(
        Contender(run, number, "personal", float(score), loss)
        for (run, number, loss), score in zip(contenders, units.mean(0), strict=True)
    )
    return ValidationScores(found, units, np.zeros(len(units), dtype=np.int64), True, "accuracy", 1.0)


def test_a_run_stands_by_its_best_round_or_by_a_later_one_that_is_as_good() -> None:
    """On 100 samples: 80 after round 2; 74 after 4, by six that it lost; 79 after 8, by five lost and four gained."""
    units = np.zeros((100, 4))
    units[:80, 0] = units[:74, 1] = units[:75, 2] = units[80:84, 2] = units[:60, 3] = 1.0
    scores = scores_of(units, *(("a", number, 0.5) for number in (2, 4, 8, 16)))
    assert scores.ranking() == [scores.contenders[2]]  # behind by 0.01, within sqrt(9) / 100
    assert scores.ranking(until=4) == [scores.contenders[0]]  # 0.06 is more than sqrt(6) / 100
    assert scores.ranking({"b"}) == []


def test_of_runs_that_are_as_good_the_one_with_the_least_loss_is_first() -> None:
    """On 100 samples: a has 80; b has 79, by five lost and four gained; c has 74 of those of a, and d 76 of them."""
    units = np.zeros((100, 4))
    units[:80, 0] = units[:75, 1] = units[80:84, 1] = units[:74, 2] = units[:76, 3] = 1.0
    scores = scores_of(units, ("a", 2, 0.5), ("b", 2, 0.4), ("c", 2, 0.1), ("d", 2, 0.3))
    # b is within sqrt(9) / 100 of a, d is not within sqrt(4) / 100, c not within sqrt(6) / 100. Of the three that are
    # left a is the best and as good as nobody; d and c differ by two samples, which is more than sqrt(2) / 100.
    assert [each.run for each in scores.ranking()] == ["b", "a", "d", "c"]


def test_rounds_are_worth_more_while_they_make_the_best_better_by_two_standard_errors() -> None:
    """A run that gains g samples of 100 and loses none is ahead by g / 100, which is sqrt(g) standard errors."""
    for gained, improved in ((4, False), (5, True), (-5, False)):
        units = np.zeros((100, 4))
        units[:60, 0] = units[: 60 + gained, 1] = units[:60, 2] = units[:51, 3] = 1.0
        scores = scores_of(units, ("a", 2, 0.5), ("a", 6, 0.5), ("b", 2, 0.5), ("b", 6, 0.5))
        assert scores.improved(2, [{"a", "b"}]) is improved


def test_rounds_that_let_those_behind_catch_up_are_not_worth_more() -> None:
    """On 100 samples: a has 80 before and after; b gains 20, which are more than four standard errors, and has 70."""
    units = np.zeros((100, 4))
    units[:80, 0] = units[:80, 1] = units[:50, 2] = units[:70, 3] = 1.0
    scores = scores_of(units, ("a", 2, 0.5), ("a", 6, 0.5), ("b", 2, 0.5), ("b", 6, 0.5))
    assert not scores.improved(2, [{"a", "b"}])
    assert scores.improved(2, [{"a"}, {"b"}])  # each the best of its side
    assert not scores.climbs(2, {"a", "b"})  # the ten that it still lacks are more than three standard errors


def test_one_that_has_come_up_to_the_best_is_waited_for() -> None:
    """On 100 samples: a has 80 before and after; b has 79 now, behind by one standard error, and had so many less."""
    for gained, climbs in ((4, False), (5, True)):
        units = np.zeros((100, 4))
        units[:80, 0] = units[:80, 1] = units[: 79 - gained, 2] = units[:79, 3] = 1.0
        scores = scores_of(units, ("a", 2, 0.5), ("a", 6, 0.5), ("b", 2, 0.5), ("b", 6, 0.5))
        assert not scores.improved(2, [{"a", "b"}])
        assert scores.climbs(2, {"a", "b"}) is climbs and not scores.climbs(2, {"a"}) and not scores.climbs(6, {"b"})


def test_scores_are_means_over_clients_of_their_own_means(tiny: Choice) -> None:
    run = tiny.stages[-1].ranking[0]
    assert run.round <= 6
    frame = Result(tiny.path / "runs" / run.run).metrics
    own = frame[(frame["split"] == "validation") & (frame["model"] == run.model) & (frame["metric"] == "accuracy")]
    assert own[own["round"] == run.round]["value"].mean() == pytest.approx(run.score, abs=1e-12)


def test_stages_go_as_planned_and_no_round_is_played_twice(tiny: Choice) -> None:
    """Six that federate, of three methods, and two alone: all to round 2, 3 and 2 to round 3, 2 and 2 to round 6."""
    assert [(len(stage.runs), stage.rounds) for stage in tiny.stages] == [(8, 2), (5, 3), (4, 6)]
    methods = {Result(tiny.path / "runs" / run).config["algorithm"] for run in tiny.stages[1].runs}
    assert methods == {"local", *METHODS}
    last = [Result(tiny.path / "runs" / run).config["algorithm"] for run in tiny.stages[-1].runs]
    assert last.count("local") == 2 and len(set(last)) == 3
    for stage in tiny.stages:
        for run in stage.runs:
            end = max(each.rounds for each in tiny.stages if run in each.runs)
            timings = Result(tiny.path / "runs" / run).timings
            assert timings["round"].tolist() == list(range(1, end + 1))


def ways_back(**values: Any) -> dict[str, set[Any]]:
    found: dict[str, set[Any]] = {}
    for run in make_candidates({**GROUPED, **values}).plan.runs:
        found.setdefault(run.method, set()).add(run.candidate.get("returning", "not tried"))
    return found


def test_ways_back_are_tried_where_some_are_away() -> None:
    names = ["fedavg", "fedacs", "flame"]
    tried = {"local": {"not tried"}, "fedavg": {"not tried"}}
    assert ways_back(methods=names, participation=0.5) == tried | {
        "fedacs": {"own", "mixture"},
        "flame": {"own", "consensus"},
    }
    assert ways_back(methods=names) == tried | {"fedacs": {"not tried"}, "flame": {"not tried"}}
    own = {"algorithm": "fedacs", "settings": {"returning": "mixture"}}
    assert ways_back(methods=["fedavg", own], participation=0.5) == tried | {"fedacs": {"not tried"}}
    few = {"algorithm": "fedacs", "tune": {"returning": ["own"]}}
    assert ways_back(methods=["fedavg", few], participation=0.5) == tried | {"fedacs": {"own"}}


def test_on_grouped_clients_of_whom_a_third_is_present_the_way_back_that_helps_is_found(tmp_path: Path) -> None:
    """FedAvg-FT is as good as it gets after 6 rounds, when FedACS with the mixture has come up to it."""
    wanted = {**QUICK, "methods": ["fedavg_ft", "fedacs"], "participation": 0.34}
    found = choose(**GROUPED, **wanted, rounds=24, out=tmp_path / "choice")
    assert found.federate and found.config["algorithm"] == "fedacs" and found.stages[-1].rounds == 24
    assert found.config["settings"]["returning"] == "mixture" and found.config["participation"] == 0.34
    assert found.decision.best.test > found.decision.alone.test + 0.1


def test_the_file_makes_what_was_chosen(tiny: Choice, tmp_path: Path) -> None:
    chosen = tiny.decision.best if tiny.federate else tiny.decision.alone
    again = coterie.api.run_config(from_yaml(tiny.file), out=tmp_path / "again", progress=False)
    assert again.summary["rounds"] == chosen.round
    assert again.summary[tiny.decision.model]["final"]["mean"] == pytest.approx(chosen.test)
    taken = of_experiment(tiny.file, {"settings": {}})
    assert taken["algorithm"] == tiny.method and taken["rounds"] == chosen.round
    assert taken["settings"]["lr"] == tiny.config["settings"]["lr"]


# ----------------------------------------------------------------------------------------------------- stopped anywhere


def without_seconds(path: Path) -> list[Any]:
    return [{**stage, "seconds": 0} for stage in json.loads((path / "stages.json").read_text())["stages"]]


@pytest.mark.parametrize(("error", "at"), [(KeyboardInterrupt, 2), (KeyboardInterrupt, 5), (Killed, 3)])
def test_stopped_in_a_stage_it_goes_on_and_ends_the_same(
    error: type[BaseException], at: int, tiny: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_round = Simulation.play_round

    def stopping(self: Simulation, clients: Tensor, round_number: int) -> Any:
        info = play_round(self, clients, round_number)
        if self.algorithm.name == "fedacs" and round_number == at:
            raise error
        return info

    path = tmp_path / "choice"
    with monkeypatch.context() as patched, pytest.raises(Interrupted if error is KeyboardInterrupt else error):
        patched.setattr(Simulation, "play_round", stopping)
        if error is Killed:
            patched.setattr(Experiment, "keep", lambda self: None)
        choose(**TINY, out=path)
    assert not (path / "choice.yaml").exists()
    found = choose(**TINY, out=path)
    assert without_seconds(path) == without_seconds(tiny.path)
    assert found.file.read_bytes() == tiny.file.read_bytes()
    pd.testing.assert_frame_equal(found.clients, tiny.clients)


def test_what_has_ended_is_only_read_again(tiny: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiny.file.read_bytes()
    monkeypatch.setattr(Simulation, "play_round", None)  # nothing is played
    again = choose(**TINY, out=tiny.path)
    assert again.file.read_bytes() == before and again.decision.sure == tiny.decision.sure


def test_another_plan_or_budget_is_refused(tiny: Choice) -> None:
    with pytest.raises(RunFolderError, match=r"another plan \(budget"):
        choose(**{**TINY, "rounds": 7}, out=tiny.path)
    with pytest.raises(RunFolderError, match="another plan"):
        choose(**{**TINY, "tune": {"lr": [0.1, 0.2]}}, out=tiny.path)


def test_a_mistake_that_nothing_came_of_can_be_mended_in_the_same_folder(tmp_path: Path) -> None:
    wrong = {**TINY, "clients": 3}
    with pytest.raises(CoterieError, match="4 natural clients"):
        choose(**wrong, out=tmp_path / "choice")
    mended = {**TINY, "rounds": 1, "methods": ["fedavg"], "tune": {"lr": [0.1]}}
    assert choose(**mended, out=tmp_path / "choice").decision.rounds == 1


# -------------------------------------------------------------------------------------------------------------- minutes


def player(tmp_path: Path, minutes: float, *seconds: float) -> StagePlayer:
    """With 6 federated candidates and 2 alone, of which 8, 5 and 4 play, and stages that took so long."""
    candidates = make_candidates({name: value for name, value in TINY.items() if name not in ("rounds", "progress")})
    runs = tuple(run.name for run in candidates.plan.runs)
    ends = [2 * 3**number for number in range(len(seconds))]
    stages = [Stage(k, end, runs[: (8, 5, 4)[k]], seconds[k]) for k, end in enumerate(ends)]
    return StagePlayer(
        tmp_path, candidates, Budget(1000, minutes), ScoreReader(tmp_path), StudyProgress("test"), stages=stages
    )


def test_minutes_are_planned_from_what_rounds_have_taken(tmp_path: Path) -> None:
    """8 runs × 2 rounds took 16 s, a second each, and 104 s of two minutes are left: 5 (⌈R/4⌉ - 2) + 4 (R - ⌈R/4⌉)."""
    last = player(tmp_path, 2.0, 16.0)._last_round(1, 2)

    def cost(rounds: int) -> int:
        middle = max(3, -(-rounds // 4))
        return 5 * (middle - 2) + 4 * (rounds - middle)

    assert last == max(rounds for rounds in range(3, 200) if cost(rounds) <= 104)
    assert player(tmp_path, 0.1, 16.0)._last_round(1, 2) == 2  # nothing is left: it ends with what there is
    assert player(tmp_path, 9.0)._last_round(0, 0) == 2  # nothing is known


def test_slower_rounds_than_expected_shorten_the_last_stage(tmp_path: Path) -> None:
    """The second stage, 5 runs × 4 rounds, took 4 s for a round of a run; 48 s are left for 4 runs: three rounds."""
    assert player(tmp_path, 2.4, 16.0, 80.0)._last_round(2, 6) == 6 + 3


def test_it_ends_when_rounds_made_nobody_better(tmp_path: Path) -> None:
    found = player(tmp_path, 9.0, 16.0)
    ended = replace(found.stages[0], staying=found.stages[0].runs, ended=True)
    for improved in (True, False):
        found.stages = [replace(ended, improved=improved)]
        following = found._next()
        assert (following is not None) is improved


def test_with_minutes_it_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a round of a run takes a second: 8 × 2, and at most 44 s more in one minute."""
    clock = [0.0]
    play_round = Simulation.play_round

    def ticking(self: Simulation, clients: Tensor, round_number: int) -> Any:
        clock[0] += 1.0
        return play_round(self, clients, round_number)

    monkeypatch.setattr(Simulation, "play_round", ticking)
    monkeypatch.setattr(stages_module.time, "monotonic", lambda: clock[0])
    options = {name: value for name, value in TINY.items() if name != "rounds"}
    found = choose(**options, minutes=1, out=tmp_path / "choice")
    assert 30 < clock[0] <= 60 and found.decision.rounds > 3
    assert sum(stage.seconds for stage in read_stages(found.path)) == clock[0]


# --------------------------------------------------------------------------------------------------------- the decision


def of_clients(*verdicts: str) -> ClientGains:
    return ClientGains(pd.DataFrame({"verdict": list(verdicts)}), "accuracy", "exact")


@pytest.mark.parametrize(
    ("pvalue", "gain", "clients", "federate", "words"),
    [
        (0.01, 0.1, of_clients("helped", "", ""), True, "helps 1 and harms nobody of 3"),
        (0.01, 0.1, of_clients("", "", ""), True, "helps nobody and harms nobody of 3"),
        (0.01, 0.1, of_clients("helped", "harmed"), True, "helps 1 and harms 1 of 2"),
        (0.05, 0.1, of_clients("helped"), False, "may be chance (p = 0.05)"),
        (0.01, 0.0, of_clients(""), False, "on test samples the best federated candidate is no better"),
        (0.01, 0.1, of_clients("helped", "harmed", "harmed"), False, "2 against 1"),
    ],
)
def test_when_to_federate(pvalue: float, gain: float, clients: ClientGains, federate: bool, words: str) -> None:
    reasons, found = decision_module._reasons(pvalue, gain, clients)
    assert found is federate and words in " ".join(reasons)


def test_where_two_models_answer_alike_nothing_is_said_of_what_could_be_told(grouped: Choice) -> None:
    said = [*words.findings(grouped.decision), *words.findings(replace(grouped.decision, detectable=0.0))]
    told, alike = [line for line in said if "Chance would give" in line]
    assert f"could not have told less than {grouped.decision.detectable:.4f} from chance." in told
    assert alike.endswith("; on validation samples the two do not differ at all.")


def test_a_clients_name_of_several_lines_does_not_reach_into_the_file(grouped: Choice) -> None:
    own = grouped.decision.clients
    named = replace(own, clients=own.clients.assign(name="one\nrounds: 1000", verdict="helped"))
    text = yaml_text(replace(grouped.decision, clients=named))
    assert "one rounds: 1000" in text and yaml.safe_load(text)["rounds"] == grouped.config["rounds"]


def test_bytes_are_those_of_a_client_in_a_round(grouped: Choice) -> None:
    """A linear model of 20 features and 4 classes has 84 numbers of 4 bytes, which go down and come back."""
    assert (grouped.decision.up, grouped.decision.down) == (336, 336)


def test_where_some_take_part_the_cost_is_that_of_those_rounds(tmp_path: Path) -> None:
    """Two of four clients a round: of four rounds a client is there for two, with 12 numbers of 4 bytes each way."""
    found = choose(**{**TINY, "rounds": 4}, participation=0.5, out=tmp_path / "choice")
    rounds = found.decision.best.round
    assert (found.decision.up, found.decision.down) == (48, 48)
    assert (
        f"takes part in: {48 * rounds} bytes in {rounds} rounds, of which it takes part in 50 %."
        in found.sentences()[-1]
    )


# --------------------------------------------------------------------------------------------------- tables and objects


@pytest.fixture
def frame() -> Iterator[pd.DataFrame]:
    draw = stream(1, "frame")
    x = draw.standard_normal((240, 3))
    yield pd.DataFrame(
        {
            **{f"x{number}": x[:, number] for number in range(3)},
            "clinic": np.repeat(["<North>", "South", "East"], 80),
            "outcome": np.where(x[:, 0] + 0.3 * draw.standard_normal(240) > 0, "yes", "no"),
        }
    )


def test_a_table_that_is_an_object_gives_named_clients(frame: pd.DataFrame, tmp_path: Path) -> None:
    options: dict[str, Any] = {"label": "outcome", "client": "clinic", "methods": ["fedavg"], "tune": {"lr": [0.1]}}
    options |= {"rounds": 3, "model": "linear", "progress": False, "out": tmp_path / "choice"}
    found = coterie.choose(frame, **options)
    assert set(found.clients["name"]) == {"<North>", "South", "East"}
    page = found.page.read_text(encoding="utf-8")
    assert "<North>" not in page and "&lt;North&gt;" in page and "default-src 'none'" in page
    assert "hand them over again" in found.file.read_text(encoding="utf-8")
    assert "<ul>" in found._repr_html_()
    again = coterie.run(**found.config | {"data": frame, "label": "outcome", "client": "clinic"}, out=tmp_path / "run")
    assert again.summary["rounds"] == found.config["rounds"] <= 3


def test_a_table_is_read_once_however_many_candidates_and_stages_there_are(
    frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame.to_csv(tmp_path / "stays.csv", index=False)
    asked: list[str] = []

    def counting(name: str) -> None:
        own = getattr(TableSource, name)

        def counted(self: TableSource, *rest: Any) -> Any:
            asked.append(name)
            return own(self, *rest)

        monkeypatch.setattr(TableSource, name, counted)

    counting("load")
    counting("owners")
    options = {**QUICK, "data": f"table:{tmp_path / 'stays.csv'},label=outcome,client=clinic", "model": "linear"}
    found = choose(**options, rounds=6, local_epochs=1, out=tmp_path / "choice")
    assert [len(stage.runs) for stage in found.stages] == [8, 5, 4] and sorted(asked) == ["load", "owners"]


def test_another_metric_is_judged_by_clients(tmp_path: Path) -> None:
    found = choose(**{**TINY, "rounds": 2}, metrics=["auroc"], out=tmp_path / "choice")
    assert not found.decision.by_samples and found.decision.metric == "auroc"
    said = " ".join(found.sentences())
    assert "can be said of accuracy alone" in said and "draws of other clients" in said
    page = found.page.read_text(encoding="utf-8")
    assert "McNemar" not in page and "Lines are 95 %" not in page  # there are no lines, and nobody was tested


def test_a_lower_metric_is_better_where_it_is(tmp_path: Path) -> None:
    """Of brier scores the lower is the better: the ranking rises, and a gain is a fall."""
    found = choose(**{**TINY, "rounds": 2}, metrics=["brier"], out=tmp_path / "choice")
    scores = [each.score for each in found.stages[0].ranking]
    assert scores == sorted(scores)
    assert found.gain[0] == pytest.approx(found.decision.alone.test - found.decision.best.test)


# ----------------------------------------------------------------------------------------------------- the command line


def test_the_command_prints_and_writes_the_answer(tiny: Choice, tmp_path: Path) -> None:
    words = "choose fedavg fedavg_ft fedacs --data synthetic:clients=4,samples=30,features=5,classes=2 --threads 1"
    words += " --partition natural --clients 4 --model linear --rounds 6 --local-epochs 1 --tune lr=0.1,0.3"
    done = CliRunner().invoke(app, [*words.split(), "--out", str(tmp_path / "choice")], catch_exceptions=False)
    assert done.exit_code == 0
    for sentence in tiny.sentences():
        assert sentence in done.output
    for name in ("choice.yaml", "plan.yaml"):
        assert (tmp_path / "choice" / name).read_bytes() == (tiny.path / name).read_bytes()
    page = tiny.page.read_text(encoding="utf-8")
    for each in ("Does federating help?", "Whom it helps and whom it harms", "prefers-color-scheme: dark"):
        assert each in page


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"methods": ["local"]}, "something to compare it with"),
        ({"methods": "fedavg"}, r"methods is 'fedavg', but must be a list"),
        ({"tune": {"lr": 0.1}}, r"0\.1 for lr, but must list"),
        ({"eta": 1}, "eta is 1"),
        ({"rounds": 0}, "rounds is 0"),
        ({"minutes": -1}, "minutes is -1"),
        ({"validation": 0}, "validation is 0"),
        ({"attack": "gaussian:0.2"}, "attack is 'gaussian:0.2'"),
        ({"tune": {"lr": [1e30]}, "model": "mlp:hidden=4"}, "NaN or infinite"),
    ],
)
def test_mistakes_are_told_in_a_sentence(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        choose(**{**TINY, **options}, out=tmp_path / "choice")


def test_training_alone_is_always_there_and_learning_rates_are_tried_unless_given() -> None:
    shared = {"data": "digits"}
    plan = make_candidates({**shared, "methods": ["fedavg", {"algorithm": "ditto", "lr": 0.2}]}).plan
    assert plan.methods == ("local", "fedavg", "ditto")
    assert [run.candidate.get("lr") for run in plan.runs] == [0.01, 0.03, 0.1, 0.3] * 2 + [None]
    assert len(make_candidates({**shared, "methods": ["fedavg"], "lr": 0.1}).plan.runs) == 2
    both = make_candidates({**shared, "methods": ["fedacs"], "tune": {"p": [0.0, 0.5]}}).plan
    assert len(both.runs) == 4 + 4 * 2


def test_the_plan_in_the_folder_is_one_that_a_report_reads(tiny: Choice, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tiny.path), "--out", str(tmp_path / "report.html"), "-q"])
    assert done.exit_code == 0 and (tmp_path / "report.html").exists()
    assert yaml.safe_load((tiny.path / "plan.yaml").read_text())["budget"] == {"rounds": 6, "minutes": None, "eta": 4}
