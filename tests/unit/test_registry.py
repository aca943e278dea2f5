"""Plug-ins by file name: how names are spelled, and what an unknown one is told."""

import pytest

from ckbench import registry
from ckbench.errors import ConfigError


@pytest.mark.parametrize("shelf", registry.SHELVES)
def test_a_shelf_lists_its_files(shelf: str) -> None:
    names = registry.names(shelf)
    assert names == tuple(sorted(names)) and names
    assert not [name for name in names if name.startswith("_") or name in ("base", "--init--")]


def test_hyphen_underscore_and_case_are_the_same() -> None:
    assert registry.load("strategies", "per_block") is registry.load("strategies", " Per-Block ")
    assert registry.spell("One_In_K ") == "one-in-k"


@pytest.mark.parametrize(
    ("shelf", "name", "told"),
    [
        ("strategies", "perblock", "unknown strategy 'perblock'; did you mean 'per-block'?"),
        ("strategies", "everyk", "unknown strategy 'everyk'; did you mean 'every-k'?"),
        ("models", "lama", "unknown model family 'lama'; did you mean 'llama'?"),
        ("devices", "cup", "unknown device 'cup'; did you mean 'cpu'?"),
        ("reports", "consol", "unknown report 'consol'; did you mean 'console'?"),
        ("strategies", "base", f"unknown strategy 'base'; have: {', '.join(registry.names('strategies'))}"),
        ("models", "_ffn", f"unknown model family '_ffn'; have: {', '.join(registry.names('models'))}"),
        ("models", "../config", f"unknown model family '../config'; have: {', '.join(registry.names('models'))}"),
    ],
)
def test_unknown_names(shelf: str, name: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.load(shelf, name)
    assert str(error.value) == told


def test_nothing_to_suggest() -> None:
    assert registry.did_you_mean("x", []) == ""
    assert registry.did_you_mean("x", ["abc", "def"]) == "; have: abc, def"
