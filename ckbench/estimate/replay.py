"""Replay a trial's steps on tensors without data, in the semantics of a device, and give its memory figures."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ckbench.config import RunConfig
from ckbench.devices._timeline import figures
from ckbench.engine.trial import Trial, is_compiled
from ckbench.estimate.semantics import KINDS, Semantics
from ckbench.estimate.substitutes import NotEstimated
from ckbench.estimate.tracker import StorageTracker
from ckbench.plan import Plan


@dataclass(kw_only=True)
class Replayed:
    """A replayed trial: figures of its first and of a steady step, and the steady step's timeline."""

    first: dict[str, Any]
    steady: dict[str, Any]
    described: dict[str, Any]
    tracker: StorageTracker
    trial: Trial
    begin: int
    """Index of the steady step's first event."""
    gradients: frozenset[int]
    """Numbers of the storages that hold gradients at the end of backward."""
    static: frozenset[int]
    """Numbers of parameters, buffers and optimizer state."""
    host_bytes: int | None
    """Most that lay in the host store at one time, None where there is none."""
    host_pinned_bytes: int | None
    """What pinning took for it, None where nothing is pinned."""


def name_modules(tracker: StorageTracker, trial: Trial) -> None:
    """Tell the tracker at all times which module's forward runs, recomputation included."""
    names = {module: name for name, module in trial.module.named_modules()}
    blocks = [names[block] for block in trial.model.blocks]

    def enter(module: Any, _args: Any) -> None:
        stack.append(tracker.where)
        tracker.where = names[module]

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        tracker.where = stack.pop() if stack else ""  # a library's own recomputation may leave what it never entered

    stack: list[str] = []
    for module in names:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)  # early stop ends a recomputation by an exception
    counts = trial.applied.counts
    entered = counts.enter_block

    def enter_block(index: int) -> None:  # the engine starts recomputed blocks without their hooks
        entered(index)
        if counts.in_backward:
            stack.clear()
            tracker.where = blocks[index]

    counts.enter_block = enter_block  # type: ignore[method-assign]


class _Marks:
    """Writes a step's events into the timeline, and notes the gradients at the end of backward."""

    def __init__(self, tracker: StorageTracker, trial: Trial, semantics: Semantics) -> None:
        self.tracker = tracker
        self.trial = trial
        self.semantics = semantics
        self.gradients: dict[int, int] = {}

    def at(self, event: str) -> None:
        if event == "optimizer":
            self.gradients = _by_number(self.tracker, (p.grad for p in self.trial.module.parameters()))
        self.semantics.at(event)
        self.tracker.mark(event)
        updates = ("turn", "blocks", "optimizer") if self.trial.train.optimizer_in_backward else ("optimizer",)
        self.tracker.reads_one = event in updates
        if event in ("turn", "blocks", "optimizer"):
            self.tracker.where = ""
        if event != "blocks":
            self.tracker.block = None
        self.tracker.follows_arguments = event == "optimizer"


def _by_number(tracker: StorageTracker, tensors: Any) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        birth = None if tensor is None else tracker.birth_of(tensor)
        if birth is not None:
            found[birth.number] = birth.n_bytes
    return found


def replay(
    config: RunConfig,
    kind: str,
    workspace_bytes: int = 0,
    *,
    names_modules: bool = False,
    prepare: Callable[[Trial], None] | None = None,
    plan: Plan | None = None,
    watch: Callable[[StorageTracker, Trial], None] | None = None,
    n_steps: int = 2,
) -> Replayed:
    """Run two steps of a trial without data: the first makes the optimizer's state, the second is steady.

    ``workspace_bytes`` is what libraries hold on the device all the while (cuBLAS). ``prepare`` may change the built
    trial before its first step. ``plan`` is applied instead of the strategy's; ``watch`` may look at the steps.
    Raises NotEstimated where a step cannot run without data.
    """
    semantics: Semantics = KINDS[kind](config)
    tracker = semantics.make_tracker()
    with _only_new_garbage(), semantics.running(tracker):
        trial = semantics.build(config, plan)
        if kind != "real" and is_compiled(config, trial.applied.plan):
            raise NotEstimated("what compiled blocks keep is decided by the compiler, which needs the device")
        if prepare is not None:
            prepare(trial)
        tracker.add_constant(workspace_bytes)
        tracker.add_all(trial.module.parameters(), "parameter")
        tracker.add_all(trial.module.buffers(), "buffer")
        tracker.add_all(_leaves(trial.batches), "input")
        tracker.add_all(trial.optimizer.device_tensors(), "optimizer state")
        steps = []
        if names_modules:
            name_modules(tracker, trial)
        if watch is not None:
            watch(tracker, trial)
        with tracker:
            for _ in range(n_steps):
                gc.collect()
                steps.append(_one_step(tracker, trial, semantics))
    first, steady = steps[0], steps[-1]
    host_bytes = trial._figures().get("host_store_peak_bytes")
    return Replayed(
        first=first[0],
        steady=steady[0],
        described=trial.describe(),
        tracker=tracker,
        trial=trial,
        begin=steady[1],
        gradients=steady[2],
        static=steady[3],
        host_bytes=host_bytes,
        host_pinned_bytes=None if host_bytes is None else semantics.pinned_bytes,
    )


@contextlib.contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Have the collector look at nothing older: all of PyTorch's modules take it longer than a short stack's steps."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _one_step(
    tracker: StorageTracker, trial: Trial, semantics: Semantics
) -> tuple[dict[str, Any], int, frozenset[int], frozenset[int]]:
    begin, mark = len(tracker.timeline.events), len(tracker.timeline.marks)
    at_start = _by_number(tracker, (p.grad for p in trial.module.parameters()))
    live = tracker.live_bytes
    marks = _Marks(tracker, trial, semantics)
    trial.observed_step(marks)
    static = _by_number(
        tracker, (*trial.module.parameters(), *trial.module.buffers(), *trial.optimizer.device_tensors())
    )
    values = figures(
        tracker.timeline.events[begin:],
        tracker.timeline.marks[mark:],
        live_at_start_bytes=live,
        static_bytes=sum(static.values()),
        gradients=marks.gradients,
        gradients_at_start=at_start,
    )
    return values, begin, frozenset(marks.gradients), frozenset(static)


def _leaves(batches: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(batches) if isinstance(leaf, Tensor))
