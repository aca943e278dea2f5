"""A made-up chain: 4 blocks, each kept (100 bytes) or recomputed (10 bytes, one second), and a planner of it."""

from collections.abc import Callable
from typing import Any

from ckbench.config import RunConfig
from ckbench.estimates import Estimate
from ckbench.launch import Launcher
from ckbench.plan import Plan, Region, plan_from_json
from ckbench.planner.chain import Chain, Item
from ckbench.planning import Planner, Probed


def made_up(n_blocks: int = 4) -> Chain:
    def item(i: int, region: Region | None, kept: int, seconds: float) -> Item:
        return Item(
            start=i, stop=i + 1, region=region, kept_bytes=kept, forward_peak_bytes=110, backward_peak_bytes=120,
            extra_s=seconds,
        )  # fmt: skip

    items = tuple((item(i, None, 100, 0.0), item(i, Region(start=i, stop=i + 1), 10, 1.0)) for i in range(n_blocks))
    return Chain(
        n_blocks=n_blocks,
        items=items,
        start_bytes=1000,
        head_peak_bytes=50,
        later_bytes=(0,) * (n_blocks + 1),
        fixed_peak_bytes=0,
        plain_s=20.0,
    )


class Made(Planner):
    """A planner of the made-up chain, whose allocator takes ``over`` bytes more than a plan's chain peak."""

    def __init__(self, over: Callable[[Plan], int] = lambda _plan: 0, n_blocks: int = 4) -> None:
        super().__init__("cuda", Launcher())
        self.chain, self.over = made_up(n_blocks), over
        self.n_replays = 0

    def probed(self, config: RunConfig) -> Probed:
        return Probed(chain=self.chain, source="made up", left_out=())

    def _ask(self, config: RunConfig, task: str, **more: Any) -> dict[str, Any]:
        assert task == "check"
        self.n_replays += 1
        plan = plan_from_json(more["plan"])
        chosen = [items[any(r.start == i for r in plan.regions)] for i, items in enumerate(self.chain.items)]
        peak = self.chain.peak_bytes(chosen) + self.over(plan)
        estimate = Estimate(strategy="budget", peak_allocated_bytes=peak, first_step_peak_bytes=peak - 1)
        return {"estimate": vars(estimate)}
