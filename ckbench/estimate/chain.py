"""Estimate a deep stack of equal blocks from the replay of a short one: the chain model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ckbench import registry, specs
from ckbench.config import ModelConfig, RunConfig
from ckbench.errors import NotYetMeasured
from ckbench.estimate.allocator import CachingAllocator
from ckbench.estimate.repeats import KEPT, NotAChain, Short, lengthen, shorten
from ckbench.estimate.replay import Replayed, replay
from ckbench.estimate.spans import Span, spans, watch_blocks
from ckbench.estimates import Estimate
from ckbench.models.base import BuiltModel
from ckbench.plan import Plan, StackShape, plan_from_json
from ckbench.records import PHASES

MIN_LAYERS = 64
"""Depth from which an estimate takes the chain where it can: below, a replay is quick and knows the allocator too."""


def is_equal_stack(config: RunConfig) -> bool:
    """Tell whether all blocks are equal and their number is a setting, so that a short stack stands for a deep one."""
    return isinstance(config.model, ModelConfig) and not isinstance(config.model.d_ff, tuple)


def shape_of(config: RunConfig) -> StackShape:
    """Give what a strategy may know of a model of ours, from a stack of one block. Raises NotAChain for others."""
    model = config.model
    if not is_equal_stack(config) or not isinstance(model, ModelConfig):
        raise NotAChain("only stacks of equal blocks of our own families are known to be equal beforehand")
    with torch.device("meta"):
        built: BuiltModel = registry.load("models", model.family)(with_layers(config, 1).model, config.train.seq_len)
    return replace(built.shape(), n_layers=model.n_layers, precision=config.train.precision)


def with_layers(config: RunConfig, n_layers: int) -> RunConfig:
    """Give the same trial with another depth."""
    return config.model_copy(update={"model": config.model.model_copy(update={"n_layers": n_layers})})


def estimate_chain(config: RunConfig, kind: str, workspace_bytes: int = 0, plan: Plan | None = None) -> Estimate:
    """Estimate a trial of any depth by a short replay.

    Requested bytes are those of the whole replay to the byte. On CUDA allocated bytes take the short stack's blocks of
    the allocator for the long one's, and what it reserves is not known. Raises NotAChain where it does not apply.
    """
    shape = shape_of(config)
    if plan is None and config.plan is not None:
        plan = plan_from_json(config.plan)
    if plan is None:
        try:
            plan = specs.resolve(config.strategy, shape)
        except NotYetMeasured as error:
            raise NotAChain(str(error)) from None
    replayed, short, steps = _lengthened(config, kind, workspace_bytes, plan)
    if replayed.host_bytes is not None:
        raise NotAChain("what lies on the host at one time is known only of a whole replay")
    first, steady = figures(steps[0]), figures(steps[1])
    n_layers = shape.n_layers
    result = Estimate(
        strategy=config.strategy.label,
        peak_allocated_bytes=steady.peak_bytes,
        peak_requested_bytes=steady.peak_bytes,
        first_step_peak_bytes=first.peak_bytes,
        static_bytes=_scaled(replayed, replayed.static, n_layers),
        gradient_bytes=_scaled(replayed, replayed.gradients, n_layers),
        saved_bytes=steady.saved_bytes,
        peak_phase=steady.peak_phase,
        peaks={phase: steady.peaks.get(phase) for phase in PHASES},
        n_parameters=_parameters(replayed, n_layers),
        method="chain",
    )
    if kind == "cuda":
        sizes = _block_bytes(replayed)
        rounded = step_spans(
            lengthen(spans(replayed, lambda number, n: sizes.get(number, n)), short.runs, checked=False)
        )
        result.first_step_peak_bytes = figures(rounded[0]).peak_bytes
        result.peak_allocated_bytes = figures(rounded[1]).peak_bytes
    return result


def _lengthened(
    config: RunConfig, kind: str, workspace_bytes: int, plan: Plan
) -> "tuple[Replayed, Short, list[StepSpans]]":
    """Replay a plan short and put its steps together again, with more of each run where few were not enough."""
    for n_kept in KEPT:
        short = shorten(plan, n_kept)
        small = with_layers(config, short.plan.n_layers)
        replayed = replay(small, kind, workspace_bytes, plan=short.plan, watch=watch_blocks)
        try:
            steps = step_spans(lengthen(spans(replayed), short.runs))
            if sum(span.added_bytes for span in steps[-1].spans):
                raise NotAChain("what many equal blocks hold is let go at once")
            return replayed, short, steps
        except NotAChain:
            if n_kept == KEPT[-1]:
                raise
    raise AssertionError("KEPT is not empty")


@dataclass(kw_only=True)
class Figures:
    """What one step comes to, bytes."""

    peak_bytes: int
    peak_phase: str
    peaks: dict[str, int]
    saved_bytes: int


@dataclass(kw_only=True)
class StepSpans:
    """One step's spans, and what lives when it begins."""

    start_bytes: int
    spans: list[Span]


