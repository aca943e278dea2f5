"""What others would run: ckptplan's knapsack, PyTorch's SAC MILP, Chen's and Megatron's rules, every block.

Both solvers run as published, on the figures that our planner works with, since neither can take its own here:

* ckptplan 0.1.0rc1 refuses profiles made on a processor. Its ``plan_checkpoints`` gets, per block, the bytes that
  keeping it adds and the seconds that recomputing it adds, with early stop. Buckets are 16 KiB rather than its 1 MiB,
  which is coarse for models this small.
* PyTorch's ``SACEstimator`` and ``RuntimeEstimator`` need CUDA, and end the process where there is none. The MILP
  itself (``torch.distributed._tools.sac_ilp.sac_milp``) gets a graph of root, blocks and head with our bytes and
  seconds, and per block the hull of its choices as the trade-off that it would have fitted. It answers a fraction to
  discard per block. PyTorch's second MILP, which makes operations of a fraction, needs the estimator too; here a block
  takes the fastest of its probed choices that keeps no more than the fraction leaves.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ckbench import specs
from ckbench.plan import Plan, StackShape
from ckbench.planner.chain import Chain, Item
from ckbench.planning import plan_of

METHODS = {
    "block": "Megatron block",
    "uniform": "Megatron uniform",
    "sqrt": "Chen sqrt(L)",
    "per-block": "per-block",
    "ckptplan": "ckptplan",
    "sac-milp": "PyTorch SAC MILP",
}
"""Methods whose plans run eagerly, as ours do; torch.compile's budget stands beside them with a baseline of its own."""
COMPILE_BUDGETS = (0.0, 0.3, 0.6)
N_TARGETS = 24
"""Targets at which ckptplan is asked besides those that follow from the budgets."""
BUCKET_BYTES = 1 << 14
GIB_BYTES = 2**30

Proposal = tuple[str, str, Plan, int | None]
"""Method, spec, plan, and the peak in bytes that it was asked for; None where it was asked for something else."""


def left_out() -> list[str]:
    """Say which solvers are not installed, and how to have them."""
    lines = []
    if importlib.util.find_spec("ckptplan") is None:
        lines.append(
            "ckptplan: not installed, left out; pip install --no-deps --target FOLDER ckptplan==0.1.0rc1, "
            "then --ckptplan FOLDER"
        )
    if importlib.util.find_spec("pulp") is None:
        lines.append(
            "PyTorch's SAC MILP: its solver is not installed, left out; "
            "pip install --no-deps --target FOLDER pulp==3.3.2, then --pulp FOLDER"
        )
    return lines


def plans(chain: Chain, budgets: Sequence[int], none_bytes: int, quick: bool) -> Iterator[Proposal]:
    """Give every rival's plans for a stack; the same plan may come more than once."""
    n = chain.n_blocks
    shape = StackShape(n_layers=n)
    for method, name in (("block", "first-n"), ("uniform", "segments")):
        for k in range(1, n + 1):
            spec = f"{name}:{k}"
            yield method, spec, specs.resolve(specs.parse(spec), shape), None
    for method in ("sqrt", "per-block"):
        yield method, method, specs.resolve(specs.parse(method), shape), None
    if importlib.util.find_spec("ckptplan") is not None:
        yield from _ckptplan(chain, budgets, none_bytes, 6 if quick else N_TARGETS)
    if importlib.util.find_spec("pulp") is not None:
        yield from _sac_milp(chain, budgets)


def _choices(chain: Chain, block: int) -> list[Item]:
    """Give the ways to run one block by itself."""
    return [item for item in chain.items[block] if item.stop == block + 1]


def _plain(chain: Chain, block: int) -> Item:
    return next(item for item in _choices(chain, block) if item.region is None)


def _full(chain: Chain, block: int) -> Item:
    """Give the item that recomputes all of a block."""
    whole = (i for i in _choices(chain, block) if i.region is not None and not (i.region.save_ops or i.region.children))
    return next(whole)


def _saved_bytes(chain: Chain) -> list[int]:
    """Give, per block, what keeping it holds beyond what recomputing it holds."""
    blocks = range(chain.n_blocks)
    return [max(0, _plain(chain, i).kept_bytes - _full(chain, i).kept_bytes) for i in blocks]


