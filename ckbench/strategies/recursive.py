"""recursive: halves within halves, down to one block."""

from dataclasses import dataclass

from ckbench.plan import Plan, Region, StackShape


@dataclass(frozen=True, kw_only=True)
class Recursive:
    """Recompute the stack by halves, each half by halves.

    Kept: b + h; peak about max(b + h, (1 + log2 L)·b + a + t); L·(1 + log2(L)/2) block forwards in
    backward with early stop, L·(1 + log2 L) without.
    """

    def plan(self, stack: StackShape) -> Plan:
        """Cover the stack by a binary tree; an odd span gives its first half the extra block."""
        return Plan(n_layers=stack.n_layers, regions=(_halved(0, stack.n_layers),))


def _halved(start: int, stop: int) -> Region:
    if stop - start == 1:
        return Region(start=start, stop=stop)
    middle = (start + stop + 1) // 2
    return Region(start=start, stop=stop, children=(_halved(start, middle), _halved(middle, stop)))


PLUGIN = Recursive
