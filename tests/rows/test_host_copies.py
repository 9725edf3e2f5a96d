"""Small tensors that lie on both sides are not read from the device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch

from coterie.rows.backends import RowIndex
from coterie.rows.host_copies import LateRead, on_device, on_host, to_device

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
META = torch.device("meta")  # has no numbers, so that whoever reads them fails


def test_what_came_from_the_host_is_found_there_again() -> None:
    numbers = torch.tensor([3, 1, 2])
    there = on_device(numbers, META)
    assert there.device == META and on_host(there) is numbers
    assert RowIndex.of(there, META).on_host is numbers
    assert RowIndex.from_host(numbers, META).on_host is numbers


def test_on_the_host_there_is_one_tensor() -> None:
    numbers = torch.tensor([3, 1, 2])
    assert on_device(numbers, torch.device("cpu")) is numbers and on_host(numbers) is numbers


def test_what_was_changed_or_never_known_is_read() -> None:
    there = on_device(torch.tensor([3, 1, 2]), META)
    there.add_(1)
    for unknown in (there, torch.empty(3, device=META), on_device(torch.tensor([3]), META)[:]):
        with pytest.raises(NotImplementedError):
            on_host(unknown)


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_what_goes_to_a_device_and_comes_back_late_is_the_same(name: str) -> None:
    device, sent = torch.device(name), [torch.arange(6).view(2, 3).T, torch.zeros(0), torch.tensor([[True], [False]])]
    with _nobody_waits(device):
        there = [to_device(values, device) for values in sent]
        late = [LateRead(values) for values in there]
        if name == "cuda":
            for values in there:
                values.zero_()  # what the device does later is not read
    for values, read in zip(sent, late, strict=True):
        assert torch.equal(read.values(), values) and read.values().device.type == "cpu"
    assert all(values.device.type == name for values in there)


@contextlib.contextmanager
def _nobody_waits(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
