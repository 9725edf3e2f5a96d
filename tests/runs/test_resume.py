"""A run that was stopped, however and whenever, ends exactly as the run that never was."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.algorithms import registry
from coterie.config import from_mapping
from coterie.errors import CheckpointError, ConfigError, CoterieError, Diverged, Interrupted, RunFolderError
from coterie.results import Result
from coterie.runs import launch
from coterie.runs.experiment import Experiment
from tests.small_runs import (
    FAR_TOO_FAST,
    OWN,
    SMALL,
    Killed,
    assert_same_end,
    config_of,
    finish,
    last_state,
    stop,
    when,
)

PLACES = ["in a round", "after a round", "in evaluation", "while recording", "before a checkpoint"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the disk: what a failing machine leaves behind is tested with the storage."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.parametrize("name", registry.names())
def test_stopped_again_and_again_ends_the_same(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    finish(launch.begin(config, tmp_path / "whole"))
    stop(launch.begin(config, tmp_path / "cut"), "in a round", 2)
    stop(launch.resume(tmp_path / "cut"), "in evaluation", 4, Killed)
    stop(launch.resume(tmp_path / "cut"), "before a checkpoint", 5)
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


OTHERS = {
    "attack": {"attack": "gaussian:0.4"},
    "newcomers": {"hold_out": 0.2, "adapt_rounds": 2},
    "loop": {"engine": "loop", "dtype": "float64"},
    "dropout": {"data": "synthetic:clients=5,samples=14,features=784,classes=3", "model": "import:coterie_dropout:Net"},
    "seldom": {"eval_every": 3, "checkpoint_every": 4, "eval_train": True},
    "fedpg": {"algorithm": "fedpg", "settings": {"fresh": True}},
    "local part": {"algorithm": "fedacs", "local": "head, body.*.bias", "settings": {"momentum": 0.5}},
}


@pytest.mark.parametrize("which", OTHERS)
def test_other_experiments_end_the_same(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "coterie_dropout.py").write_text(
        "from torch import nn\n\n\n"
        "def Net(outputs):\n"
        "    return nn.Sequential(nn.Linear(784, 5), nn.ReLU(), nn.Dropout(0.4), nn.Linear(5, outputs))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    more = dict(OTHERS[which])
    config = config_of(more.pop("algorithm", "fedavg_ft"), **more)
    finish(launch.begin(config, tmp_path / "whole"))
    stop(launch.begin(config, tmp_path / "cut"), "in a round", 3)
    stop(launch.resume(tmp_path / "cut"), "in evaluation", 5, Killed)
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    finish(launch.begin(config_of("fedacs"), path))
    return path


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, Killed])
@pytest.mark.parametrize("round_number", [1, 4])
def test_every_place(place: str, error: type[BaseException], round_number: int, whole: Path, tmp_path: Path) -> None:
    stop(launch.begin(config_of("fedacs"), tmp_path / "cut"), place, round_number, error)
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(whole, tmp_path / "cut")


def test_a_stop_in_a_round_keeps_the_rounds_before_it(tmp_path: Path) -> None:
    playing = launch.begin(config_of("fedacs"), tmp_path / "run")
    stop(playing, "in a round", 4)
    assert last_state(tmp_path / "run").round == 3  # and not 2, where the last one was due
    assert launch.resume(tmp_path / "run").completed == 3


def send(playing: Experiment, owner: Any, name: str, round_number: int, *signals: int) -> None:
    """Send signals to this process when a round has got so far."""
    then = getattr(owner, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        if playing.completed + 1 == round_number:
            for number in signals:
                os.kill(os.getpid(), number)
        return then(*args, **kwargs)

    setattr(owner, name, instead)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_round_stops_at_once(number: signal.Signals, whole: Path, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    playing = launch.begin(config_of("fedacs"), tmp_path / "cut")
    send(playing, playing.simulation.exchange, "deliver", 4, number)
    with playing.folder, pytest.raises(Interrupted, match=f"coterie resume {tmp_path / 'cut'}") as caught:
        playing.run()
    assert (caught.value.round_number, caught.value.signal_number) == (3, number)
    assert signal.getsignal(number) is before
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(whole, tmp_path / "cut")


def test_a_signal_in_evaluation_waits_for_the_records(whole: Path, tmp_path: Path) -> None:
    playing = launch.begin(config_of("fedacs"), tmp_path / "cut")
    send(playing, playing.parts.scorer, "scores", 3, signal.SIGINT)
    with playing.folder, pytest.raises(Interrupted) as caught:
        playing.run()
    assert caught.value.round_number == 3 == last_state(tmp_path / "cut").round
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(whole, tmp_path / "cut")


def test_a_second_signal_does_not_wait(whole: Path, tmp_path: Path) -> None:
    playing = launch.begin(config_of("fedacs"), tmp_path / "cut")
    send(playing, playing.parts.scorer, "scores", 3, signal.SIGINT, signal.SIGINT)
    with playing.folder, pytest.raises(Interrupted) as caught:
        playing.run()
    assert caught.value.round_number == 2 == last_state(tmp_path / "cut").round
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(whole, tmp_path / "cut")


def test_a_signal_in_the_last_records_changes_nothing(whole: Path, tmp_path: Path) -> None:
    playing = launch.begin(config_of("fedacs"), tmp_path / "cut")
    send(playing, playing.parts.scorer, "scores", 5, signal.SIGINT)
    finish(playing)
    assert_same_end(whole, tmp_path / "cut")


def test_signals_stay_the_callers_in_another_thread(whole: Path, tmp_path: Path) -> None:
    results: list[Result] = []
    playing = launch.begin(config_of("fedacs"), tmp_path / "run")
    thread = threading.Thread(target=lambda: results.append(finish(playing)))
    thread.start()
    thread.join()
    assert results[0].finished
    assert_same_end(whole, tmp_path / "run")


def test_a_killed_run_is_not_locked(tmp_path: Path) -> None:
    playing = launch.begin(config_of("local"), tmp_path / "run")
    with pytest.raises(RunFolderError, match="in use"):
        launch.resume(tmp_path / "run")
    del playing
    gc.collect()
    finish(launch.resume(tmp_path / "run"))


def test_a_run_killed_before_anything_was_chosen(whole: Path, tmp_path: Path) -> None:
    launch.begin(config_of("fedacs"), tmp_path / "cut").folder.close()
    (tmp_path / "cut" / "choices.json").unlink()
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(whole, tmp_path / "cut")


def test_a_finished_run_is_not_resumed(whole: Path) -> None:
    with pytest.raises(RunFolderError, match="finished"):
        launch.resume(whole)


def test_a_damaged_checkpoint_is_passed_over(whole: Path, tmp_path: Path) -> None:
    stop(launch.begin(config_of("fedacs"), tmp_path / "cut"), "in a round", 5)
    checkpoints = sorted((tmp_path / "cut" / "checkpoint").iterdir())
    assert len(checkpoints) == 2
    (checkpoints[1] / "state.safetensors").write_bytes(b"")
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(whole, tmp_path / "cut")


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    stop(launch.begin(config_of("fedacs"), tmp_path / "one"), "in a round", 5)
    stop(launch.begin(config_of("fedacs", seed=2), tmp_path / "two"), "in a round", 5)
    for path in (tmp_path / "one" / "checkpoint").iterdir():
        (path / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match="whole"):
        launch.resume(tmp_path / "one")
    (tmp_path / "one" / "checkpoint").rename(tmp_path / "away")
    (tmp_path / "two" / "checkpoint").rename(tmp_path / "one" / "checkpoint")
    with pytest.raises(CheckpointError, match="another run"):
        launch.resume(tmp_path / "one")
    with pytest.raises(CheckpointError):  # and its folder is not left locked
        launch.resume(tmp_path / "one")


def test_a_changed_configuration_is_another_run(tmp_path: Path) -> None:
    stop(launch.begin(config_of("fedacs"), tmp_path / "run"), "in a round", 4)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("rounds: 5", "rounds: 9"))
    with pytest.raises(CheckpointError, match="another run"):
        launch.resume(tmp_path / "run")
    config.write_text(config.read_text().replace("rounds: 9", "rounds: many"))
    with pytest.raises(ConfigError, match="rounds is 'many', but must be integer ≥ 1"):
        launch.resume(tmp_path / "run")


def table(path: Path, shift: float) -> None:
    rows = [f"{client + shift},{sample % 5},{'ab'[sample % 2]},{client}" for client in range(5) for sample in range(14)]
    path.write_text("\n".join(["u,v,label,client", *rows]))


def test_changed_data_are_refused_and_relative_paths_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "mine.csv", 0.0)
    config = config_of("local", data="table:mine.csv,label=label,client=client")
    stop(launch.begin(config, Path("run")), "in a round", 4)
    monkeypatch.chdir("/")
    table(tmp_path / "mine.csv", 0.5)
    with pytest.raises(CheckpointError, match="the data is not what the run"):
        launch.resume(tmp_path / "run")
    table(tmp_path / "mine.csv", 0.0)
    finish(launch.resume(tmp_path / "run"))


def test_views_and_shared_memory_in_a_state(tmp_path: Path) -> None:
    (tmp_path / "turned.py").write_text(OWN)
    config = from_mapping({"algorithm": str(tmp_path / "turned.py"), **SMALL})
    playing = launch.begin(config, tmp_path / "whole")
    finish(playing)
    states = [*playing.simulation.server.values(), *playing.simulation.clients.rows.values()]
    assert all(value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes for value in states)
    assert len({value.data_ptr() for value in states}) == len(states)
    stop(launch.begin(config, tmp_path / "cut"), "in a round", 4)
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


def test_a_changed_algorithm_file_changes_nothing_in_a_run_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("turned.py").write_text(OWN)
    config = from_mapping({"algorithm": "turned.py", **SMALL})
    finish(launch.begin(config, Path("whole")))
    stop(launch.begin(config, Path("run")), "in a round", 3)
    monkeypatch.chdir("/")
    (tmp_path / "turned.py").write_text(OWN.replace("1 / len(own)", "2 / len(own)"))
    stop(launch.resume(tmp_path / "run"), "in a round", 4)
    (tmp_path / "turned.py").unlink()
    finish(launch.resume(tmp_path / "run"))
    assert_same_end(tmp_path / "whole", tmp_path / "run")


def test_another_version_of_a_method_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop(launch.begin(config_of("fedavg"), tmp_path / "run"), "in a round", 4)
    fedavg = registry.get("fedavg")
    init = fedavg.init
    monkeypatch.setattr(
        fedavg, "init", lambda self, start: (init(self, start)[0] | {"new": start.row}, init(self, start)[1])
    )
    with pytest.raises(CheckpointError, match="another version of FedAvg"):
        launch.resume(tmp_path / "run")


def test_what_diverges_stops_with_round_and_clients_and_keeps_its_records(tmp_path: Path) -> None:
    data = "synthetic:clients=5,samples=14,features=6,task=regression"
    config = config_of("local", data=data, model="linear", settings=FAR_TOO_FAST, participation=1.0)
    playing = launch.begin(config, tmp_path / "run")
    with pytest.raises(Diverged) as caught:
        finish(playing)
    error = caught.value
    assert 1 < error.round_number <= 5 and error.clients and str(error).startswith(f"round {error.round_number}: ")
    assert error.__notes__ == [f"run: {tmp_path / 'run'}"]
    kept = Result(tmp_path / "run")
    assert not kept.finished
    assert sorted(kept.metrics["round"].unique()) == list(range(1, error.round_number))
    assert last_state(tmp_path / "run").round == error.round_number - 1
    again = launch.resume(tmp_path / "run")
    assert again.completed == error.round_number - 1
    assert bool(again.simulation.clients.rows["w"].isfinite().all())  # there to be looked at
    with pytest.raises(Diverged) as caught:
        finish(again)
    assert (caught.value.round_number, caught.value.clients) == (error.round_number, error.clients)


def test_a_failure_that_is_nobodys_fault_keeps_the_run(whole: Path, tmp_path: Path) -> None:
    stop(launch.begin(config_of("fedacs"), tmp_path / "cut"), "in a round", 4, ZeroDivisionError)
    assert last_state(tmp_path / "cut").round == 3
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(whole, tmp_path / "cut")


def test_no_memory_is_one_sentence(tmp_path: Path) -> None:
    playing = launch.begin(config_of("fedacs"), tmp_path / "cut")
    exchange = playing.simulation.exchange
    exchange.deliver = when(2, playing, MemoryError, exchange.deliver)  # type: ignore[method-assign]
    with playing.folder, pytest.raises(CoterieError, match="too little memory"):
        playing.run()
    assert last_state(tmp_path / "cut").round == 1


def test_threads_and_data_folder_are_those_the_run_began_with(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    playing = launch.begin(config_of("local", threads=2), tmp_path / "run", tmp_path / "data")
    seen: list[int] = []
    playing.run(lambda number, mean: seen.append(torch.get_num_threads()))
    playing.folder.close()
    assert set(seen) == {2} and torch.get_num_threads() == before
    choices = launch.resume(tmp_path / "run").folder.choices
    assert choices["threads"] == 2 and choices["data_dir"] == str(tmp_path / "data")
