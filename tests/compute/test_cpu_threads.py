"""How many CPU threads compute follows from the sizes of the work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.compute import cpu_threads
from coterie.compute.nets.row_net import ModuleNet, layout_of
from coterie.compute.sample_costs import multiplications_of_sample


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


@pytest.mark.parametrize(
    ("module", "shape", "by_hand"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10)),
            (1, 8, 8),
            64 * 200 + 200 * 10,
        ),
        # 16 maps of 6x6 places, each a sum over 2x3x3; then 8 maps of 4x4, over the 4 maps of a group of 3x3
        (nn.Sequential(nn.Conv2d(2, 16, 3), nn.Conv2d(16, 8, 3, groups=4)), (2, 8, 8), 16 * 36 * 18 + 8 * 16 * 36),
        (nn.Linear(7, 3, bias=False), (7,), 21),
    ],
    ids=["mlp", "cnn", "linear"],
)
def test_multiplications_are_counted(module: nn.Module, shape: tuple[int, ...], by_hand: int) -> None:
    layout = layout_of(module)
    row = layout.row_of(dict(module.named_parameters()))
    found = multiplications_of_sample(ModuleNet(module, layout), row, torch.randn(1, 3, *shape))
    assert found == max(by_hand, len(row))  # as many as it has parameters, at the least


def test_a_recurrent_net_counts_every_step_of_a_sequence() -> None:
    module = Recurrent()
    layout = layout_of(module)
    row = layout.row_of(dict(module.named_parameters()))
    short, long = (
        multiplications_of_sample(ModuleNet(module, layout), row, torch.randn(1, 2, steps, 3)) for steps in (50, 100)
    )
    assert short > len(row) and long == pytest.approx(2 * short, rel=0.05)


@pytest.mark.parametrize(
    ("policy", "multiplications", "threads"),
    [
        ("PASSIVE", 0, 1),
        ("PASSIVE", 16 * 10**6, 1),
        ("PASSIVE", 31 * 10**6, 1),
        ("PASSIVE", 32 * 10**6, 2),
        ("passive", 50 * 10**6, 3),
        ("PASSIVE", 10**9, 4),
        ("ACTIVE", 5 * 10**6, 1),
        ("", 6 * 10**6, 2),
        ("ACTIVE", 10**9, 4),
    ],
)
def test_more_work_pays_for_more_threads_up_to_all(
    policy: str, multiplications: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    with cpu_threads.paid_by(multiplications):
        assert torch.get_num_threads() == threads
        assert cpu_threads.available() == 4
        with cpu_threads.paid_by(10**12):  # within small work: no more than there are, and as many as there are
            assert torch.get_num_threads() == 4
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == cpu_threads.available() == 4


def test_threads_are_as_before_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="halfway"), cpu_threads.paid_by(0):
        raise RuntimeError("halfway")
    assert torch.get_num_threads() == cpu_threads.available() == 4


def threads_of_training(tmp_path: Path, **more: Any) -> set[int]:
    seen = set[int]()

    def watched(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad and targets.numel() >= 10:  # in training, and not when it is tried at the beginning
            seen.add(torch.get_num_threads())
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    values = {"data": "digits", "model": "mlp", "clients": 6, "rounds": 1, "loss": watched} | more
    coterie.run("fedavg", **values, out=tmp_path / "run", progress=False)
    assert torch.get_num_threads() == 4
    return seen


# A sample takes 64 x 200 + 200 x 10 = 14,800 multiplications; two threads need 32 million of them.
@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_small_batches_are_trained_on_by_one_thread(engine: str, tmp_path: Path) -> None:
    assert threads_of_training(tmp_path, batch_size=10, engine=engine) == {1}  # 6 x 10 samples at once at most


def test_rows_that_are_computed_at_once_count_together(tmp_path: Path) -> None:
    wide = {"model": "mlp:hidden=2000", "batch_size": 50}  # 148,000 multiplications, of 50 samples of each client
    assert threads_of_training(tmp_path / "together", **wide) == {2}  # 6 x 50: 44 millions
    assert threads_of_training(tmp_path / "in turn", **wide, chunk=1) == {1}


def test_whoever_says_how_many_gets_them(tmp_path: Path) -> None:
    assert threads_of_training(tmp_path, batch_size=10, threads=3) == {3}


def test_a_client_that_is_computed_alone_is_given_what_its_own_samples_pay_for(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    sizes = {"small": 100, "large": 4000}
    data = {
        name: (torch.randn(size, 64, generator=draw), torch.randint(10, (size,), generator=draw))
        for name, size in sizes.items()
    }
    whole = {"batch_size": 0, "engine": "loop"}
    # 14,800 multiplications a sample: 1.2 millions of 80 samples, 47 of 3,200, whoever else takes part.
    assert threads_of_training(tmp_path / "both", **whole, data=data, clients=2) == {1, 2}
    for name, threads in (("small", 1), ("large", 2)):
        assert threads_of_training(tmp_path / name, **whole, data={name: data[name]}, clients=1) == {threads}
