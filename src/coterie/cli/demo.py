"""Four methods on embedded data, side by side: ``python -m coterie.cli.demo``, or ``make demo``.

Handwritten digits are dealt out to 20 clients by a Dirichlet distribution, so that each client sees some classes often
and others hardly ever. One model for all (FedAvg), each client alone (Local), and two methods that let each client find
those it can learn from (FedAMP, FedACS) play the same rounds on the same samples.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

METHODS = ("local", "fedavg", "fedamp", "fedacs")
SETTING: dict[str, Any] = {
    "data": "digits",
    "partition": "dirichlet:0.1",
    "clients": 20,
    "rounds": 50,
    "model": "mlp",
    "seed": 1,
    "threads": 1,  # models as small as these gain nothing from a second one
}
FOLDER = Path("demo-runs")
NEXT = "coterie run fedacs --data digits --partition dirichlet:1 --clients 20 --rounds 50"


def main(folder: Path = FOLDER) -> None:
    """Run the methods, each with a progress bar, and end in one table."""
    from coterie import api
    from coterie.cli.console import err, out
    from coterie.results import table

    place = _new_folder(folder)
    err.print(
        f"{SETTING['clients']} clients, {SETTING['data']}, {SETTING['partition']}, {SETTING['model']}, "
        f"{SETTING['rounds']} rounds; runs go to {place}/",
        highlight=False,
    )
    results = [api.run(method, out=place / method, **SETTING) for method in METHODS]
    out.print(table([result.summary for result in results]))
    err.print(f"Next, see what is left of this when clients differ less: {NEXT}", highlight=False)


def _new_folder(folder: Path) -> Path:
    number = 1
    while True:
        place = folder / f"{number:03d}"
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return place


if __name__ == "__main__":
    from coterie.errors import CoterieError, Interrupted

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        main()
    except (Interrupted, KeyboardInterrupt) as stop:
        print(stop or "interrupted", file=sys.stderr)
        sys.exit(130)
    except CoterieError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
