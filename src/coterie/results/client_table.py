"""The clients of one run by name: what each holds, and how the models do on its test samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from coterie.tables import ABSENT, Row, Table, numbers, words

if TYPE_CHECKING:
    from coterie.results.result import Result

_MODELS = ("personal", "global", "newcomer")


def client_table(result: Result, limit: int = 40) -> Table:
    """List up to ``limit`` clients at the last evaluated round: samples, and each model's metrics but the loss."""
    frame = result.metrics
    frame = frame[(frame["split"] == "test") & (frame["metric"] != "loss") & frame["model"].isin(_MODELS)]
    last = frame[frame["round"] == frame["round"].max()]
    scores = last.pivot_table(index="client", columns=["model", "metric"], values="value", observed=True)
    kinds = sorted(scores.columns, key=lambda kind: (_MODELS.index(kind[0]), kind[1]))
    sizes = result.shares.set_index("client")[["train", "test"]] if result.has_shares else None
    rows = []
    for client, name in list(result.client_names.items())[:limit]:
        held = [] if sizes is None else [f"{int(sizes[part][client]):,}" for part in ("train", "test")]
        found = [float(scores[kind].get(client, math.nan)) for kind in kinds]
        rows.append(Row((name, str(client), *held, *(ABSENT if math.isnan(each) else f"{each:.4f}" for each in found))))
    left = len(result.client_names) - len(rows)
    return Table(
        (
            *words("client"),
            *numbers("number", *([] if sizes is None else ["train", "test"]), *(" ".join(kind) for kind in kinds)),
        ),
        tuple(rows),
        "test samples by client",
        (f"{left} more clients",) if left else (),
        labels=1,
    )
