"""ckbench: benchmark activation checkpointing for transformers in PyTorch."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {"apply_plan": "ckbench.engine.applying", "frame": "ckbench.api", "load": "ckbench.api", "run": "ckbench.api"}
"""Where each public name lives; __init__.pyi tells the same to editors and type checkers."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Load a public name with its first use: the command line imports this package and must answer at once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
