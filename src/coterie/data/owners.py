"""Clients that the data name themselves: the column, folder or array that says whose a sample is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from coterie import options
from coterie.data.partitions.registry import SCHEMES
from coterie.data.registry import SOURCES


def clients_of_the_data(data: str, partition: str, given: Collection[str]) -> dict[str, Any]:
    """Give the partition, and how many clients there are where the data name them.

    Those are the clients, unless another partition or number is among the ``given`` fields.
    """
    scheme = options.resolve("partition", partition, SCHEMES)
    places: dict[str, Any] = {"partition": scheme.text()}
    if {"partition", "clients"} <= set(given) or ("partition" in given and scheme.name != "natural"):
        return places
    owners = options.resolve("data set", data, SOURCES).owners()
    if owners is None:
        return places
    from coterie.data.partitions.natural import Natural

    natural = scheme if isinstance(scheme, Natural) else Natural()
    places["partition"] = natural.text()
    if "clients" not in given:
        places["clients"] = max(1, natural.client_count(list(owners.values())))
    return places
