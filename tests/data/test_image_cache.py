"""Images that are decoded once into a file, and bytes that stay bytes until they are used."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import coterie
from coterie import data
from coterie.cli.app import app
from coterie.compute import samples as samples_module
from coterie.compute.samples import Samples
from coterie.config import from_mapping
from coterie.data import image_cache, mapped
from coterie.errors import DataError
from coterie.runs.population import make_population


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 24 pictures of two classes, too many to be kept in memory here."""
    monkeypatch.setattr(image_cache, "IN_MEMORY", 0)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "elsewhere"))
    draw = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "pictures" / ["a", "b"][number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (6, 5, 3), dtype=np.uint8)).save(folder / f"{number:02}.png")
    return tmp_path / "pictures"


def files(root: Path) -> list[Path]:
    return sorted((root / ".coterie").glob("images-*.npy"))


def test_images_are_decoded_once(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = data.load(f"folder:{pictures}")
    assert mapped.is_mapped(first.x) and first.x.dtype == torch.uint8 and first.classes == ("a", "b")
    monkeypatch.setattr(image_cache, "_decode", None)  # which cannot be called
    assert torch.equal(data.load(f"folder:{pictures}").x, first.x)
    monkeypatch.setattr(image_cache, "IN_MEMORY", 2**26)
    plain = data.load(f"folder:{pictures}")
    assert not mapped.is_mapped(plain.x) and torch.equal(plain.x, first.x) and len(files(pictures)) == 1


def test_what_changes_is_decoded_anew(pictures: Path) -> None:
    before = data.load(f"folder:{pictures}").x.clone()
    Image.new("RGB", (5, 6), (7, 8, 9)).save(pictures / "a" / "00.png")
    after = data.load(f"folder:{pictures}").x
    assert after[0, :, 0, 0].tolist() == [7, 8, 9] and torch.equal(after[1:], before[1:])
    assert data.load(f"folder:{pictures},size=4").input_shape == (3, 4, 4)
    assert len(files(pictures)) == 3


def test_a_folder_that_cannot_be_written_has_its_file_elsewhere(pictures: Path, tmp_path: Path) -> None:
    (pictures / ".coterie").write_text("in the way")
    found = data.load(f"folder:{pictures}").x
    assert mapped.is_mapped(found) and len(list((tmp_path / "elsewhere" / "images").glob("*.npy"))) == 1


def test_a_picture_that_cannot_be_read_leaves_nothing(pictures: Path) -> None:
    (pictures / "b" / "13.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"13\.png cannot be read"):
        data.load(f"folder:{pictures}")
    assert sorted(path.name for path in (pictures / ".coterie").iterdir()) == [".lock"]
    Image.new("RGB", (9, 9)).save(pictures / "b" / "13.png")
    with pytest.raises(DataError, match="is 9x9, but the first one is 6x5: give size="):
        data.load(f"folder:{pictures}")


def test_of_many_that_want_a_file_one_decodes(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, calls = image_cache._decode, []

    def counted(*arguments: Any) -> None:
        calls.append(1)
        decode(*arguments)

    monkeypatch.setattr(image_cache, "_decode", counted)
    found: list[Any] = []
    each = [threading.Thread(target=lambda: found.append(data.load(f"folder:{pictures}").x)) for _ in range(4)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert len(calls) == 1 and len(found) == 4 and all(torch.equal(x, found[0]) for x in found)


def test_no_room(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(DataError, match=r"24 images are 2\.16 kB decoded, but .* has 100 bytes left"):
        data.load(f"folder:{pictures}")


def test_the_files_are_listed_and_removed(pictures: Path) -> None:
    data.load(f"folder:{pictures}")
    listed = CliRunner().invoke(app, ["data", "decoded", str(pictures)])
    assert listed.exit_code == 0 and str(files(pictures)[0]) in listed.output
    assert CliRunner().invoke(app, ["data", "decoded", str(pictures), "--remove"]).exit_code == 0
    assert not files(pictures)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_was_read_is_let_go(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1024, 40_000), dtype=np.uint8))  # 41 MB

    def in_memory() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("RssFile:"))

    x = mapped.map_file(tmp_path / "x.npy")
    before = in_memory()
    assert int(x.sum()) == x.numel()
    read = in_memory()
    mapped.let_go(x)
    assert read - before > 30_000 and in_memory() - before < 5_000
    assert int(x[-1].sum()) == 40_000


# -------------------------------------------------------------------------------------------- bytes until they are used


@pytest.mark.parametrize("scope", ["federated", "local", "pooled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_give_the_same_numbers_when_they_are_used(
    scope: str, dtype: torch.dtype, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"algorithm": "fedavg", "data": f"folder:{pictures},norm=own", "scope": scope}
    population = make_population(from_mapping({**said, "partition": "iid", "clients": 3}))

    def gathered(limit: int) -> tuple[torch.dtype, torch.Tensor]:
        monkeypatch.setattr(samples_module, "_FLOAT_LIMIT", limit)
        found = Samples.of(population.dataset, population.shares, seed=1, dtype=dtype, own=population.own)
        index = torch.arange(24).view(3, 8)
        return found.x.dtype, found.gather(index, torch.arange(3))[0]

    (kept, late), (made, early) = gathered(0), gathered(2**28)
    assert kept == torch.uint8 and made == dtype and late.dtype == dtype and torch.equal(late, early)
    # and they are what they should be: every channel of the training samples has mean 0 and deviation 1
    train = population.shares.train[0] if scope == "local" else population.shares.train.flat
    if scope != "pooled":
        values = late.view(24, *late.shape[2:])[train].double()
        torch.testing.assert_close(values.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)
        torch.testing.assert_close(
            values.var((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64), rtol=1e-5, atol=0
        )


def test_a_run_on_a_file_is_a_run_in_memory(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {"data": f"folder:{pictures},norm=own", "partition": "iid", "clients": 3, "rounds": 2}
    said |= {"model": "linear", "progress": False}
    monkeypatch.setattr(samples_module, "_FLOAT_LIMIT", 0)
    monkeypatch.setattr(mapped.PagesInUse, "MOST", 100)  # so that pages are let go all the time
    on_disk = coterie.run("ditto", out=tmp_path / "a", **said)
    monkeypatch.setattr(samples_module, "_FLOAT_LIMIT", 2**28)
    monkeypatch.setattr(image_cache, "IN_MEMORY", 2**26)
    in_memory = coterie.run("ditto", out=tmp_path / "b", **said)
    assert on_disk.metrics.equals(in_memory.metrics)


def test_samples_that_share_an_owner_s_statistics_must_have_one_owner(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    population = make_population(
        from_mapping({"algorithm": "local", "data": f"folder:{pictures},norm=own", "partition": "iid", "clients": 3})
    )
    monkeypatch.setattr(samples_module, "_FLOAT_LIMIT", 0)
    shared = replace(population.shares, test=population.shares.train)
    with pytest.raises(coterie.CoterieError, match="clients share samples"):
        Samples.of(population.dataset, shared, seed=1, own=population.own)
