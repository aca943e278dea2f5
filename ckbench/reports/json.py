"""json: rows with raw units, null for unknown; strict JSON."""

import json

from ckbench.compare import row_json
from ckbench.table import Table


def render(table: Table, *, width: int | None = None) -> str:
    """Give a list of rows as strict JSON."""
    return json.dumps([row_json(row) for row in table.rows], indent=1, allow_nan=False) + "\n"


PLUGIN = render
