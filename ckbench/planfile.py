"""A plan as a file: written by ``ckbench plan --save``, read by the strategy ``plan:FILE`` and by ``apply_plan``."""

from pathlib import Path
from typing import Any

import yaml

from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, plan_from_json

VERSION = 1
MAX_BYTES = 4 * 2**20
_SPAN = ("start", "stop")


def plan_data(plan: Plan) -> dict[str, Any]:
    """Give a plan as plain data without what has its default."""
    data: dict[str, Any] = {"n_layers": plan.n_layers}
    plain = Plan(n_layers=plan.n_layers)
    for key in ("early_stop", "preserve_rng", "reentrant", "offload", "native", "compile_budget"):
        if getattr(plan, key) != getattr(plain, key):
            data[key] = getattr(plan, key)
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
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise PlanError(f"{path}: not a YAML file") from None
    if not isinstance(content, dict) or not isinstance(content.get("plan"), dict):
        raise PlanError(f"{path}: no plan file; `ckbench plan STUDY --budget SIZE --save {path.name}` writes one")
    if content.get("ckbench_plan") != VERSION:
        raise PlanError(f"{path}: plan file of version {content.get('ckbench_plan')!r}, this ckbench reads {VERSION}")
    try:
        return plan_from_json(content["plan"])
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
