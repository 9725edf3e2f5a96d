"""The recipes there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, UnknownName
from coterie.yaml_file import read_yaml

if TYPE_CHECKING:
    from coterie.studies.recipes.schema import Recipe

BOOK = Path(__file__).parent / "book"
"""The folder of the recipes' files."""

_SHARED = ("plan", "quick", "labels")


@dataclass(frozen=True)
class RecipeInfo:
    """A recipe in one line.

    Parameters
    ----------
    name
        Its name.
    paper
        Which paper.
    source
        Which table or figure of it.
    title
        What it shows.
    """

    name: str
    paper: str
    source: str
    title: str


def names() -> list[str]:
    """Name all recipes of the book.

    Returns
    -------
    list of str
        By paper, tables before figures.
    """
    return [entry.name for entry in entries()]


def entries() -> list[RecipeInfo]:
    """List the book.

    Returns
    -------
    list of RecipeInfo
        By paper, tables before figures, in the papers' order.
    """
    found = []
    for path in BOOK.glob("*.yaml"):
        values = read_yaml(path)
        found.append(RecipeInfo(path.stem, *(str(values.get(field, "")) for field in ("paper", "source", "title"))))
    return sorted(found, key=_order)


def _order(entry: RecipeInfo) -> tuple[str, bool, list[int], str]:
    numbers = [int(piece) for piece in "".join(c if c.isdigit() else " " for c in entry.source).split()]
    return entry.paper, "able" not in entry.source, numbers, entry.name


def load(name: str) -> Recipe:
    """Load a recipe.

    Parameters
    ----------
    name
        Its name in the book, or the path of a ``.yaml`` file of the user's.

    Returns
    -------
    Recipe
        The recipe; everything in it has been checked that can be without data.

    Raises
    ------
    ConfigError
        If the file's own name is not the recipe's.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _in_book(name)
    values = read_yaml(path)
    if values.get("name") != path.stem:
        raise ConfigError(f"the recipe in {path.name} has the name {values.get('name')!r}: it must be its file's")
    from coterie.studies.recipes.checks import parse  # of plans, for which methods are imported

    return parse(_filled_in(values), path.stem)


def _in_book(name: str) -> Path:
    path = BOOK / f"{name}.yaml"
    if Path(name).name != name or not path.is_file():
        raise UnknownName("recipe", name, [path.stem for path in BOOK.glob("*.yaml")])
    return path


def _filled_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Give parts that are like another recipe's what that one has."""
    parts = values.get("parts")
    if not isinstance(parts, list):
        return dict(values)
    return {**values, "parts": [_like(part) if isinstance(part, Mapping) else part for part in parts]}


def _like(part: Mapping[str, Any]) -> dict[str, Any]:
    like = part.get("like")
    if like is None:
        return dict(part)
    recipe, _, name = str(like).partition("/")
    theirs = read_yaml(_in_book(recipe)).get("parts") or []
    found = next((each for each in theirs if each.get("name") == name), None)
    if found is None or "plan" not in found:
        raise ConfigError(f"a part is like {like!r}, which is no part with a plan: write RECIPE/PART")
    for field in _SHARED:
        if field in part:
            raise ConfigError(
                f"the part {part.get('name')!r} is like {like!r} and has a {field} of its own: leave it out"
            )
    return {**{field: found[field] for field in _SHARED if field in found}, **part}
