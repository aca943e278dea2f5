"""Find the fastest plan that fits a budget: probe the trial in a child, solve, check the answer by its replay."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckbench.cards import read_budget, workspace_bytes
from ckbench.config import RunConfig, digest
from ckbench.errors import NothingFits, PlanError
from ckbench.estimates import Estimate
from ckbench.launch import Launcher, enter_child, last_line
from ckbench.plan import Plan
from ckbench.planner.chain import Chain, Item
from ckbench.planner.wire import unpack
from ckbench.units import format_bytes

if TYPE_CHECKING:
    from ckbench.planner.solve import Floor, Solution

TIMEOUT_S = 3600.0
MAX_TRIES = 6
"""Solutions tried until the replayed peak, which knows the allocator, is within the budget."""
MAX_PROVEN = 256
"""Deepest stack that the solver takes its time for; autocast's two sums make deeper ones take minutes."""
MAX_FRONT = 64
"""Deepest stack whose neighbours on the front are looked up in the whole front."""
SHARES_ABOVE = (0.002, 0.02)
"""How much more peak the faster neighbour of a deeper stack may have."""
MAX_REPLAYED = 128
"""Deepest stack whose plan is replayed whole; a deeper one is replayed short, where what is left is no deeper."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """A trial's chain, and where its seconds are from."""

    chain: Chain
    source: str
    left_out: tuple[str, ...]


@dataclass(kw_only=True)
class Planned:
    """The answer for one budget."""

    budget_bytes: int
    plan: Plan
    items: tuple[Item, ...]
    peak_bytes: int
    """Predicted need, the first step included: the estimate's, which on CUDA knows the allocator, else the chain's."""
    chain_peak_bytes: int
    """Added up from the blocks, before the allocator rounds."""
    slowdown_ratio: float
    """Predicted step time against keeping everything."""
    chain: Chain
    floor_bytes: int
    owner: str
    floor_owner: str
    proven_optimal: bool
    gap: float
    method: str
    source: str
    estimate: Estimate | None = None
    """The plan's own, by a whole replay or, of a deep stack, a short one; None where neither is possible."""
    cheaper: "Solution | None" = None
    faster: "Solution | None" = None
    left_out: tuple[str, ...] = field(default=())


