"""What there is to judge claims by: measured rows of one device, and estimates; looked up by study and keys."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckbench import store
from ckbench.compare import compare
from ckbench.errors import StoreError
from ckbench.store import Skipped

ESTIMATES_NAME = "estimates.json"
MAX_ESTIMATES_BYTES = 10_000_000


class NotMeasured(Exception):
    """A figure that a claim needs is not there; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Rows of one device, and estimates, which are of no device."""

    device: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows as `report --format json` gives them: newest session of each study."""
    estimates: list[dict[str, Any]] = field(default_factory=list)
    """Estimated rows: study, command, strategy, model, train, and figures."""

    def find(self, study: str, strategy: str, **where: Any) -> list[dict[str, Any]]:
        """Give the measured rows of a strategy that ended ok, in the order of their study."""
        return [row for row in _matching(self.rows, study, strategy, where) if row["status"] == "ok"]

    def row(self, study: str, strategy: str, **where: Any) -> dict[str, Any]:
        """Give the one row that fits. Raises NotMeasured."""
        found = self.find(study, strategy, **where)
        if len(found) == 1:
            return found[0]
        ended = [row["status"] for row in _matching(self.rows, study, strategy, where) if row["status"] != "ok"]
        why = f" ended {ended[0]}" if ended else " is not in the records" if not found else " is there several times"
        raise NotMeasured(f"{study}: {_told(strategy, where)}{why}")

    def number(self, study: str, strategy: str, key: str, **where: Any) -> float:
        """Give one figure of a measured row. Raises NotMeasured where it is unknown."""
        return _number(self.row(study, strategy, **where), key, f"{study}: {_told(strategy, where)}")

    def estimate(self, study: str, strategy: str, key: str, **where: Any) -> float:
        """Give one figure of an estimated row. Raises NotMeasured."""
        found = _matching(self.estimates, study, strategy, where)
        if len(found) != 1:
            raise NotMeasured(f"{study}: {_told(strategy, where)} is not among the estimates")
        return _number(found[0], key, f"{study}: {_told(strategy, where)}")

    def settings(self, study: str, name: str) -> list[Any]:
        """List the values that a key takes in the measured rows of a study, in order. Raises NotMeasured for none."""
        values = dict.fromkeys(_setting(row, name) for row in self.rows if row["study"] == study)
        if not values:
            raise NotMeasured(f"{study} is not in the records")
        return sorted(values)

    def estimated_settings(self, study: str, name: str) -> list[Any]:
        """List the values that a key takes in the estimates of a study, in order. Raises NotMeasured for none."""
        values = dict.fromkeys(_setting(row, name) for row in self.estimates if row["study"] == study)
        if not values:
            raise NotMeasured(f"{study} is not among the estimates")
        return sorted(values)


def _matching(rows: list[dict[str, Any]], study: str, strategy: str, where: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        row
        for row in rows
        if row["study"] == study
        and row["strategy"] == strategy
        and all(_setting(row, name) == value for name, value in where.items())
    ]


def _setting(row: dict[str, Any], name: str) -> Any:
    return row["model"].get(name, row["train"].get(name))


def _number(row: dict[str, Any], key: str, place: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotMeasured(f"{place} has no {key}")
    return value


def _told(strategy: str, where: dict[str, Any]) -> str:
    return ", ".join([strategy, *(f"{name} {value}" for name, value in where.items())])


def read(path: Path) -> tuple[list[Evidence], list[Skipped]]:
    """Read records and estimates below a folder, one Evidence per device; with estimates alone, one of no device.

    Raises StoreError where there is neither, or where an estimates file cannot be used.
    """
    records, skipped = store.read(path)
    estimates = read_estimates(path)
    if not records and not estimates:
        raise StoreError(f"{path}: neither records nor estimates of claims; `ckbench claims` makes them")
    return gather(records, estimates), skipped


def gather(records: Iterable[dict[str, Any]], estimates: list[dict[str, Any]]) -> list[Evidence]:
    """Sort records by device; of each study the newest session counts."""
    by_device: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        device = record["device_name"] or record["device"]
        by_device.setdefault(device, {}).setdefault(record["study"], []).append(record)
    made = []
    for device, studies in by_device.items():
        rows = [row.values for members in studies.values() for row in compare(_newest_session(members)).rows]
        made.append(Evidence(device=device, rows=rows, estimates=estimates))
    return made or [Evidence(device="", estimates=estimates)]


def _newest_session(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    newest = max(records, key=lambda record: record["started_at"])["session_id"]
    return [record for record in records if record["session_id"] == newest]


def read_estimates(path: Path) -> list[dict[str, Any]]:
    """Read every estimates file below a folder, as rows. Raises StoreError for one that is not such a file."""
    if not path.is_dir():
        return []
    rows: list[dict[str, Any]] = []
    for file in sorted(path.rglob(ESTIMATES_NAME)):
        if store.PUBLISHED in file.relative_to(path).parts and store.PUBLISHED not in path.resolve().parts:
            continue
        try:
            if file.stat().st_size > MAX_ESTIMATES_BYTES:
                raise StoreError(f"{file}: larger than any file of estimates")
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{file}: cannot be read ({error}); `ckbench claims` makes it anew") from None
        rows += _checked(content, file)
    return rows


def _checked(content: Any, file: Path) -> list[dict[str, Any]]:
    rows = content.get("rows") if isinstance(content, dict) else None
    needed = {"study": str, "command": str, "strategy": str, "model": dict, "train": dict}
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in needed.items()) for row in rows
    ):
        raise StoreError(f"{file}: not a file of estimates; `ckbench claims` makes it anew")
    return rows
