"""hf-native: the transformers library's own activation checkpointing, switched on for every block."""

from dataclasses import dataclass

from ckbench.errors import PlanError
from ckbench.plan import Plan, StackShape


@dataclass(frozen=True, kw_only=True)
class HfNative:
    """Let the library recompute each block. Kept and recomputed are as in ``per-block``.

    What the library calls gradient checkpointing, in PyTorch's non-reentrant variant.
    """

    def plan(self, stack: StackShape) -> Plan:
        """Leave it to the library. Raises PlanError where the model is not of a library that can."""
        if not stack.has_native:
            raise PlanError(
                "hf-native is the transformers library's own checkpointing, and this model has none; write per-block"
            )
        return Plan(n_layers=stack.n_layers, native=True)


PLUGIN = HfNative
