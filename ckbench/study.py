"""One YAML file is one study: what is fixed, what varies, which strategies, and how to measure."""

import copy
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ckbench import faults, registry, specs
from ckbench.config import (
    MAX_LAYERS,
    MODEL_CLASSES,
    SECTIONS,
    AnyModel,
    HfConfig,
    ModelConfig,
    RunConfig,
    RunSettings,
    Section,
    StrategySpec,
    TrainConfig,
    check_together,
    model_class,
)
from ckbench.errors import CkbenchError, ConfigError, NotYetMeasured, OtherDepth
from ckbench.marked_yaml import KeyPath, Marked, read_file, read_value
from ckbench.plan import Plan, StackShape
from ckbench.ranges import coarse_to_fine, parse_range
from ckbench.units import clean

TOP_KEYS = ("name", "description", *SECTIONS, "strategies", "vary", "on_cpu")
SECTION_CLASSES: dict[str, tuple[type[Section], ...]] = {
    "model": (ModelConfig, *MODEL_CLASSES.values()),
    "train": (TrainConfig,),
    "run": (RunSettings,),
}
SECTION_KEYS = {
    section: tuple(dict.fromkeys(key for cls in classes for key in cls.model_fields))
    for section, classes in SECTION_CLASSES.items()
}
"""Keys of each section, those of all families together."""
MAPPING_KEYS = {
    section: tuple(
        key for cls in classes for key, info in cls.model_fields.items() if info.annotation == dict[str, Any]
    )
    for section, classes in SECTION_CLASSES.items()
}
"""Keys that hold a mapping of foreign keys, which --set and vary reach into: ``model.config.n_embd``."""
MAX_POINTS = 20_000
MAX_BLOCKS = 1_000_000
"""Blocks of all points together; every plan is made before the first trial, and more would look like a hang."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of the grid: a model and a training step, to be measured under every strategy."""

    study: str
    model: AnyModel
    train: TrainConfig
    run: RunSettings
    strategies: tuple[StrategySpec, ...]
    varied: tuple[tuple[str, int | str | float | bool], ...] = ()

    @property
    def stack(self) -> StackShape:
        """Describe the stack of blocks to strategies, as far as the study tells."""
        model, precision = self.model, self.train.precision
        if isinstance(model, ModelConfig):
            is_invertible = model.residual == "reversible"
            return StackShape(n_layers=model.n_layers, precision=precision, is_invertible=is_invertible)
        if model.n_layers is None:
            raise NotYetMeasured("how many blocks this model has is known once it is built")
        return StackShape(n_layers=model.n_layers, precision=precision, has_native=isinstance(model, HfConfig))

    def plans(self) -> list[tuple[StrategySpec, Plan | None, StrategySpec | None]]:
        """Resolve every spec; the third item names an earlier spec with the very same plan.

        The plan is None where it depends on figures of the built model.
        """
        seen: list[tuple[StrategySpec, Plan]] = []
        resolved: list[tuple[StrategySpec, Plan | None, StrategySpec | None]] = []
        for spec in self.strategies:
            try:
                plan = specs.resolve(spec, self.stack)
            except NotYetMeasured:
                resolved.append((spec, None, None))
                continue
            alias = None
            if spec.repeat == 1:  # a repeat is asked for to be measured by itself
                alias = next((other for other, same in seen if same == plan), None)
                seen.append((spec, plan))
            resolved.append((spec, plan, alias))
        return resolved

    def config(self, spec: StrategySpec) -> RunConfig:
        """Give one trial's config."""
        return RunConfig(study=self.study, model=self.model, train=self.train, strategy=spec, run=self.run)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study that has been read and checked for both kinds of device."""

    name: str
    description: str
    source: str
    marked: Marked
    overrides: tuple[tuple[str, Any], ...] = ()
    strategies: tuple[Any, ...] | None = None
    swept: dict[str, list[Any]] = field(default_factory=dict)
    _expanded: dict[str, list[Point]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def points(self, device_kind: str) -> list[Point]:
        """Expand the grid for one kind of device (cpu, cuda, replay), coarse to fine.

        Raises ConfigError naming file and line of each fault.
        """
        kind = device_kind if self.marked.data.get("on_cpu") else "any"
        if kind not in self._expanded:
            self._expanded[kind] = _expand(self, device_kind)
        return self._expanded[kind]

    def device(self) -> str:
        """Give the device the study asks for, overrides included, before on_cpu is known to apply."""
        return self.points("cuda")[0].run.device

    def cpu_notes(self) -> list[str]:
        """List what on_cpu changes, as ``model.n_layers 12 -> 4``."""
        marked = self.marked
        notes = []
        for path, value in _leaves(marked.data.get("on_cpu") or {}):
            old: Any = marked.data
            for key in path:
                old = old.get(key) if isinstance(old, dict) else None
            if old != value:
                notes.append(f"{'.'.join(path)} {_brief(old)} -> {_brief(value)}")
        return notes


def load(
    path: Path | Marked,
    *,
    sets: tuple[str, ...] = (),
    strategies: tuple[Any, ...] = (),
    swept: dict[str, list[Any]] | None = None,
) -> Study:
    """Read a study (or take one read), apply overrides, and check every point of it for CPU and GPU.

    ``sets`` are ``section.key=value``; ``strategies`` replace the file's; ``swept`` adds to ``vary``.
    Raises ConfigError.
    """
    marked = path if isinstance(path, Marked) else read_file(path)
    _check_top(marked)
    study = Study(
        name=_name(marked),
        description=str(marked.data.get("description") or ""),
        source=marked.source,
        marked=marked,
        overrides=tuple(parse_set(text) for text in sets),
        strategies=tuple(strategies) or None,
        swept=dict(swept or {}),
    )
    for kind in ("cuda", "cpu"):
        study.points(kind)
    return study


def parse_set(text: str) -> tuple[str, Any]:
    """Read ``section.key=value``; the value follows the rules of the file."""
    key, equals, value = text.partition("=")
    key = key.strip()
    section, dot, name = key.partition(".")
    if not equals or not dot:
        raise ConfigError(f"--set {text!r}: write section.key=value, for example train.batch_size=4")
    if not _is_key(section, name):
        raise ConfigError(f"--set {text!r}: {faults.unknown_dotted_key(key, SECTION_KEYS)}")
    return key, read_value(value)


def _is_key(section: str, name: str) -> bool:
    """Tell whether ``section.name`` is a key, or reaches into one that holds a mapping."""
    outer, dot, inner = name.partition(".")
    if dot:
        return bool(inner) and "." not in inner and outer in MAPPING_KEYS.get(section, ())
    return name in SECTION_KEYS.get(section, ())


def _put(data: dict[str, Any], key: str, value: Any) -> tuple[str, ...]:
    """Write a value under its dotted key, at most three deep; give the path."""
    *outer, last = key.split(".", 2)
    for name in outer:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{key}: {name} is not a mapping")
    data[last] = value
    return (*outer, last)


def _check_top(marked: Marked) -> None:
    data = marked.data
    if data is None:
        raise ConfigError(f"{marked.source}: the file is empty; `ckbench init` writes examples")
    if not isinstance(data, dict):
        raise ConfigError(f"{marked.where(())}: a study is a mapping with the keys {', '.join(TOP_KEYS)}")
    found = []
    for key in data:
        if key not in TOP_KEYS:
            found.append(faults.unknown_key(marked, (key,), TOP_KEYS, SECTION_KEYS))
    for section in (*SECTIONS, "vary", "on_cpu"):
        if section in data and not isinstance(data[section], dict):
            found.append(f"{marked.where((section,))}: {section} must be a mapping of keys")
    on_cpu = data.get("on_cpu")
    if isinstance(on_cpu, dict):
        allowed = (*SECTIONS, "strategies", "vary")
        for key, value in on_cpu.items():
            if key not in allowed:
                found.append(faults.unknown_key(marked, ("on_cpu", key), allowed, SECTION_KEYS))
            elif key != "strategies" and not isinstance(value, dict):
                found.append(f"{marked.where(('on_cpu', key))}: on_cpu.{key} must be a mapping of keys")
    for key in ("name", "description"):
        if key in data and not isinstance(data[key], str):
            found.append(f"{marked.where((key,))}: {key} must be text, got {faults.show(data[key])}")
    for section in ("model", "train"):
        if section not in data:
            found.append(f"{marked.source}: section {section!r} is missing")
    if found:
        raise ConfigError(found)


def _name(marked: Marked) -> str:
    name = marked.data.get("name") or clean(Path(marked.source).stem)  # a file's name may hold bytes that are no text
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise ConfigError(f"{marked.where(('name',))}: name must be one line of 1 to 200 characters")
    return str(name)


def _expand(study: Study, device_kind: str) -> list[Point]:
    data = copy.deepcopy(study.marked.data)
    lines = dict(study.marked.lines)
    if device_kind == "cpu" and data.get("on_cpu"):
        _overlay(data, data["on_cpu"], (), lines)
    for key, value in study.overrides:
        here = _put(data, key, value)
        lines = {path: line for path, line in lines.items() if path[: len(here)] != here}
    marked = Marked(source=study.source, data=data, lines=lines)
    told = frozenset(tuple(key.split(".", 1)) for key, _ in study.overrides)
    axes = _axes(marked, study.swept)
    # A fault of a varied value stands in vary, not in its section; a study made of a mapping has no lines
    for key in (key for key in axes if key not in study.swept and ("vary", key) in lines):
        lines[tuple(key.split(".", 2))] = lines[("vary", key)]
    strategies = _strategies(marked, study.strategies)
    points = []
    for combination in _combinations(axes):
        values = copy.deepcopy(data)
        for key, value in combination:
            _put(values, key, value)
        points.append(_point(study.name, marked, values, strategies, combination, told))
    return points


def _overlay(base: dict[str, Any], top: dict[str, Any], path: tuple[str, ...], lines: dict[KeyPath, int]) -> None:
    """Write ``top`` over ``base``, section by section; moved keys keep the line they were written in."""
    for key, value in top.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(base.get(key), dict) and len(path) < 1:
            _overlay(base[key], value, here, lines)
            continue
        base[key] = copy.deepcopy(value)
        for old in [p for p in lines if p[: len(here)] == here]:
            del lines[old]
        for old, line in list(lines.items()):
            if old[: len(here) + 1] == ("on_cpu", *here):
                lines[old[1:]] = line


def _axes(marked: Marked, swept: dict[str, list[Any]]) -> dict[str, list[Any]]:
    axes: dict[str, list[Any]] = {}
    for key, value in (marked.data.get("vary") or {}).items():
        where = marked.where(("vary", key))
        section, dot, name = key.partition(".")
        if section == "run" and name in RunSettings.model_fields:
            raise ConfigError(f"{where}: {key} cannot vary: it says how to measure; vary keys of model and train")
        if not dot or section not in ("model", "train") or not _is_key(section, name):
            raise ConfigError(f"{where}: {faults.unknown_dotted_key(key, SECTION_KEYS)}")
        try:
            if isinstance(value, str) and ".." in value:
                axes[key] = list(parse_range(value))
            elif isinstance(value, list) and value:
                axes[key] = value
            elif isinstance(value, str | int | float) and not isinstance(value, bool):
                axes[key] = [value]
            else:
                raise ConfigError("write a range like 2..48:2 or a list like [2, 4, 8]")
        except ConfigError as error:
            raise ConfigError(f"{where}: vary {key}: {error}") from None
    axes.update(swept)
    size = 1
    for values in axes.values():
        size *= len(values)
    if size > MAX_POINTS:
        raise ConfigError(f"{marked.source}: the grid has {size} points, more than {MAX_POINTS}")
    depths = axes.get("model.n_layers") or [marked.data["model"].get("n_layers")]
    n_blocks = size * sum(depth for depth in depths if type(depth) is int and 0 < depth <= MAX_LAYERS) // len(depths)
    if n_blocks > MAX_BLOCKS:
        thinner = "thin it, for example with --points"
        raise ConfigError(f"{marked.source}: the grid has {n_blocks} blocks in all, more than {MAX_BLOCKS}; {thinner}")
    return axes


def _combinations(axes: dict[str, list[Any]]) -> list[tuple[tuple[str, Any], ...]]:
    """Order the grid coarse to fine, so that an interrupted sweep already shows the curve."""
    if not axes:
        return [()]
    orders = [coarse_to_fine(len(values)) for values in axes.values()]
    rank = [{position: i for i, position in enumerate(order)} for order in orders]
    cells = list(itertools.product(*(range(len(values)) for values in axes.values())))
    cells.sort(key=lambda cell: (max(r[c] for r, c in zip(rank, cell, strict=True)), cell))
    return [tuple((key, axes[key][c]) for key, c in zip(axes, cell, strict=True)) for cell in cells]


def _strategies(marked: Marked, given: tuple[Any, ...] | None) -> tuple[StrategySpec, ...]:
    raw: Any = list(given) if given else marked.data.get("strategies", ["none", "per-block"])
    if raw is None or isinstance(raw, str | bool | dict):
        raw = [raw]
    if not isinstance(raw, list) or not raw:
        raise ConfigError(f"{marked.where(('strategies',))}: strategies must be a list of at least one strategy")
    parsed: list[StrategySpec] = []
    found = []
    for i, item in enumerate(raw):
        where = "--strategy" if given else marked.where(("strategies", i))
        try:
            spec = specs.parse(item)
        except CkbenchError as error:
            found.append(f"{where}: {error}")
            continue
        parsed.append(spec)
    if found:
        raise ConfigError(found)
    return specs.number_repeats(parsed)


def _point(
    study: str,
    marked: Marked,
    values: dict[str, Any],
    strategies: tuple[StrategySpec, ...],
    varied: tuple[tuple[str, Any], ...],
    told: frozenset[tuple[str, ...]],
) -> Point:
    parts: dict[str, BaseModel] = {}
    found: list[str] = []
    for section, classes in SECTION_CLASSES.items():
        given = dict(values.get(section) or {})
        cls = model_class(given.get("family")) if section == "model" else classes[0]
        if section == "train" and "seq_len" not in given and (own := _own_seq_len(parts.get("model"))) is not None:
            given["seq_len"] = own
        keys = {**SECTION_KEYS, section: tuple(cls.model_fields)}
        try:
            parts[section] = cls.model_validate_json(json.dumps(given))
        except ValidationError as error:
            found += faults.explain(error, marked, section, given, keys, told)
    if found:
        raise ConfigError(found)
    model, train, run = parts["model"], parts["train"], parts["run"]
    assert isinstance(model, AnyModel) and isinstance(train, TrainConfig) and isinstance(run, RunSettings)
    if model.family not in registry.names("models"):
        hint = registry.did_you_mean(registry.spell(model.family), registry.names("models"))
        raise ConfigError(f"{marked.where(('model', 'family'))}: unknown model family {model.family!r}{hint}")
    try:
        check_together(model, train)
    except ValueError as error:
        raise ConfigError(f"{marked.where(('train', 'loss'))}: {error}") from None
    point = Point(study=study, model=model, train=train, run=run, strategies=strategies, varied=varied)
    for i, spec in enumerate(strategies):
        try:
            specs.resolve(spec, point.stack)
        except (NotYetMeasured, OtherDepth):
            continue
        except CkbenchError as error:
            raise ConfigError(f"{marked.where(('strategies', i))}: strategy {spec.label}: {error}") from None
    return point


def _own_seq_len(model: BaseModel | None) -> int | None:
    return model.own_seq_len() if isinstance(model, AnyModel) else None


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict) and len(path) < 2:
        return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, key))]
    return [(path, tree)]


def _brief(value: Any) -> str:
    text = "unset" if value is None else faults.show(value)
    return text if len(text) <= 60 else text[:57] + "..."
