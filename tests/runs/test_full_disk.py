"""A disk that fills up wherever a run writes: one sentence and exit code 2, and what was finished before is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUNS = """
import contextlib, io, resource, sys
from coterie.cli import main
(out, *rooms), hard = sys.argv[1:], resource.getrlimit(resource.RLIMIT_FSIZE)[1]
sys.dont_write_bytecode = True  # cut off, it would be in the way of every process to come

def command(*arguments):
    sys.argv[1:] = arguments
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    return code, next((line for line in said.getvalue().splitlines() if line.startswith("error: ")), "")

some = "--rounds 2 --clients 4 --data digits --checkpoint-every 1 --matrix --model mlp:hidden=8".split()
assert command("run", "fedacs", *some, "--out", out + "/whole")[0] == 0
for room in map(int, rooms):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    print(room, "run", *command("run", "fedacs", *some, "--out", f"{out}/{room}"), sep="|")
    exported = f"{out}/{room}-exported"
    print(room, "export", *command("export", out + "/whole", "--client", "0", "--out", exported), sep="|")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
"""
"""Runs in a process of their own, whose files must not become larger than so many bytes."""


def test_wherever_the_disk_is_full_a_command_ends_with_a_sentence(tmp_path: Path) -> None:
    # In the configuration or the parameters; in a table; in a checkpoint.
    rooms = {100: ("run", "export"), 2000: ("run", "export"), 10000: ("run",)}
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(tmp_path), *map(str, rooms)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    found = {(int(room), what): (code, said) for room, what, code, said in map(_parts, done.stdout.splitlines())}
    assert done.returncode == 0, done.stderr
    for room, commands in rooms.items():
        for what in commands:
            code, said = found[room, what]
            assert code == "2" and said.startswith("error: ") and "File too large" in said, (room, what, code, said)


def _parts(line: str) -> list[str]:
    return line.split("|", 3)
