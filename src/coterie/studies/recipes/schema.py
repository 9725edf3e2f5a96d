"""What a recipe's file holds: the setting, the plans, how numbers are read off the runs, the paper's, and criteria.

A file of the book, in short (``book/fedamp-table3.yaml`` is a whole one)::

    name: fedamp-table3                     # the file's own name
    title: FedAMP, Table 3                  # one line
    paper: fedamp                           # fedacs, fedamp, fedpg or flame
    source: Table 3
    unit: percent                           # or fraction: how the paper writes accuracies, and so we do
    about: >-                               # plain words: the setting, what is known of it, what had to be decided
      …
    parts:
      - name: fmnist
        title: Fashion-MNIST
        plan:                               # exactly what `coterie compare` takes, for the whole version
          methods: [local, {algorithm: fedavg_ft, name: FedAvg-FT}]
          seeds: [1, 10, 100, 1000, 10000]
          grid: {partition: ["q_label:2", "q_label:3"]}
          data: fashion_mnist
          clients: 100
          rounds: 100
        labels:                             # what points of the grid are called; "name=value" where nothing is said
          partition: {"q_label:2": "#label=2", "q_label:3": "#label=3"}
        quick: {data: digits, clients: 20, rounds: 20, seeds: [1]}   # over the plan; without it the part is left out
        at: best_oracle                     # final, best (on validation data) or best_oracle (on test data)
        tuned_by: global                    # whose validation accuracy tuning compares, where a method has that model
        readings:                           # the columns; the first is what criteria mean unless they say
          accuracy: {model: personal, models: {FedAvg: global}}
          variance: {metric: loss, over: variance, at: final}
          p: {paired: pvalue, against: FedAMP}
          contrast: {weights: contrast}
        numbers:                            # the paper's
          readings: [accuracy]              # by default all readings, in their order
          rows:                             # "METHOD", or with a grid "METHOD | SETTING"; null where it prints none
            "local | #label=2": [0.9835±0.0034]
            "FedAvg-FT | #label=2": 0.9642  # a list may be left out for a single reading
        not_targets:
          - cells: ["FedAvg-FT | accuracy"] # "METHOD", "METHOD | READING", "METHOD | READING | SETTING"; * for METHOD
            why: the paper's program fine-tunes another model.
    criteria:
      - name: first
        says: FedAMP is above every other method.
        parts: [fmnist]                     # by default all; each is judged by itself
        settings: ["#label=2"]              # by default each point of the grid is judged by itself
        above: {of: [FedAMP], than: ["*"], by: 0.5}
        leave_out: [HeurFedAMP]             # methods that * does not stand for, besides those that are named
        quick: true                         # expected to hold in the quick version too
        note: …                             # what else to know, one line

A criterion has exactly one of these; ``of`` and ``than`` list terms (:mod:`coterie.studies.recipes.cells`):

========  =========================================  =====================================================
above     ``{of, than, by: 0}``                      every ``of`` exceeds every ``than`` by more than ``by``
at_least  ``{of, than, slack: 0}``                   no ``of`` is below a ``than`` by more than ``slack``
close     ``{of, within}``                           the largest and the smallest are at most that far apart
between   ``{of, low, high}``                        each lies in these limits (one may be left out), both included
monotone  ``{of, direction: up or down, slack: 0}``  in this order, no step goes against the direction by more than
                                                     ``slack``, and the last is beyond the first
near      ``{of, within}``                           each is at most that far from the paper's number
========  =========================================  =====================================================

Numbers in criteria are in the recipe's unit, as in its tables. ``take: mean`` averages every term over the parts and
settings that the criterion speaks of, and judges once.

``like: fedamp-table3/fmnist`` in a part takes ``plan``, ``quick`` and ``labels`` from that part of that recipe, so
that a figure can be read off a table's runs (``coterie recipe run FIGURE --runs FOLDER-OF-THE-TABLE``).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from coterie.results import MODELS, At
from coterie.studies.recipes.cells import Address, PaperNumber, Term

KINDS = ("above", "at_least", "close", "between", "monotone", "near")
"""What a criterion can say."""

KNOWN_MODELS = (*MODELS, "cloud")
"""Models that can be read: those of summaries, and the cloud models of message passing."""

Fraction = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", description="small letters and digits, with hyphens")]
Terms = Annotated[tuple[Term, ...], Field(min_length=1)]
Margin = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)


class Reading(_Strict):
    """One number that is read off the runs of a method: a column of the table.

    Of every run one number is taken, a statistic over its clients; clients that attack are not counted. Cells hold the
    mean over seeds. Weights and paired tests are the two other kinds of reading.
    """

    title: str = Field("", description="the column's heading; the reading's name if not given")
    model: str = Field("personal", description="personal, global, hybrid, hybrid_oracle, or a method's own, as cloud")
    models: dict[str, str] = Field(default_factory=dict, description="for single methods, another model than that")
    metric: str | None = Field(
        None, description="loss, or a metric's name; of cross l_acc, g_acc or s_acc FRACTION; the primary one if absent"
    )
    split: Literal["test", "validation", "train", "cross"] = Field(
        "test", description="whose samples; cross reads the accuracy matrix, train needs eval_train in the plan"
    )
    over: Literal["mean", "std", "variance", "median", "worst", "worst_tenth"] = Field(
        "mean", description="the statistic over clients, divisors their number"
    )
    spread: Literal["seeds", "clients"] = Field(
        "seeds",
        description="what our plus-minus sign stands before: deviation over seeds, or over clients",
    )
    of_seeds: Literal["mean", "std"] = Field(
        "mean", description="what the cell holds of the seeds' numbers: their mean, or their deviation (two at least)"
    )
    at: At | Literal["mean"] | Fraction | None = Field(
        None,
        description="when: as the part's; mean for the average over all evaluated rounds; or a fraction of the rounds",
    )
    weights: Literal["contrast", "recovery"] | None = Field(
        None, description="of the last collaboration weights: within groups over between, or the Rand index of groups"
    )
    paired: Literal["pvalue", "ahead", "difference"] | None = Field(
        None,
        description="client by client with `against`: Wilcoxon's p, share of clients on which this method is ahead "
        "(ties count half), median difference",
    )
    against: str | None = Field(None, description="the method to pair with")
    scale: float | None = Field(None, gt=0, description="factor on our number; by default 100 for a percent's accuracy")
    decimals: int | None = Field(None, ge=0, le=8, description="digits shown; by default 2 for percent, else 4")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.paired is None) != (self.against is None):
            raise ValueError("paired and against belong together: give both or none")
        if self.weights is not None and (self.paired is not None or self.metric is not None):
            raise ValueError("weights reads collaboration weights: leave out metric and paired")
        if self.of_seeds == "std" and (self.weights is not None or self.paired is not None or self.spread != "seeds"):
            raise ValueError("of_seeds std is the deviation over seeds: leave out weights, paired, spread")
        if self.split == "cross" and self.metric is None:
            raise ValueError(
                "split cross needs a metric: l_acc, g_acc, s_acc FRACTION, or accuracy of the global model"
            )
        kind, _, fraction = (self.metric or "").partition(" ")
        if fraction and (kind != "s_acc" or not re.fullmatch(r"[01]?\.?\d+", fraction)):
            raise ValueError(f"the metric {self.metric!r} must be a metric's name, or s_acc with a fraction")
        for name in (self.model, *self.models.values()):
            if name not in KNOWN_MODELS:
                raise ValueError(f"there is no model {name!r}: known are {', '.join(KNOWN_MODELS)}")
        if self.paired is not None and (self.over != "mean" or isinstance(self.at, float) or self.at == "mean"):
            raise ValueError("paired compares clients at one round: leave out over, and let at be final or best")
        return self


def _listed(given: Any) -> Any:
    return given if isinstance(given, list | tuple) else [given]


class PaperNumbers(_Strict):
    """The paper's numbers of one part, a row for each method and setting."""

    readings: tuple[str, ...] = Field((), description="which readings the rows give, in order; all if not given")
    rows: dict[str, Annotated[tuple[PaperNumber | None, ...], BeforeValidator(_listed)]] = Field(
        default_factory=dict, description='numbers by "METHOD" or "METHOD | SETTING"'
    )


