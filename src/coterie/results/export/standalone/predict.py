"""Predicts for new rows with a model that was taken home from a federated run.

On the command line::

    python predict.py new.csv --out scores.csv      (and --client NAME, if there are models of several clients)

From Python, in this folder or with it on the path::

    import predict

    model = predict.load("north")
    scores = model.scores(predict.read_table("new.csv"))

It needs Python 3.11 or newer, torch, numpy and safetensors. What the columns are, their categories and how they are
scaled stands in ``model.json``, the layers in ``network.py``, and the parameters of each client in a file of its own.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parent
GAPS = {
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>"),
    *("N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
}
"""Texts that stand for a missing value, the same as in training."""
TRUTHS = {"true": 1.0, "false": 0.0}
AT_ONCE = 4096

Columns = Mapping[str, Sequence[str]]


class UnfitInput(ValueError):
    """What was given cannot be predicted from; ``problems`` says all of why, in sentences."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


class ModelToFeed:
    """One client's model and all that is done to rows before they reach it.

    Parameters
    ----------
    folder
        The exported folder.
    client
        The client's name or number; may be left out if there is only one model.
    """

    def __init__(self, folder: Path = FOLDER, client: str | int | None = None) -> None:
        self.about: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        self.client = choose(self.about["clients"], client)
        self.scaling: dict[str, list[float]] = self.client.get("scaling") or self.about["scaling"]
        self.dtype: torch.dtype = getattr(torch, self.about["dtype"])
        self.network = make_network(folder).to(self.dtype)
        state = load_file(folder / self.client["file"])
        held = dict(self.network.named_buffers())
        for name in held.keys() & (state.keys() - self.network.state_dict().keys()):  # that training changed, unsaved
            owner, _, short = name.rpartition(".")
            self.network.get_submodule(owner).register_buffer(short, held[name])
        self.network.load_state_dict(state)
        self.network.eval()

    def features(self, columns: Columns) -> Tensor:
        """Make numbers ``[rows, features]`` of a table's texts, with NaN for gaps; columns that are not used are left.

        Everything that does not fit is told in one ``UnfitInput``.
        """
        made: list[list[float]] = []
        problems = [f"there is no column {name!r}" for name in self.about["columns"] if name not in columns]
        for name, column in self.about["columns"].items():
            if name not in columns:
                continue
            known = {*GAPS, *column.get("missing", ())}
            gaps = [text in known or text.strip() in known for text in columns[name]]
            if column["kind"] == "category":
                made += one_hot(columns[name], gaps, column["categories"])
            else:
                values, wrong = read_numbers(columns[name], gaps, name, column["kind"])
                made.append(values)
                problems += wrong
            if column["gaps"] == "none":
                if any(gaps):
                    problems.append(f"column {name!r} has a gap in row {gaps.index(True)}, but had none in training")
            elif column["indicator"]:
                made.append([float(gap) for gap in gaps])
        if problems:
            raise UnfitInput(problems)
        return torch.from_numpy(np.array(made, dtype=np.float64).T.astype(np.float32))

    def prepare(self, x: Tensor) -> Tensor:
        """Fill gaps and scale ``[rows, ...]`` as in training; bytes are 0 to 255, whole numbers stay as they are."""
        shape = tuple(self.about["shape"])
        if tuple(x.shape[1:]) != shape:
            raise UnfitInput([f"a sample has the shape {tuple(x.shape[1:])}, but must have {shape}"])
        if self.about["type"] == "int64":
            return x.to(torch.int64)
        if self.about["type"] == "uint8" and x.dtype != torch.uint8 and not x.is_floating_point():
            if bool(((x < 0) | (x > 255)).any()):
                raise UnfitInput(["samples are bytes, 0 to 255, or floating-point numbers from 0 to 1"])
            x = x.to(torch.uint8)
        over_axes = (-1, *(1,) * (x.dim() - 2))
        mean, std = (torch.tensor(self.scaling[name], dtype=self.dtype).view(over_axes) for name in ("mean", "std"))
        if self.scaling["fill"]:
            x = torch.where(x.isnan(), torch.tensor(self.scaling["fill"], dtype=x.dtype), x)
        scale = 1 / (255.0 * std if x.dtype == torch.uint8 else std)
        return x.to(self.dtype) * scale - mean / std

    def outputs(self, x: Tensor) -> Tensor:
        """Apply the network to raw samples ``[rows, ...]``: what it gives, before probabilities are made of it."""
        with torch.no_grad():
            pieces = [self.network(self.prepare(piece)) for piece in x.split(AT_ONCE)]
        # A network may give its outputs beside other things, under the name that is usual for them.
        return torch.cat([piece if isinstance(piece, Tensor) else piece.logits for piece in pieces]).flatten(1)

    def probabilities(self, x: Tensor) -> Tensor:
        """Give the probability of each class ``[rows, classes]``, or of numbers the values ``[rows, 1]``."""
        outputs = self.outputs(x)
        if self.about["task"] == "regression":
            return outputs[:, :1]
        if self.about["task"] == "binary":
            return torch.cat([torch.sigmoid(-outputs), torch.sigmoid(outputs)], 1)
        return torch.softmax(outputs, 1)

    def scores(self, rows: Any) -> dict[str, list[Any]]:
        """Predict for a table by column, or for raw samples in an array: columns of results, in the order of the rows.

        A table is a mapping, such as a data frame, of texts or of values that are written as texts; samples are a
        tensor, a NumPy array, or lists of numbers.
        """
        x = self.features({name: texts_of(rows[name]) for name in rows}) if hasattr(rows, "keys") else as_samples(rows)
        if not len(x):
            raise UnfitInput(["there are no rows"])
        found = self.probabilities(x)
        if self.about["task"] == "regression":
            return {"predicted": found[:, 0].tolist()}
        # A head may be wider than there are classes.
        names: list[str] = list(self.about["classes"])
        names += [f"output {place}" for place in range(len(names), found.shape[1])]
        columns = {f"probability {name}": found[:, place].tolist() for place, name in enumerate(names)}
        return {"predicted": [names[place] for place in found.argmax(1).tolist()]} | columns


