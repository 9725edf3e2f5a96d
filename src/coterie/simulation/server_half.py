"""Calling the server's half of an algorithm, and seeing that what it gives can be gone on with."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor

from coterie.algorithms.base import Algorithm, Ask, Cohort, Info, Message, Replies, Start, State, Weights
from coterie.algorithms.contract import calling, check_pair, check_rows, check_same, check_tensors
from coterie.errors import AlgorithmError
from coterie.rows import Rows
from coterie.simulation.exchange import play

Deliver = Callable[[Ask], Replies]
"""Asks the clients of a cohort."""


def initial(algorithm: Algorithm, start: Start) -> tuple[State, Rows]:
    """Give the server's state and the clients' before the first round."""
    with calling(f"{algorithm.title}, init"):
        both = algorithm.init(start)
        check_pair("it", both, "the server's state and the clients'")
        check_tensors("the server's state", both[0])
        check_rows("the clients' state", both[1], start.clients)
    return both


def begin(algorithm: Algorithm, half: str, server: State, cohort: Cohort) -> Generator[Ask, Replies, Any]:
    """Begin one of its generators: ``"round"``, ``"welcome"`` or ``"personalise"``."""
    with calling(f"{algorithm.title}, {half}"):
        script: Generator[Ask, Replies, Any] = getattr(algorithm, half)(server, cohort)
        return script


def play_half(algorithm: Algorithm, half: str, server: State, cohort: Cohort, deliver: Deliver) -> tuple[State, Info]:
    """Play the server's half of a round: its new state, and what to record."""
    whose = f"{algorithm.title}, {half}"
    both: tuple[State, Info] = play(begin(algorithm, half, server, cohort), deliver, whose)
    with calling(whose):
        check_pair("it", both, "the server's state and what to record")
        check_same("the server's state", both[0], server)
        check_tensors("what to record", both[1], (Tensor, Weights))
    return both


def play_last_message(algorithm: Algorithm, server: State, cohort: Cohort, deliver: Deliver) -> Message:
    """Play what clients are asked before they have personal models: the message of which these are made."""
    whose = f"{algorithm.title}, personalise"
    message = play(begin(algorithm, "personalise", server, cohort), deliver, whose)
    with calling(whose):
        if not isinstance(message, Message):
            raise AlgorithmError(f"it must return a Message, but returns a {type(message).__name__}")
        check_rows("the message", message.each, len(cohort.clients))
    return message
