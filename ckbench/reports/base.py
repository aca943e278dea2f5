"""What a report format is given, and what it gives back. No torch here.

A plug-in gets ``Findings``: the tables to draw, laid out, and under them the comparison whose rows (``row.values``)
hold every figure with raw units and whose rows' ``records`` hold every stored field. Text formats read ``parts``, one
table per value of ``--group-by``; formats that draw figures read ``comparison`` and ``whole``. A plug-in is one of two:

* text, for terminals, pipes and files alike: ``PLUGIN`` is a function of the shape of ``Report``;
* files, which no terminal shows: ``PLUGIN`` is a ``FileReport``, whose ``files`` gives names and contents. One file may
  be sent through a pipe (``> page.html``) or be named (``--out page.html``); several need a folder (``--out plots``).

Libraries that are slow to import, or that need not be installed, are imported inside functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckbench.compare import Comparison, Row
from ckbench.table import Table


@dataclass(frozen=True, kw_only=True)
class Budget:
    """An amount of memory that somebody may have to stay in."""

    name: str
    """As a reader knows it: a card, or the size as typed."""
    usable_bytes: int
    """What of it tensors may take."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything there is to draw. All strings in it may come from a stranger's file."""

    comparison: Comparison
    """Rows in the order to show them; rows that were never compared (of an estimate) have no baselines."""
    whole: Table
    """All rows as one table, with header, failures, doubts and what was passed over."""
    parts: Sequence[Table]
    """The same rows as tables to show one after the other; ``[whole]`` where nothing divides them."""
    budgets: Sequence[Budget] = ()
    """Budgets that were asked about, beside those of common cards."""
    charts: bool = True
    """Whether text may have charts under its tables, where a terminal allows them."""

    @classmethod
    def of_table(cls, table: Table) -> "Findings":
        """Wrap a table whose rows were not compared."""
        alone = Comparison(rows=table.rows, varied=(), baselines={}, fallback_groups=frozenset())
        return cls(comparison=alone, whole=table, parts=[table])

    @property
    def rows(self) -> list[Row]:
        """List all rows in the order of the parts."""
        return [row for part in self.parts for row in part.rows]

    @property
    def records(self) -> list[dict[str, Any]]:
        """List the stored records behind the rows."""
        return [record for row in self.rows for record in row.records]


class Report(Protocol):
    """A format that is text."""

    def __call__(self, findings: Findings, *, width: int | None = None) -> str:
        """Draw the findings as text. ``width`` is the terminal's, None where nothing may be cut or dropped."""
        ...


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """A format that is files."""

    files: Callable[[Findings], dict[str, bytes]]
    """Give contents by file name, without folders. A lone file is text in ASCII, so that any pipe carries it."""
