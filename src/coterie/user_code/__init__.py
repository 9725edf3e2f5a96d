"""Code of the user's own: imported by name, loaded from a file, copied into a run's folder and loaded from there.

A model, a loss or a data set may be written as ``import:package.module:name``, and a method as the path of a Python
file. All of them are loaded here, and what is wrong with them is told in one way.
"""

from __future__ import annotations

from coterie.user_code.copies import MANIFEST, Copies, as_given, collect
from coterie.user_code.loader import IMPORT, explain, load, load_file, place

__all__ = ["IMPORT", "MANIFEST", "Copies", "as_given", "collect", "explain", "load", "load_file", "place"]
