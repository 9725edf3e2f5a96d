"""Evaluation of all clients: every model on each client's own samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from coterie.algorithms.contract import calling, check_tensors
from coterie.compute.samples import Split
from coterie.errors import Diverged
from coterie.evaluation import metrics as metric_table
from coterie.evaluation.selection import hybrid_oracle, hybrid_validation
from coterie.rows import Rows
from coterie.simulation.measurement import ANSWERED, Measured, Measurement, Targets
from coterie.simulation.simulation import Simulation

Keep = Callable[[str, Tensor, Rows], None]
"""Shown the name under which models are measured, the clients and their rows, before the next ones are made."""
_OF_CLASSES = frozenset({*metric_table.names("multiclass"), *metric_table.names("binary")})


@dataclass(frozen=True)
class Score:
    """One metric of one model, for each client.

    Parameters
    ----------
    model
        ``"personal"``, ``"global"``, ``"hybrid"``, ``"hybrid_oracle"``, ``"newcomer"``, or a name of the method's own.
    split
        Whose samples: ``"train"``, ``"validation"`` or ``"test"``.
    metric
        ``"loss"``, or a metric's name.
    values
        A float64 value for each client, NaN where it has none.
    clients
        The clients.
    answers
        With the losses on validation and test samples, where they were asked for: for every sample, client after
        client, the probability of the predicted class, negative if that is wrong.
    """

    model: str
    split: Split
    metric: str
    values: Tensor
    clients: Tensor
    answers: Tensor | None = None


class _Group:
    """Clients that are evaluated together."""

    def __init__(self, simulation: Simulation, clients: Tensor, splits: tuple[Split, ...]) -> None:
        self.clients, self._simulation, self._splits = clients, simulation, splits

    @cached_property
    def targets(self) -> Targets:
        # Runs of one engine that evaluate the same clients have one of them, which holds what its key names.
        samples, once = self._simulation.engine.samples, self._simulation.processes.once
        key = "targets", id(samples), id(self.clients), self._splits
        return once(key, lambda: (samples, self.clients, self._collected()))[2]

    def _collected(self) -> Targets:
        engine, mine = self._simulation.engine, self._simulation.processes.mine(self.clients)
        splits = tuple(split for split in self._splits if bool(engine.sizes[split][self.clients].any()))
        here = tuple(split for split in splits if bool(engine.sizes[split][mine].any()))
        index = torch.cat([engine.samples.flat_index(mine, split) for split in here] or [mine.new_zeros(0)])
        ends = torch.cat([engine.sizes[split][mine] for split in here] or [mine.new_zeros(0)]).cumsum(0)
        return Targets(splits, here, mine, engine.samples.y[index], torch.cat([ends.new_zeros(1), ends]))


def on_host(score: Score) -> Score:
    """Give a score whose values and clients are on the host; the same one if they are."""
    if score.values.device.type == "cpu" and score.clients.device.type == "cpu":
        return score
    return replace(score, values=score.values.cpu(), clients=score.clients.cpu())


class Scorer:
    """Evaluates a simulation.

    Parameters
    ----------
    simulation
        The simulation.
    clients
        The clients that train, in increasing order.
    newcomers
        The clients that never train.
    splits
        Which samples to evaluate on.
    adapt_rounds
        Rounds that newcomers join for before they are evaluated.
    """

    def __init__(
        self,
        simulation: Simulation,
        clients: Tensor,
        newcomers: Tensor,
        splits: tuple[Split, ...] = ("validation", "test"),
        adapt_rounds: int = 1,
    ) -> None:
        self.simulation, self.clients, self.adapt_rounds = simulation, clients, adapt_rounds
        self.splits, self._answering = splits, False
        self.primary = simulation.engine.problem.metrics[0]
        self._blocks = [_Group(simulation, block, splits) for block in simulation.blocks(clients)]
        self._newcomers = _Group(simulation, newcomers, splits)
        self._hosts: dict[int, tuple[Tensor, Tensor]] = {}  # clients, by the tensor that holds them
        everyone = torch.cat([clients, newcomers]).sort().values if len(newcomers) else clients
        together = len(self._blocks) == 1 and not len(newcomers)
        self._everyone = self._blocks[0] if together else _Group(simulation, everyone, splits)

    def scores(self, round_number: int, answers: bool = False, keep: Keep | None = None) -> list[Score]:
        """Evaluate every model on every client's own samples, after the round that was played last.

        ``answers`` asks for those to single samples too, which are given of classes. ``keep`` is shown the personal
        models and those of newcomers.
        """
        keep = keep or (lambda kind, clients, rows: None)
        self._answering = answers and self.primary in _OF_CLASSES
        simulation, algorithm = self.simulation, self.simulation.algorithm
        blocks = [group.clients for group in self._blocks]
        scores: list[Score] = []
        if algorithm.has_personal:
            parts = []
            for group, (block, rows) in zip(
                self._blocks, simulation.personal_blocks(blocks, round_number), strict=True
            ):
                keep("personal", block, rows)
                parts.append(self._score("personal", rows, group))
            scores += self._joined(parts)
        with calling(f"{algorithm.title}, global_model"):
            shared = algorithm.global_model(simulation.server)
            if shared is not None:
                check_tensors("what it gives", shared)
        if shared is not None:
            applied, one = simulation.on_clients(shared, self._everyone.clients)
            scores += self._score("global", applied, self._everyone, shared=one)
        for name, rows in algorithm.other_models(simulation.server).items():
            mine = simulation.processes.rows_of_mine
            some = [{key: mine(value, group.clients) for key, value in rows.items()} for group in self._blocks]
            some = [simulation.with_local(own, g.targets.clients) for own, g in zip(some, self._blocks, strict=True)]
            scores += self._joined([self._score(name, *both) for both in zip(some, self._blocks, strict=True)])
        if algorithm.has_hybrid and algorithm.has_personal and shared is not None:
            scores += self._hybrid(scores)
        if len(self._newcomers.clients) and algorithm.has_personal:
            adapted = simulation.adapt(self._newcomers.clients, round_number, self.adapt_rounds)
            keep("newcomer", self._newcomers.clients, adapted)
            scores += self._score("newcomer", adapted, self._newcomers)
        scores = self._all_on_host(scores)
        self._refuse_nan(round_number, scores)
        return scores

    def _all_on_host(self, scores: list[Score]) -> list[Score]:
        """Bring all values to the host at once: what becomes of them there would wait for the device each time."""
        if not scores or scores[0].values.device.type == "cpu":
            return scores
        values = torch.cat([score.values for score in scores]).cpu().split([len(score.values) for score in scores])
        found = []
        for score, mine in zip(scores, values, strict=True):
            if id(score.clients) not in self._hosts:
                self._hosts[id(score.clients)] = score.clients, score.clients.cpu()
            found.append(replace(score, values=mine, clients=self._hosts[id(score.clients)][1]))
        return found

    def _refuse_nan(self, round_number: int, scores: list[Score]) -> None:
        """Raise :class:`~coterie.errors.Diverged` with clients whose loss on samples that they have is NaN."""
        losses = [score for score in scores if score.metric == "loss" and bool(score.values.isnan().any())]
        for score in losses:
            bad = score.values.isnan() & (self.simulation.engine.host_sizes[score.split][score.clients] > 0)
            if bool(bad.any()):
                what = f"{score.split} loss of the {score.model} model"
                raise Diverged(round_number, score.clients[bad].tolist(), what)

    def score(self, models: Mapping[str, Rows], answers: bool = False) -> list[Score]:
        """Evaluate given models, each with a row for each client, on the clients' own samples.

        ``answers`` asks for those to single samples too, which are given of classes.
        """
        self._answering = answers and self.primary in _OF_CLASSES
        group = _Group(self.simulation, self.clients, self.splits)
        scores = [each for name, rows in models.items() for each in self._score(name, rows, group)]
        if self.simulation.algorithm.has_hybrid and {"personal", "global"} <= models.keys():
            scores += self._hybrid(scores)
        return scores

    def _score(self, model: str, rows: Rows, group: _Group, shared: bool = False) -> list[Score]:
        processes, targets = self.simulation.processes, group.targets
        if not targets.splits:
            return []
        names = ("loss", *self.simulation.engine.problem.metrics)
        found, answers = processes.together(partial(self._values, model, rows, targets, shared))
        values = iter(processes.gathered(found, group.clients))
        given = {(split, "loss"): self._of_all(answers.get(split), split, group) for split in ANSWERED}
        return [
            Score(model, split, name, next(values), group.clients, given.get((split, name)))
            for split in targets.splits
            for name in names
        ]

    def _values(self, model: str, rows: Rows, targets: Targets, shared: bool) -> Measured:
        """Give the loss and every metric of each split ``[values, clients]`` for the clients here, and the answers."""
        engine, algorithm = self.simulation.engine, self.simulation.algorithm
        if not targets.here:
            shape = (len(targets.splits) * (1 + len(engine.problem.metrics)), len(targets.clients))
            return torch.full(shape, torch.nan, dtype=torch.float64, device=engine.device), {}
        wanted = Measurement(algorithm, rows, targets, shared, self._answering)
        with calling(f"{algorithm.title}, predict of the {model} model"):
            return self.simulation.processes.measure(engine, wanted)

    def _of_all(self, answers: Tensor | None, split: Split, group: _Group) -> Tensor | None:
        """Put together the answers of all processes, client after client."""
        processes, sizes = self.simulation.processes, self.simulation.engine.sizes[split]
        if processes.count == 1 or not self._answering or split not in group.targets.splits:
            return answers
        places = torch.arange(int(sizes[group.clients].max()), device=sizes.device)
        # Processes exchange columns of one length: each client's answers are padded to the longest.
        own = places < sizes[group.targets.clients].unsqueeze(1)
        padded = torch.zeros(own.shape, dtype=torch.float32, device=sizes.device)
        if answers is not None:
            padded[own] = answers
        return processes.gathered(padded.T, group.clients).T[places < sizes[group.clients].unsqueeze(1)]

    def _joined(self, parts: list[list[Score]]) -> list[Score]:
        """Put the scores of all blocks of clients together; of a block without samples there are none."""
        if len(parts) == 1:
            return parts[0]
        found = [{(score.model, score.split, score.metric): score for score in part} for part in parts]
        names = {name: None for part in found for name in part}
        out = []
        for name in names:
            missing = (torch.full_like(group.clients, torch.nan, dtype=torch.float64) for group in self._blocks)
            values = [part[name].values if name in part else none for part, none in zip(found, missing, strict=True)]
            told = [each for part in found if name in part and (each := part[name].answers) is not None]
            out.append(Score(*name, torch.cat(values), self.clients, torch.cat(told) if told else None))
        return out

    def _hybrid(self, scores: list[Score]) -> list[Score]:
        trained = {(score.model, score.split, score.metric): self._of_trainers(score) for score in scores}
        higher = metric_table.get(self.primary).higher_is_better

        def pair(split: Split, metric: str, sign: float = 1.0) -> tuple[Tensor, Tensor]:
            return sign * trained["personal", split, metric], sign * trained["global", split, metric]

        sign = 1.0 if higher else -1.0
        test = pair("test", self.primary, sign)
        chosen = {"hybrid_oracle": hybrid_oracle(*test).personal}
        if ("personal", "validation", "loss") in trained:
            accuracies, losses = pair("validation", self.primary, sign), pair("validation", "loss")
            chosen["hybrid"] = hybrid_validation(
                *test,
                personal_validation=accuracies[0],
                global_validation=accuracies[1],
                personal_loss=losses[0],
                global_loss=losses[1],
            ).personal
        return [
            Score(name, split, metric, torch.where(use_personal, *pair(split, metric)), self.clients)
            for name, use_personal in chosen.items()
            for split in self.splits
            for metric in ("loss", *self.simulation.engine.problem.metrics)
            if ("personal", split, metric) in trained
        ]

    def _of_trainers(self, score: Score) -> Tensor:
        return score.values[torch.isin(score.clients, self.clients)]
