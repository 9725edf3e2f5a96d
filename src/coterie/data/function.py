"""The user's own data by a function of the user's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from coterie.data.dataset import Dataset, Source
from coterie.errors import CoterieError, DataError


class FunctionSource(Source):
    """Your own loader: a function without parameters that gives a coterie.data.Dataset."""

    name: ClassVar[str] = "import"
    how_many: ClassVar[str] = "your own"
    shape: ClassVar[str] = "as the function gives them"
    class_count: ClassVar[str] = "your own"
    obtained: ClassVar[str] = "your own"
    citation: ClassVar[str] = "your own"
    positional: ClassVar[str | None] = "function"

    function: str = Field(pattern=r"^[\w.]+:\w+$", description="where it is, as package.module:function")

    def load(self, folder: Path, seed: int) -> Dataset:
        """Call the function.

        Parameters
        ----------
        folder
            Not used.
        seed
            Not used.

        Returns
        -------
        Dataset
            What it gives.

        Raises
        ------
        CoterieError
            If the function raises one itself.
        DataError
            If it cannot be imported, fails, or gives something else.
        """
        module, _, name = self.function.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)()
        except CoterieError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"the loader {self.text()!r} failed ({reason}); is it on PYTHONPATH?") from error
        if not isinstance(found, Dataset):
            raise DataError(f"the loader {self.text()!r} gave a {type(found).__name__}, not a coterie.data.Dataset")
        return found
