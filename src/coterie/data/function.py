"""The user's own data by a function of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from coterie import user_code
from coterie.data._user_data import count_owners
from coterie.data.dataset import Dataset, Source
from coterie.errors import CoterieError, DataError

# What was loaded to count its owners and is about to be used: the function is called once, not twice.
_counted: dict[str, Dataset] = {}


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
        """
        return _counted.pop(self.text(), None) or self._called()

    def owners(self) -> dict[str, int] | None:
        """Call the function and count whose the samples are."""
        found = _counted.get(self.text()) or self._called()
        _counted.clear()
        _counted[self.text()] = found
        if found.owner is None:
            return None
        names = found.owner_names or tuple(map(str, range(int(found.owner.max()) + 1)))
        return count_owners(found.owner, names)

    def _called(self) -> Dataset:
        shown = f"data {user_code.as_given(self.text())!r}"
        function = user_code.load(
            "data",
            self.text(),
            form="package.module:function",
            must_be="a function without parameters that gives a coterie.data.Dataset",
            error=DataError,
        )
        try:
            found = function()
        except CoterieError:
            raise
        except Exception as error:
            raise DataError(f"{shown} failed: {user_code.explain(error)}{user_code.place(error)}") from error
        if not isinstance(found, Dataset):
            raise DataError(f"{shown} gave a {type(found).__name__}, not a coterie.data.Dataset")
        return found
