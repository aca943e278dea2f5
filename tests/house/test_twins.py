"""Every plug-in has a twin: one short test file of the same name."""

from pathlib import Path

import pytest

from ckbench import registry

TESTS = Path(__file__).parents[1]
PLUG_INS = [(shelf, name) for shelf in registry.SHELVES for name in registry.names(shelf)]


@pytest.mark.parametrize(("shelf", "name"), PLUG_INS, ids=[f"{shelf}/{name}" for shelf, name in PLUG_INS])
def test_plug_in_has_a_test_of_its_name(shelf: str, name: str) -> None:
    twin = TESTS / shelf / f"test_{name.replace('-', '_')}.py"
    assert twin.is_file(), f"write tests/{shelf}/{twin.name}"


@pytest.mark.parametrize(("shelf", "name"), PLUG_INS, ids=[f"{shelf}/{name}" for shelf, name in PLUG_INS])
def test_plug_in_is_spelled_the_way_users_write_it(shelf: str, name: str) -> None:
    assert name == registry.spell(name)
    assert name.replace("-", "").isalnum()
