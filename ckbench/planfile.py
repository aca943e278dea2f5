"""A plan as a file: written by ``ckbench plan --save``, read by the strategy ``plan:FILE`` and by ``apply_plan``.

A file may come from anywhere, so every key and type is checked before it becomes a Plan.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, plan_from_json

VERSION = 1
MAX_BYTES = 4 * 2**20
MAX_DEPTH = 64
"""Regions inside one another; a plan of 10,000 blocks that halves its spans has 14."""
MAX_SHOWN_CHARS = 60
_SPAN = ("start", "stop")


def plan_data(plan: Plan) -> dict[str, Any]:
    """Give a plan as plain data without what has its default."""
    data: dict[str, Any] = {"n_layers": plan.n_layers}
    plain = Plan(n_layers=plan.n_layers)
    for key in ("early_stop", "preserve_rng", "reentrant", "offload", "native", "compile_budget", "tolerance"):
        if getattr(plan, key) != getattr(plain, key):
            data[key] = getattr(plan, key)
    if plan.offload_spans:
        data["offload_spans"] = [list(span) for span in plan.offload_spans]
    data["regions"] = [_region_data(region) for region in plan.regions]
    return data


def _region_data(region: Region) -> dict[str, Any]:
    plain = Region(start=region.start, stop=region.stop)
    data: dict[str, Any] = {key: getattr(region, key) for key in _SPAN}
    for key in ("part", "save_every", "mode"):
        if getattr(region, key) != getattr(plain, key):
            data[key] = getattr(region, key)
    if region.save_ops:
        data["save_ops"] = list(region.save_ops)
    if region.children:
        data["children"] = [_region_data(child) for child in region.children]
    return data


def write_plan(path: Path, plan: Plan, made_for: dict[str, Any]) -> None:
    """Write a plan and what it was made for. Raises PlanError where the file cannot be written."""
    content = {"ckbench_plan": VERSION, "made_for": made_for, "plan": plan_data(plan)}
    text = "# A plan for activation checkpointing: ckbench run STUDY -s plan:FILE, or ckbench.apply_plan(model, FILE)\n"
    try:
        path.write_text(text + yaml.safe_dump(content, sort_keys=False, width=110), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot write the plan: {error.strerror}") from None


def read_plan(path: Path) -> Plan:
    """Read a plan. Raises PlanError with a sentence where the file is missing, no plan file or holds no valid plan."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PlanError(f"{path}: larger than any plan file ({MAX_BYTES} bytes)")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot read the plan: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: no text, no date, too many digits
        raise PlanError(f"{path}: not a YAML file") from None
    if not isinstance(content, dict) or not isinstance(content.get("plan"), dict):
        raise PlanError(f"{path}: no plan file; `ckbench plan STUDY --budget SIZE --save {path.name}` writes one")
    version = content.get("ckbench_plan")
    if type(version) is not int or version != VERSION:
        raise PlanError(f"{path}: plan file of version {_shown(version)}, this ckbench reads {VERSION}")
    try:
        return plan_of_data(content["plan"])
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def plan_of_data(data: Mapping[Any, Any]) -> Plan:
    """Make a plan of plain data from outside, as ``plan_data`` gives it. Raises PlanError naming what is wrong."""
    _check_keys("the plan", data, _PLAN_KEYS, ("n_layers", "regions"))
    for region in data["regions"]:
        _check_region(region, 1)
    return plan_from_json(dict(data))


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _is_span(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_whole(block, 0) for block in value)


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


Check = tuple[Callable[[Any], bool], str]
_FLAG: Check = (lambda value: type(value) is bool, "true or false")
_COUNT: Check = (lambda value: _is_whole(value, 1), "a whole number of at least 1")
_WORD: Check = (lambda value: isinstance(value, str), "a word")
_LIST: Check = (lambda value: isinstance(value, list | tuple), "a list")
_PLAN_KEYS: dict[str, Check] = {
    "n_layers": _COUNT,
    "regions": _LIST,
    **dict.fromkeys(("early_stop", "preserve_rng", "reentrant", "offload", "native"), _FLAG),
    "offload_spans": (
        lambda value: isinstance(value, list | tuple) and all(map(_is_span, value)),
        "a list of pairs of blocks, as [[0, 4]]",
    ),
    "compile_budget": (lambda value: value is None or _is_number(value, 1), "a share from 0 to 1"),
    "tolerance": (lambda value: _is_number(value, float("inf")), "a number of at least 0"),
}
_REGION_KEYS: dict[str, Check] = {
    "start": (lambda value: _is_whole(value, 0), "a whole number of at least 0"),
    "stop": _COUNT,
    "part": _WORD,
    "mode": _WORD,
    "children": _LIST,
    "save_every": _COUNT,
    "save_ops": (
        lambda value: isinstance(value, list | tuple) and all(isinstance(word, str) for word in value),
        "a list of words",
    ),
}


def _check_region(data: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise PlanError(f"regions lie deeper in one another than {MAX_DEPTH}")
    if not isinstance(data, Mapping):
        raise PlanError(f"a region is a mapping, not {_shown(data)}")
    _check_keys("a region", data, _REGION_KEYS, _SPAN)
    for child in data.get("children", ()):
        _check_region(child, depth + 1)


def _check_keys(name: str, data: Mapping[Any, Any], known: dict[str, Check], needed: tuple[str, ...]) -> None:
    for key in needed:
        if key not in data:
            raise PlanError(f"{name} needs {key}")
    for key, value in data.items():
        if key not in known:
            raise PlanError(f"{name} has no key {_shown(key)}")
        holds, told = known[key]
        if not holds(value):
            raise PlanError(f"{key} is {told}, not {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple | dict) and len(value) > 3:
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value) if not isinstance(value, list | tuple | dict) or _is_flat(value) else f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _is_flat(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    return not any(isinstance(item, list | tuple | dict) for item in inside)
