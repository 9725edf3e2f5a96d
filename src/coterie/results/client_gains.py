"""Who gains and who loses: a method against a reference, client by client, each on its own test samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from coterie import evaluation
from coterie.errors import ConfigError
from coterie.results.result import Result
from coterie.results.statistics import At, client_scores, refuse_other_clients

LEVEL = 0.05
"""The rate of false discoveries among clients that are called helped or harmed."""

REFERENCES = ("local", "fedavg_ft")
"""Methods that others are compared with: training alone, and the plainest way to personalise."""

_MODELS = ("personal", "global")
_NUMBERS = ["score", "reference", "gain", "low", "high", "pvalue", "adjusted"]


@dataclass(frozen=True)
class ClientGains:
    """What each client gains by a method over a reference.

    Parameters
    ----------
    clients
        A row for each client of each seed, from the greatest loss to the greatest gain: ``seed``, ``client``, ``name``,
        ``samples`` (test samples), ``score``, ``reference``, ``gain`` (positive if the method is better, whatever the
        metric), ``low`` and ``high`` (a 95 % interval of that gain, each client for itself; NaN unless ``test`` is
        ``"exact"``), ``pvalue``, ``adjusted`` (by Benjamini and Hochberg, for the number of rows), and ``verdict``:
        ``"helped"``, ``"harmed"``, or empty where chance explains the difference.
    metric
        What was measured.
    test
        How it was tested: ``"exact"`` by McNemar's exact test on the client's own test samples, ``"bound"`` by the
        same test with as many samples on which the two differ as their accuracies allow (so it finds fewer), empty if
        the metric is not a count of right answers and nothing could be tested.
    """

    clients: pd.DataFrame
    metric: str
    test: str

    @property
    def helped(self) -> int:
        """How many clients gain beyond chance."""
        return int((self.clients["verdict"] == "helped").sum())

    @property
    def harmed(self) -> int:
        """How many clients lose beyond chance."""
        return int((self.clients["verdict"] == "harmed").sum())

    @property
    def worst(self) -> float:
        """The least gain, negative if a client loses; NaN without clients."""
        return float(self.clients["gain"].min())

    @property
    def mean(self) -> float:
        """The mean gain."""
        return float(self.clients["gain"].mean())

    def __len__(self) -> int:
        """How many clients of all seeds there are.

        Returns
        -------
        int
            Rows of :attr:`clients`.
        """
        return len(self.clients)


def gains(
    results: Result | Sequence[Result],
    reference: Result | Sequence[Result],
    model: str | None = None,
    reference_model: str | None = None,
    at: At | int = "final",
    level: float = LEVEL,
    reference_at: At | int | None = None,
) -> ClientGains:
    """Say which clients gain and which lose by a method, compared with a reference such as ``local``.

    Each client is tested on its own test samples: those that one of the two models alone has right are counted, and
    McNemar's exact test says whether chance would share them out as unequally. P-values are adjusted by Benjamini and
    Hochberg for the number of clients, so that at most ``level`` of those called helped or harmed are expected to be
    neither. Seeds are not averaged: each deals samples out and trains anew.

    Parameters
    ----------
    results
        A finished run of the method, or several that differ by their seed.
    reference
        The same of the reference, with the same clients and seeds.
    model
        Which model of the method, by default the personal one if there is one, else the global one.
    reference_model
        Which model of the reference, by default likewise.
    at
        At which round. Answers to single samples are recorded after the last one, and after rounds that were the last
        before a run was made longer; for other rounds the test is the bound that :class:`ClientGains` describes.
    level
        The rate of false discoveries.
    reference_at
        At which round of the reference, by default likewise.

    Returns
    -------
    ClientGains
        The gain of each client that has a score in both and attacks in neither.

    Raises
    ------
    ConfigError
        If the runs do not go together: other seeds, other samples, other metrics, or no such model.

    Examples
    --------
    >>> found = gains(coterie.load("runs/fedacs"), coterie.load("runs/local"))  # doctest: +SKIP
    >>> found.helped, found.harmed, found.worst  # doctest: +SKIP
    (9, 1, -0.04)
    """
    ours, theirs = _by_seed(results), _by_seed(reference)
    if ours.keys() != theirs.keys():
        raise ConfigError(
            f"the runs have the seeds {_listed(ours)} and the reference {_listed(theirs)}: they must have the same"
        )
    parts, tests = [], []
    for seed, run in ours.items():
        pair = (run, model or _first_model(run)), (theirs[seed], reference_model or _first_model(theirs[seed]))
        found, test = _of_seed(*pair, at, at if reference_at is None else reference_at)
        parts.append(found.assign(seed=np.int64(seed)))
        tests.append(test)
    clients = pd.concat(parts, ignore_index=True)
    clients["adjusted"] = evaluation.benjamini_hochberg(clients["pvalue"].to_numpy())
    sure = (clients["adjusted"] < level).to_numpy()
    sign = np.sign(clients["gain"].to_numpy())
    clients["verdict"] = np.select([sure & (sign > 0), sure & (sign < 0)], ["helped", "harmed"], "")
    columns = ["seed", "client", "name", "samples", *_NUMBERS, "verdict"]
    ordered = clients[columns].sort_values(["gain", "seed", "client"], kind="stable", ignore_index=True)
    # What is said of all must hold for each seed.
    test = "" if "" in tests else "bound" if "bound" in tests else "exact"
    return ClientGains(ordered, str(next(iter(ours.values())).summary["metric"]), test)


def _of_seed(
    one: tuple[Result, str], other: tuple[Result, str], at: At | int, other_at: At | int
) -> tuple[pd.DataFrame, str]:
    (run, model), (against, theirs) = one, other
    refuse_other_clients(run, against)
    scores = pd.concat([client_scores(run, model, at), client_scores(against, theirs, other_at)], axis=1, join="inner")
    scores.columns = pd.Index(["score", "reference"])
    sign = 1.0 if run.summary["higher_is_better"] else -1.0
    names = getattr(run, "client_names", None) or {}
    found = scores.reset_index().sort_values("client", ignore_index=True)
    clients = found["client"].to_numpy(dtype=np.int64)
    found["name"] = [str(names.get(int(client), f"client {client}")) for client in clients]
    found["gain"] = np.round(sign * (found["score"] - found["reference"]), 12)
    sizes = run.shares.set_index("client")["test"].reindex(clients).to_numpy(dtype=np.int64)
    found["samples"] = sizes
    found["low"] = found["high"] = np.nan
    if run.summary["metric"] != "accuracy":
        return found.assign(pvalue=np.nan), ""
    discordant = _discordant(_right(run, model, at), _right(against, theirs, other_at), clients, sizes)
    if discordant is not None:
        found["low"], found["high"] = evaluation.paired_interval(*discordant, sizes)
        return found.assign(pvalue=evaluation.mcnemar(*discordant)), "exact"
    right, other_right = (np.rint(found[name].to_numpy() * sizes).astype(np.int64) for name in ("score", "reference"))
    gained, lost = evaluation.most_discordant(right, other_right, sizes)
    return found.assign(pvalue=evaluation.mcnemar(gained, lost)), "bound"


def _right(result: Result, model: str, at: At | int) -> pd.Series[bool] | None:
    """Give for every test sample whether it was answered rightly, by client; ``None`` if that was not recorded."""
    if isinstance(at, int):
        answers = result.answers_after(at)
        own = answers[answers["model"] == model] if answers is not None else pd.DataFrame()
        return None if own.empty else (own["answer"] > 0).set_axis(own["client"].to_numpy())
    if at != "final" or result.answers is None:
        return None
    own = result.answers[result.answers["model"] == model]
    measured = result.metrics.loc[(result.metrics["model"] == model) & (result.metrics["split"] == "test"), "round"]
    if own.empty or int(own["round"].iloc[0]) != int(np.max(measured.to_numpy())):
        return None
    return (own["answer"] > 0).set_axis(own["client"].to_numpy())


def _discordant(
    one: pd.Series[bool] | None, other: pd.Series[bool] | None, clients: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Count the samples that only the one, and only the other, has right, for each client."""
    if one is None or other is None:
        return None
    first, second = one[one.index.isin(clients)], other[other.index.isin(clients)]
    # Samples lie in the order of their clients' shares, which are those of both runs.
    if not np.array_equal(first.index.to_numpy(), second.index.to_numpy()) or len(first) != int(sizes.sum()):
        return None
    place = np.searchsorted(clients, first.index.to_numpy())
    right, wrong = first.to_numpy(), second.to_numpy()
    count = [np.bincount(place[only], minlength=len(clients)) for only in (right & ~wrong, wrong & ~right)]
    return count[0], count[1]


def _by_seed(results: Result | Sequence[Result]) -> dict[int, Result]:
    listed = [results] if isinstance(results, Result) else list(results)
    found = {int(result.config["seed"]): result for result in listed}
    if not listed or len(found) < len(listed):
        raise ConfigError(f"gains need at least one run of a method, and each seed once: there are {len(listed)} runs")
    return found


def _first_model(result: Result) -> str:
    model = next((name for name in _MODELS if result.summary.get(name)), None)
    if model is None:
        raise ConfigError(f"the run in {result.path} has neither personal models nor a global one")
    return model


def _listed(seeds: dict[int, Result]) -> str:
    return ", ".join(map(str, sorted(seeds)))
