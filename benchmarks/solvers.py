"""How long the planner takes to find the fastest plan for a budget, and whether it proves it.

    python benchmarks/solvers.py              equal and unequal stacks of 12 to 1,000 blocks, 10 options per block
    python benchmarks/solvers.py --spans      the same, with segments of 2, 3 and 4 blocks
    python benchmarks/solvers.py --autocast   with copies of weights that forward holds and backward does not
    python benchmarks/solvers.py --highs      HiGHS alone beside it, up to 96 blocks

Stacks have the proportions of GPT-2 XL (``tests/planner/chains.py``); in unequal ones every figure is up to a quarter
off. Budgets lie at shares of the way from the least peak of any plan to the peak of keeping everything. Seconds are the
shortest of three runs, wall clock; solver means table, bounds and search, from a chain to a plan.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy
import scipy

from ckbench.planner.solve import floor, front, solve
from tests.planner.chains import gpt_chain

SIZES = (12, 96, 256, 1000)
SHARES = (0.0, 0.02, 0.1, 0.35, 0.7)
N_OPTIONS = 10

Result = TypeVar("Result")


def timed(work: Callable[[], Result], n_runs: int = 3) -> tuple[float, Result]:
    """Run ``work`` some times; give the shortest seconds and its result."""
    best_s = float("inf")
    for _ in range(n_runs):
        start = time.perf_counter()
        result = work()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s, result


def main() -> None:
    """Print one line per stack and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", action="store_true", help="segments of 2, 3 and 4 blocks too")
    parser.add_argument("--autocast", action="store_true", help="copies of weights that only forward holds")
    parser.add_argument("--highs", action="store_true", help="HiGHS alone too, up to 96 blocks")
    parser.add_argument("--runs", type=int, default=3, help="runs per figure; the shortest counts (default 3)")
    options = parser.parse_args()
    print(f"numpy {numpy.__version__}, scipy {scipy.__version__}, Python {platform.python_version()}")
    print(f"{'stack':>14} {'budget':>7} {'seconds':>8}  {'method':7} {'proven':7} {'gap':>8}  extra of a step")
    for seed in (None, 1):
        for n in SIZES:
            chain = gpt_chain(n, N_OPTIONS, seed=seed, spans=options.spans, is_autocast=options.autocast)
            name = f"{n} {'equal' if seed is None else 'unequal'}"
            floor_s, least = timed(lambda chain=chain: floor(chain), options.runs)  # type: ignore[misc]
            most = chain.peak_bytes([row[0] for row in chain.items])
            print(f"{name:>14} {'floor':>7} {floor_s:8.3f}  {least.owner}")
            for share in SHARES:
                budget = least.peak_bytes + int(share * (most - least.peak_bytes))
                for method in ("auto", "highs") if options.highs and n <= 96 else ("auto",):
                    seconds, found = timed(
                        lambda chain=chain, budget=budget, method=method: solve(chain, budget, method=method),  # type: ignore[misc]
                        options.runs if method == "auto" else 1,
                    )
                    assert found.extra_s is not None
                    print(
                        f"{name:>14} {share:7.0%} {seconds:8.3f}  {found.method:7} "
                        f"{'yes' if found.proven_optimal else 'no':7} {found.gap:8.1e}  "
                        f"{found.extra_s / chain.plain_s:.2%}",
                        flush=True,
                    )
    for seed in (None, 1):
        chain = gpt_chain(48, 12, seed=seed, spans=options.spans, is_autocast=options.autocast)
        seconds, points = timed(lambda chain=chain: front(chain), 1)  # type: ignore[misc]
        print(f"front of 48 {'equal' if seed is None else 'unequal'}: {len(points)} plans in {seconds:.3f} s")


if __name__ == "__main__":
    main()
