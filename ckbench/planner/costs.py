"""Seconds of a step's pieces: measured on the device, from stored records, or by the roofline of a named card.

All seconds are of one step, every micro-batch in it, under ``none``.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckbench.card_speeds import CardSpeed, card_speed
from ckbench.config import RunConfig
from ckbench.errors import ConfigError
from ckbench.planner.operations import BlockOperations, StepOperations, Work, rerun
from ckbench.records import Record

NOMINAL = CardSpeed(
    variant="no card",
    fp32_flops_per_s=10.0,
    tf32_flops_per_s=10.0,
    short_flops_per_s=10.0,
    memory_bytes_per_s=1.0,
    pcie_generation=3,
    source="",
)
"""A processor's balance, within a factor of two or three of common ones: times of it are only shares."""


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """What one block takes."""

    forward_s: float
    backward_s: float
    """Without recomputation."""
    op_s: tuple[float, ...]
    """By operation of its ``BlockOperations``; they add up to ``forward_s``."""
    region_s: float = 0.0
    """What a region around the block takes beside what it runs again; 0 where it is not measured, and less where
    backward is the faster for what was just made again."""
    selective_s: float = 0.0
    """What it takes besides where it keeps results."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What a step takes, piece by piece, and where that is known from."""

    blocks: tuple[BlockCosts, ...]
    """By place in the stack; equal blocks are one object."""
    rest_s: float
    """Embedding, head, loss and optimizer."""
    source: str
    """A phrase to print."""
    link_bytes_per_s: float | None = None
    """What goes to the host or comes back in a second, one way; None where nobody says."""

    @property
    def plain_s(self) -> float:
        """Give the step's seconds where everything is kept."""
        return self.rest_s + sum(block.forward_s + block.backward_s for block in self.blocks)


def rerun_s(costs: BlockCosts, operations: BlockOperations, save_ops: Sequence[str] = ()) -> float:
    """Give the extra seconds of a block in a region of its own that keeps the results of ``save_ops``, with early stop.

    With early stop off it is ``tail_s`` more.
    """
    again_s = sum(costs.op_s[i] for i in rerun(operations, save_ops))
    return max(0.0, again_s + costs.region_s + (costs.selective_s if save_ops else 0.0))


def tail_s(costs: BlockCosts, operations: BlockOperations) -> float:
    """Give the forward seconds that early stop skips: of a region over several blocks, those of its last block."""
    pairs = zip(costs.op_s, operations.operations, strict=True)
    return sum(seconds for seconds, operation in pairs if not operation.is_rerun)


def work_s(work: Work, speed: CardSpeed, precision: str) -> float:
    """Give the seconds of one operation that computes or moves at a card's peak, whichever takes longer."""
    return max(work.flops / speed.flops_per_s(work.dtype, precision), work.moved_bytes / speed.memory_bytes_per_s)


def roofline(step: StepOperations, card: str, precision: str) -> StepCosts:
    """Cost a traced step by a card's peaks; ``precision`` as ``train.precision`` names it.

    Raises ConfigError for an unknown card.
    """
    name, speed = card_speed(card)
    source = f"roofline of {name} ({_peaks(speed, precision)}), ratios only: the share of peak is not modelled"
    return replace(_by_peaks(step, speed, precision), source=source)


def recorded(step: StepOperations, records: Sequence[Record], config: RunConfig, card: str | None) -> StepCosts:
    """Cost a traced step by stored step times of the same model and training section, under ``none`` and ``per-block``.

    What ``per-block`` adds is what its replays take, so it scales the forward; ``none`` is the whole step. Shares
    inside both are a roofline's: of ``card``, or without one of a machine that computes 10 floating-point operations
    in the time it moves a byte. Raises ConfigError where there is no such record of ``none``.
    """
    alike = [
        record
        for record in records
        if record.status == "ok"
        and record.step_s_median
        and record.model == config.model.model_dump(mode="json")
        and record.train == config.train.model_dump(mode="json")
    ]
    device = next((record.device_name for record in reversed(alike) if record.strategy == "none"), None)
    if device is None:
        raise ConfigError("there is no record of none for this model and training section; measure it first")
    none, recomputed = (
        [r.step_s_median or 0.0 for r in alike if r.device_name == device and r.strategy == strategy]
        for strategy in ("none", "per-block")
    )
    if card is None:
        shares, by = _by_peaks(step, NOMINAL, config.train.precision), "10 FLOP per byte"
    else:
        shares, by = roofline(step, card, config.train.precision), f"roofline of {card_speed(card)[0]}"
    none_s = statistics.median(none)
    predicted_s = sum(map(rerun_s, shares.blocks, step.blocks))
    scale = none_s / shares.plain_s
    told = f"none {none_s * 1000:.4g} ms"
    if recomputed and predicted_s > 0:
        per_block_s = statistics.median(recomputed)
        scale = max(0.0, per_block_s - none_s) / predicted_s
        told += f", per-block {per_block_s * 1000:.4g} ms"
    return replace(_scaled(shares, scale, none_s), source=f"recorded on {device} ({told}), shares by {by}")


def _scaled(shares: StepCosts, scale: float, plain_s: float) -> StepCosts:
    """Multiply forwards by ``scale``, and have backward and the rest share what is left of the step as they did."""
    left_s = plain_s - scale * sum(block.forward_s for block in shares.blocks)
    others_s = shares.plain_s - sum(block.forward_s for block in shares.blocks)
    others = max(0.0, left_s) / others_s if others_s else 0.0
    made = {
        id(block): BlockCosts(
            forward_s=scale * block.forward_s,
            backward_s=others * block.backward_s,
            op_s=tuple(scale * seconds for seconds in block.op_s),
        )
        for block in shares.blocks
    }
    return replace(shares, blocks=tuple(made[id(block)] for block in shares.blocks), rest_s=others * shares.rest_s)


def _by_peaks(step: StepOperations, speed: CardSpeed, precision: str) -> StepCosts:
    def seconds(works: Sequence[Work]) -> float:
        return sum(work_s(work, speed, precision) for work in works)

    n = step.n_micro_batches
    made: dict[int, BlockCosts] = {}
    for block in step.blocks:
        if id(block) not in made:
            op_s = tuple(n * work_s(operation, speed, precision) for operation in block.operations)
            made[id(block)] = BlockCosts(forward_s=sum(op_s), backward_s=n * seconds(block.backward), op_s=op_s)
    return StepCosts(
        blocks=tuple(made[id(block)] for block in step.blocks),
        rest_s=n * seconds(step.rest) + step.update_share * seconds(step.update),
        source="",
    )


def _peaks(speed: CardSpeed, precision: str) -> str:
    dtype = "float32" if precision in ("fp32", "tf32") else "bfloat16"
    teraflops = speed.flops_per_s(dtype, precision) / 1e12
    return f"{teraflops:g} TFLOP/s {precision}, {speed.memory_bytes_per_s / 1e12:.2g} TB/s; {speed.source}"
