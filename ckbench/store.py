"""Results on disk: append-only JSON lines, one file per session, each line written the moment a trial ends.

Reading trusts nothing: a cut, foreign or newer line is named and passed over, and the rest is used.
"""

import contextlib
import json
import math
import os
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckbench.errors import StoreError
from ckbench.records import SCHEMA, STATUSES, Record

PUBLISHED = "published"
LOCK_NAME = ".lock"
MAX_LINE_BYTES = 50_000_000
MAX_NESTING = 12


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A line, or a whole file, that could not be used, and why."""

    path: Path
    line: int | None
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}" if self.line is None else f"{self.path}:{self.line}"
        return f"{where}: {self.reason}"


class ResultStore:
    """Writes one session's records into a results folder that no other session writes to meanwhile."""

    def __init__(self, folder: Path, study: str, session_id: str) -> None:
        self.folder = folder
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"{slug(study)}_{stamp}_{session_id}.jsonl"
        self._lock: int | None = None

    def __enter__(self) -> "ResultStore":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except FileExistsError:
            raise StoreError(f"{self.folder}: is a file, not a results folder") from None
        except NotADirectoryError:
            raise StoreError(f"{self.folder}: a parent of it is a file") from None
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written ({error.strerror})") from None
        if not _take_lock(self._lock):
            os.close(self._lock)
            self._lock = None
            raise StoreError(f"{self.folder}: another ckbench is writing there; wait for it or use --out elsewhere")
        return self

    def __exit__(self, *details: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append(self, record: Record) -> None:
        """Write one record as one line, whole or not at all, and make it durable.

        Raises StoreError when it cannot be written; what was there before stays readable.
        """
        line = json.dumps(record.to_json(), allow_nan=False, separators=(",", ":")) + "\n"
        data = line.encode()
        try:
            target = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written ({error.strerror})") from None
        try:
            size = os.fstat(target).st_size
            if size and _last_byte(self.path) != b"\n":
                data = b"\n" + data  # a line cut short stays by itself
            try:
                written = 0
                while written < len(data):
                    written += os.write(target, data[written:])
                os.fsync(target)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(target, size)
                raise StoreError(f"{self.path}: cannot be written ({error.strerror}); record not kept") from None
        finally:
            os.close(target)
            with contextlib.suppress(OSError):
                if self.path.stat().st_size == 0:
                    self.path.unlink()


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _take_lock(lock: int) -> bool:
    try:
        import fcntl
    except ImportError:  # no fcntl on Windows; sessions write files of their own there all the same
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def slug(text: str) -> str:
    """Make a file name part of letters, digits, dot, underscore and hyphen.

    >>> slug("gpt small: bf16|v2")
    'gpt-small-bf16-v2'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:60] or "study"


def read(path: Path) -> tuple[list[dict[str, Any]], list[Skipped]]:
    """Read every record below a folder, or in one file; ``published`` only when it is named.

    Gives records as plain data, in the order of their files, and what was passed over.
    Raises StoreError when the path is not there or not readable.
    """
    records: list[dict[str, Any]] = []
    skipped: list[Skipped] = []
    seen: set[str] = set()
    for file in _files(path):
        for number, outcome in _lines(file):
            if isinstance(outcome, str):
                skipped.append(Skipped(path=file, line=number, reason=outcome))
                continue
            identity = outcome["record_id"]
            if identity and identity in seen:
                skipped.append(Skipped(path=file, line=number, reason=f"record {identity} was read before"))
                continue
            seen.add(identity)
            records.append(outcome)
    return records, skipped


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise StoreError(f"{path}: no such results folder; `ckbench run` makes one")
    try:
        found = sorted(path.rglob("*.jsonl"))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    inside = PUBLISHED in path.resolve().parts
    return [file for file in found if inside or PUBLISHED not in file.relative_to(path).parts]


def _lines(file: Path) -> Iterator[tuple[int | None, dict[str, Any] | str]]:
    """Yield line numbers with a record, or with the reason why there is none."""
    try:
        data = file.read_bytes()
    except OSError as error:
        yield None, f"cannot be read ({error.strerror})"
        return
    if not data.strip():
        yield None, "empty file"
        return
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if raw.strip():
            yield number, _parse(raw, is_cut=not data.endswith(b"\n") and raw == data.rsplit(b"\n", 1)[-1])


def _parse(raw: bytes, *, is_cut: bool) -> dict[str, Any] | str:
    if len(raw) > MAX_LINE_BYTES:
        return "longer than any record"
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return "cut short (the write was interrupted)" if is_cut else "not JSON"
    if not isinstance(value, dict) or "schema" not in value or "strategy" not in value:
        return "not a ckbench record"
    schema = value["schema"]
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA:
        return f"schema {schema} is newer than this ckbench reads ({SCHEMA}); upgrade ckbench"
    if schema != SCHEMA:
        return f"unknown schema {str(schema)[:40]!r}"
    record = {**_DEFAULTS, **{key: item for key, item in value.items() if key in _DEFAULTS}}
    for key, item in record.items():
        if not _fits(item, *_TYPES[key]):
            return f"field {key} has a value it cannot have"
    if record["status"] not in STATUSES:
        return f"unknown status {record['status'][:40]!r}"
    return record


def _refuse_constant(text: str) -> float:
    raise ValueError(text)


def _allowed_types(annotation: Any) -> tuple[tuple[type, ...], bool]:
    """Give the Python types a field may have, and whether it may be None."""
    options = typing.get_args(annotation) if typing.get_origin(annotation) is not dict else ()
    if typing.get_origin(annotation) in (dict, list):
        return (typing.get_origin(annotation),), False
    if options:
        kinds = tuple((typing.get_origin(o) or o) for o in options if o is not type(None))
        return kinds, type(None) in options
    return (annotation,), False


_TYPES = {f.name: _allowed_types(f.type) for f in fields(Record)}
_DEFAULTS = Record().to_json()


def _fits(value: Any, kinds: tuple[type, ...], optional: bool) -> bool:
    if value is None:
        return optional
    kind = type(value)
    if kind is float:
        return float in kinds and math.isfinite(value)
    if kind is int:
        return (int in kinds or float in kinds) and abs(value) < 2**63
    if kind not in kinds:
        return False
    if kind is list and value and type(value[0]) in (float, int):
        return all(type(item) in (float, int) and 0 <= item < math.inf for item in value)
    return kind in (str, bool) or _is_plain(value, 0)


def _is_plain(value: Any, depth: int) -> bool:
    """Tell whether nested data is bounded and finite."""
    if depth > MAX_NESTING:
        return False
    if isinstance(value, dict):
        return all(_is_plain(item, depth + 1) for item in value.values())
    if isinstance(value, list):
        return all(_is_plain(item, depth + 1) for item in value)
    return not isinstance(value, float) or math.isfinite(value)
