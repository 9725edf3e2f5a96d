"""Configurations: what they take, what they refuse and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from coterie.config import ExperimentConfig, Kind, fields, from_mapping, from_yaml, kind_of
from coterie.errors import ConfigError, UnknownName
from coterie.options import allowed, make
from coterie.yaml_file import read_yaml
from tests.small_runs import OWN

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": ({"algorithm": "fedavgg"}, "there is no algorithm 'fedavgg': did you mean 'fedavg'? known are "),
    "no algorithm": ({"algorithm": None}, "algorithm is missing: name the method to run"),
    "setting": ({"round": 3}, "there is no setting 'round': did you mean 'rounds'? known are "),
    "number as a name": ({3: 3}, "there is no setting '3': known are "),
    "data": ({"data": "digit"}, "there is no data set 'digit': did you mean 'digits'? known are "),
    "data option": (
        {"data": "synthetic:client=3"},
        "data set 'synthetic' has no parameter 'client': did you mean 'clients'? its parameters are clients, ",
    ),
    "partition": ({"partition": "dirichlett:0.5"}, "there is no partition 'dirichlett': did you mean 'dirichlet'?"),
    "partition range": ({"partition": "dirichlet:-1"}, "partition 'dirichlet': beta is '-1', but must be number > 0"),
    "metric": ({"metrics": ["acuracy"]}, "there is no metric 'acuracy': did you mean 'accuracy'? known are "),
    "loss": ({"loss": "crossentropy"}, "there is no loss 'crossentropy': did you mean 'cross_entropy'? known are "),
    "attack": ({"attack": "gausian:0.2"}, "there is no attack 'gausian': did you mean 'gaussian'? known are "),
    "attack auto": ({"attack": "auto"}, "there is no attack 'auto'"),
    "attack fraction": ({"attack": "gaussian:2"}, "attack 'gaussian:2': fraction='2': input should be less than 1"),
    "parameter": ({"settings": {"learning_rate": 1}}, "FedAvg has no parameter 'learning_rate': "),
    "parameter beside": ({"momentum": 0.5}, "momentum is a parameter of FedAvg: put it under settings (--set momentum"),
    "parameter range": ({"settings": {"momentum": 1}}, "FedAvg: momentum is 1, but must be number ≥ 0 and < 1"),
    "parameter type": ({"lr": "fast"}, "FedAvg: lr is 'fast', but must be number ≥ 0"),
    "infinite parameter": ({"lr": "inf"}, "FedAvg: lr is inf, but must be number ≥ 0, and finite"),
    "parameter that is not there": (
        {"algorithm": "fedsgd", "local_epochs": 2},
        "FedSGD has no parameter 'local_epochs': its parameters are ",
    ),
    "parameter given twice": (
        {"lr": 0.1, "settings": {"lr": 0.2}},
        "lr is given twice: as 0.1 and, in settings, as 0.2",
    ),
    "settings": ({"settings": [1]}, "settings is [1], but must map the method's parameters to values"),
    "seed": ({"seed": -1}, "experiment: seed is -1, but must be integer ≥ 0"),
    "clients": ({"clients": 0}, "experiment: clients is 0, but must be integer ≥ 1"),
    "truth value for a number": ({"clients": True}, "experiment: clients is True, but must be integer ≥ 1"),
    "fraction for an integer": ({"rounds": 1.5}, "experiment: rounds is 1.5, but must be integer ≥ 1"),
    "text for a number": ({"rounds": "ten"}, "experiment: rounds is 'ten', but must be integer ≥ 1"),
    "list for a number": ({"rounds": [1]}, "experiment: rounds is [1], but must be integer ≥ 1"),
    "number for a text": ({"data": 3}, "experiment: data is 3, but must be text"),
    "participation": ({"participation": 0}, "experiment: participation is 0, but must be number > 0 and ≤ 1"),
    "nan": ({"participation": float("nan")}, "experiment: participation is nan, but must be number > 0 and ≤ 1"),
    "engine": ({"engine": "fast"}, "experiment: engine is 'fast', but must be batched or loop"),
    "truth value": ({"compile": "perhaps"}, "experiment: compile is 'perhaps', but must be true or false"),
    "device": ({"device": "gpu"}, "experiment: device is 'gpu', but must be cpu, cuda, cuda:N or auto"),
    "device number": ({"device": "cuda:x"}, "experiment: device is 'cuda:x', but must be cpu, cuda, cuda:N or auto"),
    "contradiction": (
        {"engine": "loop", "chunk": 3, "compile": True},
        "experiment: engine=loop contradicts chunk, compile, which only engine=batched and engine=sharded have",
    ),
    "metric twice": (
        {"metrics": ["accuracy", "auroc", "accuracy"]},
        "experiment: metrics are accuracy+auroc+accuracy, but each must be named once",
    ),
    "two things": (
        {"seed": -1, "clients": 0},
        "experiment: clients is 0, but must be integer ≥ 1; seed is -1, but must be integer ≥ 0",
    ),
    "contradiction of the method's own": (
        {"settings": {"byzantine": 1}},
        "FedAvg: byzantine=1 has no effect with aggregator=mean",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_one_sentence(what: str) -> None:
    values, words = WRONG[what]
    with pytest.raises(ConfigError) as caught:
        from_mapping({"algorithm": "fedavg", **values})
    assert str(caught.value).startswith(words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_may_be_texts_and_auto_is_nothing() -> None:
    config = from_mapping({"algorithm": "fedamp", "clients": "12", "lr": "1e-3", "chunk": "auto", "scarcity": None})
    assert (config.clients, config.chunk, config.scarcity) == (12, None, None)
    assert config.plain()["settings"]["lr"] == 0.001
    assert from_mapping({"algorithm": "fedamp", "settings": {"sigma": "auto"}}).plain()["settings"]["sigma"] is None


@pytest.mark.parametrize("given", ["accuracy+auroc", ["accuracy", "auroc"], ("accuracy", "auroc")])
def test_metrics_are_a_list_or_joined(given: Any) -> None:
    assert from_mapping({"algorithm": "fedavg", "metrics": given}).metrics == ("accuracy", "auroc")


@given(
    lr=st.floats(0, 10),
    momentum=st.floats(0, 1, exclude_max=True),
    clients=st.integers(1, 10**6),
    participation=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**70),
    device=st.sampled_from(["cpu", "cuda", "cuda:3", "auto"]),
)
def test_what_is_written_reads_back_as_the_same(**values: Any) -> None:
    momentum = values.pop("momentum")
    config = from_mapping({"algorithm": "fedavg", **values, "settings": {"momentum": momentum}})
    written = yaml.safe_load(yaml.safe_dump(config.plain()))
    assert from_mapping(written).plain() == config.plain()
    assert written["settings"]["lr"] == values["lr"] and written["clients"] == values["clients"]


def test_names_are_brought_to_one_form() -> None:
    config = from_mapping({"algorithm": "fedavg", "data": "digits:", "partition": "dirichlet:beta=0.30"})
    assert (config.data, config.partition) == ("digits", "dirichlet:0.3")


def test_a_device_that_is_not_there() -> None:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    config = from_mapping({"algorithm": "fedavg", "device": f"cuda:{there}"})
    with pytest.raises(ConfigError, match=f"device is 'cuda:{there}', but PyTorch finds .* here: use --device cpu"):
        config.torch_device()
    assert from_mapping({"algorithm": "fedavg"}).torch_device() == torch.device("cpu")
    auto = from_mapping({"algorithm": "fedavg", "device": "auto"}).torch_device()
    assert auto.type == ("cuda" if there else "cpu")


def test_every_field_says_what_it_is_and_takes() -> None:
    for name, info in ExperimentConfig.model_fields.items():
        assert info.description, name
        assert allowed(info) and "Annotated" not in allowed(info), name


def test_every_field_says_what_it_decides() -> None:
    for name, info in ExperimentConfig.model_fields.items():
        assert len([entry for entry in info.metadata if isinstance(entry, Kind)]) == 1, name
        assert name in fields(kind_of(info).value)
    kinds = [fields("what"), fields("how"), fields("record")]
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds)) == len(ExperimentConfig.model_fields)
    assert {"data", "seed", "dtype", "metrics"} <= kinds[0]
    assert {"engine", "device", "keep", "scratch", "threads"} <= kinds[1]
    assert {"eval_every", "matrix"} <= kinds[2]


def test_make_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="experiment: the parameter 'algorithm' must be given"):
        make(ExperimentConfig, {}, "experiment")


# ------------------------------------------------------------------------------------------------ files


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_says_what_options_say(tmp_path: Path) -> None:
    file = write(
        tmp_path / "experiment.yaml",
        "algorithm: fedacs\ndata: synthetic:clients=7\npartition: natural\nclients: 7\nlr: 1e-2\nsettings: {p: 0.3}\n",
    )
    values = {"data": "synthetic:clients=7", "partition": "natural", "clients": 7, "lr": 0.01, "settings": {"p": 0.3}}
    assert from_yaml(file).plain() == from_mapping({"algorithm": "fedacs", **values}).plain()


@pytest.mark.parametrize(
    ("text", "over", "lr"),
    [
        ("lr: 0.1", {"lr": 0.5}, 0.5),
        ("lr: 0.1", {"settings": {"lr": 0.5}}, 0.5),
        ("settings: {lr: 0.1}", {"lr": 0.5}, 0.5),
        ("settings: {lr: 0.1}", {"settings": {"lr": 0.5}}, 0.5),
        ("settings: {lr: 0.1}", {}, 0.1),
        ("settings:", {"lr": 0.5}, 0.5),
    ],
)
def test_options_stand_over_the_file(text: str, over: dict[str, Any], lr: float, tmp_path: Path) -> None:
    file = write(tmp_path / "experiment.yaml", f"algorithm: fedavg\nrounds: 7\n{text}\n")
    config = from_yaml(file, {"seed": 9, **over})
    assert (config.rounds, config.seed, config.plain()["settings"]["lr"]) == (7, 9, lr)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold settings by name, not nothing"),
        ("- fedavg\n", "must hold settings by name, not a list"),
        ("fedavg\n", "must hold settings by name, not a str"),
        ("algorithm: [\n", "is not valid YAML: "),
        ("algorithm: fedavg\nrounds: 3\nrounds: 4\n", "is not valid YAML: 'rounds' is given twice"),
        ("algorithm: fedavg\nsettings: [1]\n", "settings is [1], but must map"),
        ("algorithm: fedavg\nlr: 0.1\nsettings: {lr: 0.2}\n", "lr is given twice: as 0.1 and, in its settings, as 0.2"),
        ("rounds: 3\n", "algorithm is missing"),
        ("algorithm: fedavg\n? [1, 2]\n: 3\n", "is not valid YAML"),
        ("algorithm: !!python/object:os.system {}\n", "is not valid YAML"),
    ],
)
def test_files_that_are_no_experiment(text: str, words: str, tmp_path: Path) -> None:
    file = write(tmp_path / "experiment.yaml", text)
    with pytest.raises(ConfigError) as caught:
        from_yaml(file)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_may_take_over_entries_of_another_mapping(tmp_path: Path) -> None:
    text = "algorithm: fedavg\nsettings: &all {lr: 0.3, batch_size: 5}\nmore:\n  <<: *all\n  lr: 0.4\n"
    values = read_yaml(write(tmp_path / "experiment.yaml", text))
    assert values["more"] == {"lr": 0.4, "batch_size": 5} and values["settings"]["lr"] == 0.3
    twice = text + "  lr: 0.5\n"
    with pytest.raises(ConfigError, match="'lr' is given twice"):
        read_yaml(write(tmp_path / "experiment.yaml", twice))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        from_yaml(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigError, match="cannot be read: "):
        from_yaml(tmp_path / "binary.yaml")


def test_options_that_contradict_each_other_over_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "experiment.yaml", "algorithm: fedavg\n")
    with pytest.raises(ConfigError, match=r"lr is given twice: as 0\.1 and, in --set, as 0\.2"):
        from_yaml(file, {"lr": 0.1, "settings": {"lr": 0.2}})


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "turned.py", OWN)
    config = from_mapping({"algorithm": "turned.py", "data": "npz:mine/some, data.npz,task=binary"})
    assert config.algorithm == str(tmp_path / "turned.py") and len(config.algorithm_sha256 or "") == 64
    assert config.data == f"npz:{tmp_path}/mine/some, data.npz,task=binary"
    monkeypatch.chdir("/")
    assert from_mapping(config.plain()) == from_mapping(config.plain())


def test_unknown_names_are_of_one_kind() -> None:
    with pytest.raises(UnknownName) as caught:
        from_mapping({"algorithm": "fedavg", "metrics": "acc"})
    assert (caught.value.kind, caught.value.name) == ("metric", "acc")
