from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coterie.errors import RunFolderError
from coterie.runs.storage import EVERYONE, MetricsLog, metrics_log


def record(log: MetricsLog, number: int) -> None:
    """Append what a made-up round measures: values that name their round, model and client."""
    clients = np.array([4, 0, 7])
    for offset, model in enumerate(("personal", "global")):
        log.append(number, model, "test", "accuracy", number + offset / 10 + clients / 100, clients)
    log.append_bytes(number, up=2**40 + number, down=number)


def expected(rounds: list[int]) -> pd.DataFrame:
    """Write down by hand what :func:`record` must have left."""
    rows = []
    for number in rounds:
        for offset, model in enumerate(("personal", "global")):
            rows += [(number, c, model, "test", "accuracy", number + offset / 10 + c / 100) for c in (4, 0, 7)]
        rows += [(number, -1, "federation", "wire", "bytes_up", 2.0**40 + number)]
        rows += [(number, -1, "federation", "wire", "bytes_down", float(number))]
    frame = pd.DataFrame(rows, columns=["round", "client", "model", "split", "metric", "value"])
    frame = frame.astype({"round": "int32", "client": "int32", "value": "float64"})
    for name in ("model", "split", "metric"):
        frame[name] = pd.Categorical(frame[name], sorted(set(frame[name])))
    return frame


