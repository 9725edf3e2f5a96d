"""``python -m coterie``, and ``torchrun -m coterie``: the command line."""

from __future__ import annotations

from coterie.cli import main

if __name__ == "__main__":
    main()
