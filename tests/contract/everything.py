"""Every strategy with sensible arguments, every family with small sizes, and which of them go together."""

from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import pytest

from ckbench import registry, specs
from ckbench.plan import StackShape

L = 5

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    # with parameters that divide L = 5 badly, and one above it
    "every-k": [{"k": 2}, {"k": 9}],
    "first-n": [{"n": 2}],
    "largest-n": [{"n": 2}],
    "nested": [{"k": 2}, {"k": 5}],
    "one-in-k": [{"k": 2}],
    "segments": [{"n": 2}, {"n": 9}],
    "selective": [{"policy": "matmul"}, {"policy": "matmul+attention"}, {"policy": "every-2nd-matmul"}],
    "sequential": [{"n": 2}, {"n": 5}],
}
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    # by a name for the test: dropout everywhere, so that random states matter
    "gpt": {"family": "gpt", "n_layers": L, "dropout": 0.1},
    "llama": {"family": "llama", "n_layers": L, "dropout": 0.1, "n_kv_heads": 2},  # grouped-query attention
    "bert": {"family": "bert", "n_layers": L, "dropout": 0.1},
    "vit": {"family": "vit", "n_layers": L, "dropout": 0.1},
    "gpt-reversible": {"family": "gpt", "n_layers": L, "dropout": 0.1, "residual": "reversible"},
    "llama-reversible": {"family": "llama", "n_layers": L, "dropout": 0.1, "residual": "reversible"},
    "custom": {
        "family": "custom",
        "build": "tests.contract.own_model:build",
        "args": {"depth": L},
        "vocab_size": 64,
        "n_layers": L,
    },
    "hf-gpt2": {
        "family": "hf",
        "arch": "gpt2",  # the library's default drops 10 %
        "n_layers": L,
        "config": {"n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 32},
    },
}
OF_OURS = ("gpt", "llama", "bert", "vit", "gpt-reversible", "llama-reversible")
"""Settings whose blocks have an attention core; foreign ones have none that a region could cover."""
ONLY_ON: dict[str, tuple[str, ...]] = {
    "reversible": ("gpt-reversible", "llama-reversible"),
    "hf-native": ("hf-gpt2",),
    "core-attn": OF_OURS,
}
"""Strategies that not every family can have, with the settings they are proven on."""
FROM_ELSEWHERE = ("budget", "plan")
"""Strategies whose plan is found or stored elsewhere; proven in tests/planner and in their own tests."""
COMPILED = ("compile-budget",)
"""Strategies whose blocks are compiled, which takes seconds for each: proven in test_compile.py, not here."""

OURS = ["gpt", "llama", "bert"]
"""Families of ours that take every key of ModelConfig (a reversible stack takes no post-norm, a vit no vocabulary)."""
SHAPE = StackShape(n_layers=L, block_saved_bytes=tuple(range(1, L + 1)), is_invertible=True, has_native=True)
"""A stack that can do everything, to resolve any strategy."""


def needs(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Skip, with the reason, what needs a library that is not there."""
    if FAMILY_SETTINGS[name]["family"] != "hf":
        return ()
    return (pytest.mark.skipif(find_spec("transformers") is None, reason="the extra hf is not installed"),)


def all_specs() -> list[str]:
    """Write every strategy on the shelf with sensible arguments, as labels.

    A strategy with parameters that ARGUMENTS does not know fails here, so that none goes unproven.
    """
    labels = []
    for name in registry.names("strategies"):
        if name in (*COMPILED, *FROM_ELSEWHERE):
            continue
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
        pytest.param(name, label, marks=needs(name))
        for name in FAMILY_SETTINGS
        for label in labels
        if name in ONLY_ON.get(specs.parse(label).name, tuple(FAMILY_SETTINGS))
    ]