def same(left: pd.DataFrame, right: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(left, right, check_exact=True)


def test_reads_what_was_appended_before_and_after_the_merge(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for number in (1, 2, 3):
        record(log, number)
        log.flush()
    same(MetricsLog(tmp_path).read(), expected([1, 2, 3]))
    log.merge()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.parquet"]
    same(MetricsLog(tmp_path).read(), expected([1, 2, 3]))


def test_long_form_for_other_programs(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    record(log, 1)
    log.merge()
    schema = pq.read_schema(tmp_path / "metrics.parquet")
    assert [(field.name, str(field.type)) for field in schema] == [
        ("round", "int32"),
        ("client", "int32"),
        ("model", "string"),
        ("split", "string"),
        ("metric", "string"),
        ("value", "double"),
    ]


def test_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = np.array([np.nan, np.inf, -0.0, 5e-324, 0.1 + 0.2])
    log = MetricsLog(tmp_path)
    log.append(0, "personal", "test", "loss", values, np.arange(5))
    log.merge()
    assert log.read()["value"].to_numpy().tobytes() == values.tobytes()


def test_what_is_given_is_copied(tmp_path: Path) -> None:
    values, clients = np.ones(2), np.array([0, 1])
    log = MetricsLog(tmp_path)
    log.append(1, "personal", "test", "accuracy", values, clients)
    values[:], clients[:] = 7, 7
    assert log.read()["value"].tolist() == [1, 1] and log.read()["client"].tolist() == [0, 1]


def test_nothing_recorded(tmp_path: Path) -> None:
    frame = MetricsLog(tmp_path / "nowhere").read()
    assert frame.columns.tolist() == ["round", "client", "model", "split", "metric", "value"] and frame.empty
    log = MetricsLog(tmp_path)
    log.append(1, "personal", "validation", "accuracy", [], [])
    log.flush()
    log.cut(0)
    log.merge()
    assert log.read().empty


@settings(max_examples=25, deadline=None)
@example(rounds=1, events=[(0, "cut"), (0, "merge"), (0, "cut")])  # nothing is left when it is merged, then cut again
@given(
    rounds=st.integers(1, 6),
    events=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["flush", "merge", "reopen", "cut"])), max_size=8),
)
def test_the_table_does_not_depend_on_how_it_was_written(rounds: int, events: list[tuple[int, str]]) -> None:
    """Flushes, merges, processes and resumes at any round leave one and the same file behind."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        plain = MetricsLog(Path(one))
        for number in range(1, rounds + 1):
            record(plain, number)
        plain.merge()

        log, number = MetricsLog(Path(other)), 0
        pending = list(events)
        while number < rounds:
            number += 1
            record(log, number)
            while pending and pending[0][0] <= number:
                back_to, event = pending.pop(0)
                log.flush()
                if event == "merge":
                    log.merge()
                elif event == "reopen":
                    log = MetricsLog(Path(other))
                elif event == "cut":
                    log.cut(back_to)
                    number = back_to
        log.merge()
        same(MetricsLog(Path(other)).read(), expected(list(range(1, rounds + 1))))
        assert (Path(one) / "metrics.parquet").read_bytes() == (Path(other) / "metrics.parquet").read_bytes()


def test_cut_through_a_part(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for number in (1, 2, 3, 4):
        record(log, number)
    log.flush()
    record(log, 5)
    log.flush()
    record(log, 6)
    log = MetricsLog(tmp_path)  # killed: what was not flushed is gone
    same(log.read(), expected([1, 2, 3, 4, 5]))
    log.cut(2)
    same(log.read(), expected([1, 2]))
    record(log, 3)
    same(log.read(), expected([1, 2, 3]))
    log.cut(-1)
    assert log.read().empty


def test_cut_forgets_what_is_not_flushed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    record(log, 1)
    record(log, 2)
    log.cut(1)
    record(log, 2)
    same(log.read(), expected([1, 2]))


def test_leftover_parts_of_an_interrupted_merge_do_not_count(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    record(log, 1)
    log.flush()
    part = tmp_path / "metrics" / "part-000001.parquet"
    left = part.read_bytes()
    log.merge()
    part.parent.mkdir()
    part.write_bytes(left)
    same(MetricsLog(tmp_path).read(), expected([1]))
    again = MetricsLog(tmp_path)
    record(again, 2)
    again.merge()
    same(MetricsLog(tmp_path).read(), expected([1, 2]))


def test_groups_of_rows_do_not_depend_on_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "_GROUP_ROWS", 5)
    log = MetricsLog(tmp_path)
    for number in range(1, 5):  # eight rows each
        record(log, number)
        log.flush()
    log.merge()
    file = pq.ParquetFile(tmp_path / "metrics.parquet").metadata
    assert [file.row_group(i).num_rows for i in range(file.num_row_groups)] == [5] * 6 + [2]
    same(log.read(), expected([1, 2, 3, 4]))


def test_a_full_buffer_goes_to_the_disk_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "_BUFFER_ROWS", 6)
    log = MetricsLog(tmp_path)
    record(log, 1)
    assert (tmp_path / "metrics" / "part-000001.parquet").exists()
    same(log.read(), expected([1]))


def test_a_folder_that_looks_like_a_setting_adds_no_column(tmp_path: Path) -> None:
    run = tmp_path / "lr=0.1"
    log = MetricsLog(run)
    record(log, 1)
    log.flush()
    same(log.read(), expected([1]))
    log.merge()
    same(log.read(), expected([1]))


def test_rounds_do_not_go_backwards(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    record(log, 3)
    with pytest.raises(ValueError, match="round 2 comes after round 3"):
        record(log, 2)


@pytest.mark.parametrize("values", [[1.0], [[1.0, 2.0]], [1.0, 2.0, 3.0]])
def test_one_value_a_client(tmp_path: Path, values: list[float]) -> None:
    with pytest.raises(ValueError, match="one value a client"):
        MetricsLog(tmp_path).append(1, "personal", "test", "accuracy", values, [0, 1])


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.parquet").write_bytes(b"PAR1 but not much of it")
    with pytest.raises(RunFolderError, match=r"metrics\.parquet is damaged"):
        MetricsLog(tmp_path).read()


def test_everyone_is_no_client() -> None:
    assert EVERYONE < 0


def test_a_reader_finds_all_while_the_parts_are_merged_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watches a run reads its files between any two steps of the process that writes them."""
    writer, reader = MetricsLog(tmp_path), MetricsLog(tmp_path)
    for number in (1, 2):
        writer.append_bytes(number, 1, 2)
        writer.flush()
    real = metrics_log._read

    def go_on() -> None:
        writer.append_bytes(3, 1, 2)
        writer.flush()

    steps = [writer.merge, go_on, writer.merge]

    def interrupted(path: Path, *given: Any, **named: Any) -> Any:
        if steps:  # after the files were listed, and before they are read
            with monkeypatch.context() as patch:
                patch.setattr(metrics_log, "_read", real)  # the writer reads, too
                steps.pop(0)()
        return real(path, *given, **named)

    monkeypatch.setattr(metrics_log, "_read", interrupted)
    assert sorted(set(reader.read()["round"])) == [1, 2, 3] and not steps
