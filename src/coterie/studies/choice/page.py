"""The page and the file that a choice leaves."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import yaml

from coterie.config import ExperimentConfig
from coterie.results import figures
from coterie.results.report.elements import Markup, Plot, Section, Variant, bullets, paragraph, table
from coterie.results.report.page import page
from coterie.studies.choice import words
from coterie.studies.choice.candidates import Candidates
from coterie.studies.choice.decision import LEVEL, Decision
from coterie.studies.choice.stages import Stage
from coterie.user_code import OBJECT
from coterie.version import __version__

_HOW = (
    "Candidates were dropped and one was chosen by validation samples alone. What is said about gains stands on test "
    "samples, which were looked at once, when all had been chosen.",
    "Training alone is the answer unless three things hold: the best federated candidate is better beyond chance "
    f"(p < {LEVEL}, put together from validation samples, where chance has all candidates to pick from, and test "
    "samples, where it has one), it is better on test samples, and it does not harm more clients than it helps beyond "
    "chance.",
    "A candidate stands by its best round, or by more rounds that are as good within one standard error: more rounds "
    "can be worse, and how many there should be is chosen like all else. Of candidates that are as good as the best "
    "within one standard error, the one with the least loss on validation samples is first.",
    "From the third stage on it ends where neither the best of what federates nor the best of training alone is "
    "better, by two standard errors, than the best of the same candidates was before. More rounds may still have "
    "helped a little.",
    "Candidates that were dropped early might have won with more rounds; so the first cut leaves every method its two "
    "best settings.",
    "Another split of the samples (--seed) may choose another of nearly equal methods.",
)
_BY_CLIENT = "How much better each client is served than by training alone, on its own test samples."
_TESTED = (
    "Colours say whether chance explains the difference: McNemar's exact test, with at most 5 % false discoveries "
    "expected among those called helped or harmed (Benjamini and Hochberg). Lines are 95 % intervals of each client by "
    "itself."
)
_NOT_TESTED = "Whether chance explains a client's difference can be said of accuracy alone."


def write_page(decision: Decision, candidates: Candidates, stages: Sequence[Stage], file: str) -> str:
    """Write the page."""
    config = candidates.plan.runs[0].config
    seconds = sum(stage.seconds for stage in stages)
    about = (
        f"data {config.data} · {len(decision.clients)} clients · {len(candidates.plan.runs)} candidates · "
        f"{seconds / 60:.1f} minutes · coterie {__version__}"
    )
    answer = [
        Markup(f"<p><strong>{html.escape(words.headline(decision))}</strong></p>"),
        bullets(words.reasons(decision)),
        bullets([*words.findings(decision), words.cost(decision)]),
    ]
    gains = [*_pictures(decision), table(words.client_table(decision))]
    run = [_code("\n".join(words.commands(decision.config, file, decision.federate))), _code(_as_yaml(decision.config))]
    sections = [
        Section("answer", "Does federating help?", tuple(answer)),
        Section("clients", "Whom it helps and whom it harms", tuple(gains)),
        Section("method", "Which method", (table(words.method_table(decision)),)),
        Section("run", "Run it", tuple(run)),
        Section("stages", "All candidates", (table(words.stage_table(candidates, stages)),)),
        Section("how", "How it was decided", tuple(paragraph(each) for each in _HOW)),
    ]
    return page("Does federating help, and with which method?", about, sections)


def yaml_text(decision: Decision) -> str:
    """Write the file that runs what was chosen, with what it is in comments."""
    lines = [words.headline(decision), *words.reasons(decision), *words.findings(decision), words.cost(decision)]
    if decision.config.data.startswith(OBJECT) or decision.config.model.startswith(OBJECT):
        lines.append("Data or model were objects of a program: hand them over again, as coterie.run takes them.")
    head = "".join(f"# {' '.join(line.split())}\n" for line in lines)  # a client's name may have several lines
    return head + _as_yaml(decision.config)


def _as_yaml(config: ExperimentConfig) -> str:
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def _plain(config: ExperimentConfig) -> dict[str, Any]:
    """Give what is not at its default, and what names the experiment."""
    named = ("algorithm", "data", "partition", "clients", "rounds", "model", "seed")
    fields, plain = ExperimentConfig.model_fields, config.plain()
    found = {name: value for name, value in plain.items() if name in named or value != fields[name].get_default()}
    defaults = {name: list(fields[name].get_default()) for name in ("metrics", "s_acc")}
    found = {name: value for name, value in found.items() if name not in defaults or value != defaults[name]}
    return {**found, "settings": plain["settings"]}


def _pictures(decision: Decision) -> list[Markup | Plot]:
    chart = figures.gains_by_client(decision.clients.clients, f"gain in {decision.metric}")
    title = f"{decision.best.title} against {decision.alone.title}"
    caption = f"{_BY_CLIENT} {_TESTED if decision.clients.test else _NOT_TESTED}"
    return [Plot("who-gains", title, caption, (Variant("", chart),))]


def _code(text: str) -> Markup:
    return Markup(
        f'<div class="code"><button type="button" class="copy">Copy</button><pre>{html.escape(text)}</pre></div>'
    )
