"""Short words for hand-written plans: resolve a spec, and say spans as pairs."""

from collections.abc import Callable

import pytest

from ckbench import specs
from ckbench.plan import Plan, Region, StackShape


@pytest.fixture(scope="session")
def plan_of() -> Callable[[str, int], Plan]:
    """Resolve a spec for a stack of L blocks."""

    def resolve(spec: str, n_layers: int) -> Plan:
        return specs.resolve(specs.parse(spec), StackShape(n_layers=n_layers))

    return resolve


@pytest.fixture(scope="session")
def spans() -> Callable[[Plan], list[tuple[int, int]]]:
    """List the outermost regions as (start, stop)."""
    return lambda plan: [(region.start, region.stop) for region in plan.regions]


@pytest.fixture(scope="session")
def leaves() -> Callable[[Plan], list[tuple[int, int]]]:
    """List the regions without children as (start, stop)."""

    def listed(plan: Plan) -> list[tuple[int, int]]:
        found: list[Region] = [region for region in plan.walk() if not region.children]
        return [(region.start, region.stop) for region in found]

    return listed
