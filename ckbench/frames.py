"""Records as a pandas DataFrame: a column per field, a declared dtype, dots for what is nested, NA for unknown.

pandas takes a third of a second to load, so it comes in with the first frame.
"""

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ckbench.compare import check_baseline, compare, row_json
from ckbench.config import Section, StrategySpec
from ckbench.errors import ConfigError
from ckbench.plan import Plan
from ckbench.records import Record
from ckbench.study import SECTION_CLASSES

if TYPE_CHECKING:
    import pandas as pd

DTYPES: dict[Any, str] = {int: "Int64", float: "Float64", bool: "boolean", str: "string"}
"""All of them have pandas' NA for unknown."""
OTHER = "object"
"""Lists, and columns of mixed types."""
TIME_COLUMN = "started_at"
TIME = "datetime64[us, UTC]"
POOLED = {"rounds": "Int64", "baseline": "string", "peak_change_ratio": "Float64", "nvml_device_grown_bytes": "Int64"}
"""What rows have beside the fields of a record."""


def dtype_of(annotations: Iterable[Any]) -> str:
    """Give the dtype that holds every value of the annotated types, None aside.

    >>> dtype_of([int | None]), dtype_of([int, float]), dtype_of([list[float]])
    ('Int64', 'Float64', 'object')
    """
    kinds = {kind for annotation in annotations for kind in _kinds(annotation)} - {type(None)}
    if kinds == {int, float}:
        return DTYPES[float]
    return DTYPES.get(kinds.pop(), OTHER) if len(kinds) == 1 else OTHER


def _kinds(annotation: Any) -> set[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return set(map(type, typing.get_args(annotation)))
    if origin in (typing.Union, types.UnionType):
        return {kind for option in typing.get_args(annotation) for kind in _kinds(option)}
    return {origin or annotation}


NESTED = tuple(f.name for f in fields(Record) if dict in _kinds(f.type))
"""Fields that hold mappings, and become columns by their keys."""


def _declared() -> dict[str, str]:
    """Give the dtype of every column whose type is known before there is a value, in the order of the columns."""
    columns: dict[str, str] = {}
    for field in fields(Record):
        if field.name not in NESTED:
            columns[field.name] = TIME if field.name == TIME_COLUMN else dtype_of([field.type])
            continue
        for key, annotations in _keys_of(field.name).items():
            if not any(dict in _kinds(annotation) for annotation in annotations):
                columns[f"{field.name}.{key}"] = dtype_of(annotations)
    return columns


def _keys_of(nested: str) -> dict[str, list[Any]]:
    """Give the keys that a nested field may have, with their types in every class that has them."""
    if nested == "plan":
        return {field.name: [field.type] for field in fields(Plan)}
    sections: tuple[type[Section], ...] = SECTION_CLASSES.get(nested, ())
    keys: dict[str, list[Any]] = {}
    for cls in (StrategySpec,) if nested == "strategy_spec" else sections:
        for key, info in cls.model_fields.items():
            keys.setdefault(key, []).append(info.annotation)
    return keys


DECLARED = _declared()


def frame(
    records: Iterable[Record | Mapping[str, Any]], *, pooled: bool = False, baseline: str | None = None
) -> "pd.DataFrame":
    """Give a DataFrame of records, as ``ckbench.run`` gives them or as they are stored.

    One row per trial, in the order given: shape (trials, columns). With ``pooled`` one row per strategy and
    configuration, as the report shows it: shape (rows, columns), the rounds of the newest session together, with
    ``slowdown_ratio`` and its 95 % interval against ``baseline`` (a strategy as typed; none where it is left out) and
    with the columns ``rounds``, ``baseline``, ``peak_change_ratio`` and ``nvml_device_grown_bytes``.

    Every field of a record is a column of the same name, bytes in ``_bytes``, seconds in ``_s``. What is nested has
    dots, ``model.n_layers``; such a column is there when one of the records has it. Unknown is NA. docs/api.md lists
    columns and dtypes. Raises ConfigError for a ``baseline`` that no record has.
    """
    plain = [record.to_json() if isinstance(record, Record) else dict(record) for record in records]
    if baseline is not None and not pooled:
        raise ConfigError("baseline goes with pooled=True: ratios are of rows, not of trials")
    check_baseline(plain, baseline)
    if pooled:
        plain = [row_json(row) for row in compare(plain, baseline=baseline).rows]
    import pandas as pd

    flat = [_flat(record) for record in plain]
    declared = {**DECLARED, **(POOLED if pooled else {})}
    names = [name for name in declared if not name.startswith(tuple(f"{field}." for field in NESTED))]
    order = {name: i for i, name in enumerate(f.name for f in fields(Record))}
    found = dict.fromkeys([*names, *(name for record in flat for name in record)])
    columns = sorted(found, key=lambda name: order.get(name.partition(".")[0], len(order)))
    made = {name: _series([record.get(name) for record in flat], declared.get(name)) for name in columns}
    return pd.DataFrame(made, index=pd.RangeIndex(len(flat)))


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Give nested mappings their dotted names, and leave out the empty ones."""
    flat: dict[str, Any] = {}

    def put(prefix: str, mapping: Mapping[str, Any]) -> None:
        for key, value in mapping.items():
            name = prefix + (f'"{key}"' if prefix and "." in key else key)  # a key's own dot is no nesting
            if isinstance(value, dict):
                put(f"{name}.", value)
            elif not (value is None and not prefix and key in NESTED):
                flat[name] = value

    put("", record)
    return flat


def _series(values: list[Any], declared: str | None) -> "pd.Series[Any]":
    """Make a column of the declared dtype; of a fitting one where a file holds something else, or none is declared."""
    import pandas as pd

    if declared == TIME:
        return pd.Series(pd.to_datetime(values, format="ISO8601", utc=True, errors="coerce"), dtype=TIME)
    kinds = [{type(value)} for value in values if value is not None]
    fitting = dtype_of(set().union(*kinds)) if kinds else declared or OTHER
    fits = declared in (fitting, OTHER) or (fitting, declared) == (DTYPES[int], DTYPES[float])
    dtype = declared if declared is not None and fits else fitting
    return pd.Series([pd.NA if value is None else value for value in values], dtype=dtype)