class NotTarget(_Strict):
    """Numbers of the paper that a right program does not reach, and why."""

    cells: tuple[str, ...] = Field(min_length=1, description="addresses; * for METHOD means all methods")
    why: str = Field(min_length=1, description="one sentence")

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The cells, read."""
        return tuple(Address.parse(text) for text in self.cells)


class Above(_Strict):
    """Every ``of`` exceeds every ``than`` by more than ``by``."""

    of: Terms
    than: Terms
    by: Margin = 0.0


class AtLeast(_Strict):
    """No ``of`` is below a ``than`` by more than ``slack``."""

    of: Terms
    than: Terms
    slack: Margin = 0.0


class Close(_Strict):
    """The largest and the smallest are at most ``within`` apart."""

    of: Terms
    within: Margin


class Between(_Strict):
    """Each lies between two limits, both included; one may be left out."""

    of: Terms
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _limited(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("between needs low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"between has low {self.low:g} above high {self.high:g}")
        return self


class Monotone(_Strict):
    """No step goes against the direction by more than ``slack``, and the last is beyond the first."""

    of: Annotated[tuple[Term, ...], Field(min_length=2)]
    direction: Literal["up", "down"]
    slack: Margin = 0.0


class Near(_Strict):
    """Each is at most ``within`` from the paper's number."""

    of: Terms
    within: Margin


