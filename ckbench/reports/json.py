"""json: rows with raw units, null for unknown; strict JSON."""

import json

from ckbench.compare import row_json
from ckbench.reports.base import Findings


def render(findings: Findings, *, width: int | None = None) -> str:
    """Give a list of rows as strict JSON."""
    return json.dumps([row_json(row) for row in findings.rows], indent=1, allow_nan=False) + "\n"


PLUGIN = render
