"""Calls to a server that are made again where it does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import httpx

_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between attempts
_PERSISTENCE = 60.0  # seconds after which a call is given up

Given = TypeVar("Given")


class CutOff(Exception):
    """The server does not answer any more, or does not know the node; the text says how that was seen."""


def persist(call: Callable[[], Given]) -> Given:
    """Make a call, again and again for a while where the server does not answer it; then it is :class:`CutOff`.

    What the server refuses is ``httpx.HTTPStatusError``, unless it does not know who calls.
    """
    until, pause = time.monotonic() + _PERSISTENCE, _PAUSE
    while True:
        try:
            return call()
        except httpx.HTTPError as error:
            if status_of(error) == httpx.codes.UNAUTHORIZED:  # of a SuperLink that was started anew
                raise CutOff(words_of(error)) from error
            if is_refusal(error):
                raise
            if time.monotonic() > until:
                raise CutOff(words_of(error)) from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def status_of(error: httpx.HTTPError) -> int:
    """Give the status that a server answered with, 0 where it did not answer."""
    return error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0


def is_refusal(error: httpx.HTTPError) -> bool:
    """Say whether the server understood a call and does not do what it asks for."""
    return 400 <= status_of(error) < 500


def words_of(error: httpx.HTTPError) -> str:
    """Say in a few words what went wrong."""
    if status := status_of(error):
        return f"it answered with {status}"
    return " ".join(str(error).split()) or type(error).__name__
