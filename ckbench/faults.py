"""Say what is wrong with a study in one line per fault: where, which key, and the nearest right one."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from ckbench.marked_yaml import KeyPath, Marked
from ckbench.registry import did_you_mean

Sections = Mapping[str, tuple[str, ...]]
"""The keys of each section."""

OTHER_TOOLS_NAMES = {
    "layers": "n_layers",
    "num_layers": "n_layers",
    "num_hidden_layers": "n_layers",
    "n_layer": "n_layers",
    "depth": "n_layers",
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "dim": "d_model",
    "width": "d_model",
    "heads": "n_heads",
    "n_head": "n_heads",
    "num_heads": "n_heads",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "d_ff",
    "ffn_dim": "d_ff",
    "vocab": "vocab_size",
    "batch": "batch_size",
    "micro_batch_size": "batch_size",
    "seq": "seq_len",
    "sequence_length": "seq_len",
    "block_size": "seq_len",
    "context_length": "seq_len",
    "dtype": "precision",
    "accum": "grad_accumulation",
    "gradient_accumulation_steps": "grad_accumulation",
    "learning_rate": "lr",
    "warmup": "warmup_steps",
    "steps": "max_steps",
    "strategy": "strategies",
}

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
}


def show(value: Any) -> str:
    """Write a value the way YAML would."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_key(marked: Marked, path: KeyPath, allowed: Iterable[str], sections: Sections) -> str:
    """Name an unknown or misplaced key of a mapping, with file and line."""
    key = str(path[-1])
    inside = f" in {'.'.join(map(str, path[:-1]))}" if len(path) > 1 else ""
    return f"{marked.where(path)}: {_unknown(key, inside, list(allowed), sections)}"


def unknown_dotted_key(key: str, sections: Sections) -> str:
    """Name an unknown ``section.key``."""
    section, _, name = key.rpartition(".")
    if section in sections:
        return _unknown(name, f" in {section}", list(sections[section]), sections)
    name = key.rpartition(".")[2]
    name = OTHER_TOOLS_NAMES.get(name, name)
    homes = [home for home, keys in sections.items() if name in keys]
    if homes:
        return f"unknown key {key!r}; did you mean '{homes[0]}.{name}'?"
    return f"unknown key {key!r}; write section.key with one of the sections {', '.join(sections)}"


def _unknown(key: str, inside: str, allowed: list[str], sections: Sections) -> str:
    homes = [home for home, keys in sections.items() if key in keys and key not in allowed]
    if homes:
        return f"misplaced key {key!r}{inside}; did you mean '{homes[0]}.{key}'?"
    other = OTHER_TOOLS_NAMES.get(key)
    if other is not None:
        if other in allowed:
            return f"unknown key {key!r}{inside}; did you mean {other!r}?"
        homes = [home for home, keys in sections.items() if other in keys]
        if homes:
            return f"unknown key {key!r}{inside}; did you mean '{homes[0]}.{other}'?"
    return f"unknown key {key!r}{inside}{did_you_mean(key, allowed)}"


def explain(
    error: ValidationError,
    marked: Marked,
    section: str,
    values: dict[str, Any],
    sections: Sections,
    told: frozenset[tuple[str, ...]],
) -> list[str]:
    """Turn pydantic's faults of one section into lines of ours, one per key.

    ``told`` holds keys given by ``--set``, whose faults name the option instead of a line.
    """
    lines: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        loc = tuple(part for part in fault["loc"] if part in values or isinstance(part, int))[:2]
        key = str(fault["loc"][0]) if fault["loc"] else ""
        path: KeyPath = (section, *(loc or ((key,) if key else ())))
        where = f"--set {section}.{key}" if (section, key) in told else marked.where(path)
        text = _sentence(fault, section, key, values, sections)
        lines.setdefault(f"{where} {key}" if fault["type"] != "value_error" else text, f"{where}: {text}")
    return list(lines.values())


def _sentence(fault: Any, section: str, key: str, values: dict[str, Any], sections: Sections) -> str:
    kind = fault["type"]
    context = fault.get("ctx") or {}
    if kind == "extra_forbidden":
        return _unknown(key, f" in {section}", list(sections[section]), sections)
    if kind == "missing":
        return f"key {key!r} is missing in {section}"
    if kind == "value_error":
        text = str(context.get("error", fault["msg"]))
        return f"{section}.{key}: {text}" if key else text
    name, got = f"{section}.{key}", show(values.get(key))
    if values.get(key) is None and key in values:
        return f"{name} is null; give a value or leave the key out"
    if kind == "literal_error":
        choices = str(context.get("expected", ""))
        return f"{name} must be {choices}, got {got}"
    if key == "d_ff":
        return f"{name} must be a whole number of at least 1 or a list of them, got {got}"
    if kind in _TYPES:
        return f"{name} must be {_TYPES[kind]}, got {got}"
    if kind == "string_pattern_mismatch" and key == "device":
        return f"{name} must be auto, cpu, cuda, cuda:N or replay:FILE, got {got}"
    bounds = {
        "greater_than_equal": "at least",
        "greater_than": "above",
        "less_than": "below",
        "less_than_equal": "at most",
    }
    if kind in bounds:
        limit = context.get("ge", context.get("gt", context.get("lt", context.get("le"))))
        return f"{name} must be {bounds[kind]} {limit:g}, got {got}"
    return f"{name}: {fault['msg']}, got {got}"
