"""Small tensors that lie on both sides are not read from the device."""

from __future__ import annotations

import pytest
import torch

from coterie.rows.backends import RowIndex
from coterie.rows.host_copies import on_device, on_host

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
