"""Results on disk: append-only JSON lines, one file per session, each line written the moment a trial ends.

Reading trusts nothing: a cut, foreign or newer line is named and passed over, and the rest is used.
"""

import contextlib
import json
import os
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from ckbench.errors import StoreError
from ckbench.records import SCHEMA, STATUSES, Record
from ckbench.units import one_line

PUBLISHED = "published"
LOCK_NAME = ".lock"
MAX_LINE_BYTES = 50_000_000
MAX_NESTING = 12
MAX_NUMBER = 2**63
"""More than any seed, count, byte or second of a trial; sums and ratios of such numbers stay finite."""
ROOM_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A line, or a whole file, that could not be used, and why."""

    path: Path
    line: int | None
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}" if self.line is None else f"{self.path}:{self.line}"
        return one_line(f"{where}: {self.reason}")


class ResultStore:
    """Writes one session's records into a results folder that no other session writes to meanwhile."""

    def __init__(self, folder: Path, study: str, session_id: str) -> None:
        self.folder = folder
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self._name = f"{slug(study)}_{stamp}"
        self.continue_session(session_id)
        self._lock: int | None = None

    def __enter__(self) -> "ResultStore":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
            _try_writing(self._lock)
        except FileExistsError:
            raise StoreError(f"{self.folder}: is a file, not a results folder") from None
        except NotADirectoryError:
            raise StoreError(f"{self.folder}: a parent of it is a file") from None
        except OSError as error:
            self.__exit__()
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

    def continue_session(self, session_id: str) -> None:
        """Write as a part of this session, in a file of its own."""
        # An earlier session's name comes from a file, which may say ../../anything
        self.session_id = session_id
        self.path = self.folder / f"{self._name}_{slug(session_id)}.jsonl"

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


def _try_writing(lock: int) -> None:
    """Find a full disk before the first trial: take the room that a few records need, and give it back."""
    try:
        written = 0
        while written < ROOM_BYTES:
            written += os.write(lock, bytes(ROOM_BYTES - written))
        os.fsync(lock)  # some file systems only say now that there is no room
    finally:
        os.ftruncate(lock, 0)


def _take_lock(lock: int) -> bool:
    try:
        import fcntl
    except ImportError:  # no fcntl on Windows; sessions write files of their own there all the same
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def slug(text: str) -> str:
    """Make a file name part of letters, digits, underscore and hyphen; nul.txt is a device on Windows.

    >>> slug("gpt small: bf16|v2")
    'gpt-small-bf16-v2'
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:60] or "study"


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


def read_some(path: Path, *, maker: str = "`ckbench run`") -> tuple[list[dict[str, Any]], list[Skipped]]:
    """Read as ``read`` does. Raises StoreError also where there is no record; ``maker`` is what makes some."""
    records, skipped = read(path)
    if not records:
        hint = f"; passed over: {skipped[0]}" if skipped else f"; {maker} makes some"
        raise StoreError(f"{path}: no ckbench records{hint}")
    return records, skipped


def _files(path: Path) -> list[Path]:
    try:
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise StoreError(f"{path}: no such results folder; `ckbench run` makes one")
        found = sorted(path.rglob("*.jsonl"))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    inside = PUBLISHED in path.resolve().parts
    return [file for file in found if inside or PUBLISHED not in file.relative_to(path).parts]


def _lines(file: Path) -> Iterator[tuple[int | None, dict[str, Any] | str]]:
    """Yield line numbers with a record, or with the reason why there is none."""
    if not file.is_file():  # a folder of that name, or a pipe, at which reading would wait for ever
        yield None, "not a file"
        return
    is_empty = True
    try:
        with file.open("rb") as stream:
            for number, raw in enumerate(_raw_lines(stream), start=1):
                if raw.strip():
                    is_empty = False
                    yield number, _parse(raw, is_cut=not raw.endswith(b"\n"))
    except OSError as error:
        yield None, f"cannot be read ({error.strerror})"
        return
    if is_empty:
        yield None, "empty file"


def _raw_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield line by line; of one longer than any record, only so much that this can be seen."""
    while line := stream.readline(MAX_LINE_BYTES + 2):
        yield line
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)


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
        return f"unknown schema {repr(schema)[:40]}"
    record = {**_DEFAULTS, **{key: item for key, item in value.items() if key in _DEFAULTS}}
    for key, item in value.items():
        kind = type(item)  # thousands of records are read at once: the commonest cases need no call
        if (kind is str and key in _TEXTS) or (item is None and key in _OPTIONAL) or key not in _DEFAULTS:
            continue
        if not _fits(key, item):
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
_ITEM_TYPES = {f.name: typing.get_args(f.type)[0] for f in fields(Record) if typing.get_origin(f.type) is list}
_OPTIONAL = frozenset(name for name, (_, optional) in _TYPES.items() if optional)
_TEXTS = frozenset(name for name, (kinds, _) in _TYPES.items() if str in kinds)
_DEFAULTS = Record().to_json()


def _fits(key: str, value: Any) -> bool:
    """Tell whether a field may have a value: its type, finite, and not negative unless it tells a change."""
    kinds, optional = _TYPES[key]
    if value is None:
        return optional
    kind = type(value)
    if kind is int or kind is float:
        lowest = -MAX_NUMBER if key.endswith("_ratio") else 0
        return (kind in kinds or float in kinds) and lowest <= value < MAX_NUMBER
    if kind not in kinds:
        return False
    if kind is str:
        return True
    if kind is list and _ITEM_TYPES[key] is float:
        return not value or ({*map(type, value)} <= {float, int} and 0 <= min(value) and max(value) < MAX_NUMBER)
    return kind in (str, bool) or _is_plain(value, 0)


def _is_plain(value: Any, depth: int) -> bool:
    """Tell whether nested data is bounded and finite."""
    if depth > MAX_NESTING:
        return False
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            kind = type(item)
            if kind is not str and kind is not bool and item is not None and not _is_plain(item, depth + 1):
                return False
        return True
    return not isinstance(value, int | float) or -MAX_NUMBER < value < MAX_NUMBER
