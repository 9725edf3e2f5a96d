"""The seam between the two halves: who drives the server's, and what is counted and refused on the way."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from coterie.algorithms.base import Ask, Replies, State
from coterie.compute.engine import Call
from coterie.errors import Diverged
from coterie.rows import ClientMatrix, Rows

Result = TypeVar("Result")
Exchange = Callable[[Ask], Replies]
Transform = Callable[[Rows, Tensor, Call], Rows]
"""From replies, the clients they come from, and when and why they were sent, to what the server gets: attacks."""


class NoReplies(Exception):
    """Nobody answered an ask: the round is void."""


def play(script: Generator[Ask, Replies, Result], exchange: Exchange) -> Result:
    """Drive the server's half of a round to its end.

    Parameters
    ----------
    script
        A generator of asks.
    exchange
        Delivers an ask and gives the replies.

    Returns
    -------
    Result
        What the generator returns.
    """
    try:
        ask = next(script)
        while True:
            ask = script.send(exchange(ask))
    except StopIteration as end:
        result: Result = end.value
        return result


@dataclass
class Traffic:
    """Bytes that crossed the wire.

    Parameters
    ----------
    down
        From the server to clients.
    up
        From clients to the server.
    """

    down: int = 0
    up: int = 0


def refuse_infinite_server(server: State, round_number: int) -> None:
    """See that the server's state is finite.

    Parameters
    ----------
    server
        The state.
    round_number
        The round that made it.

    Raises
    ------
    Diverged
        If it is not.
    """
    for tensor in server.values():
        # Of a matrix that is kept, what is not in the patch was looked at when it was.
        value = tensor.patch if isinstance(tensor, ClientMatrix) else tensor
        if value is None:
            continue
        if value.is_floating_point() and not bool(value.sum().isfinite()) and not bool(value.isfinite().all()):
            raise Diverged(round_number, [])


def refuse_infinite(clients: Tensor, rows: Rows, call: Call) -> None:
    """See that what clients computed is finite.

    Parameters
    ----------
    clients
        The clients.
    rows
        What they computed, a row each.
    call
        When and why.

    Raises
    ------
    Diverged
        If a number is not.
    """
    different = {id(value): value for value in rows.values() if value.is_floating_point() and value.numel()}
    flat = [value.reshape(len(value), -1) for value in different.values()]
    if not flat:
        return
    # A sum is finite only if all its terms are, but for overflow, which the exact test then clears. In the rows' own
    # type: a CPU takes 25 times as long to sum float32 numbers in float64.
    sums = torch.stack([value.sum(1).double() for value in flat])
    if bool(sums.isfinite().all()):
        return
    bad = ~torch.stack([value.isfinite().all(1) for value in flat]).all(0)
    if bool(bad.any()):
        raise Diverged(call.round, clients[bad].tolist())
