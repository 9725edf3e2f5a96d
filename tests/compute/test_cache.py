"""What is put in last stays; putting it in again makes it the newest again."""

from __future__ import annotations

import weakref

import torch

from coterie.compute._cache import BoundedCache, Identity


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


def test_identities_are_of_the_object_and_not_of_its_value() -> None:
    one, same = torch.tensor([1, 2]), torch.tensor([1, 2])
    known = {Identity(one): "one"}
    assert known.get(Identity(one)) == "one" and Identity(same) not in known
    assert Identity(one) != one


def test_an_identity_keeps_its_object_alive() -> None:
    class Thing:
        pass

    thing = Thing()
    left, key = weakref.ref(thing), Identity(thing)
    del thing
    assert left() is not None
    del key
    assert left() is None
