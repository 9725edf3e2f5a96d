"""What is the user's own: code, imported by name or from a file, copied into a run's folder; objects, handed over.

A model, a loss or a data set may be written as ``import:package.module:name``, and a method as the path of a Python
file. All of them are loaded here, and what is wrong with them is told in one way.
"""

from __future__ import annotations

from coterie.user_code.copies import MANIFEST, Copies, as_given, collect
from coterie.user_code.loader import IMPORT, explain, load, load_file, place
from coterie.user_code.objects import OBJECT, HeldObject, digest_in, find, hold

__all__ = [
    "IMPORT",
    "MANIFEST",
    "OBJECT",
    "Copies",
    "HeldObject",
    "as_given",
    "collect",
    "digest_in",
    "explain",
    "find",
    "hold",
    "load",
    "load_file",
    "place",
]
