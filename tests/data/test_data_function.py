from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coterie import data
from coterie.config import from_mapping
from coterie.errors import ConfigError, DataError
from coterie.runs.population import make_population

LOADERS = """
import torch
from coterie.data import Dataset

CALLS = []

def samples():
    CALLS.append(1)
    y = torch.tensor([0, 1, 1])
    return Dataset("mine", torch.eye(3), y, 3, "multiclass", ("a", "b"), (0.0,), (1.0,))

def owned():
    CALLS.append(1)
    owner = torch.tensor([1, 0, 1, 1, 0, 1])
    more = {"owner": owner, "owner_names": ("north", "south")}
    return Dataset("mine", torch.eye(6), owner.clone(), 6, "multiclass", ("a", "b"), (0.0,), (1.0,), **more)

def rows():
    return [1, 2]

def broken():
    raise OSError("no such disk")
"""


@pytest.fixture(autouse=True)
def _loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loaders.py").write_text(LOADERS)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_of_the_users_is_called() -> None:
    loaded = data.load("import:own_loaders:samples")
    assert torch.equal(loaded.x, torch.eye(3)) and loaded.y.tolist() == [0, 1, 1] and loaded.classes == ("a", "b")


def test_owners_alone_make_the_clients_and_the_function_is_called_once() -> None:
    import own_loaders

    own_loaders.CALLS.clear()
    config = from_mapping({"algorithm": "fedavg", "data": "import:own_loaders:owned"})
    assert (config.partition, config.clients) == ("natural", 2)
    shares = make_population(config).shares
    assert shares.names == ("north", "south") and sorted(shares.test[0].tolist() + shares.train[0].tolist()) == [1, 4]
    assert own_loaders.CALLS == [1]
    assert from_mapping({"algorithm": "fedavg", "data": "import:own_loaders:samples", "clients": 1}).clients == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import:own_loaders:rows", "gave a list, not a coterie.data.Dataset"),
        ("import:own_loaders:broken", "OSError: no such disk"),
        ("import:own_loaders:nowhere", "'nowhere' is missing in 'own_loaders'; it must be a function"),
        ("import:no_such_module:load", "No module named 'no_such_module'"),
    ],
)
def test_what_is_wrong_with_it_is_said_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        data.load(text)
    assert sentence in str(error.value) and repr(text) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["import", "import:", "import:own_loaders", "import:own_loaders:a:b"])
def test_a_text_that_names_no_function_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="function"):
        data.load(text)
