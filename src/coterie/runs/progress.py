"""What a running experiment shows: rounds, accuracy, time left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_bar(
    title: str, rounds: int, done: int = 0, show: bool = True
) -> Iterator[Callable[[int, float | None], None]]:
    """Show a progress bar on the error stream, so that what is printed can still be piped."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(title, total=rounds, completed=done, score="")

        def watch(round_number: int, mean: float | None) -> None:
            bar.update(task, completed=round_number)
            if mean is not None:
                bar.update(task, score=f"{mean:.4f}")

        yield watch
