"""Every strategy with sensible arguments, every family with small sizes, and which of them go together."""

from dataclasses import fields
from typing import Any

from ckbench import registry, specs
from ckbench.plan import StackShape

L = 5

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    # with parameters that divide L = 5 badly, and one above it
    "every-k": [{"k": 2}, {"k": 9}],
    "first-n": [{"n": 2}],
    "nested": [{"k": 2}, {"k": 5}],
    "one-in-k": [{"k": 2}],
    "segments": [{"n": 2}, {"n": 9}],
}
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    # by a name for the test: dropout everywhere, so that random states matter
    "gpt": {"family": "gpt", "n_layers": L, "dropout": 0.1},
    "llama": {"family": "llama", "n_layers": L, "dropout": 0.1, "n_kv_heads": 2},  # grouped-query attention
}
ONLY_ON: dict[str, tuple[str, ...]] = {}
"""Strategies that not every family can have, with the settings they are proven on."""

OURS = [name for name, settings in FAMILY_SETTINGS.items() if settings["family"] in ("gpt", "llama")]
"""Families of ours that take every key of ModelConfig."""
SHAPE = StackShape(n_layers=L, block_saved_bytes=tuple(range(1, L + 1)), is_invertible=True, has_native=True)
"""A stack that can do everything, to resolve any strategy."""


def all_specs() -> list[str]:
    """Write every strategy on the shelf with sensible arguments, as labels.

    A strategy with parameters that ARGUMENTS does not know fails here, so that none goes unproven.
    """
    labels = []
    for name in registry.names("strategies"):
        needed = {field.name for field in fields(registry.load("strategies", name))}
        for arguments in ARGUMENTS.get(name, [{}]):
            assert set(arguments) == needed, f"give {name} an entry in ARGUMENTS of {__name__}: it takes {needed}"
            labels.append(specs.parse({"name": name, **arguments}).label)
    return labels


def pairs(labels: list[str]) -> list[Any]:
    """Pair strategies with the families they are for."""
    missing = set(registry.names("models")) - {settings["family"] for settings in FAMILY_SETTINGS.values()}
    assert not missing, f"give {missing} an entry in FAMILY_SETTINGS of {__name__}"
    return [
        (name, label)
        for name in FAMILY_SETTINGS
        for label in labels
        if name in ONLY_ON.get(specs.parse(label).name, tuple(FAMILY_SETTINGS))
    ]
