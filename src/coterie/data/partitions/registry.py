"""The partition schemes there are, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.lazy import Registry
from coterie.options import Parameter, resolve

if TYPE_CHECKING:
    from coterie.data.partitions.scheme import Scheme

SCHEMES: Registry[type[Scheme]] = Registry(
    {
        "iid": "coterie.data.partitions.iid:Iid",
        "shards": "coterie.data.partitions.label_skew:Shards",
        "pathological": "coterie.data.partitions.label_skew:Pathological",
        "q_label": "coterie.data.partitions.label_skew:QLabel",
        "dirichlet": "coterie.data.partitions.dirichlet:Dirichlet",
        "quantity": "coterie.data.partitions.dirichlet:Quantity",
        "quality": "coterie.data.partitions.iid:Quality",
        "natural": "coterie.data.partitions.natural:Natural",
        "hybrid": "coterie.data.partitions.dirichlet:HybridSkew",
        "groups": "coterie.data.partitions.groups:Groups",
    }
)
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
