"""What ran in a step: starts of blocks and regions, split at the turn from forward to backward."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counts:
    """What ran, split at the turn from forward to backward; ``in_backward`` is set by the step."""

    in_backward: bool = False
    block_calls_forward: list[int] = field(default_factory=list)
    block_calls_backward: list[int] = field(default_factory=list)
    region_calls_forward: int = 0
    region_calls_backward: int = 0

    def clear(self) -> None:
        """Start counting anew."""
        self.block_calls_forward = [0] * len(self.block_calls_forward)
        self.block_calls_backward = [0] * len(self.block_calls_backward)
        self.region_calls_forward = self.region_calls_backward = 0

    def enter_block(self, index: int) -> None:
        """Note the start of one block's own forward."""
        calls = self.block_calls_backward if self.in_backward else self.block_calls_forward
        calls[index] += 1

    def leave_block(self, index: int, output: Any) -> None:
        """Hear that a block's own forward gave ``output``; nothing is noted here, a replay looks at it."""

    def enter_region(self) -> None:
        """Note the start of a region's body."""
        if self.in_backward:
            self.region_calls_backward += 1
        else:
            self.region_calls_forward += 1
