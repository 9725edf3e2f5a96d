"""Where samples lie: on the device, on the host or in a file, by choice or as there is room; with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie import memory, randomness
from coterie.compute import samples as samples_module
from coterie.compute.samples import Samples
from coterie.config import from_mapping
from coterie.data.dataset import Dataset
from coterie.data.mapped import is_mapped
from coterie.data.partitions import Ragged, Shares
from coterie.errors import RunFolderError
from coterie.runs import launch
from coterie.runs.builder import assemble
from tests.support import DEVICE

KEEPS = ("auto", "device", "host", "disk")


def drawn(kind: str) -> dict[str, Any]:
    """Four clients' samples: bytes, numbers, a table with gaps, or words."""
    draw = randomness.stream(0, "samples")
    y = draw.integers(0, 3, 240)
    x: Any = draw.integers(0, 256, (240, 1, 8, 8), dtype=np.uint8)
    if kind == "numbers":
        x = x / 255.0
    elif kind == "words":
        x = draw.integers(0, 20, (240, 6))
    return {f"{k}": (x[k::4], y[k::4]) for k in range(4)}


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU computes where its samples lie")
@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_device_without_room_gets_its_samples_from_the_host(
    as_bytes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = drawn("bytes" if as_bytes else "numbers")
    monkeypatch.setattr(samples_module, "_FLOAT_LIMIT", 0)
    runs = []
    for part in (0.5, 0.0):
        monkeypatch.setattr(samples_module, "_DEVICE_PART", part)
        runs.append(
            coterie.run("ditto", data=data, rounds=2, device=str(DEVICE), out=tmp_path / str(part), progress=False)
        )
    values = [torch.from_numpy(run.metrics["value"].to_numpy().copy()) for run in runs]
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)


def test_grey_images_shown_as_colours_stay_one_channel_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = randomness.stream(0, "grey")
    grey = torch.from_numpy(draw.integers(0, 256, (12, 1, 4, 4), dtype=np.uint8)).expand(-1, 3, -1, -1)
    dataset = Dataset("grey", grey, torch.arange(12) % 2, 12, "multiclass", classes=("a", "b"), mean=(0.3,), std=(0.3,))
    monkeypatch.setattr(samples_module, "_FLOAT_LIMIT", 0)
    held = Ragged.of([torch.arange(0, 6), torch.arange(6, 12)])
    samples = Samples.of(dataset, Shares(held, held, held, None, False, None, "iid"), seed=1, device=DEVICE)
    index, clients = torch.tensor([[3, 1], [7, 7]], device=DEVICE), torch.arange(2, device=DEVICE)
    gathered = {}
    monkeypatch.setattr(Samples, "channels_alike", True)
    for alike in (False, True):
        gathered[alike], _ = samples.gather(index, clients, alike=alike)
    # They stay so only for a model that takes them as they are: `view` does not.
    assert samples.x.stride(1) == 0 and gathered[True].stride(2) == 0 and gathered[False].stride(2) > 0
    assert torch.equal(gathered[True], gathered[False]) and gathered[True].shape == (2, 2, 3, 4, 4)
    monkeypatch.undo()
    assert samples.channels_alike == (DEVICE.type == "cuda")  # it is for kernels of a GPU
    assert torch.equal(samples.gather(index, clients, alike=True)[0], gathered[False])
    moved = samples_module._moved(grey, torch.device("meta"))
    assert moved.shape == grey.shape and moved.stride(1) == 0


