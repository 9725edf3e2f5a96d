"""Recordings of steps: what has to be so while one is made, which needs no GPU to be looked at."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.compute import cuda_graphs
from coterie.compute.cuda_graphs import padded_rows
from coterie.errors import CoterieWarning
from coterie.randomness import torch_stream
from tests.support import DEVICE, classification, play, simulate


class Recording:
    """In the place of a CUDA graph."""


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
    with cuda_graphs._recorded_as(object(), None):  # type: ignore[arg-type]
        assert not gc.isenabled()
    assert collecting == [False, False]
    assert gc.isenabled()


def test_it_is_collected_again_after_a_recording_that_failed(collecting: list[bool]) -> None:
    with pytest.raises(ValueError, match="broken"), cuda_graphs._recorded_as(object(), None):  # type: ignore[arg-type]
        raise ValueError("broken")
    assert collecting == [False, False]
    assert gc.isenabled()


def test_who_does_not_collect_garbage_still_does_not_afterwards(collecting: list[bool]) -> None:
    gc.disable()
    try:
        with cuda_graphs._recorded_as(object(), None):  # type: ignore[arg-type]
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert collecting == [False, False]


def test_a_step_that_cannot_be_recorded_is_called_as_it_is(
    collecting: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    taken = []

    def step() -> None:
        taken.append(len(taken))
        if len(taken) == 1:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors\nand more of it")

    with pytest.warns(CoterieWarning, match=r"as a CUDA graph \(Cannot copy between CPU and CUDA tensors\): its"):
        replay = cuda_graphs._replay_of(step)
    assert replay is step and taken == [0]
    replay()
    assert taken == [0, 1]


def test_too_little_memory_for_a_recording_is_said_as_such(
    collecting: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def step() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        cuda_graphs._replay_of(step)


class Moving(nn.Module):
    """Brings numbers to the device in every pass."""

    def __init__(self, bring: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bring, self.body = bring, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.bring(x)


def moved(x: Tensor) -> Tensor:
    return torch.arange(3, dtype=x.dtype).to(x.device)


def listed(x: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype, device=x.device)


def number(x: Tensor) -> Tensor:
    return torch.tensor(0.5, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize(("bring", "recorded"), [(moved, False), (listed, False), (number, True)])
def test_a_model_that_brings_numbers_to_the_device_trains_all_the_same(
    bring: Callable[[Tensor], Tensor], recorded: bool
) -> None:
    rows = {}
    for engine, options in {"loop": {}, "batched": {"record": True, "kernel": "vmap"}}.items():
        with torch_stream(1, "model"):
            module = Moving(bring)
        simulation = simulate("fedacs", classification(), module, task="multiclass", engine=engine, **options)
        said = DEVICE.type == "cuda" and engine == "batched" and not recorded
        with pytest.warns(CoterieWarning, match="cannot be recorded") if said else contextlib.nullcontext():
            play(simulation, 3)
        rows[engine] = simulation.clients.rows
    for name, value in rows["loop"].items():
        assert (value - rows["batched"][name]).abs().max() < 1e-10


def test_recordings_share_memory_as_long_as_one_of_them_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    memory = cuda_graphs._SharedMemory()
    first, second = Recording(), Recording()
    name = memory.name
    memory.used_by(first)
    assert memory.name is name
    memory.used_by(second)
    del first
    assert memory.name is name
    del second  # PyTorch has given the memory back, and knows it by this name no longer
    assert memory.name is not name


def test_a_recording_that_fails_leaves_its_memory_to_those_that_are_there(
    collecting: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    memory = cuda_graphs._SharedMemory()
    kept, _ = cuda_graphs._capture(list, memory)
    name = memory.name

    def fails() -> None:
        raise RuntimeError("it reads from the device")

    with pytest.raises(RuntimeError, match="reads from"):
        cuda_graphs._capture(fails, memory)
    assert memory.name is not name and kept is not None


def test_what_is_recorded_is_told_which_memory_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    @contextlib.contextmanager
    def graph(*_: Any, pool: Any, **__: Any) -> Iterator[None]:
        told.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    memory = cuda_graphs._SharedMemory()
    kept = [cuda_graphs._capture(list, memory)[0] for _ in range(2)]
    cuda_graphs._capture(list)
    assert told[0] is told[1] and told[0] is not None and told[2] is None and len(kept) == 2


def test_rows_are_padded_by_a_fifth_at_most_where_they_are_many() -> None:
    assert [padded_rows(rows, 1000) for rows in (1, 2, 3, 5, 9, 17, 33, 50, 129)] == [1, 2, 4, 8, 16, 32, 40, 56, 160]
    assert padded_rows(70, 75) == 75
    for rows in range(33, 600):
        assert rows <= padded_rows(rows, 600) <= min(600, 1.25 * rows)
