"""Damage to what a run leaves on the disk is found, and what a kill or a full disk left there does no harm."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from coterie import api
from coterie.errors import RunFolderError
from coterie.results import Result
from coterie.runs.storage import MetricsLog, RunFolder, events, seals
from coterie.runs.storage.atomic_files import append_lines
from coterie.runs.storage.run_files import read_client_names
from coterie.runs.storage.timings_log import TimingsLog
from tests.small_runs import SMALL


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    api.run("fedamp", out=path, progress=False, matrix=True, **{**SMALL, "rounds": 2})
    return path


READERS: dict[str, Callable[[Path], Any]] = {
    "metrics.parquet": lambda run: Result(run).metrics,
    "shares.parquet": lambda run: Result(run).shares,
    "answers.parquet": lambda run: Result(run).answers,
    "validation_answers.parquet": lambda run: Result(run).answers_after(2, "validation"),
    "summary.json": lambda run: Result(run).summary,
    "choices.json": lambda run: RunFolder.written_elsewhere(run, {}).choices,
    "weights/round-00000002.safetensors": lambda run: Result(run).weights(2),
    "matrix/round-00000002.safetensors": lambda run: Result(run).matrix(2),
}


def flipped(content: bytes, place: int) -> bytes:
    out = bytearray(content)
    out[place] ^= 1 << place % 8
    return bytes(out)


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_is_found_wherever_it_is(name: str, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    file, read = run / name, READERS[name]
    content, right = file.read_bytes(), read(run)
    found = 0
    for place in range(0, len(content), 7):
        file.write_bytes(flipped(content, place))
        try:
            got = read(run)
        except RunFolderError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            found += 1
        else:  # in the mark of the seal itself: then the file is read as one from before there were seals
            assert got.equals(right) if isinstance(right, pd.DataFrame) else got.items() >= right.items()
            assert content.rfind(b"coterie-sha256:") <= place < content.rfind(b"coterie-sha256:") + 15
    assert found >= len(content) // 7 - 3


def test_every_byte_of_a_part_is_guarded(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(1, "personal", "test", "loss", [0.25, 0.5], [0, 1])
    log.flush()
    file = tmp_path / "metrics" / "part-000001.parquet"
    content = file.read_bytes()
    mark = content.rfind(b"coterie-sha256:")
    for place in range(len(content)):
        if not mark <= place < mark + 15:
            file.write_bytes(flipped(content, place))
            with pytest.raises(RunFolderError, match="is damaged"):
                MetricsLog(tmp_path).read()


@pytest.mark.parametrize("before", [0, 5, 2**22 - 40, 2**22, 2**22 + 7, 2**23 - 3])
@pytest.mark.parametrize("after", [0, 3, 2**22 - 17, 2**22 + 1])
def test_a_seal_is_found_wherever_blocks_begin(tmp_path: Path, before: int, after: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * before + seals.BLANK.encode() + b"b" * after)
    seals.seal(path)
    blank, content = seals.BLANK.encode(), path.read_bytes()
    digest = hashlib.sha256(b"a" * before + blank + b"b" * after).hexdigest().encode()
    assert content == b"a" * before + blank[:-64] + digest + b"b" * after
    seals.check_seal(path)
    for at in {0, before // 2, len(content) - 1}:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with contextlib.suppress(RunFolderError):
            seals.check_seal(path)
            assert before <= at < before + 15, "only without its mark is a file taken as it is"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_large_file_is_checked_without_being_held(tmp_path: Path) -> None:
    """A model's file would otherwise count as this process's memory, beside the model."""
    path = tmp_path / "file"
    path.write_bytes(seals.BLANK.encode() + b"b" * 2**26)
    code = """
