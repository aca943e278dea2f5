"""None against none comes out as no difference as often as a 95 % interval promises, also when rounds are added."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.prove

N_STUDIES = 400
LOW, HIGH = 0.92, 0.98
"""Where 400 studies of an honest 95 % interval land but for one time in about two hundred."""


@pytest.fixture(scope="module")
def null() -> ModuleType:
    """Load the benchmark that does the same with more studies."""
    path = Path(__file__).parents[2] / "benchmarks" / "null.py"
    spec = importlib.util.spec_from_file_location("benchmarks_null", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("max_rounds", [0, 12])
def test_coverage(null: ModuleType, tmp_path: Path, max_rounds: int) -> None:
    device = null.simulated_device(tmp_path)
    held = 0
    for seed in range(N_STUDIES):
        ratio, low, high = null.study(device, seed, 5, max_rounds, None)
        assert low < ratio < high
        held += low <= 1.0 <= high
    assert LOW <= held / N_STUDIES <= HIGH
