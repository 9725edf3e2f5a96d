"""Objects in place of text: what a program hands over of data, model, loss and method, written as a configuration is.

A configuration is text. An object is held in memory under its digest and named by it, so that a run's folder says what
it was made with, and a resumed run is made with the same or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie import user_code
from coterie.algorithms import registry
from coterie.algorithms.base import Algorithm
from coterie.data.registry import SOURCES
from coterie.errors import ConfigError
from coterie.models import handed_over as models
from coterie.options import resolve
from coterie.user_code import OBJECT, HeldObject
from coterie.user_code.digests import digest_of

BESIDE_DATA = ("test", "owners")
"""What may be handed over beside data: samples to test on, and whose each sample is."""


def as_text(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[HeldObject]]:
    """Give settings in which every object is named by text, and the objects, to be kept while they are used."""
    out, held = dict(values), list[HeldObject]()
    if out.get("algorithm") is not None and not isinstance(out["algorithm"], str):
        out |= method(out["algorithm"], out)
    if not isinstance(out.get("data"), str | None):
        from coterie.data.objects import OPTIONS, hand_over

        options = {name: out.pop(name) for name in (*OPTIONS, *BESIDE_DATA) if out.get(name) is not None}
        kept, out["data"] = hand_over(out["data"], **options)
        held.append(kept)
    else:
        _refuse_options(out)
    for field, hand in (("model", models.hand_over), ("loss", _hand_over_loss)):
        if not isinstance(out.get(field), str | None):
            kept = hand(out[field])
            out[field] = kept.text
            held.append(kept)
    return out, held


def _refuse_options(values: Mapping[str, Any]) -> None:
    beside = [name for name in ("label", "client", "owners", "test") if values.get(name) is not None]
    if beside:
        raise ConfigError(
            f"{beside[0]} is given, but data is {values.get('data', 'digits')!r}, a text: write what is to be said of "
            "it there, as in table:a.csv,label=outcome,client=hospital"
        )


def method(given: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Register the class of a method, or of an object that is one, and give its name and settings."""
    if not isinstance(given, Algorithm):
        return {"algorithm": registry.hand_over(given)}
    name = registry.hand_over(type(given))
    for other in ("settings", "lr", "local_epochs", "batch_size"):
        if values.get(other):
            raise ConfigError(
                f"{other} is {values[other]!r}, but algorithm is an object with settings of its own: give its class "
                f"{type(given).__name__} instead, or the settings to the object"
            )
    settings = given.settings()
    if registry.make(name, settings) != given:
        raise ConfigError(
            f"algorithm is a {type(given).__name__} with more than its settings, which cannot be written down: make it "
            "of its fields alone"
        )
    return {"algorithm": name, "settings": settings}


def _hand_over_loss(loss: Any) -> HeldObject:
    if not callable(loss):
        raise ConfigError(
            f"loss is a {type(loss).__name__}, but must be a name, or a function of outputs and targets that gives a "
            "loss for each sample"
        )
    return user_code.hold(getattr(loss, "__name__", type(loss).__name__), digest_of(loss), loss, keep=True)


def hand_over_again(stored: Mapping[str, Any], given: Mapping[str, Any], where: str) -> list[HeldObject]:
    """Hold the objects of a run that goes on; each must be what the run began with."""
    held = list[HeldObject]()
    given = {name: value for name, value in given.items() if value is not None}
    if "algorithm" in given:
        name = method(given["algorithm"], {})["algorithm"] if not isinstance(given["algorithm"], str) else ""
        if (name, registry.handed_over(name)) != (stored.get("algorithm"), stored.get("algorithm_sha256")):
            raise ConfigError(_differs("algorithm", str(stored.get("algorithm")), where))
    for field in ("data", "model", "loss"):
        text = str(stored.get(field))
        if field not in given:
            continue
        if not text.startswith(OBJECT):
            raise ConfigError(
                f"{field} is handed over, but the run in {where} has {text!r}, which is no object: leave it out"
            )
        if field == "data":
            from coterie.data.objects import OPTIONS, hand_over

            source = resolve("data set", text, SOURCES)
            options = {name: getattr(source, name) for name in OPTIONS if name in source.model_fields_set}
            found, _ = hand_over(
                given["data"], **options, **{name: given[name] for name in BESIDE_DATA if name in given}
            )
        else:
            found = models.hand_over(given[field]) if field == "model" else _hand_over_loss(given[field])
        if user_code.digest_in(text) != found.digest:
            raise ConfigError(_differs(field, user_code.as_given(text), where))
        held.append(found)
    return held


def _differs(field: str, text: str, where: str) -> str:
    return (
        f"{field} is not what the run in {where} began with ({text!r}, whose digest differs): hand over the same "
        "again, or begin a new run"
    )
