from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from coterie.runs.storage import MetricsLog
from coterie.runs.storage.metric_columns import MetricColumns


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    found = MetricsLog(tmp_path)
    for number in range(1, 4):
        for model in ("personal", "global")[: 1 + number % 2]:
            for metric in ("loss", "accuracy"):
                values = [number + 0.5, float("nan"), -number]
                found.append(number, model, "test", metric, values, [4, 0, 7])
        found.append_bytes(number, up=3, down=5)
        if number == 2:
            found.flush()  # words get other codes in another part
    return found


def same(columns: MetricColumns, frame: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(columns.frame().astype(object), frame.reset_index(drop=True).astype(object))


def test_columns_are_the_table(log: MetricsLog) -> None:
    same(log.columns(), log.read())
    same(MetricColumns.of_frame(log.read()), log.read())
    log.merge()
    same(log.columns(), log.read())


def test_rows_are_looked_up(log: MetricsLog) -> None:
    columns, frame = log.columns(), log.read()
    same(columns.where(model="global"), frame[frame["model"] == "global"])
    chosen = (frame["model"] == "personal") & (frame["metric"] == "loss") & frame["client"].isin([0, 7, 9])
    same(columns.where(model="personal", metric="loss", clients=[0, 7, 9]), frame[chosen])
    same(columns.where(model="personal").after(3), frame[(frame["model"] == "personal") & (frame["round"] == 3)])
    assert len(columns.where(model="hybrid")) == 0
    assert len(columns.where(clients=())) == 0


def test_nothing_was_measured(tmp_path: Path) -> None:
    columns = MetricsLog(tmp_path).columns()
    assert len(columns) == len(columns.where(model="personal", clients=[1])) == 0
    assert columns.value.dtype == np.float64


def test_one_part_becomes_the_same_file_as_several(tmp_path: Path) -> None:
    files = []
    for parts in (1, 2):
        folder = tmp_path / str(parts)
        log = MetricsLog(folder)
        for number in range(1, 61):
            for metric in ("loss", "accuracy"):
                log.append(number, "personal", "test", metric, np.sin(number * np.arange(50)), range(50))
            if parts > 1 and number == 20:
                log.flush()
        log.merge()
        assert [path.name for path in folder.iterdir()] == ["metrics.parquet"]
        files.append((folder / "metrics.parquet").read_bytes())
    assert files[0] == files[1]
