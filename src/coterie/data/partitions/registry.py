"""The partition schemes there are, by name."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.data.partitions.dirichlet import Dirichlet, HybridSkew, Quantity
from coterie.data.partitions.groups import Groups
from coterie.data.partitions.iid import Iid, Quality
from coterie.data.partitions.label_skew import Pathological, QLabel, Shards
from coterie.data.partitions.natural import Natural
from coterie.data.partitions.scheme import Scheme
from coterie.options import Parameter, resolve

SCHEMES: dict[str, type[Scheme]] = {
    scheme.name: scheme
    for scheme in (Iid, Shards, Pathological, QLabel, Dirichlet, Quantity, Quality, Natural, HybridSkew, Groups)
}
"""The schemes by name."""


@dataclass(frozen=True)
class SchemeInfo:
    """What there is to know about a scheme.

    Parameters
    ----------
    name
        The name to ask for it by.
    parameters
        What may follow the name; the positional one may be given without its name.
    positional
        The parameter that a bare value after the colon sets, if any.
    doc
        One line.
    citation
        Whom to cite.
    """

    name: str
    parameters: tuple[Parameter, ...]
    positional: str | None
    doc: str
    citation: str


def describe() -> list[SchemeInfo]:
    """Describe each scheme and its parameters.

    Returns
    -------
    list[SchemeInfo]
        One for each name.
    """
    return [
        SchemeInfo(scheme.name, scheme.parameters(), scheme.positional, scheme.summary(), scheme.citation)
        for scheme in SCHEMES.values()
    ]


def parse(text: str) -> Scheme:
    """Read a scheme from text.

    Parameters
    ----------
    text
        For instance ``"iid"``, ``"dirichlet:0.5"``, ``"pathological:2,balanced=false"``.

    Returns
    -------
    Scheme
        The validated scheme.

    Examples
    --------
    >>> parse("dirichlet:0.5,balanced=true").text()
    'dirichlet:0.5,balanced=true'
    """
    return resolve("partition", text, SCHEMES)