def load(client: str | int | None = None, folder: str | Path = FOLDER) -> ModelToFeed:
    """Load one client's model from an exported folder, by default the one that this file lies in."""
    return ModelToFeed(Path(folder), client)


def choose(clients: Sequence[dict[str, Any]], client: str | int | None) -> dict[str, Any]:
    """Find a client by name or number; a model that is for all clients is anybody's."""
    if len(clients) == 1 and (client is None or clients[0]["client"] is None):
        return clients[0]
    for key in ("name", "client"):
        for each in clients:
            if client is not None and str(each.get(key)) == str(client):
                return each
    known = ", ".join(str(each.get("name", each["client"])) for each in clients)
    if client is None:
        raise UnfitInput([f"there are models of several clients, so one must be chosen (--client): {known}"])
    raise UnfitInput([f"there is no model of a client {str(client)!r}: there are {known}"])


def make_network(folder: Path) -> nn.Module:
    """Build the network of ``network.py``, with parameters that are still to be loaded."""
    spec = importlib.util.spec_from_file_location("network", folder / "network.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    network: nn.Module = module.make()
    return network


# ------------------------------------------------------------------------------------------------ from texts to numbers


def texts_of(values: Sequence[Any]) -> list[str]:
    """Write a column's values as a CSV file has them; what is missing is an empty text."""
    return [value if isinstance(value, str) else "" if is_missing(value) else str(value) for value in values]


def is_missing(value: Any) -> bool:
    """Return whether a value stands for one that is not there: it equals nothing, or cannot say whether it does."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True


def as_samples(given: Any) -> Tensor:
    """Take samples as a tensor, from a NumPy array or lists too."""
    if isinstance(given, Tensor):
        return given
    try:
        array = np.array(given, order="C")  # its own: what is given may be read-only
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except (TypeError, ValueError) as error:
        raise UnfitInput([f"samples must be numbers in an array, or a table by column ({error})"]) from None


def one_hot(texts: Sequence[str], gaps: Sequence[bool], categories: Sequence[str]) -> list[list[float]]:
    """Give a column of 0 and 1 for each category; a text that is none of them, or a gap, is 0 in all."""
    given: list[Any] = list(texts)
    wanted: list[Any] = list(categories)
    for read in (as_float, as_truth):  # categories that are all numbers are compared as such, and truths in any case
        if not any(math.isnan(read(one)) for one in categories):
            given, wanted = [read(text) for text in texts], [read(one) for one in categories]
            break
    return [[float(value == one and not gap) for value, gap in zip(given, gaps, strict=True)] for one in wanted]


def read_numbers(texts: Sequence[str], gaps: Sequence[bool], name: str, kind: str) -> tuple[list[float], list[str]]:
    """Read a column of numbers, truths or dates, with NaN for gaps; say what is none."""
    read = {"date": as_days, "boolean": as_truth}.get(kind, as_float)
    values = [math.nan if gap else read(text) for text, gap in zip(texts, gaps, strict=True)]
    problems = []
    unread = [row for row, (value, gap) in enumerate(zip(values, gaps, strict=True)) if math.isnan(value) and not gap]
    infinite = [row for row, value in enumerate(values) if math.isinf(value)]
    if unread:
        problems.append(f"column {name!r} has {texts[unread[0]]!r} in row {unread[0]}, which is no {kind}")
    if infinite:
        problems.append(f"there is an infinite value in column {name!r}, row {infinite[0]}")
    return values, problems


def as_float(text: str) -> float:
    """Read a number, NaN if it is none."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def as_truth(text: str) -> float:
    """Read true or false, in any case, or a number."""
    return TRUTHS[text.lower()] if text.lower() in TRUTHS else as_float(text)


def as_days(text: str) -> float:
    """Read a date as days since 1970; one without a time zone is taken as UTC."""
    try:
        when = datetime.fromisoformat(text.strip())
    except ValueError:
        return math.nan
    when = when.replace(tzinfo=UTC) if when.tzinfo is None else when
    return (when - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86400


# ---------------------------------------------------------------------------------------------------------------- files


def read_table(path: str | Path) -> dict[str, list[str]]:
    """Read a CSV file with a header as texts by column; blank lines are left out."""
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        return table_of(file)


def table_of(file: io.TextIOBase | Any) -> dict[str, list[str]]:
    """Read an open CSV file."""
    lines = [line for line in csv.reader(file) if line]
    if not lines:
        raise UnfitInput(["the table is empty: it must have a header"])
    header, rows = lines[0], lines[1:]
    doubled = sorted({name for name in header if header.count(name) > 1})
    problems = [f"there are two columns {name!r}" for name in doubled]
    long = [(number, len(row)) for number, row in enumerate(rows) if len(row) > len(header)]
    if long:
        problems.append(f"row {long[0][0]} has {long[0][1]} fields, but the header has {len(header)}")
    if problems:
        raise UnfitInput(problems)
    return {name: [row[place] if place < len(row) else "" for row in rows] for place, name in enumerate(header)}


def read_samples(path: str | Path) -> Tensor:
    """Read samples from a NumPy file: an array in ``.npy``, or the array ``x`` in ``.npz``."""
    found = np.load(path, allow_pickle=False)
    return as_samples(found["x"] if hasattr(found, "files") else found)


def write_table(file: Any, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns as CSV; numbers with all their digits."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))


def main(words: Sequence[str] | None = None) -> int:
    """Predict for a file; gives the exit code."""
    parser = argparse.ArgumentParser(description="Predict for new rows with the model in this folder.")
    parser.add_argument("rows", help="a CSV file with a header, or samples in .npy or .npz")
    parser.add_argument("--client", help="whose model, if there are several")
    parser.add_argument("--out", help="the CSV file for the scores; they are printed if there is none")
    given = parser.parse_args(words)
    failed = f"{given.rows} cannot be read"
    try:
        is_array = Path(given.rows).suffix in (".npy", ".npz")
        rows = read_samples(given.rows) if is_array else read_table(given.rows)
        failed = f"the model in {FOLDER} cannot be made"
        scores = load(given.client).scores(rows)
    except UnfitInput as unfit:
        print(*(f"error: {problem}" for problem in unfit.problems), sep="\n", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {failed} ({error.strerror or error})", file=sys.stderr)
        return 1
    if given.out is None:
        write_table(sys.stdout, scores)
        return 0
    with Path(given.out).open("w", encoding="utf-8", newline="") as file:
        write_table(file, scores)
    return 0


if __name__ == "__main__":
    sys.exit(main())
