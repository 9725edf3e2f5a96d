"""Algorithms by name and by file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import coterie
from coterie.algorithms import registry
from coterie.algorithms.base import Algorithm
from coterie.algorithms.fedavg import FedAvg
from coterie.errors import ConfigError, UnknownName
from coterie.options import allowed
from tests.small_runs import OWN


@pytest.mark.parametrize("name", registry.names())
def test_every_algorithm_says_what_it_is(name: str) -> None:
    algorithm = registry.get(name)
    assert algorithm.name == name == algorithm.__module__.rpartition(".")[2], "file, registry and class share a name"
    assert algorithm.__name__.lower() == name.replace("_", "")
    assert algorithm.title and algorithm.citation and algorithm.summary().endswith(".")
    for field, info in algorithm.model_fields.items():
        assert info.description, f"{name}.{field} is not described"
        assert not info.is_required(), f"{name}.{field} has no default"
        assert "typing" not in allowed(info) and "[" not in allowed(info), f"{name}.{field}: {allowed(info)}"
    made = registry.make(name)
    assert registry.make(name, made.settings()) == made


def test_names_are_sorted_and_found() -> None:
    assert registry.names() == sorted(registry.names()) and {"fedavg", "fedacs", "local"} <= set(registry.names())
    with pytest.raises(UnknownName, match="there is no algorithm 'fedadmp': did you mean 'fedamp'"):
        registry.get("fedadmp")


def test_parameters_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"FedACS has no parameter 'P': did you mean 'p'\? its parameters are"):
        registry.make("fedacs", {"P": 0.5})
    with pytest.raises(ConfigError, match=r"FedACS: p is 1\.5, but must be number ≥ 0 and < 1$"):
        registry.make("fedacs", {"p": 1.5})
    message = "HeurFedAMP: self_weight is 'x', but must be number ≥ 0 and ≤ 1 or a list of number ≥ 0 and ≤ 1$"
    with pytest.raises(ConfigError, match=message):
        registry.make("heurfedamp", {"self_weight": "x"})


def test_registering_a_class_of_ones_own() -> None:
    @coterie.register
    class Mine(FedAvg):
        """Mine."""

        name = "mine"
        title = "Mine"

    assert registry.get("mine") is Mine and "mine" in registry.names()

    class Thief(Mine):
        """Another one of that name."""

    with pytest.raises(ConfigError, match=r"an algorithm named 'mine' is registered already \(.*Mine\)"):
        coterie.register(Thief)
    Thief.__qualname__ = Mine.__qualname__  # as if a notebook's cell were run again
    assert coterie.register(Thief) is Thief is registry.get("mine")


def test_ours_cannot_be_replaced() -> None:
    class FedAvg(registry.get("fedavg")):  # type: ignore[misc]
        """Not ours."""

    FedAvg.__qualname__ = "FedAvg"
    with pytest.raises(ConfigError, match=r"registered already \(coterie.algorithms.fedavg.FedAvg\)"):
        coterie.register(FedAvg)
    assert registry.get("fedavg").__module__ == "coterie.algorithms.fedavg"


def test_an_incomplete_class_is_told_what_it_lacks() -> None:
    class Half(Algorithm):
        """Half of one."""

        name = "half"

        def tasks(self):  # type: ignore[no-untyped-def]
            return {}

    with pytest.raises(ConfigError, match="Half cannot be registered: it lacks title, citation, init, round"):
        coterie.register(Half)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "turned.py"
    path.write_text(OWN)
    algorithm = registry.get(str(path))
    assert (algorithm.name, algorithm.title) == ("turned", "Turned")
    assert registry.get(str(path)) is algorithm, "one file is one class, however often it is asked for"
    assert "turned" not in registry.names()
    path.write_text(OWN.replace('"Turned"', '"Turned again"'))
    assert registry.get(str(path)).title == "Turned again"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "turned.py").write_text(OWN)
    assert registry.get(str(tmp_path / "other" / "turned.py")).title == "Turned"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def broken(:\n", "cannot be loaded (SyntaxError: "),
        ("import nowhere_at_all\n", "cannot be loaded (ModuleNotFoundError: No module named 'nowhere_at_all')"),
        ("1 / 0\n", "cannot be loaded (ZeroDivisionError: division by zero)"),
        ("raise ValueError('two\\nlines')\n", "cannot be loaded (ValueError: two lines)"),
        ("x = 1\n", "defines 0 complete algorithms, and must define one"),
        (OWN + OWN.replace("class Turned", "class Again"), "defines 2 complete algorithms, and must define one"),
        (OWN.replace("    title", "    heading"), "must define one (Turned lacks title)"),
        (
            OWN.replace("def round", "def play"),
            "defines 0 complete algorithms, and must define one (Turned lacks round)",
        ),
        ("from coterie.algorithms.fedavg import FedAvg\n", "defines 0 complete algorithms"),
    ],
)
def test_files_with_mistakes(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    before = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        registry.get(str(path))
    message = str(caught.value)
    assert message.startswith(f"the algorithm file '{path}' ") and words in message and "\n" not in message
    if "loaded" in words:
        assert not {name for name in set(sys.modules) - before if name.startswith("coterie_user")}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py' cannot be read: No such file or directory"):
        registry.get(str(tmp_path / "nowhere.py"))
