"""The JSON schema of a study file, made from the config classes, for editors."""

import json
from typing import Any

from ckbench import registry
from ckbench.ranges import MAX_VALUES
from ckbench.specs import OPTIONS
from ckbench.study import MAPPING_KEYS, SECTION_CLASSES, SECTION_KEYS


def schema() -> dict[str, Any]:
    """Give the schema as plain data (JSON Schema 2020-12)."""
    sections = {name: _merged([_section(cls) for cls in classes]) for name, classes in SECTION_CLASSES.items()}
    optional = {name: {k: v for k, v in section.items() if k != "required"} for name, section in sections.items()}
    strategy = _strategy()
    vary = {
        "type": "object",
        "description": f"Grid: dotted key to a range like 2..48:2 (both ends) or a list; at most {MAX_VALUES} values.",
        "propertyNames": {
            "anyOf": [
                {"enum": [f"{section}.{key}" for section in ("model", "train") for key in SECTION_KEYS[section]]},
                {"pattern": f"^model\\.({'|'.join(MAPPING_KEYS['model'])})\\."},
            ]
        },
        "additionalProperties": {"anyOf": [{"type": ["string", "number"]}, {"type": "array", "minItems": 1}]},
    }
    strategies = {"anyOf": [{"type": "array", "items": strategy, "minItems": 1}, strategy]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ckbench study",
        "type": "object",
        "additionalProperties": False,
        "required": ["model", "train"],
        "properties": {
            "name": {"type": "string", "description": "Name of the study; the file's name where it is left out."},
            "description": {"type": "string"},
            **sections,
            "run": optional["run"],
            "strategies": {**strategies, "description": "Strategies to measure; none and per-block by default."},
            "vary": vary,
            "on_cpu": {
                "type": "object",
                "description": "Keys that replace the file's when it is measured on a CPU.",
                "additionalProperties": False,
                "properties": {**optional, "strategies": strategies, "vary": vary},
            },
        },
    }


def _section(cls: Any) -> dict[str, Any]:
    section: dict[str, Any] = cls.model_json_schema()
    section.pop("title", None)
    assert "$defs" not in section, "sections are flat"
    if "family" in section["properties"]:
        section["properties"]["family"] = {"type": "string", "enum": list(registry.names("models")), "default": "gpt"}
    return section


def _merged(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """Make one section of those of several families: a key takes what any of them takes; the tool is stricter."""
    if len(sections) == 1:
        return sections[0]
    properties: dict[str, Any] = {}
    for section in sections:
        for key, value in section["properties"].items():
            known = properties.setdefault(key, value)
            if known != value and key != "family":
                choices = known.get("anyOf", [known])
                properties[key] = {"anyOf": [*choices, *([] if value in choices else [value])]}
    return {**sections[0], "properties": properties, "required": []}


def _strategy() -> dict[str, Any]:
    names = list(registry.names("strategies"))
    return {
        "anyOf": [
            {"enum": names},
            {"type": "string", "pattern": f"^({'|'.join(names)})(:[^,]+)?(\\+offload)?(,[a-z_]+(=(true|false))?)*$"},
            {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"enum": names}, **{option: {"type": "boolean"} for option in OPTIONS}},
                "additionalProperties": {
                    "anyOf": [
                        {"type": "number", "minimum": 0},
                        {"type": "string"},
                        {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    ]
                },
            },
        ]
    }


def text() -> str:
    """Give the schema as JSON text."""
    return json.dumps(schema(), indent=1) + "\n"
