"""``coterie data`` and ``coterie partition``: what they say, and that mistakes are one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from coterie import data
from coterie.config import from_mapping
from coterie.runs.builder import make_population
from tests.cli.test_cli import FAST, OPTIONS, Coterie, coterie

__all__ = ["coterie"]  # the fixture


def test_data_list_is_the_list_of_data(coterie: Coterie) -> None:
    assert coterie("data", "list") == coterie("list", "data")
    said = coterie("data", "list", "cifar100")
    assert said.code == 0 and "labels" in said.out and "mnist" not in said.out


def test_data_status_says_what_is_there_and_what_to_do(coterie: Coterie, tmp_path: Path) -> None:
    folder = tmp_path / "sets"
    (folder / "MNIST" / "raw").mkdir(parents=True)
    (folder / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(b"not labels")
    (folder / "FashionMNIST" / "raw").mkdir(parents=True)
    (folder / "FashionMNIST" / "raw" / "notes.txt").write_text("none yet")
    said = coterie("data", "status", "--data-dir", folder)
    assert said.code == 0 and said.err == ""
    lines = {line.split()[0]: line for line in said.out.splitlines() if line and not line.startswith(" ")}
    assert set(data.names()) <= set(lines)
    assert re.search(r"digits +built in", lines["digits"]) and re.search(r"table +your own", lines["table"])
    assert re.search(r"mnist +damaged +run `coterie data fetch mnist`", lines["mnist"])
    assert "train-labels-idx1-ubyte" in said.out
    assert re.search(r"fashion_mnist +incomplete", lines["fashion_mnist"])
    assert "FashionMNIST/raw/train-images-idx3-ubyte is missing" in said.out
    assert re.search(r"cifar10 +missing +run `coterie data fetch cifar10`", lines["cifar10"])
    only = coterie("data", "status", "cifar10", "--data-dir", folder)
    assert "cifar10" in only.out and "mnist" not in only.out


def test_the_data_folder_of_the_environment(coterie: Coterie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "elsewhere"))
    assert coterie("data", "status", "digits").out.splitlines()[0] == f"data folder: {tmp_path / 'elsewhere'}"


def test_fetch(coterie: Coterie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    asked: list[tuple[str, Path | None, bool]] = []

    def fetch(name: str, data_dir: Path | None, progress: bool) -> Path:
        asked.append((name, data_dir, progress))
        return tmp_path / "MNIST"

    monkeypatch.setattr(data, "fetch", fetch)
    assert coterie("data", "fetch", "mnist") == (0, "", f"data: {tmp_path / 'MNIST'}\n")
    assert coterie("data", "fetch", "mnist", "--data-dir", tmp_path, "-q").code == 0
    assert asked == [("mnist", None, True), ("mnist", tmp_path, False)]


DIGITS = ["--data", "digits", "--partition", "dirichlet:0.5", "--clients", "6", "--seed", "3"]


def test_partition_show_is_what_a_run_would_deal(coterie: Coterie) -> None:
    more = ["--scarcity", "30", "--validation", "0.2", "--test-fraction", "0.3", "--max-test", "9"]
    said = coterie("partition", "show", *DIGITS, *more)
    assert said.code == 0 and said.err == "" and "6 clients, dirichlet:0.5" in said.out
    config = from_mapping(
        {"algorithm": "fedavg", "data": "digits", "partition": "dirichlet:0.5", "clients": 6, "seed": 3}
        | {"scarcity": 30, "validation": 0.2, "test_fraction": 0.3, "max_test": 9}
    )
    population = make_population(config)
    counts = population.shares.counts(population.dataset.y, 10)
    rows = [line.split() for line in said.out.splitlines() if re.match(r" +\d+ ", line)]
    assert len(rows) == 6
    for client, row in enumerate(rows):
        sizes = [
            int(part.sizes[client])
            for part in (population.shares.train, population.shares.validation, population.shares.test)
        ]
        wanted = [client, *sizes, *counts[client].tolist()]
        assert [0 if cell == "·" else int(cell) for cell in row] == wanted


@pytest.mark.parametrize(("name", "begins"), [("who.png", b"\x89PNG"), ("who.svg", b"<?xml"), ("who.PDF", b"%PDF")])
def test_partition_show_draws(coterie: Coterie, name: str, begins: bytes) -> None:
    said = coterie("partition", "show", *DIGITS, "--plot", name)
    assert said.code == 0 and said.err == f"chart: {name}\n"
    picture = Path(name).read_bytes()
    assert picture.startswith(begins) and len(picture) > 5000


def test_the_table_can_be_cut(coterie: Coterie) -> None:
    said = coterie("partition", "show", *DIGITS, "--limit", "2")
    assert "…" in said.out and len([line for line in said.out.splitlines() if re.match(r" +[0-5] +\d+ ", line)]) == 2


MISTAKES = {
    "a picture": (["partition", "show", "--plot", "who.gif"], "must end in .png, .svg, .pdf"),
    "a place": (["partition", "show", "--plot", "nowhere/who.png"], "there is no folder 'nowhere'"),
    "a name": (["partition", "show", "--data", "digit"], "there is no data set 'digit': did you mean 'digits'"),
    "a scheme": (["partition", "show", "--partition", "natural"], "does not say whose a sample is"),
    "a range": (["partition", "show", "--validation", "2"], "validation is 2.0, but must be"),
    "a set": (["data", "fetch", "mnits"], "there is no data set 'mnits': did you mean 'mnist'"),
    "nothing to fetch": (["data", "fetch", "digits"], "is built in: there is nothing to fetch"),
    "a status": (["data", "status", "mnits"], "there is no data set 'mnits'"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_one_sentence(coterie: Coterie, what: str) -> None:
    words, sentence = MISTAKES[what]
    said = coterie(*words)
    assert said.code == 2 and said.out == ""
    assert said.err.startswith("error: ") and sentence in said.err and said.err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_a_picture_that_cannot_be_written(coterie: Coterie) -> None:
    Path("taken.png").mkdir()
    said = coterie("partition", "show", *DIGITS, "--plot", "taken.png")
    assert said.code == 2 and "plot is 'taken.png', which cannot be written" in said.err


def test_lists_of_attacks_and_metrics(coterie: Coterie) -> None:
    said = coterie("list", "attacks")
    assert all(word in said.out for word in ("same_value", "sign_flip", "gaussian", "label_poisoning", "variance=0.1"))
    said = coterie("list", "metrics")
    assert all(word in said.out for word in ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "rmse"))
    assert "less is better" in coterie("list", "metrics", "rmse").out


def test_a_run_with_a_matrix_prints_its_readings(coterie: Coterie) -> None:
    small = [*OPTIONS, *FAST, "--out", "run", "--matrix", "--s-acc", "0", "--s-acc", "0.5"]
    said = coterie("run", "fedavg", *small)
    assert said.code == 0 and said.out.endswith(coterie("show", "run").out)
    found = json.loads(Path("run/summary.json").read_text())["matrix"]
    rows = [line.split()[1:3] for line in said.out.splitlines() if line.split()[:1] == ["FedAvg"]]
    means = [found["l_acc"], found["s_acc"]["0.0"], found["s_acc"]["0.5"], found["g_acc"], found["global"]]
    names = ["L-acc", "S-acc(0)", "S-acc(0.5)", "G-acc", "global"]
    assert rows == [[name, f"{reading['mean']:.4f}"] for name, reading in zip(names, means, strict=True)]
