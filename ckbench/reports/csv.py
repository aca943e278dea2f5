"""csv: one line per row with raw units, an empty cell for unknown."""

import csv
import io
import json
from typing import Any

from ckbench.compare import row_json
from ckbench.reports.base import Findings
from ckbench.units import clean

FORMULA_SIGNS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
LEFT_OUT = ("step_samples_s", "live_bytes_timeline", "plan", "run", "environment", "strategy_spec")


def render(findings: Findings, *, width: int | None = None) -> str:
    """Give every scalar of every row; model and train as columns of their own."""
    flat = [{clean(key): value for key, value in _flat(row_json(row)).items()} for row in findings.rows]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key in LEFT_OUT:
            continue
        if key in ("model", "train"):
            flat.update({f"{key}.{name}": _cell(item) for name, item in value.items()})
        else:
            flat[key] = _cell(value)
    return flat


def _cell(value: Any) -> Any:
    """Write a value; text that a spreadsheet would run as a formula is quoted."""
    if isinstance(value, list | dict):
        return json.dumps(value)
    if isinstance(value, str):
        text = clean(" ".join(value.splitlines()))
        return "'" + text if text.lstrip()[:1] in FORMULA_SIGNS else text
    return value


PLUGIN = render