def _ckptplan(chain: Chain, budgets: Sequence[int], none_bytes: int, n_targets: int) -> Iterator[Proposal]:
    """Ask ckptplan for each budget, less what none holds at its peak beside blocks, and for targets in between."""
    import torch
    from ckptplan import BlockProfile, CheckpointableBlock, plan_checkpoints  # type: ignore[import-not-found]

    saved = _saved_bytes(chain)
    known: dict[str, Any] = {
        "device": "cpu", "dtype": "torch.float32", "input_shape_signature": "", "output_shape_signature": "",
        "param_count": 0, "trainable_param_count": 0, "timing_only": False,
        "activation_bytes_method": "isolated_forward_delta", "forward_time_ms_mean": 0.0, "forward_time_ms_std": 0.0,
        "recompute_time_upper_bound_ms_std": 0.0,
        "recompute_time_source": "measured_full_recompute_early_stop_disabled", "num_warmup": 1, "num_trials": 1,
        "is_stochastic": False, "is_stateful": False, "stochastic_submodules": (), "stateful_submodules": (),
        "eligible_for_checkpoint": True, "exclusion_reason": None, "warnings": (), "pytorch_version": "",
        "profiler_version": "",
    }  # fmt: skip
    profiles = [
        BlockProfile(
            block_id=str(i),
            order=i,
            activation_bytes_estimate=saved[i],
            recompute_time_upper_bound_ms_mean=1000 * _full(chain, i).extra_s,
            **known,
        )
        for i in range(chain.n_blocks)
    ]
    blocks = [CheckpointableBlock(str(i), i, torch.nn.Identity()) for i in range(chain.n_blocks)]
    rest = none_bytes - sum(saved)
    wanted: list[tuple[int, int | None]] = [(budget - rest, budget) for budget in budgets]
    wanted += [(sum(saved) * k // n_targets, None) for k in range(n_targets)]
    for target, budget in wanted:
        answer = plan_checkpoints(
            profiles,
            blocks,
            target_kind="activation_budget_bytes",
            target_value=max(0, target),
            activation_bucket_bytes=BUCKET_BYTES,
            on_infeasible="best_effort",
        )
        picked = [d.checkpointed for d in answer.decisions]
        items = [(_full if is_picked else _plain)(chain, i) for i, is_picked in enumerate(picked)]
        named = ",".join(str(i) for i, is_picked in enumerate(picked) if is_picked)
        yield "ckptplan", f"ckptplan {named or 'nothing'}", plan_of(chain, items), budget


def _sac_milp(chain: Chain, budgets: Sequence[int]) -> Iterator[Proposal]:
    """Ask PyTorch's MILP for each budget."""
    from torch.distributed._tools.sac_ilp import sac_milp

    blocks = range(chain.n_blocks)
    saved = _saved_bytes(chain)
    units = [f"model.{i}" for i in blocks]
    for budget in budgets:
        found, _, peak = sac_milp(_graph(chain, saved), budget / GIB_BYTES, ac_units=units)
        if peak < 0:
            continue
        items = [_nearest(chain, i, (1 - found.get(units[i], 0.0)) * saved[i]) for i in blocks]
        yield "sac-milp", f"sac-milp:{budget}", plan_of(chain, items), budget


def _nearest(chain: Chain, block: int, kept_bytes: float) -> Item:
    """Give the fastest choice for a block that keeps at most ``kept_bytes`` beyond recomputing all of it."""
    least = _full(chain, block)
    fitting = [i for i in _choices(chain, block) if i.kept_bytes - least.kept_bytes <= kept_bytes + 1]
    return min(fitting, key=lambda item: item.extra_s, default=least)


def _graph(chain: Chain, saved: Sequence[int]) -> Any:
    """Lay the chain out as the graph of modules that the MILP reads: root, blocks, head."""
    from torch.distributed._tools.ilp_utils import Graph

    n = chain.n_blocks
    kept = [_plain(chain, i).kept_bytes for i in range(n)]
    nothing = {
        "param_per_module": 0, "grad_per_module": 0, "grad_total": 0, "act_fw_per_module": 0, "act_bw_per_module": 0,
        "act_grad_per_module": 0, "act_total": 0, "input_per_module": 0, "output_per_module": 0,
        "fw_runtime_per_module": 0.0, "bw_runtime_per_module": 0.0, "is_leaf": True, "sac_runtime": 0.0,
        "sac_memory": 0, "n_segments": 0, "slopes": [], "intercepts": [], "breakpoints": [], "tradeoff_curve": {},
    }  # fmt: skip
    graph = Graph(n + 2)
    graph.fw_post_order = [*(f"model.{i}" for i in range(n)), "model.head", "model"]
    nodes: list[dict[str, Any]] = [{"fqn": "model", "param_per_module": chain.start_bytes, "act_total": sum(kept)}]
    for i in range(n):
        slopes, intercepts = _trade_off(chain, i, saved[i])
        nodes.append(
            {
                "fqn": f"model.{i}",
                "is_leaf": False,
                "grad_total": chain.later_bytes[i + 1],
                "act_total": sum(kept[: i + 1]),
                "act_fw_per_module": saved[i],
                "act_grad_per_module": _plain(chain, i).backward_peak_bytes - kept[i],
                "sac_memory": saved[i],
                "sac_runtime": 1000 * _full(chain, i).extra_s,
                "n_segments": len(slopes),
                "slopes": slopes,
                "intercepts": intercepts,
            }
        )
    head = max(chain.head_peak_bytes, chain.head_backward_peak_bytes)
    nodes.append({"fqn": "model.head", "act_total": sum(kept), "act_grad_per_module": head})
    for index, node in enumerate(nodes):
        place = {"index": index, "pos_fw_post_order": graph.fw_post_order.index(node["fqn"])}
        graph.add_node({**nothing, **node, **place})  # type: ignore[typeddict-item]
        graph.ad_matrix[index][index] = graph.ad_matrix[0][index] = 1
    return graph


def _trade_off(chain: Chain, block: int, saved_bytes: int) -> tuple[list[float], list[float]]:
    """Give the lower hull of (share discarded, share of the recomputation) as lines."""
    full = _full(chain, block)
    points = sorted(
        (1 - (item.kept_bytes - full.kept_bytes) / saved_bytes, item.extra_s / full.extra_s)
        for item in _choices(chain, block)
    )
    hull: list[tuple[float, float]] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
            hull.pop()
        if not hull or point[0] > hull[-1][0]:
            hull.append(point)
    slopes = [_slope(a, b) for a, b in pairwise(hull)]
    return slopes, [a[1] - slope * a[0] for slope, a in zip(slopes, hull, strict=False)]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0]) if b[0] > a[0] else float("-inf")