class Words(torch.nn.Module):
    """A mean of embedded words."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(x).mean(1))
        return out


@pytest.mark.parametrize("kind", ["bytes", "numbers", "words"])
def test_the_numbers_are_the_same_wherever_samples_lie(kind: str, tmp_path: Path) -> None:
    model: Any = Words if kind == "words" else "linear"
    ends = []
    for keep in KEEPS:
        run = coterie.run(
            "fedavg",
            data=drawn(kind),
            model=model,
            rounds=2,
            device=str(DEVICE),
            keep_samples=keep,
            out=tmp_path / keep,
            progress=False,
        )
        ends.append(torch.from_numpy(run.metrics["value"].to_numpy().copy()))
    for end in ends[1:]:
        # On a GPU steps whose samples come from the host are not recorded, and sums may be taken in another order.
        torch.testing.assert_close(end, ends[0], rtol=0, atol=0 if DEVICE.type == "cpu" else 1e-5)


@pytest.mark.parametrize("more", [{}, {"scope": "local"}, {"partition": "quality"}, {"algorithm": "local"}], ids=str)
def test_each_is_where_it_was_said_to_be(more: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    np.savez(tmp_path / "d.npz", x=drawn("bytes")["0"][0], y=drawn("bytes")["0"][1])
    values = {"algorithm": "fedavg", "data": f"npz:{tmp_path / 'd.npz'}", "clients": 3, "partition": "iid"} | more
    found: dict[str, Samples] = {}
    for keep in KEEPS:
        config = from_mapping(values | {"device": str(DEVICE), "keep_samples": keep, "scratch": str(folder)})
        parts = assemble(config)
        found[keep] = parts.engine.samples
        assert is_mapped(parts.population.dataset.x) == (keep == "disk")
    assert found["device"].x.device.type == DEVICE.type and not is_mapped(found["device"].x)
    assert found["host"].x.device.type == "cpu" and found["host"].pages is None
    assert found["disk"].x.device.type == "cpu" and is_mapped(found["disk"].x) and found["disk"].pages is not None
    assert not list(folder.iterdir())  # a file without a name
    index, clients = torch.arange(12, device=DEVICE).view(3, 4), torch.arange(3, device=DEVICE)
    gathered = [samples.gather(index, clients)[0] for samples in found.values()]
    for each in gathered[1:]:
        # Noise that is drawn on a GPU may differ in its last bit from that of the host.
        torch.testing.assert_close(each, gathered[0], rtol=0, atol=0 if DEVICE.type == "cpu" else 1e-5)


def test_a_device_is_chosen_where_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice for a GPU with a megabyte left, of which inputs may take half."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**30))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    fits, does_not = torch.zeros(2**17), torch.zeros(2**17 + 1)
    place = samples_module._place
    assert place("auto", fits, gpu, torch.float32) == gpu
    assert place("auto", does_not, gpu, torch.float32) == cpu
    assert place("auto", does_not, gpu, torch.uint8) == gpu  # a quarter of it as bytes
    assert place("device", does_not, gpu, torch.float32) == gpu
    assert place("host", fits, gpu, torch.float32) == place("disk", fits, gpu, torch.float32) == cpu
    assert {place(keep, does_not, cpu, torch.float32) for keep in KEEPS} == {cpu}


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    config = from_mapping(
        {"algorithm": "fedavg", "clients": 4, "rounds": 1, "keep_samples": "disk", "scratch": str(tmp_path / "nowhere")}
    )
    with pytest.raises(RunFolderError, match=r"cannot hold .* of samples \(No such file.*\): choose another"):
        launch.begin(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(memory.free_memory() < 2**30, reason="there is too little memory to tell")
def test_what_lies_in_a_file_is_not_in_memory(tmp_path: Path) -> None:
    """Of 64 MB in a file that were all read, what this process has of them in memory is let go of."""
    from coterie.data.mapped import let_go, mapped_copy

    held = mapped_copy(torch.arange(2**23, dtype=torch.int64).view(-1, 2**10), tmp_path)

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
        own = [index for index, line in enumerate(lines) if str(tmp_path) in line]
        return sum(int(next(each for each in lines[at:] if each.startswith("Rss:")).split()[1]) for at in own) * 1024

    assert int(held.sum()) == 2**22 * (2**23 - 1) and resident() > 2**25
    let_go(held)
    assert resident() < 2**20 and int(held[-1, -1]) == 2**23 - 1
