"""What a report format offers."""

from typing import Protocol

from ckbench.table import Table


class Report(Protocol):
    """One file of this shelf: ``PLUGIN`` is a function of this shape."""

    def __call__(self, table: Table, *, width: int | None = None) -> str:
        """Draw the table as text. ``width`` is the terminal's, None where nothing may be cut or dropped."""
        ...
