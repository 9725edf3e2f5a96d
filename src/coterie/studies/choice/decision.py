r"""The answer: whether to federate, with what, how sure that is, whom it helps and harms, and what it costs.

Whom to compare is decided on validation samples; then test samples are looked at, once. Let :math:`\bar d` be the mean
over clients of what the best federated candidate has right more than training alone does. To federate is the answer if

1. :math:`\bar d > 0` beyond chance. On validation samples by which the best was picked, chance gets the best of all
   candidates (:func:`~coterie.evaluation.better_than_reference`, over every one of them); on test samples, by which
   nothing was picked, it gets the one. The two p-values are put together, and are to be below 5 %;
2. :math:`\bar d > 0` on test samples; and
3. no more clients are harmed than are helped beyond chance, each on its own test samples
   (:func:`~coterie.results.gains`).

Otherwise the answer is to train alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie import evaluation
from coterie.algorithms import registry
from coterie.config import ExperimentConfig
from coterie.randomness import stream
from coterie.results import ClientGains, Result, client_scores, gains
from coterie.studies.choice.candidates import Candidates, is_alone, recommended
from coterie.studies.choice.stages import Stage
from coterie.studies.choice.validation import Contender, ScoreReader, ValidationScores, read_units

LEVEL = 0.05
"""Below which p-value federating is better beyond chance."""

_SURE = 4000  # draws for how sure a method is, which is told in whole percents: its standard error is below one
_NUMBERS = 2**28  # that are drawn for a test at most; with very many samples fewer draws do


@dataclass(frozen=True)
class MethodsBest:
    """The best that was found of a method.

    Parameters
    ----------
    run
        The run.
    title
        What people see the candidate called.
    round
        After which round it is the best on validation samples.
    model
        Which of its models that is.
    validation
        That model's mean over clients on validation samples.
    test
        The same on test samples, by which nothing was chosen.
    alone
        Whether it trains alone.
    """

    run: str
    title: str
    round: int
    model: str
    validation: float
    test: float
    alone: bool


@dataclass(frozen=True)
class Decision:
    """What was found.

    Parameters
    ----------
    federate
        Whether to federate.
    reasons
        Why, in sentences.
    best
        The best federated candidate.
    alone
        The best that trains alone.
    methods
        The best of every method, the best on validation samples first.
    config
        What to run: the best federated candidate's configuration, or that of training alone.
    model
        Which of its models to use: ``"personal"`` or ``"global"``.
    gain
        The best federated candidate's mean gain over training alone, on test samples.
    low
        The lower end of its 95 % interval.
    high
        The upper end.
    clients
        The gain of each client.
    validation_gain
        The mean gain on validation samples, which is what was chosen by, and so is likely to be too good.
    pvalue
        How often chance alone would give such gains, on validation and test samples together.
    validation_pvalue
        How often it would give the best of all candidates such a gain on validation samples.
    test_pvalue
        How often it would give one candidate such a gain on test samples.
    detectable
        The least mean gain that these validation samples could have told from chance.
    sure
        The share of bootstrap draws of validation samples in which its method has the best score of all that federate.
    edges
        Which of its values, and of those of training alone, are the least or the greatest that were tried.
    rounds
        The last round that anybody played.
    up
        Bytes that a client sends in a round that it takes part in.
    down
        Bytes that it receives.
    participation
        Fraction of the clients that take part in a round of the best federated candidate.
    by_samples
        Whether chance is that of samples (with accuracy) or of clients (with other metrics).
    metric
        What was measured.
    """

    federate: bool
    reasons: tuple[str, ...]
    best: MethodsBest
    alone: MethodsBest
    methods: tuple[MethodsBest, ...]
    config: ExperimentConfig
    model: str
    gain: float
    low: float
    high: float
    clients: ClientGains
    validation_gain: float
    pvalue: float
    validation_pvalue: float
    test_pvalue: float
    detectable: float
    sure: float
    edges: tuple[str, ...]
    rounds: int
    up: float
    down: float
    participation: float
    by_samples: bool
    metric: str


def decide(reader: ScoreReader, candidates: Candidates, stages: Sequence[Stage]) -> Decision:
    """Say what follows from stages that have come to their end."""
    seed = candidates.plan.seeds[0]
    diverged = {name for stage in stages for name in stage.diverged}
    every = {run.name: Result(reader.folder / run.name) for run in candidates.plan.runs if run.name not in diverged}
    alone_runs = {name for name in every if is_alone(candidates.run(name))}
    scores = reader.read(every)
    last = {each.run for each in stages[-1].ranking}  # who was dropped before has played fewer rounds
    best, alone = scores.best(last - alone_runs), scores.best(last & alone_runs)
    assert best is not None and alone is not None  # as every stage has seen to
    beyond = _beyond_chance(scores, alone, alone_runs, seed)
    number = [each for each in range(len(scores.contenders)) if scores.contenders[each].run not in alone_runs].index(
        scores.place(best)
    )
    validation_gain, pvalue, detectable = (
        float(values[number]) for values in (beyond.gains, beyond.pvalues, beyond.detectable)
    )
    # From here on nothing is chosen any more: test samples are looked at.
    clients = gains(every[best.run], every[alone.run], best.model, alone.model, at=best.round, reference_at=alone.round)
    gain, low, high = _mean_gain(clients)
    on_test = _pvalue_on_test(every, best, alone, scores.by_samples, seed)
    together = evaluation.combined_pvalue(pvalue, on_test)
    reasons, federate = _reasons(together, gain, clients)
    chosen = best if federate else alone
    size, participation = every[best.run], candidates.run(best.run).config.participation
    takes_part = int(size.summary["rounds"]) * max(1, round(participation * int(size.config["clients"])))
    firsts: dict[str, Contender] = {}
    for each in scores.ranking():
        firsts.setdefault(candidates.run(each.run).method, each)
    return Decision(
        federate=federate,
        reasons=reasons,
        best=_told(candidates, every, best, alone_runs),
        alone=_told(candidates, every, alone, alone_runs),
        methods=tuple(_told(candidates, every, each, alone_runs) for each in firsts.values()),
        config=recommended(candidates.run(chosen.run).config, chosen.round),
        model=chosen.model,
        gain=gain,
        low=low,
        high=high,
        clients=clients,
        validation_gain=validation_gain,
        pvalue=together,
        validation_pvalue=pvalue,
        test_pvalue=on_test,
        detectable=detectable,
        sure=_sure(candidates, scores, best, alone_runs, seed),
        edges=candidates.edges(best.run) + candidates.edges(alone.run),
        rounds=stages[-1].rounds,
        up=size.summary["bytes"]["up"] / takes_part,
        down=size.summary["bytes"]["down"] / takes_part,
        participation=participation,
        by_samples=scores.by_samples,
        metric=scores.metric,
    )


def _beyond_chance(
    scores: ValidationScores, alone: Contender, alone_runs: set[str], seed: int
) -> evaluation.MaximumTest:
    """Compare every federated contender with training alone, those that were dropped as they were when they were."""
    reference = scores.units[:, [scores.place(alone)]]
    others = [place for place, each in enumerate(scores.contenders) if each.run not in alone_runs]
    draws = _draws(len(scores.units))
    return evaluation.better_than_reference(
        scores.units[:, others] - reference, scores.strata, stream(seed, "choice: signs"), LEVEL, draws
    )


def _pvalue_on_test(
    results: Mapping[str, Result], best: Contender, alone: Contender, by_samples: bool, seed: int
) -> float:
    """Compare what was chosen with training alone on test samples."""
    first, second = (
        read_units(results[each.run], each.round, [each.model], "test", by_samples)[each.model]
        for each in (best, alone)
    )
    # Samples lie in the order of their clients' shares, which are those of both; of clients both must have a value.
    if not by_samples:
        first, second = first.align(second, join="inner")
    ahead = first.to_numpy() - second.to_numpy()
    strata = first.index.to_numpy() if by_samples else np.zeros(len(ahead))
    draw = stream(seed, "choice: signs of test samples")
    found = evaluation.better_than_reference(ahead[:, None], strata, draw, LEVEL, _draws(len(ahead)))
    return float(found.pvalues[0])


def _sure(candidates: Candidates, scores: ValidationScores, best: Contender, alone_runs: set[str], seed: int) -> float:
    places = [place for place, each in enumerate(scores.contenders) if each.run not in alone_runs]
    methods = [candidates.run(scores.contenders[place].run).method for place in places]
    numbers = {method: number for number, method in enumerate(dict.fromkeys(methods))}
    shares = evaluation.share_of_firsts(
        scores.units[:, places],
        scores.strata,
        [numbers[method] for method in methods],
        stream(seed, "choice: bootstrap"),
        min(_SURE, _draws(len(scores.units))),
    )
    return float(shares[numbers[candidates.run(best.run).method]])


def _draws(units: int) -> int:
    return int(np.clip(_NUMBERS // units, 1000, evaluation.paired.DRAWS))


def _mean_gain(clients: ClientGains) -> tuple[float, float, float]:
    own = clients.clients
    if clients.test == "exact":
        return evaluation.mean_interval(own["gain"], own["low"], own["high"])
    values = own["gain"].to_numpy(dtype=np.float64)
    mean, half = float(values.mean()), float("nan")
    if len(values) > 1:
        half = evaluation.student_reach(float(values.std(ddof=1)), len(values))
    return mean, mean - half, mean + half


def _reasons(pvalue: float, gain: float, clients: ClientGains) -> tuple[tuple[str, ...], bool]:
    chance = f"p = {pvalue:.2g}" if pvalue >= 0.0005 else "p < 0.0005"
    against = []
    if gain <= 0:
        against.append("on test samples the best federated candidate is no better than training alone")
    elif pvalue >= LEVEL:
        against.append(f"what the best federated candidate is ahead of training alone may be chance ({chance})")
    if clients.test and clients.harmed > clients.helped:
        against.append(f"it harms more clients than it helps beyond chance: {clients.harmed} against {clients.helped}")
    if against:
        return tuple(against), False
    reasons = [f"the best federated candidate is better than training alone beyond chance ({chance})"]
    if clients.test:
        count = [str(each) if each else "nobody" for each in (clients.helped, clients.harmed)]
        reasons.append(
            f"client by client, it helps {count[0]} and harms {count[1]} of {len(clients)} beyond chance, each judged "
            "by its own test samples"
        )
    return tuple(reasons), True


def _told(
    candidates: Candidates, results: Mapping[str, Result], contender: Contender, alone_runs: set[str]
) -> MethodsBest:
    test = client_scores(results[contender.run], contender.model, contender.round)
    return MethodsBest(
        contender.run,
        candidates.title(contender.run),
        contender.round,
        contender.model,
        contender.score,
        float(test.mean()),
        contender.run in alone_runs,
    )


def settings_of(config: ExperimentConfig) -> dict[str, Any]:
    """Give the parameters of a method that are not at their defaults."""
    defaults = registry.make(config.algorithm, {}).settings()
    own = registry.make(config.algorithm, config.settings).settings()
    return {name: value for name, value in own.items() if name not in defaults or defaults[name] != value}
