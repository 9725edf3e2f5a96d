from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator, Field

from coterie.errors import ConfigError, UnknownName
from coterie.options import Spec, resolve


class Thing(Spec):
    """A thing.

    More about it.
    """

    kind: ClassVar[str] = "thing"
    name: ClassVar[str] = "thing"
    citation: ClassVar[str] = "nobody"
    positional: ClassVar[str | None] = "weight"

    weight: float = Field(0.5, gt=0, le=9, description="how heavy")
    count: int | None = Field(None, ge=1, description="how many")
    shiny: bool = Field(False, description="whether it shines")
    mode: Literal["a", "b"] = Field("a", description="which")
    parts: (
        Annotated[
            tuple[Annotated[int, Field(ge=0)], ...],
            BeforeValidator(lambda value: value.split("+") if isinstance(value, str) else value),
        ]
        | None
    ) = None


class Filed(Spec):
    """Something in a file."""

    kind: ClassVar[str] = "thing"
    name: ClassVar[str] = "filed"
    citation: ClassVar[str] = "nobody"
    positional: ClassVar[str | None] = "path"

    path: Path
    label: str = "y"


KNOWN = {"thing": Thing, "filed": Filed}


def test_bare_value_and_keys() -> None:
    thing = resolve("thing", "thing:2, count = 3 ,shiny=true,parts=1+2", KNOWN)
    assert thing == Thing(weight=2, count=3, shiny=True, parts=(1, 2))


def test_nothing_but_the_name_is_the_default() -> None:
    assert resolve("thing", "thing", KNOWN) == resolve("thing", "thing:", KNOWN) == Thing()


@given(
    weight=st.floats(0.001, 9),
    count=st.none() | st.integers(1, 1000),
    shiny=st.booleans(),
    mode=st.sampled_from(["a", "b"]),
    parts=st.none() | st.lists(st.integers(0, 50), min_size=1, max_size=4).map(tuple),
)
def test_canonical_text_reads_back_as_the_same(weight, count, shiny, mode, parts) -> None:
    thing = Thing(weight=weight, count=count, shiny=shiny, mode=mode, parts=parts)
    assert resolve("thing", thing.text(), KNOWN) == thing


@pytest.mark.parametrize(
    "path", ["a", "/tmp/a,b.csv", "C:\\data\\x.csv", "a=b/c=d,e", "x,y=3", "a b", "~nobody/a,b=" + "c" * 5000]
)
def test_paths_may_hold_commas_and_equals_signs(path: str) -> None:
    assert resolve("thing", f"filed:{path}", KNOWN) == Filed(path=Path(path))
    assert resolve("thing", f"filed:{path},label=z", KNOWN) == Filed(path=Path(path), label="z")


@pytest.mark.parametrize("rest", [",labl=z", ",labl=z,label=y", ",label=y,labl=z"])
def test_a_parameter_behind_a_path_that_exists_is_not_taken_for_a_part_of_it(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "d.npz"
    path.touch()
    with pytest.raises(ConfigError, match=r"has no parameter 'labl': did you mean 'label'\?"):
        resolve("thing", f"filed:{path}{rest}", KNOWN)
    named = Path(f"{path}{rest.removesuffix(',label=y')}")
    named.touch()
    assert resolve("thing", f"filed:{path}{rest}", KNOWN).path == named


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thing:heavy", ["weight", "'heavy'", "number > 0 and ≤ 9"]),
        ("thing:0", ["weight", "'0'", "> 0"]),
        ("thing:nan", ["weight", "nan"]),
        ("thing:inf", ["weight", "inf"]),
        ("thing:1,count=1.5", ["count", "'1.5'", "integer ≥ 1"]),
        ("thing:1,mode=c", ["mode", "'c'", "a or b"]),
        ("thing:1,shiny=perhaps", ["shiny", "true or false"]),
        ("thing:1,colour=red", ["colour", "weight, count, shiny, mode, parts"]),
        ("thing:1,weight=2", ["weight", "twice"]),
        ("thing:1,count=1,count=1", ["count", "twice"]),
        ("thing:1,parts=1+x", ["parts", "'x'", "integer ≥ 0 values joined by +"]),
        ("filed", ["path", "must be given"]),
    ],
)
def test_mistakes_are_one_sentence_that_names_field_value_and_allowed(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("thing", text, KNOWN)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_unknown_name_says_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'thing'"):
        resolve("thing", "thin:3", KNOWN)


def test_parameters_are_described() -> None:
    weight, count, _, mode, _ = Thing.parameters()
    assert (weight.name, weight.default, weight.allowed, weight.doc) == (
        "weight",
        "0.5",
        "number > 0 and ≤ 9",
        "how heavy",
    )
    assert (count.allowed, count.default) == ("integer ≥ 1", "auto")
    assert resolve("thing", "thing:1,count=auto", KNOWN) == Thing(weight=1)
    assert mode.allowed == "a or b"
    assert Thing.summary() == "A thing."
