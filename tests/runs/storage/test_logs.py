from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.errors import RunFolderError
from coterie.runs.storage import TimingsLog, collaboration_weights_log, matrix_log


def test_timings_add_up(tmp_path: Path) -> None:
    log = TimingsLog(tmp_path / "timings.jsonl")
    assert log.total() == 0 and log.read()["round"].tolist() == []
    log.append(1, train=0.5)
    log.flush()
    log.append(2, train=0.25, evaluate=2.0)
    assert log.total() == 2.75
    log.flush()
    frame = TimingsLog(tmp_path / "timings.jsonl").read()
    assert frame.to_dict("list") == {"round": [1, 2], "train": [0.5, 0.25], "evaluate": [0.0, 2.0]}


def test_timings_cut_counts_a_redone_round_once(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    log = TimingsLog(path)
    for number in (1, 2, 3):
        log.append(number, train=1.0)
    log.flush()
    with path.open("a") as file:
        file.write('{"round": 4, "tra')  # the kill came here
    log = TimingsLog(path)
    assert log.total() == 3
    log.cut(2)
    log.append(3, train=5.0)
    log.flush()
    assert TimingsLog(path).read()["train"].tolist() == [1, 1, 5]


def test_cutting_no_timings_leaves_no_file(tmp_path: Path) -> None:
    TimingsLog(tmp_path / "timings.jsonl").cut(0)
    assert not list(tmp_path.iterdir())


def test_weights_come_back_with_their_clients(tmp_path: Path) -> None:
    log = collaboration_weights_log(tmp_path)
    assert log.rounds() == []
    matrix = np.array([[0.1, 0.9], [0.3, 0.7]])
    log.append(2, matrix, [5, 3])
    log.append(10, matrix[:1].astype(np.float32), [5], columns=[8, 9])
    matrix[:] = 0
    log.flush()
    log = collaboration_weights_log(tmp_path)
    assert log.rounds() == [2, 10]
    second = log.read(2)
    assert second.index.tolist() == [5, 3] and second.columns.tolist() == [5, 3]
    assert second.loc[5, 3] == 0.9 and second.to_numpy().dtype == np.float64
    last = log.read()
    assert last.columns.tolist() == [8, 9] and last.to_numpy().dtype == np.float32


def test_weights_of_a_transposed_matrix(tmp_path: Path) -> None:
    log = collaboration_weights_log(tmp_path)
    log.append(1, np.array([[1.0, 2.0], [3.0, 4.0]]).T, [0, 1])
    assert log.read().to_numpy().tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_weights_cut(tmp_path: Path) -> None:
    log = collaboration_weights_log(tmp_path)
    for number in (1, 2, 3):
        log.append(number, [[1.0]], [0])
        log.flush()
    log.append(4, [[1.0]], [0])
    assert log.rounds() == [1, 2, 3, 4]
    log.cut(2)
    log.flush()
    assert collaboration_weights_log(tmp_path).rounds() == [1, 2]


def test_many_weights_go_to_the_disk_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_log, "_BUFFER_BYTES", 16)
    log = collaboration_weights_log(tmp_path)
    log.append(1, [[1.0]], [0])
    assert collaboration_weights_log(tmp_path).rounds() == []
    log.append(2, [[1.0]], [0])
    assert collaboration_weights_log(tmp_path).rounds() == [1, 2]


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    log = collaboration_weights_log(tmp_path)
    with pytest.raises(RunFolderError, match="holds no collaboration weights"):
        log.read()
    log.append(5, [[1.0]], [0])
    with pytest.raises(RunFolderError, match=r"round 4 has no collaboration weights.* from 5 to 5"):
        log.read(4)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    log = collaboration_weights_log(tmp_path)
    log.append(5, [[1.0]], [0])
    log.flush()
    (tmp_path / "weights" / "round-00000005.safetensors").write_bytes(b"no")
    with pytest.raises(RunFolderError, match=r"round-00000005\.safetensors is damaged"):
        log.read(5)


def test_weights_that_do_not_match_their_clients(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 2\) does not go with 1 rows and 1 columns"):
        collaboration_weights_log(tmp_path).append(1, [[1.0, 2.0]], [0])
