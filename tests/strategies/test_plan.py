"""plan:FILE: the plan of a file, as it stands there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ckbench import specs
from ckbench.errors import ConfigError, PlanError
from ckbench.plan import Plan, Region
from ckbench.planfile import write_plan

PlanOf = Callable[[str, int], Plan]
PLAN = Plan(
    n_layers=4,
    regions=(Region(start=0, stop=2, children=(Region(start=0, stop=1),)), Region(start=3, stop=4, save_ops=("aten.mm",))),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with plan.yaml, to stand in."""
    monkeypatch.chdir(tmp_path)
    write_plan(Path("plan.yaml"), PLAN, {})
    return tmp_path


def test_the_plan_is_the_file_s(folder: Path, plan_of: PlanOf) -> None:
    assert plan_of("plan:plan.yaml", 4) == PLAN
    assert plan_of(f"plan:{folder}/plan.yaml", 4) == PLAN
    assert specs.parse("plan:plan.yaml").label == "plan:plan.yaml"
    assert PLAN.block_calls_backward() == (2, 1, 0, 1)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(n_layers=2, regions=(Region(start=0, stop=2),), early_stop=False),
        Plan(n_layers=2, regions=(Region(start=0, stop=2),), preserve_rng=False),
        Plan(n_layers=2, regions=(Region(start=0, stop=2),), reentrant=True),
        Plan(n_layers=2, regions=(Region(start=0, stop=1),), offload=True),
        Plan(n_layers=2, regions=(Region(start=0, stop=2, mode="invert"),), tolerance=1e-5),
    ],
)
def test_its_own_settings_hold(folder: Path, plan_of: PlanOf, plan: Plan) -> None:
    """They are no options' defaults."""
    write_plan(Path("other.yaml"), plan, {})
    found = plan_of("plan:other.yaml", 2)
    assert found == plan and found.tolerance == plan.tolerance


def test_options_add_to_it(folder: Path, plan_of: PlanOf) -> None:
    assert plan_of("plan:plan.yaml,skip_last", 4).regions == PLAN.regions[:1]
    assert plan_of("plan:plan.yaml,early_stop=false", 4).early_stop is False
    assert plan_of("plan:plan.yaml+offload", 4).offload


def test_another_depth_or_no_file_is_said(folder: Path, plan_of: PlanOf) -> None:
    with pytest.raises(PlanError, match="^plan.yaml is a plan for 4 blocks, the model has 5$"):
        plan_of("plan:plan.yaml", 5)
    with pytest.raises(PlanError, match="^absent.yaml: cannot read the plan: No such file or directory$"):
        plan_of("plan:absent.yaml", 4)
    with pytest.raises(ConfigError, match="^strategy plan needs file; write plan:FILE$"):
        specs.parse("plan")


def test_the_page_s_example_is_a_plan(folder: Path, plan_of: PlanOf) -> None:
    page = (Path(__file__).parents[2] / "docs" / "strategies" / "plan.md").read_text(encoding="utf-8")
    Path("own.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    assert plan_of("plan:own.yaml", 8).block_calls_backward() == (1, 1, 1, 0, 0, 0, 0, 0)
