"""What the cases of public reports share: the command line, scripted devices, and models that no study can ask for."""

from collections.abc import Callable

import pytest

from ckbench.engine.trial import Trial
from ckbench.models.base import BuiltModel
from tests.cli.conftest import Outcome, Run, ckbench, replay

__all__ = ["Outcome", "Run", "ckbench", "replay"]


@pytest.fixture
def use_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], BuiltModel]], None]:
    """Make every trial of this test train the model that a function builds, whatever its config says."""

    def use(build: Callable[[], BuiltModel]) -> None:
        monkeypatch.setattr(Trial, "_build", lambda trial: build())

    return use