class Planner:
    """Plans for trials of one kind of device; what a trial's blocks come to is probed once.

    ``costs`` says where seconds come from: ``auto`` measures where the device is there and counts through a card's
    peaks elsewhere, ``measured``, or the name of a card. ``records`` of the same model and step are taken instead.
    """

    def __init__(
        self,
        kind: str,
        launcher: Launcher,
        *,
        card: str | None = None,
        costs: str = "auto",
        records: list[dict[str, Any]] | None = None,
    ) -> None:
        self.kind = kind
        self.launcher = launcher
        self.card = card
        self.costs = costs
        self.records = records
        self._probed: dict[str, Probed] = {}
        self._plans: dict[str, dict[str, Any]] = {}

    def decides(self, config: RunConfig) -> bool:
        """Tell whether a config's strategy leaves its plan to the planner, and has none yet."""
        return config.strategy.name == "budget" and config.plan is None

    def probed(self, config: RunConfig) -> Probed:
        """Give the chain of a config's model and step, whatever its strategy. Raises PlanError with the reason."""
        key = digest(config.model_dump(mode="json", include={"model", "train"}))
        if key not in self._probed:
            answer = self._ask(config, "probe")
            self._probed[key] = Probed(
                chain=unpack(answer), source=answer["source"], left_out=tuple(answer["left_out"])
            )
        return self._probed[key]

    def budget_of(self, config: RunConfig, text: str) -> int:
        """Read a budget for a config, a share of none's peak included."""
        read_budget(text, 1)  # what is wrong with it is said before anything is probed
        is_share = text.strip().endswith("%")
        return read_budget(text, self._plain_peak(config) if is_share else None)

    def planned(self, config: RunConfig) -> RunConfig:
        """Give a config of the strategy ``budget`` with its plan, and any other as it is.

        Raises NothingFits naming the least budget that would do, and PlanError where the trial cannot be planned.
        """
        if not self.decides(config):
            return config
        from ckbench.planner.solve import floor

        key = config.configuration_id()
        if key not in self._plans:
            size = str(config.strategy.params["size"])
            budget_bytes, chain = self.budget_of(config, size), self.probed(config).chain
            solution, _ = self._fitting(config, chain, budget_bytes, floor(chain))
            assert solution.items is not None
            self._plans[key] = plan_of(chain, solution.items).to_json()
        return config.model_copy(update={"plan": self._plans[key]})

    def plan(self, config: RunConfig, budget_bytes: int) -> Planned:
        """Find the fastest plan whose peak is within a budget, and check its peak by a replay.

        Raises NothingFits naming the least budget that would do, and PlanError where the trial cannot be planned.
        """
        from ckbench.planner.solve import floor, owner  # scipy takes half a second to come in

        probed = self.probed(config)
        chain = probed.chain
        least = floor(chain)
        solution, estimate = self._fitting(config, chain, budget_bytes, least)
        assert solution.items is not None and solution.peak_bytes is not None and solution.extra_s is not None
        points = _points_around(chain, solution)
        return Planned(
            budget_bytes=budget_bytes,
            plan=plan_of(chain, solution.items),
            items=solution.items,
            peak_bytes=_needed(solution, estimate),
            chain_peak_bytes=solution.peak_bytes,
            slowdown_ratio=chain.slowdown_ratio(solution.extra_s),
            chain=chain,
            floor_bytes=least.peak_bytes,
            owner=owner(chain, solution.items),
            floor_owner=least.owner,
            proven_optimal=solution.proven_optimal,
            gap=solution.gap,
            method=solution.method,
            source=probed.source,
            estimate=estimate,
            cheaper=_neighbour(points, solution, cheaper=True),
            faster=_neighbour(points, solution, cheaper=False),
            left_out=probed.left_out,
        )

    def _fitting(
        self, config: RunConfig, chain: Chain, budget_bytes: int, least: "Floor"
    ) -> "tuple[Solution, Estimate | None]":
        """Solve with less and less room until the replayed need, which knows the allocator, is within the budget."""
        room = budget_bytes
        for _ in range(MAX_TRIES):
            solution = _solve(chain, room)
            if solution.items is None or solution.peak_bytes is None:
                raise self._nothing(config, chain, budget_bytes, least)
            estimate = self._replayed(config, plan_of(chain, solution.items))
            over = _needed(solution, estimate) - budget_bytes
            if over <= 0:
                return solution, estimate
            if solution.peak_bytes == least.peak_bytes:
                raise self._nothing(config, chain, budget_bytes, least)
            room = max(least.peak_bytes, solution.peak_bytes - over)
        raise PlanError(f"the allocator's rounding keeps every plan tried above {format_bytes(budget_bytes)}")

    def _plain_peak(self, config: RunConfig) -> int:
        chain = self.probed(config).chain
        plain = [next(item for item in items if item.region is None) for items in chain.items]
        estimate = self._replayed(config, plan_of(chain, plain))
        needed = None if estimate is None else estimate.needed_bytes()
        return chain.peak_bytes(plain) if needed is None else needed

    def _nothing(self, config: RunConfig, chain: Chain, budget_bytes: int, least: "Floor") -> NothingFits:
        """Say what the least budget is that would do."""
        solution = _solve(chain, least.peak_bytes)
        estimate = None if solution.items is None else self._replayed(config, plan_of(chain, solution.items))
        needed = max(least.peak_bytes, (estimate.needed_bytes() if estimate is not None else None) or 0)
        left_out = self.probed(config).left_out
        missing = f"; not among the choices: {'; '.join(left_out)}" if left_out else ""
        error = NothingFits(
            f"no plan fits {format_bytes(budget_bytes)}; the least budget that would do is {format_bytes(needed)} "
            f"({needed} bytes), its peak is in {told_owner(least.owner)}; {advice(least.owner)}{missing}"
        )
        error.least_bytes = needed
        return error

    def _replayed(self, config: RunConfig, plan: Plan) -> Estimate | None:
        """Give the estimate of a plan; None for one that is too deep to replay and too varied to be replayed short."""
        made = self._ask(config, "check", plan=plan.to_json(), limit=MAX_REPLAYED)["estimate"]
        return None if made is None else Estimate(**made)

    def _ask(self, config: RunConfig, task: str, **more: Any) -> dict[str, Any]:
        bare = config.model_copy(update={"plan": None})
        request = {
            "task": task,
            "config": bare.model_dump(mode="json"),
            "kind": self.kind,
            "workspace_bytes": workspace_bytes(self.card) if self.kind == "cuda" else 0,
            "card": self.card,
            "costs": self.costs,
            "records": self.records,
            **more,
        }
        answer, process, tail = self.launcher.converse(_entry, json.dumps(request), TIMEOUT_S, lambda _text: None)
        if answer is None:
            raise PlanError(f"the planner's process ended: {last_line(tail, process)}")
        if "reason" in answer:
            raise PlanError(f"cannot plan this trial: {answer['reason']}")
        return answer