Test = Above | AtLeast | Close | Between | Monotone | Near
"""What a criterion says of its terms."""


class Criterion(_Strict):
    """One thing that must hold for the paper's finding to be reproduced."""

    name: Name = Field(description="what it is called, once in a recipe")
    says: str = Field(min_length=1, description="the finding, one sentence")
    parts: tuple[str, ...] = Field((), description="parts it speaks of; all if none is named")
    settings: tuple[str, ...] = Field((), description="points of the grid it speaks of; all if none is named")
    take: Literal["each", "mean"] = Field("each", description="judge every part and setting, or their means once")
    leave_out: tuple[str, ...] = Field((), description="methods that * does not stand for either")
    quick: bool = Field(False, description="expected to hold in the quick version too")
    always: bool = Field(False, description="true by definition, so that seeds leave nothing open")
    note: str = Field("", description="what else there is to know of it, one sentence")
    above: Above | None = None
    at_least: AtLeast | None = None
    close: Close | None = None
    between: Between | None = None
    monotone: Monotone | None = None
    near: Near | None = None

    @model_validator(mode="after")
    def _one_test(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"the criterion {self.name!r} must have exactly one of {', '.join(KINDS)}, not {found}")
        return self

    @property
    def test(self) -> Test:
        """What it says of its terms."""
        found: Test = next(test for kind in KINDS if (test := getattr(self, kind)) is not None)
        return found

    @property
    def terms(self) -> tuple[Term, ...]:
        """All terms that it names."""
        test = self.test
        return (*test.of, *(test.than if isinstance(test, Above | AtLeast) else ()))


class RecipePart(_Strict):
    """One comparison of a recipe, as a rule one data set: its plan, and what is read off its runs."""

    name: Name = Field(description="its name, also of its folder")
    title: str = Field("", description="its heading; its name if not given")
    note: str = Field("", description="what else there is to know of it, one sentence")
    like: str | None = Field(None, description="RECIPE/PART whose plan, quick and labels it has")
    plan: dict[str, Any] = Field(description="what `coterie compare` takes")
    labels: dict[str, dict[Any, str]] = Field(
        default_factory=dict, description="for names of the grid, what its values are called"
    )
    quick: dict[str, Any] | None = Field(
        None, description="values over the plan's for the quick version; without it the part is left out there"
    )
    at: At = Field("final", description="at which round numbers are read, unless a reading says otherwise")
    tuned_by: str | None = Field(
        None, description="the model that tuning compares where a method has it; that of the first reading if absent"
    )
    readings: dict[str, Reading] = Field(min_length=1, description="the columns")
    numbers: PaperNumbers = Field(default_factory=PaperNumbers, description="the paper's")
    not_targets: tuple[NotTarget, ...] = Field((), description="numbers of the paper that are not to be reached")

    @model_validator(mode="after")
    def _known_model(self) -> Self:
        if self.tuned_by is not None and self.tuned_by not in MODELS:
            raise ValueError(f"tuned_by is {self.tuned_by!r}, but must be one of {', '.join(MODELS)}")
        return self

    @property
    def heading(self) -> str:
        """What tables call it."""
        return self.title or self.name

    @property
    def data_set(self) -> str:
        """What its data set is called, with which its heading begins."""
        return self.heading.partition(", ")[0].partition(" with ")[0]


class Recipe(_Strict):
    """A table or a figure of a paper."""

    name: Name = Field(description="its name, as of its file")
    title: str = Field(min_length=1, description="one line")
    paper: Literal["fedacs", "fedamp", "fedpg", "flame"] = Field(description="which paper")
    source: str = Field(min_length=1, description="which table or figure")
    unit: Literal["percent", "fraction"] = Field("percent", description="how accuracies are written")
    about: str = Field(min_length=1, description="the setting, what is known of it, what had to be decided")
    parts: tuple[RecipePart, ...] = Field(min_length=1, description="its comparisons")
    criteria: tuple[Criterion, ...] = Field((), description="what must hold")

    def part(self, name: str) -> RecipePart:
        """Give one of its parts.

        Parameters
        ----------
        name
            The part's name, which must be there.

        Returns
        -------
        RecipePart
            The part.
        """
        return next(part for part in self.parts if part.name == name)
