"""Several runs looked at together, as charts and as Plotly figures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from coterie.errors import ConfigError, RunFolderError
from coterie.results import figures
from coterie.results.figures import Boxes, Chart, Line, Panels, Style
from coterie.results.heat_maps import honest_clients, primary_metric
from coterie.results.labels import attack_label, lines_of
from coterie.results.run_frames import answered, counted, stacked, timed

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from coterie.results.result import Result


class RunSet:
    """Several runs, finished or not, in figures that they share.

    Runs that differ by their seed alone make one line, with a band of one standard deviation over seeds. Clients that
    attack are counted nowhere.

    Parameters
    ----------
    results
        The runs, in the order of legends; none is refused with a ``ConfigError``.
    names
        What a plan calls the method of each, ``None`` where there is no plan; the method's title by default.
    tuned
        Parameters that were chosen for each method on validation samples, which tell no lines apart.

    Attributes
    ----------
    results
        The runs.
    lines
        The line to which each run belongs.
    styles
        How each line is drawn, by its name.

    Examples
    --------
    >>> runs = RunSet([coterie.load(path) for path in paths])  # doctest: +SKIP
    >>> runs.plot_curves()  # doctest: +SKIP
    """

    def __init__(
        self, results: Sequence[Result], names: Sequence[str | None] | None = None, tuned: Collection[str] = ()
    ) -> None:
        self.results, self._names, self._tuned = _some(results), names, tuned
        self.lines: list[Line] = lines_of(self.results, names=names, tuned=tuned)
        self.styles: dict[str, Style] = figures.styles(self.lines)

    @cached_property
    def metric_of(self) -> list[str | None]:
        """The primary metric of each run, ``None`` if it has recorded nothing yet."""
        return [primary_metric(result) for result in self.results]

    @property
    def metric_names(self) -> list[str]:
        """The primary metrics of the runs, each once."""
        return list(dict.fromkeys(metric for metric in self.metric_of if metric is not None))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """What was measured on test samples and on the wire: a run's metrics with ``line``, ``run`` and ``seed``."""
        return stacked([self._marked(number, counted(result)) for number, result in enumerate(self.results)])

    @cached_property
    def timings(self) -> pd.DataFrame:
        """Seconds of every round, with ``line``, ``run`` and ``seed``; of evaluation where a round was evaluated."""
        frames = [self._marked(number, timed(result)) for number, result in enumerate(self.results)]
        return pd.concat(frames, ignore_index=True)

    @property
    def settings(self) -> list[str]:
        """What tells runs of one method apart besides its own parameters, each once."""
        return list(dict.fromkeys(line.setting for line in self.lines))

    def of_setting(self, setting: str) -> RunSet:
        """Give the runs of one setting, with their colours but without its name.

        Parameters
        ----------
        setting
            One of :attr:`settings`.

        Returns
        -------
        RunSet
            The runs; lines are called by their methods alone.
        """
        places = [place for place, line in enumerate(self.lines) if line.setting == setting]
        part = RunSet([self.results[place] for place in places])
        part.lines = [Line(self.lines[place].method) for place in places]
        part.styles = {
            self.lines[place].method: replace(self.styles[self.lines[place].name], dash=figures.DASHES[0])
            for place in places
        }
        return part

    def firsts(self) -> list[int]:
        """Give the first run of each line, of the least seed.

        Returns
        -------
        list of int
            Places of runs, in the order of lines.
        """
        order = sorted(range(len(self.results)), key=lambda place: self.results[place].config.get("seed", 0))
        first: dict[Line, int] = {}
        for place in order:
            first.setdefault(self.lines[place], place)
        return [first[line] for line in dict.fromkeys(self.lines)]

    def curves(self, metric: str) -> Panels | None:
        """Chart a metric over rounds.

        Parameters
        ----------
        metric
            The metric.

        Returns
        -------
        Panels or None
            The chart, ``None`` if nothing was measured.
        """
        return figures.curves(self._measured_by(metric), metric, self.styles)

    def distribution(self, metric: str) -> Boxes | None:
        """Chart the distribution of a metric over clients at the last round.

        Parameters
        ----------
        metric
            The metric.

        Returns
        -------
        Boxes or None
            The chart, ``None`` if nothing was measured.
        """
        return figures.distribution(self._measured_by(metric), metric, self.styles)

    def sorted_clients(self, metric: str) -> Panels | None:
        """Chart every client's value at the last round, from the least to the greatest.

        Parameters
        ----------
        metric
            The metric.

        Returns
        -------
        Panels or None
            The chart, ``None`` if nothing was measured.
        """
        return figures.sorted_clients(self._measured_by(metric), metric, self.styles)

    def fairness(self, metric: str) -> Panels | None:
        """Chart the mean over clients against the variance over clients.

        Parameters
        ----------
        metric
            The metric.

        Returns
        -------
        Panels or None
            The chart, ``None`` if nothing was measured.
        """
        return figures.fairness(self._measured_by(metric), metric, self.styles)

    def traffic(self) -> Panels | None:
        """Chart the bytes of each round.

        Returns
        -------
        Panels or None
            The chart, ``None`` if nothing was sent.
        """
        return figures.traffic(self.metrics, self.styles)

    def seconds(self) -> Panels | None:
        """Chart the seconds of each round.

        Returns
        -------
        Panels or None
            The chart, ``None`` if nothing was timed.
        """
        return figures.seconds(self.timings, self.styles)

    def s_acc(self) -> Panels | None:
        """Chart S-acc against the fraction of the other clients, from each run's last accuracy matrix.

        Returns
        -------
        Panels or None
            The chart, ``None`` if no run has a matrix.
        """
        found = []
        for number, result in enumerate(self.results):
            if result.matrix_rounds:
                matrix, honest = result.matrix(), honest_clients(result)
                clients = [int(client) for client in matrix.index] if honest is None else honest
                of_run = figures.s_acc_by_fraction(matrix, int(result.config["seed"]), clients)
                found.append(self._marked(number, of_run))
        if not found:
            return None
        return figures.s_acc_chart(pd.concat(found), "/".join(self.metric_names), self.styles)

    def robustness(self, metric: str) -> Panels | None:
        """Chart the last mean over honest clients against the fraction of clients that attack.

        Parameters
        ----------
        metric
            The metric.

        Returns
        -------
        Panels or None
            The chart, ``None`` unless runs of one method differ in that fraction.
        """
        attacked = [attack_label(result) for result in self.results]
        alike = lines_of(self.results, leave_out=("attack",), names=self._names, tuned=self._tuned)
        final = figures.per_run(self._measured_by(metric), metric)
        if final.empty:
            return None
        last = final["round"] == final.groupby(["run", "model"], observed=True)["round"].transform("max")
        final = final[last & final["model"].isin(figures.SHOWN)]
        final = final.assign(
            line=[alike[run].name for run in final["run"]],
            kind=[attacked[run][0] for run in final["run"]],
            fraction=[attacked[run][1] for run in final["run"]],
        )
        varied = final.groupby("line")["fraction"].nunique()
        final = final[final["line"].isin(varied.index[varied > 1])]
        return None if final.empty else figures.robustness(final, metric, figures.styles(alike))

    def reliability(self) -> Panels | None:
        """Chart accuracy against confidence after the last round.

        Returns
        -------
        Panels or None
            The chart, ``None`` if no run recorded its answers.
        """
        found = [(number, answered(result)) for number, result in enumerate(self.results)]
        there = [self._marked(number, of_run) for number, of_run in found if of_run is not None]
        return figures.reliability(pd.concat(there, ignore_index=True), self.styles) if there else None

    def plot_reliability(self) -> Figure:
        """Plot accuracy against confidence after the last round: on the diagonal a model is as sure as it is right.

        Returns
        -------
        plotly.graph_objects.Figure
            A panel for each model.
        """
        return self._plotted(self.reliability(), "answers to single samples")

    def plot_curves(self, metric: str | None = None) -> Figure:
        """Plot a metric over rounds: mean over clients, then mean and deviation over seeds.

        Parameters
        ----------
        metric
            The metric (``"loss"`` for instance), by default the primary one.

        Returns
        -------
        plotly.graph_objects.Figure
            A panel for each model.
        """
        return self._plotted(self.curves(self._named(metric)), self._named(metric))

    def plot_clients(self, metric: str | None = None, sort: bool = False) -> Figure:
        """Plot how clients fare at the last round.

        Parameters
        ----------
        metric
            The metric, by default the primary one.
        sort
            Draw every client from the least to the greatest, in place of boxes.

        Returns
        -------
        plotly.graph_objects.Figure
            A panel for each model.
        """
        name = self._named(metric)
        return self._plotted(self.sorted_clients(name) if sort else self.distribution(name), name)

    def plot_fairness(self, metric: str | None = None) -> Figure:
        """Plot the mean over clients against the variance over clients, of the metric and of the loss.

        Parameters
        ----------
        metric
            The metric, by default the primary one.

        Returns
        -------
        plotly.graph_objects.Figure
            A point for each run and model.
        """
        return self._plotted(self.fairness(self._named(metric)), self._named(metric))

    def plot_bytes(self) -> Figure:
        """Plot the bytes of each round.

        Returns
        -------
        plotly.graph_objects.Figure
            A panel for each direction.
        """
        return self._plotted(self.traffic(), "bytes sent")

    def plot_seconds(self) -> Figure:
        """Plot the seconds of each round.

        Returns
        -------
        plotly.graph_objects.Figure
            A panel for each thing that took time.
        """
        return self._plotted(self.seconds(), "timings")

    def plot_s_acc(self) -> Figure:
        """Plot S-acc against the fraction of the other clients on whose samples models are tested too.

        Returns
        -------
        plotly.graph_objects.Figure
            A line for each line of runs that have an accuracy matrix.
        """
        return self._plotted(self.s_acc(), "accuracy matrix")

    def plot_robustness(self, metric: str | None = None) -> Figure:
        """Plot the last mean over honest clients against the fraction of clients that attack.

        Parameters
        ----------
        metric
            The metric, by default the primary one.

        Returns
        -------
        plotly.graph_objects.Figure
            A panel for each kind of attack and each model.
        """
        return self._plotted(self.robustness(self._named(metric)), "two fractions of attackers of one method")

    def _named(self, metric: str | None) -> str:
        return metric or next(iter(self.metric_names), "accuracy")

    def _plotted(self, chart: Chart | None, what: str) -> Figure:
        if chart is None:
            where = ", ".join(str(result.path) for result in self.results[:3]) + (" …" if self.results[3:] else "")
            raise RunFolderError(f"there is nothing to plot: {where} has no {what}")
        return figures.plotly_figure(chart)

    def _measured_by(self, metric: str) -> pd.DataFrame:
        """Give the metrics of the runs that have this one; whatever was chosen by another is not beside it."""
        if metric == "loss" or metric not in self.metric_names:
            return self.metrics
        theirs = [number for number, name in enumerate(self.metric_of) if name == metric]
        return self.metrics[self.metrics["run"].isin(theirs)]

    def _marked(self, number: int, frame: pd.DataFrame) -> pd.DataFrame:
        names = list(self.styles)
        code = np.full(len(frame), names.index(self.lines[number].name), dtype=np.int32)
        line = pd.Categorical.from_codes(code, categories=pd.Index(names))
        return frame.assign(line=line, run=np.int32(number), seed=np.int64(self.results[number].config.get("seed", 0)))


def _some(results: Sequence[Result]) -> list[Result]:
    if not results:
        raise ConfigError("there must be at least one run to look at")
    return list(results)
