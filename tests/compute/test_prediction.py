"""Models on several splits in one pass: what one split after another gives, whatever the sizes, also if asked again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.compute import _prediction, batched
from coterie.compute import strips as cutting
from coterie.compute.engine import Engine
from coterie.compute.joint.asks import OutputsAsk
from coterie.compute.joint.prediction import JointPrediction
from coterie.compute.samples import Samples, Split
from coterie.data.partitions import Ragged
from tests.support import DEVICE, classification, simulate, small_model

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
SIZES = {"train": [3, 9, 5, 4, 7], "validation": [2, 0, 1, 0, 4], "test": [0, 6, 1, 1, 0]}


def samples() -> Samples:
    known = classification(5)
    draw = torch.Generator().manual_seed(3)
    splits = {
        split: Ragged.of([torch.randint(len(known.y), (size,), generator=draw) for size in sizes])
        for split, sizes in SIZES.items()
    }
    there = {name: Ragged(each.flat.to(DEVICE), each.offsets.to(DEVICE)) for name, each in splits.items()}
    return dataclasses.replace(known, splits=there)  # type: ignore[arg-type]


def engine_of(kind: str, **options: object) -> Engine:
    settings = {"lr": 0.1, "local_epochs": 1, "batch_size": 4}
    return simulate(
        "fedavg", samples(), small_model(), task="multiclass", engine=kind, settings=settings, **options
    ).engine


def rows_of(engine: Engine, count: int) -> Tensor:
    spread = torch.linspace(0.5, 1.5, count, dtype=torch.float64, device=DEVICE)
    return engine.problem.start * spread.unsqueeze(1)


@pytest.mark.parametrize("options", [{}, {"chunk": 2}])
@pytest.mark.parametrize("some", [[0, 1, 2, 3, 4], [1, 3], [4]])
def test_in_one_pass_and_one_after_another(some: list[int], options: dict[str, int]) -> None:
    clients = torch.tensor(some, device=DEVICE)
    loop, fast = engine_of("loop"), engine_of("batched", **options)
    predict = registry.make("fedavg").predict
    rows = {"w": rows_of(loop, len(some))}
    for _ in range(2):  # the second time from what was kept
        for splits in (SPLITS, ("test", "validation"), ("train",)):
            wanted = tuple(split for split in splits if any(SIZES[split][client] for client in some))
            found = fast.predict_all(predict, rows, clients, wanted)
            for split, got in zip(wanted, found, strict=True):
                assert len(got) == sum(SIZES[split][client] for client in some)
                torch.testing.assert_close(got, loop.predict(predict, rows, clients, split), rtol=0, atol=1e-12)
            shared = fast.predict_all(predict, {"w": rows["w"][0]}, clients, wanted, shared=True)
            for split, got in zip(wanted, shared, strict=True):
                want = loop.predict(predict, {"w": rows["w"][0]}, clients, split, shared=True)
                torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_other_clients_at_the_same_place_in_memory_are_other_clients() -> None:
    """What is kept is kept with the clients it was made for, so that their place is not given to others meanwhile."""
    fast, predict = engine_of("batched"), registry.make("fedavg").predict
    for number in range(40):
        some = [number % 5, 5 - number % 2][: 1 + (number % 5 < 3)]
        clients = torch.tensor(sorted({min(client, 4) for client in some}), device=DEVICE)
        got = fast.predict_all(predict, {"w": rows_of(fast, len(clients))}, clients, ("train",))[0]
        assert len(got) == sum(SIZES["train"][client] for client in clients.tolist())
        del clients


def test_no_more_is_kept_than_a_few() -> None:
    fast, predict = engine_of("batched"), registry.make("fedavg").predict
    assert isinstance(fast, batched.BatchedEngine)
    for _ in range(3 * _prediction.CACHED_CLIENTS):
        clients = torch.arange(5, device=DEVICE)
        fast.predict_all(predict, {"w": rows_of(fast, 5)}, clients, SPLITS)
        fast.predict_all(predict, {"w": rows_of(fast, 1)[0]}, clients, SPLITS, shared=True)
    assert len(fast._prediction.blocks) == len(fast._prediction.flat) == _prediction.CACHED_CLIENTS


@pytest.mark.parametrize("options", [{}, {"chunk": 2}])
def test_in_strips_of_clients_of_similar_size(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most of one block would be padding, smaller clients' models go through fewer places."""
    monkeypatch.setattr(cutting, "_LITTLE", 0)
    monkeypatch.setattr(_prediction, "_BLOCK_ELEMENTS", 20)  # no block for all splits, and few places at a time
    loop, fast = engine_of("loop"), engine_of("batched", **options)
    predict, clients = registry.make("fedavg").predict, torch.arange(5, device=DEVICE)
    rows = {"w": rows_of(loop, 5)}
    for split in SPLITS:
        got = fast.predict(predict, rows, clients, split)
        torch.testing.assert_close(got, loop.predict(predict, rows, clients, split), rtol=0, atol=1e-12)


def test_strips_hold_every_row_once_and_little_padding() -> None:
    lengths = np.random.default_rng(1).integers(0, 2000, 300)
    found = cutting.strips(lengths, 3072)
    assert sorted(np.concatenate(found).tolist()) == list(range(300))
    padding = sum(int((lengths[rows].max() - lengths[rows]).sum()) for rows in found)
    assert padding * 3072 <= 0.25 * lengths.sum() * 3072 + len(found) * cutting._LITTLE
    assert 1 < len(found) < 25
    longest = [int(lengths[rows].max()) for rows in found]
    assert longest == sorted(longest, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "numbers"), [([5, 0, 3], 64), ([900, 1000, 950, 1000], 3072), ([], 3), ([7], 9**9)]
)
def test_rows_stay_in_order_where_padding_is_little(lengths: list[int], numbers: int) -> None:
    (one,) = cutting.strips(np.array(lengths, dtype=np.int64), numbers)
    assert one.tolist() == list(range(len(lengths)))


@pytest.mark.parametrize("little", [0, 2**22])
@pytest.mark.parametrize("splits", [("train", "validation"), ("test",), ("validation", "test")])
def test_models_of_two_runs_in_strips_some_of_clients_without_samples(
    splits: tuple[Split, ...], little: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs come run after run, split after split and client after client, in the order that each run asks for."""
    monkeypatch.setattr(cutting, "_LITTLE", little)
    fast, loop, predict = engine_of("batched"), engine_of("loop"), registry.make("fedavg").predict
    assert isinstance(fast, batched.BatchedEngine)
    joint, first = JointPrediction(fast, [0, 2]), (0, 2)
    asked = [torch.tensor([1, 0], device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)]  # clients 0, 1 and 2 to 4
    rows = [{"w": rows_of(loop, len(clients)) * (1 + run)} for run, clients in enumerate(asked)]
    for shared in (False, True):
        models = [{"w": each["w"][0]} for each in rows] if shared else rows
        asks = [OutputsAsk(run, models[run], clients, splits, shared) for run, clients in enumerate(asked)]
        for got, ask in zip(joint.outputs(predict, asks), asks, strict=True):
            mine = ask.clients + first[ask.run]
            there = [split for split in splits if any(SIZES[split][client] for client in mine.tolist())]
            wanted = [loop.predict(predict, ask.rows, mine, split, shared=shared) for split in there]
            torch.testing.assert_close(got, torch.cat(wanted), rtol=0, atol=1e-12)