def _entry(connection: Any, text: str, log: str) -> None:
    enter_child(connection, log)
    from ckbench.estimate.probing import serve

    serve(connection, text)


def plan_of(chain: Chain, items: Sequence[Item]) -> Plan:
    """Make the plan that runs these items."""
    return Plan(
        n_layers=chain.n_blocks,
        regions=tuple(item.region for item in items if item.region is not None),
        offload_spans=tuple((item.start, item.stop) for item in items if item.offload),
    )


def _needed(solution: "Solution", estimate: Estimate | None) -> int:
    """Give what a plan needs: by its estimate, or without one by the chain."""
    needed = solution.peak_bytes if estimate is None else estimate.needed_bytes()
    assert needed is not None
    return needed


def _solve(chain: Chain, budget_bytes: int) -> "Solution":
    """Solve; of deep stacks the narrow pass alone, which is proven or says how much it may miss."""
    from ckbench.planner.solve import WIDTHS, solve

    if chain.n_blocks <= MAX_PROVEN:
        return solve(chain, budget_bytes)
    return solve(chain, budget_bytes, method="labels", max_width=WIDTHS[0])


def _points_around(chain: Chain, solution: "Solution") -> "list[Solution]":
    """Give the front, or of a deep stack, whose front takes long, plans for budgets a little below and above."""
    from ckbench.planner.solve import front

    if chain.n_blocks <= MAX_FRONT:
        return front(chain)
    assert solution.peak_bytes is not None
    budgets = [solution.peak_bytes - 1, *(int(solution.peak_bytes * (1 + share)) for share in SHARES_ABOVE)]
    return [found for found in (_solve(chain, budget) for budget in budgets) if found.items is not None]


def _neighbour(points: "Sequence[Solution]", solution: "Solution", *, cheaper: bool) -> "Solution | None":
    """Give the next point of the front with less peak, or with less time; None at its end."""
    assert solution.peak_bytes is not None and solution.extra_s is not None
    if cheaper:
        below = [p for p in points if p.peak_bytes is not None and p.peak_bytes < solution.peak_bytes]
        return max(below, key=lambda p: p.peak_bytes or 0, default=None)
    quicker = [p for p in points if p.extra_s is not None and p.extra_s < solution.extra_s * (1 - 1e-9)]
    return max(quicker, key=lambda p: p.extra_s or 0.0, default=None)


def told_owner(line: str) -> str:
    """Say a line of the chain in words."""
    return "embedding or optimizer" if line == "fixed" else line


def advice(line: str) -> str:
    """Say what lowers a peak that no plan lowers."""
    if line == "head and loss":
        return "a chunked loss (train.loss: chunked_cross_entropy), a smaller batch or vocabulary lowers it"
    if line == "fixed":
        return (
            "an optimizer with less state (adamw-8bit, adafactor), optimizer_in_backward or optimizer_on_host lowers it"
        )
    return "a smaller batch or sequence lowers it; or free gradients early (optimizer_in_backward)"
