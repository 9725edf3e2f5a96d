"""The measurements of a round, as trackers receive them, from what the run has recorded."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from coterie.evaluation import metrics as metric_table
from coterie.runs.storage import EVERYONE, Block, RunFolder
from coterie.tracking.base import Measured, Vector

_NEWCOMER, _FEDERATION = "newcomer", "federation"
_CROSS = "cross"  # what is read off an accuracy matrix

_Recorded = tuple[Sequence[Block], Mapping[str, float], Vector | None]


def measured(
    folder: RunFolder, round_number: int, honest: Collection[int], primary: str, stored: bool = False
) -> Measured:
    """Return the measurements of the round that was recorded last, or with ``stored`` of one that is on the disk.

    As in a summary, clients that attack are not counted.
    """
    blocks, seconds, matrix = (_stored if stored else _latest)(folder, round_number)
    scalars: dict[str, float] = {}
    clients: dict[str, Vector] = {}
    counts = np.asarray(sorted(honest), dtype=np.int32)
    for block in blocks:
        if block.model == _FEDERATION:
            scalars |= _of_federation(block)
            continue
        # Who is held out of training does not attack, and counts as a newcomer alone.
        values = block.values if block.model == _NEWCOMER else block.values[np.isin(block.clients, counts)]
        if not len(values):
            continue
        name = tag(block.model, block.split, block.metric)
        scalars |= _spread(name, values, _higher_is_better(block, primary))
        finite = values[np.isfinite(values)]
        if block.split == "test" and len(finite):
            clients[name] = finite
    scalars |= {tag("seconds", stage): spent for stage, spent in seconds.items()}
    return Measured(scalars, clients, matrix)


def _latest(folder: RunFolder, round_number: int) -> _Recorded:
    weights = folder.collaboration_weights.latest
    matrix = None if weights is None or weights[0] != round_number else weights[1].astype(np.float64)
    return [block for block in folder.metrics.latest if block.round == round_number], folder.timings.latest, matrix


def _stored(folder: RunFolder, round_number: int) -> _Recorded:
    metrics, timings = folder.metrics.read(), folder.timings.read()
    grouped = metrics[metrics["round"] == round_number].groupby(["model", "split", "metric"], observed=True, sort=False)
    blocks = []
    for names, rows in grouped:
        model, split, metric = map(str, names)
        clients, values = rows["client"].to_numpy(np.int32), rows["value"].to_numpy(np.float64)
        blocks.append(Block(round_number, model, split, metric, clients, values))
    spent = timings[timings["round"] == round_number].drop(columns="round")
    seconds = {str(stage): float(total) for stage, total in spent.sum().items()} if len(spent) else {}
    has = round_number in folder.collaboration_weights.rounds()
    return blocks, seconds, folder.collaboration_weights.read(round_number).to_numpy(np.float64) if has else None


def tag(*parts: str) -> str:
    """Join the parts of a name by slashes, in letters that every tracker takes."""
    return "/".join(re.sub(r"[^A-Za-z0-9_.-]+", "_", part) for part in parts)


def _of_federation(block: Block) -> dict[str, float]:
    if block.metric.startswith("bytes_"):
        return {tag("bytes", block.metric.removeprefix("bytes_")): float(block.values[0])}
    name = tag(block.split, block.metric)
    if block.clients.tolist() == [EVERYONE]:
        return {name: float(block.values[0])}
    with np.errstate(all="ignore"):
        return {f"{name}/mean": float(block.values.mean()), f"{name}/std": float(block.values.std())}


def _spread(name: str, values: Vector, higher_is_better: bool) -> dict[str, float]:
    worst = values.min() if higher_is_better else values.max()
    with np.errstate(all="ignore"):  # a loss may be infinite
        mean, std = values.mean(), values.std()
    return {f"{name}/mean": float(mean), f"{name}/std": float(std), f"{name}/worst": float(worst)}


def _higher_is_better(block: Block, primary: str) -> bool:
    if block.metric == "loss":
        return False
    metric = metric_table.usual(primary) if block.split == _CROSS else block.metric
    return metric_table.get(metric).higher_is_better
