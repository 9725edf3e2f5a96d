"""Evaluation of all clients: every model on each client's own samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from coterie.compute.samples import Split
from coterie.evaluation import metrics as metric_table
from coterie.evaluation.selection import hybrid_oracle, hybrid_validation
from coterie.rows import Rows
from coterie.simulation.simulation import Simulation


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
    """

    model: str
    split: Split
    metric: str
    values: Tensor
    clients: Tensor


@dataclass(frozen=True)
class _Wanted:
    """What the models should give for some clients' samples: the same in every round, so made once."""

    splits: tuple[Split, ...]  # of which any client has samples
    here: tuple[Split, ...]  # of which a client has some that is computed in this process
    clients: Tensor  # those that are computed in this process
    targets: Tensor  # of all their samples, split after split and client after client
    offsets: Tensor  # where each client's samples of each split begin, and the last one's end


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
        self.simulation, self.clients, self.newcomers = simulation, clients, newcomers
        self.splits, self.adapt_rounds = splits, adapt_rounds
        self.primary = simulation.engine.problem.metrics[0]
        self._everyone = torch.cat([clients, newcomers]).sort().values if len(newcomers) else clients
        self._blocks = simulation.blocks(clients)
        self._known: dict[int, _Wanted] = {}

    def scores(self, round_number: int) -> list[Score]:
        """Evaluate every model on every client's own samples.

        Parameters
        ----------
        round_number
            The round that was played last.

        Returns
        -------
        list of Score
            All scores.
        """
        simulation, algorithm = self.simulation, self.simulation.algorithm
        scores: list[Score] = []
        if algorithm.has_personal:
            made = simulation.personal_blocks(self._blocks, round_number)
            scores += self._joined([self._of("personal", rows, block) for block, rows in made])
        shared = algorithm.global_model(simulation.server)
        if shared is not None:
            scores += self._of("global", shared, self._everyone, shared=True)
        for name, rows in algorithm.other_models(simulation.server).items():
            some = ({key: simulation.my_rows(value, block) for key, value in rows.items()} for block in self._blocks)
            scores += self._joined([self._of(name, one, block) for one, block in zip(some, self._blocks, strict=True)])
        if algorithm.has_hybrid and algorithm.has_personal and shared is not None:
            scores += self._hybrid(scores)
        if len(self.newcomers) and algorithm.has_personal:
            adapted = simulation.adapt(self.newcomers, round_number, self.adapt_rounds)
            scores += self._of("newcomer", adapted, self.newcomers)
        return scores

    def _of(self, model: str, rows: Rows, clients: Tensor, shared: bool = False) -> list[Score]:
        simulation = self.simulation
        names = ("loss", *simulation.engine.problem.metrics)
        wanted = self._wanted(clients)
        if not wanted.splits:
            return []
        found = simulation.apart(partial(self._values, rows, wanted, shared))
        values = iter(simulation.everyones(found, clients))
        return [Score(model, split, name, next(values), clients) for split in wanted.splits for name in names]

    def _values(self, rows: Rows, wanted: _Wanted, shared: bool) -> Tensor:
        """Give the loss and every metric of each split ``[values, clients]`` for the clients of this process."""
        engine = self.simulation.engine
        metrics, predict = engine.problem.metrics, self.simulation.algorithm.predict
        shape = (len(wanted.splits), 1 + len(metrics), len(wanted.clients))
        out = torch.full(shape, torch.nan, dtype=torch.float64, device=engine.device)
        if wanted.here:
            # All splits at once, as if a client's samples of one were another client's.
            outputs = torch.cat(engine.predict_all(predict, rows, wanted.clients, wanted.here, shared))
            losses = engine.problem.loss(outputs, wanted.targets).double()
            values = [metric_table.segment_mean(losses, wanted.offsets)]
            values += [
                metric_table.per_client(name, outputs, wanted.targets, wanted.offsets).double() for name in metrics
            ]
            which = [wanted.splits.index(split) for split in wanted.here]
            out[which] = torch.stack(values).unflatten(1, (len(which), -1)).transpose(0, 1)
        return out.flatten(0, 1)

    def _joined(self, parts: list[list[Score]]) -> list[Score]:
        """Put the scores of all blocks of clients together; of a block without samples there are none."""
        if len(parts) == 1:
            return parts[0]
        found = [{(score.model, score.split, score.metric): score for score in part} for part in parts]
        names = {name: None for part in found for name in part}
        out = []
        for name in names:
            missing = (torch.full_like(block, torch.nan, dtype=torch.float64) for block in self._blocks)
            values = [part[name].values if name in part else none for part, none in zip(found, missing, strict=True)]
            out.append(Score(*name, torch.cat(values), self.clients))
        return out

    def _wanted(self, clients: Tensor) -> _Wanted:
        """Give what is wanted of some clients' samples; for all of a block made once."""
        kinds = (*self._blocks, self._everyone, self.newcomers)
        key = next((number for number, kind in enumerate(kinds) if kind is clients), None)
        if key is not None and key in self._known:
            return self._known[key]
        engine, mine = self.simulation.engine, self.simulation.mine(clients)
        splits = tuple(split for split in self.splits if bool(engine.sizes[split][clients].any()))
        here = tuple(split for split in splits if bool(engine.sizes[split][mine].any()))
        index = [engine.samples.flat_index(mine, split) for split in here]
        ends = torch.cat([engine.sizes[split][mine] for split in here] or [mine.new_zeros(0)]).cumsum(0)
        found = _Wanted(
            splits,
            here,
            mine,
            engine.samples.y[torch.cat(index or [mine.new_zeros(0)])],
            torch.cat([ends.new_zeros(1), ends]),
        )
        if key is not None:
            self._known[key] = found
        return found

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
