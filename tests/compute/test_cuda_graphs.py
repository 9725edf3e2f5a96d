"""Recordings of steps: what has to be so while one is made, which needs no GPU to be looked at."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from coterie.compute import cuda_graphs


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether garbage was collected when a recording began and ended, in place of a GPU that records."""
    seen: list[bool] = []

    @contextlib.contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        seen.append(gc.isenabled())
        try:
            yield
        finally:
            seen.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return seen


def test_no_garbage_is_collected_while_a_step_is_recorded(collecting: list[bool]) -> None:
    with cuda_graphs._recorded_as(object()):  # type: ignore[arg-type]
        assert not gc.isenabled()
    assert collecting == [False, False]
    assert gc.isenabled()


def test_it_is_collected_again_after_a_recording_that_failed(collecting: list[bool]) -> None:
    with pytest.raises(ValueError, match="broken"), cuda_graphs._recorded_as(object()):  # type: ignore[arg-type]
        raise ValueError("broken")
    assert collecting == [False, False]
    assert gc.isenabled()


def test_who_does_not_collect_garbage_still_does_not_afterwards(collecting: list[bool]) -> None:
    gc.disable()
    try:
        with cuda_graphs._recorded_as(object()):  # type: ignore[arg-type]
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert collecting == [False, False]
