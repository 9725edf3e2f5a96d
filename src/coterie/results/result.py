"""A run as its reader sees it."""

from __future__ import annotations

import html
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from coterie.errors import ConfigError, RunFolderError
from coterie.results import figures, heat_maps
from coterie.results.labels import run_title
from coterie.results.run_set import RunSet
from coterie.results.summary_tables import table
from coterie.runs.storage import (
    MetricsLog,
    TimingsLog,
    accuracy_matrix_log,
    collaboration_weights_log,
    read_config,
    read_shares,
    read_summary,
)
from coterie.runs.storage.answers import read_answers
from coterie.runs.storage.metric_columns import MetricColumns
from coterie.runs.storage.run_files import SHARES, read_client_names, read_clients_by_role
from coterie.tables import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


class Result:
    """A run, finished or not, read from its folder. Nothing in the folder is changed.

    Everything is read when it is first asked for and then kept; make another to see how a run has gone on.

    Parameters
    ----------
    path
        The run's folder; anything else is refused with a ``RunFolderError``.

    Examples
    --------
    >>> result = Result("runs/fedacs")  # doctest: +SKIP
    >>> result.summary["personal"]["final"]["mean"]  # doctest: +SKIP
    >>> result.metrics.query("model == 'personal' and split == 'test'")  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._config = read_config(self._path)

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._path

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration, complete."""
        return self._config

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """What was measured: columns ``round``, ``client``, ``model``, ``split``, ``metric``, ``value``.

        Bytes on the wire are rows of the model ``"federation"`` and the client -1.
        """
        return MetricsLog(self._path).read()

    @cached_property
    def answers(self) -> pd.DataFrame | None:
        """How each test sample was answered after the last round: ``round``, ``model``, ``client`` and ``answer``.

        An answer is the probability of the class that was predicted, negative if that was wrong. ``None`` where it was
        not recorded: of numbers, of runs in several processes and between machines.
        """
        return read_answers(self._path)

    def answers_after(self, round_number: int, split: str = "test") -> pd.DataFrame | None:
        """Give the answers after a round that is, or was before the run was made longer, the last.

        Parameters
        ----------
        round_number
            The round.
        split
            Whose: ``"test"`` or ``"validation"`` samples'.

        Returns
        -------
        pandas.DataFrame or None
            As :attr:`answers`; ``None`` where they were not recorded.
        """
        return read_answers(self._path, split, round_number)

    @cached_property
    def timings(self) -> pd.DataFrame:
        """Seconds of every round, by what they were spent on."""
        return TimingsLog(self._path / "timings.jsonl").read()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self._summary is not None

    @property
    def summary(self) -> dict[str, Any]:
        """The result in short, as in ``summary.json``; a run without one is refused with a ``RunFolderError``."""
        if self._summary is None:
            raise RunFolderError(f"the run in {self._path} is not finished: `coterie resume {self._path}`")
        return self._summary

    @property
    def weight_rounds(self) -> list[int]:
        """The rounds that have collaboration weights, in order; none if the method has none."""
        return collaboration_weights_log(self._path).rounds()

    def weights(self, round_number: int | None = None, names: bool = False) -> pd.DataFrame:
        """Give the collaboration weights of one round.

        Parameters
        ----------
        round_number
            The round, by default the last that has weights.
        names
            Label clients by their names, where they have any, in place of their numbers.

        Returns
        -------
        pandas.DataFrame
            The matrix; its index are the clients that took, its columns those from whom they took.
        """
        return self._labelled(collaboration_weights_log(self._path).read(round_number), names)

    @property
    def matrix_rounds(self) -> list[int]:
        """The rounds that have an accuracy matrix, in order; none unless ``matrix`` was asked for."""
        return accuracy_matrix_log(self._path).rounds()

    def matrix(self, round_number: int | None = None, names: bool = False) -> pd.DataFrame:
        """Give the accuracy matrix of one round.

        Parameters
        ----------
        round_number
            The round, by default the last that has one.
        names
            Label clients by their names, where they have any, in place of their numbers.

        Returns
        -------
        pandas.DataFrame
            The matrix; its index are the clients whose personal models were measured, its columns those on whose test
            samples.
        """
        return self._labelled(accuracy_matrix_log(self._path).read(round_number), names)

    @cached_property
    def shares(self) -> pd.DataFrame:
        """What each client holds: ``client``, ``role``, sizes, and where known its name, group, noise and classes."""
        return read_shares(self._path)

    @cached_property
    def client_names(self) -> dict[int, str]:
        """The clients' names by number, where they have any: hospitals, writers, members of a federation."""
        return read_client_names(self._path)

    def client_number(self, client: int | str) -> int:
        """Give the number of a client that is named, or given by its number.

        Parameters
        ----------
        client
            The name, or the number, which may be written as a text.

        Returns
        -------
        int
            The number.

        Raises
        ------
        ConfigError
            If the run has no such client.
        """
        count = int(self._config["clients"])
        for number, name in self.client_names.items():
            if client == name:
                return number
        if isinstance(client, int) or client.isdecimal():
            if 0 <= int(client) < count:
                return int(client)
            raise ConfigError(f"client is {client}, but the run in {self._path} has clients 0 to {count - 1}")
        named = f": {', '.join(self.client_names.values())}" if self.client_names else ", which have no names"
        raise ConfigError(f"client is {client!r}, but the run in {self._path} has clients 0 to {count - 1}{named}")

    @property
    def has_shares(self) -> bool:
        """Whether the run says what its clients hold; the server of a real federation does not know."""
        return (self._path / SHARES).exists()

    def plot_curves(self, metric: str | None = None) -> Figure:
        """Plot a metric over rounds: the mean over clients, a panel for each model.

        Parameters
        ----------
        metric
            The metric (``"loss"`` for instance), by default the primary one.

        Returns
        -------
        plotly.graph_objects.Figure
            A figure that a notebook shows; :class:`coterie.results.RunSet` plots several runs together.
        """
        return RunSet([self]).plot_curves(metric)

    def plot_clients(self, metric: str | None = None, sort: bool = False) -> Figure:
        """Plot how clients fare at the last round: boxes, or every client from the least to the greatest.

        Parameters
        ----------
        metric
            The metric, by default the primary one.
        sort
            Draw every client, in place of boxes.

        Returns
        -------
        plotly.graph_objects.Figure
            A panel for each model.
        """
        return RunSet([self]).plot_clients(metric, sort)

    def plot_fairness(self, metric: str | None = None) -> Figure:
        """Plot the mean over clients against the variance over clients, of the metric and of the loss.

        Parameters
        ----------
        metric
            The metric, by default the primary one.

        Returns
        -------
        plotly.graph_objects.Figure
            A point for each model.
        """
        return RunSet([self]).plot_fairness(metric)

    def plot_weights(self, frames: int = heat_maps.FRAMES) -> Figure:
        """Plot the collaboration weights, with clients of one group beside each other and a slider over rounds.

        Parameters
        ----------
        frames
            Rounds of the slider at most.

        Returns
        -------
        plotly.graph_objects.Figure
            A heat map: a row for each client that took, a column for each from whom it took.
        """
        return figures.plotly_figure(heat_maps.weights_map(self, frames))

    def plot_matrix(self, frames: int = heat_maps.FRAMES) -> Figure:
        """Plot the accuracy matrix, with clients of one group beside each other.

        Parameters
        ----------
        frames
            Rounds of the slider at most, where there are several.

        Returns
        -------
        plotly.graph_objects.Figure
            A heat map: a row for each personal model, a column for each client on whose samples it was measured.
        """
        return figures.plotly_figure(heat_maps.matrix_map(self, frames))

    def plot_s_acc(self) -> Figure:
        """Plot S-acc, read off the accuracy matrix, against the fraction of the other clients.

        Returns
        -------
        plotly.graph_objects.Figure
            From L-acc at 0 to G-acc at 1.
        """
        return RunSet([self]).plot_s_acc()

    def plot_shares(self) -> Figure:
        """Plot who holds what: training samples of each class by client.

        Returns
        -------
        plotly.graph_objects.Figure
            Bubbles for few clients, a heat map for many.
        """
        return figures.plotly_figure(heat_maps.shares_map(self))

    def plot_bytes(self) -> Figure:
        """Plot the bytes of each round.

        Returns
        -------
        plotly.graph_objects.Figure
            A panel for each direction.
        """
        return RunSet([self]).plot_bytes()

    def plot_seconds(self) -> Figure:
        """Plot the seconds of each round.

        Returns
        -------
        plotly.graph_objects.Figure
            A panel for each thing that took time.
        """
        return RunSet([self]).plot_seconds()

    def table(self) -> Table:
        """Give the table that the end of a run prints.

        Returns
        -------
        Table
            One row for each model.
        """
        return table([self.summary], methods=[run_title(self)])

    def _labelled(self, matrix: pd.DataFrame, names: bool) -> pd.DataFrame:
        return matrix.rename(index=self.client_names, columns=self.client_names) if names else matrix

    @cached_property
    def _columns(self) -> MetricColumns:
        known: pd.DataFrame | None = self.__dict__.get("metrics")
        return MetricsLog(self._path).columns() if known is None else MetricColumns.of_frame(known)

    @cached_property
    def _attackers(self) -> npt.NDArray[np.integer[Any]]:
        shares: pd.DataFrame | None = self.__dict__.get("shares")
        if shares is None:
            return read_clients_by_role(self._path, "attacker")
        found: npt.NDArray[np.integer[Any]] = shares["client"].to_numpy()[(shares["role"] == "attacker").to_numpy()]
        return found

    @cached_property
    def _summary(self) -> dict[str, Any] | None:
        return read_summary(self._path)

    def __repr__(self) -> str:
        return f"Result({str(self._path)!r}{'' if self.finished else ', not finished'})"

    def _repr_html_(self) -> str:
        if not self.finished:
            return f"<p>{html.escape(repr(self))}</p>"
        return self.table().html()


def attackers_of(result: Result) -> npt.NDArray[np.integer[Any]]:
    """Give the clients that attack in a run; read once."""
    return result._attackers


def columns_of(result: Result) -> MetricColumns:
    """Give what :attr:`Result.metrics` holds as arrays, which are read and looked up much sooner; read once."""
    return result._columns
