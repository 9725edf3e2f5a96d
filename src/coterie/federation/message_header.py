"""What the header of a message may say: names and types, checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coterie.federation.wire import Rejected

_MOST = 2**31
_LONGEST = 200  # letters of a name, a token or a purpose


def _text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _maybe(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


def _tokens(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 16 and all(map(_text, value))


def _evaluation(value: object) -> bool:
    if not isinstance(value, dict) or set(value) != {"round", "base", "answers"}:
        return False
    return _count(value["round"]) and _text(value["base"]) and isinstance(value["answers"], bool)


def _settings(value: object) -> bool:
    return isinstance(value, dict) and all(map(_text, value))


_EVERY: dict[str, tuple[Callable[[object], bool], str]] = {
    "run": (_text, "a name"),
    "algorithm": (_text, "a name"),
    "settings": (_maybe(_settings), "parameters by name"),
    "token": (_maybe(_text), "a token or nothing"),
}
_WORK: dict[str, tuple[Callable[[object], bool], str]] = {
    "token": (_text, "a token"),
    "round": (_count, "a number of rounds"),
    "exchange": (_count, "a number of exchanges"),
    "purpose": (_text, "a name"),
    "task": (_maybe(_text), "a name or nothing"),
    "counted": (_maybe(_text), "a token or nothing"),
    "base": (_maybe(_text), "a token or nothing"),
    "keep": (_maybe(_tokens), "tokens"),
    "evaluate": (_maybe(_evaluation), "a round, a token and whether answers are wanted, or nothing"),
}


def check_types(header: Mapping[str, Any], is_work: bool) -> None:
    """Reject a header whose fields are not of their types; ``is_work`` is whether the message asks for something."""
    for name, (is_good, what) in (_EVERY | (_WORK if is_work else {})).items():
        value = header.get(name)
        if not is_good(value):
            raise Rejected(f"its {name} is {str(value)[:_LONGEST]!r}, but must be {what}")
