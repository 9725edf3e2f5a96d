"""What is put in last stays; putting it in again makes it the newest again."""

from __future__ import annotations

from coterie.engines.newest import Newest


def test_the_oldest_goes_first() -> None:
    kept: Newest[str, int] = Newest(2)
    for number, name in enumerate("abc"):
        kept[name] = number
    assert kept == {"b": 1, "c": 2}


def test_what_is_put_in_again_is_the_newest() -> None:
    kept: Newest[str, int] = Newest(2)
    for number, name in enumerate("abac"):
        kept[name] = number
    assert kept == {"a": 2, "c": 3} and kept.get("b") is None
