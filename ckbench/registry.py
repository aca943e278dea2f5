"""Find plug-ins by file name: the folder is the registry, and listing it imports nothing from it."""

import ast
import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from ckbench.errors import ConfigError

SHELVES = ("strategies", "models", "devices", "reports")


@cache
def names(shelf: str) -> tuple[str, ...]:
    """List a shelf by the names users write (hyphens), without importing what lies on it."""
    package = importlib.import_module(f"ckbench.{shelf}")
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(spell(name) for name in found if name != "base" and not name.startswith("_")))


def load(shelf: str, name: str) -> Any:
    """Give the ``PLUGIN`` of one file of a shelf.

    Raises ConfigError naming the nearest plug-in when there is none of that name.
    """
    spelled = spell(name)
    if spelled not in names(shelf):
        singular = {"strategies": "strategy", "models": "model family"}.get(shelf, shelf.rstrip("s"))
        raise ConfigError(f"unknown {singular} {name!r}{did_you_mean(spelled, names(shelf))}")
    module = importlib.import_module(f"ckbench.{shelf}.{spelled.replace('-', '_')}")
    return module.PLUGIN


def summary(shelf: str, name: str) -> str:
    """Give the first line of a plug-in's docstring, read from its source without importing it.

    A line that does not begin with the plug-in's name gets it put in front.
    """
    package = importlib.import_module(f"ckbench.{shelf}")
    source = Path(package.__path__[0], f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    line = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return line if line.startswith(name) else f"{name}: {line}"


def spell(name: str) -> str:
    """Spell a plug-in name the one way we print it: lower case, hyphens."""
    return name.strip().lower().replace("_", "-")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """End an error about an unknown name with the nearest right one, or with all of them.

    >>> did_you_mean("seqlen", ["seq_len", "batch_size"])
    "; did you mean 'seq_len'?"
    """
    known = list(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; have: {', '.join(known)}" if known else ""
