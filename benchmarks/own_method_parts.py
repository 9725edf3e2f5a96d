"""What each part of `benchmarks/own_method.py` gives: the method whole, and with one part left out at a time.

    COTERIE_DATA=... python benchmarks/own_method_parts.py FOLDER [--device cuda] [--json FILE] [SETTING...]

Every one of them is played by the leaderboard's protocol, tuned over as many candidates as the methods there, but with
the seeds by which the method was made, which the leaderboard does not have. A stopped run goes on with the same
command. Without settings, all of Fashion-MNIST.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from coterie.studies.leaderboard.entries import LeaderboardEntry
from coterie.studies.leaderboard.playing import play
from coterie.studies.leaderboard.protocol import LeaderboardProtocol, load

METHOD = Path(__file__).with_name("own_method.py")
SEEDS = (7, 8)
TUNED = {"lr": [0.025, 0.05, 0.1], "adaptation": [0.1, 0.3, 1.0]}
"""What is tried of the method in the leaderboard."""

PARTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "without class frequencies": {"tau": 0.0},
    "without the steps of those away": {"server_momentum": 0.0},
    "without the mean of models": {"averaging": 0.0},
    "without training at the end": {"adaptation": 0.0},
    "one more sample of every class": {"smoothing": 1.0},
}


def played(
    protocol: LeaderboardProtocol, part: str, settings: list[str], folder: Path, over: dict[str, Any]
) -> list[LeaderboardEntry]:
    """Play the method without one of its parts; what is fixed is not tuned, and then the protocol's rates are."""
    fixed = PARTS[part]
    tune = TUNED if "adaptation" not in fixed else {"lr": list(protocol.rates)}
    rules = protocol.with_method(str(METHOD), tune, fixed)
    return play(rules, settings, [str(METHOD)], folder / part.replace(" ", "_"), over=over, tell=print)


def row_of(part: str, entry: LeaderboardEntry) -> dict[str, Any]:
    """Give the best mean on validation samples, and what that candidate has on test samples."""
    best = max(score for _, score in entry.tried if score is not None)
    return {
        "part": part,
        "setting": entry.setting,
        "chosen": entry.chosen,
        "validation": best,
        "test": round(float(np.mean(entry.means())), 6),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Give rows as a table: validation and test accuracy in percent, a column for each setting."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    found = {(row["part"], row["setting"]): f"{100 * row['validation']:.1f} / {100 * row['test']:.1f}" for row in rows}
    lines = [f"| | {' | '.join(settings)} |", f"|---|{'---:|' * len(settings)}"]
    for part in dict.fromkeys(row["part"] for row in rows):
        lines.append(f"| {part} | {' | '.join(found.get((part, setting), '–') for setting in settings)} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    """Play all, print a table and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", nargs="*", metavar="SETTING")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path)
    words = parser.parse_intermixed_args(given)
    protocol = load()
    settings = words.settings or [name for name in protocol.settings if name.startswith("fmnist-")]
    over: dict[str, Any] = {"seeds": list(SEEDS), "device": words.device}
    over |= {} if words.rounds is None else {"rounds": words.rounds, "eval_every": words.rounds}
    rows = [row_of(part, entry) for part in PARTS for entry in played(protocol, part, settings, words.folder, over)]
    print(table(rows))
    if words.json is not None:
        words.json.write_text(json.dumps({"seeds": SEEDS, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
