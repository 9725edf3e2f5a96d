"""Data sets that are packed to be carried lie as they did where they are unpacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.programs import load_program

carry = load_program(Path(__file__).parents[2] / "benchmarks" / "carry_data.py")


def packed(name: str, data: Path, out: Path, parts: int) -> list[str]:
    assert carry.main(["pack", name, "--data", str(data), "--out", str(out), "--parts", str(parts)]) == 0
    return sorted(map(str, out.glob("*.npz")))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("parts", [1, 4])
def test_records_are_the_same_bytes_whatever_part_comes_first(name: str, parts: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    folder, files, labels = carry.CIFAR[name]
    (tmp_path / "data" / folder).mkdir(parents=True)
    for number, file in enumerate(files):
        records = draw.integers(0, 256, (3 + number, labels + carry.PIXELS), dtype=np.uint8)
        records[0, labels:] = np.linspace(0, 255, carry.PIXELS).astype(np.uint8)  # smooth, as photographs are
        (tmp_path / "data" / folder / file).write_bytes(records.tobytes())
    made = packed(name, tmp_path / "data", tmp_path / "packed", parts)
    assert len(made) == parts
    (tmp_path / "there" / folder).mkdir(parents=True)
    (tmp_path / "there" / folder / files[0]).write_bytes(bytes(10**5))  # another file lay there, and a longer one
    for path in reversed(made):
        carry.main(["unpack", path, "--data", str(tmp_path / "there")])
    assert files_of(tmp_path / "there") == files_of(tmp_path / "data")


@pytest.mark.parametrize("parts", [2, 5])  # more parts than files are there, too
def test_files_are_the_same_bytes(parts: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    for name in ("Hand/000000.jpeg", "Hand/000001.jpeg", "CXR/000000.jpeg"):
        path = tmp_path / "data" / carry.MEDICAL / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.bytes(50))
    made = packed("medical_mnist", tmp_path / "data", tmp_path / "packed", parts)
    carry.main(["unpack", *made, "--data", str(tmp_path / "there")])
    assert files_of(tmp_path / "there") == files_of(tmp_path / "data")


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        carry.main(["pack", "cifar10", "--data", str(tmp_path), "--out", str(tmp_path)])
    assert "cifar-10-batches-bin is not there" in capsys.readouterr().err