import resource, sys
from pathlib import Path
from coterie.runs.storage import seals
def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
path, before = Path(sys.argv[1]), most()
seals.seal(path)
seals.check_seal(path)
print(most() - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**25


def test_other_programs_read_sealed_files(whole: Path) -> None:
    assert len(pq.read_table(whole / "metrics.parquet")) == len(Result(whole).metrics)
    assert len(pd.read_parquet(whole / "shares.parquet")) == SMALL["clients"]
    assert load_file(whole / "matrix" / "round-00000002.safetensors")["matrix"].shape == (5, 5)
    assert json.loads((whole / "summary.json").read_text())["rounds"] == 2


def test_files_without_a_seal_are_read(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    right = Result(run).metrics
    pq.write_table(pq.read_table(run / "metrics.parquet").replace_schema_metadata(), run / "metrics.parquet")
    (run / "summary.json").write_text(json.dumps(Result(run).summary))
    assert b"coterie-sha256:" not in (run / "metrics.parquet").read_bytes()
    pd.testing.assert_frame_equal(Result(run).metrics, right)
    assert Result(run).summary == Result(whole).summary


def test_a_torn_line_is_trimmed_before_the_next(tmp_path: Path) -> None:
    log = TimingsLog(tmp_path / "timings.jsonl")
    log.append(1, training=0.5)
    log.flush()
    with (tmp_path / "timings.jsonl").open("a") as file:
        file.write('{"round": 2, "trai')
    log.append(2, training=0.25)
    log.flush()
    assert TimingsLog(tmp_path / "timings.jsonl").read()["training"].tolist() == [0.5, 0.25]

    record = events.EventLog(tmp_path)
    record(events.Event(1, "began"))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"round": 1, "wh' + "x" * 10_000)
    record(events.Event(2, "resumed"))
    assert [event.what for event in events.read(tmp_path)] == ["began", "resumed"]


def test_a_damaged_line_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "timings.jsonl").write_bytes(b'{"round": 1, "training": 0.5}\n{"round": 2, "tra\xffning" 1}\n')
    with pytest.raises(RunFolderError, match=r"timings.jsonl is damaged \(a line reads"):
        TimingsLog(tmp_path / "timings.jsonl").read()


@pytest.mark.parametrize(
    "line",
    [
        b'{"round": 2, "what": "error" "client": 1}\n',
        b'{"round": 2, "what": "\xffrror", "client": 1, "reason": ""\n',
        b'{"round": 2, "whAt": "error", "client": 1, "reason": ""}\n',
        b'{"round": "2", "what": "error", "client": 1, "reason": ""}\n',
        b'{"round": 2, "what": "error", "client": "1", "reason": ""}\n',
        b"[]\n",
    ],
)
def test_a_damaged_event_is_one_sentence(tmp_path: Path, line: bytes) -> None:
    (tmp_path / events.FILE).write_bytes(b'{"round": 1, "what": "began", "client": null, "reason": ""}\n' + line)
    with pytest.raises(RunFolderError, match=r"^.*events.jsonl is damaged \(a line reads .*: each must hold a round"):
        events.read(tmp_path)


def test_no_flipped_bit_gives_a_client_another_name(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {"algorithm": "fedavg"}) as folder:
        folder.write_client_names(["north", "south"])
    file = tmp_path / "run" / "clients.json"
    content = file.read_bytes()
    assert read_client_names(tmp_path / "run") == {0: "north", 1: "south"}
    file.write_bytes(content.replace(b"south", b"souuh"))
    with pytest.raises(RunFolderError, match=r"clients.json is damaged \(it does not match its checksum\)"):
        read_client_names(tmp_path / "run")


def test_lines_that_do_not_fit_leave_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_lines(tmp_path / "log", ["one\n"])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            append_lines(tmp_path / "log", ["two\n"])
    assert (tmp_path / "log").read_text() == "one\n"
    append_lines(tmp_path / "log", ["two\n"])
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_drafts_of_killed_writers_are_removed_when_the_run_goes_on(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    drafts = [run / ".summary.json.draft", run / "weights" / ".round-00000003.safetensors.draft"]
    drafts += [run / "metrics" / ".part-000007.parquet.draft", run / "checkpoint" / ".writing" / "state.safetensors"]
    for draft in drafts:
        draft.parent.mkdir(exist_ok=True)
        draft.write_bytes(b"half")
    api.load(run)  # readers leave them alone: a writer may be at work
    assert all(draft.exists() for draft in drafts)
    RunFolder.open(run).close()
    assert not any(draft.exists() for draft in drafts) and not (run / "checkpoint" / ".writing").exists()
