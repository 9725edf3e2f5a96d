"""What is put in last stays; putting it in again makes it the newest again."""

from __future__ import annotations

from coterie.compute.cache import BoundedCache


def test_the_oldest_goes_first() -> None:
    kept: BoundedCache[str, int] = BoundedCache(2)
    for number, name in enumerate("abc"):
        kept[name] = number
    assert kept == {"b": 1, "c": 2}


def test_what_is_put_in_again_is_the_newest() -> None:
    kept: BoundedCache[str, int] = BoundedCache(2)
    for number, name in enumerate("abac"):
        kept[name] = number
    assert kept == {"a": 2, "c": 3} and kept.get("b") is None
