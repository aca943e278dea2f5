"""The examples in the docstrings of modules that need no torch are true."""

import doctest
import importlib
from pathlib import Path

import pytest

import ckbench

PACKAGE = Path(ckbench.__file__).parent
TENSOR_ROOMS = ("models", "devices", "engine", "estimate", "parallel")


def modules_with_examples() -> list[str]:
    """Find modules by their text, so that no module is loaded for nothing."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in TENSOR_ROOMS and ">>>" in path.read_text(encoding="utf-8"):
            found.append(".".join(("ckbench", *parts)))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), report=True)
    assert result.attempted > 0
    assert result.failed == 0


def test_examples_were_found() -> None:
    assert {"ckbench.units", "ckbench.ranges", "ckbench.plan", "ckbench.registry"} <= set(modules_with_examples())