def step_spans(all_spans: Sequence[Span]) -> list[StepSpans]:
    """Cut spans into steps: each begins with the first ``forward`` after an ``end``."""
    steps: list[StepSpans] = []
    live, is_inside = 0, False
    for span in all_spans:
        if span.mark == "forward" and not is_inside:
            steps.append(StepSpans(start_bytes=live, spans=[]))
            is_inside = True
        if span.mark == "end":
            is_inside = False
        if is_inside:
            steps[-1].spans.append(span)
        live += span.added_bytes
    return steps


def figures(step: StepSpans) -> Figures:
    """Add a step up, as devices/_timeline.py does with single events."""
    live, peak, peak_phase = step.start_bytes, step.start_bytes, PHASES[0]
    peaks: dict[str, int] = {}
    saved: int | None = None
    for span in step.spans:
        if span.mark == "turn" and saved is None:
            saved = live - step.start_bytes
        top = live + span.rise_bytes
        peaks[span.phase] = max(peaks.get(span.phase, 0), top)
        if top > peak:
            peak, peak_phase = top, span.phase
        live += span.added_bytes
    return Figures(peak_bytes=peak, peak_phase=peak_phase, peaks=peaks, saved_bytes=saved or 0)


def _scaled(replayed: Replayed, numbers: frozenset[int], n_layers: int) -> int:
    """Add up storages, those of one block as often as there are blocks."""
    births, block_of = replayed.tracker.births, replayed.tracker.block_of
    n_short = len(replayed.trial.model.blocks)
    of_block = [0] * n_short
    total = 0
    for number in numbers:
        if number in births:
            total += births[number].n_bytes
            block = block_of.get(number)
            if block is not None:
                of_block[block] += births[number].n_bytes
    if len(set(of_block[1:])) > 1:  # the first block's may have the embedding's gradient with it
        raise NotAChain("equal blocks hold different bytes")
    return total + (n_layers - n_short) * of_block[-1]


def _parameters(replayed: Replayed, n_layers: int) -> int:
    blocks = list(replayed.trial.model.blocks)
    inside = {id(p) for block in blocks for p in block.parameters()}
    apart = sum(p.numel() for p in replayed.trial.module.parameters() if id(p) not in inside)
    return apart + n_layers * sum(p.numel() for p in blocks[0].parameters())


def _block_bytes(replayed: Replayed) -> dict[int, int]:
    """Give the allocator's block of every storage of the short replay, remainders that stay with it included."""
    allocator = CachingAllocator()
    sizes = {}
    for _, number, n_bytes in replayed.tracker.timeline.events:
        if n_bytes > 0:
            before = allocator.allocated
            allocator.allocate(number, n_bytes)
            sizes[number] = allocator.allocated - before
        else:
            allocator.replay([(0, number, n_bytes)])
    return sizes
