"""Trace a step without data: every operation of every block, forward and backward, and of the rest of the step."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckbench.config import ModelConfig, RunConfig, StrategySpec
from ckbench.devices.base import Observer
from ckbench.engine.flops import formulas
from ckbench.engine.saved import block_saved_bytes
from ckbench.engine.selective import UNASKED
from ckbench.engine.trial import NoObserver, Trial
from ckbench.estimate.follow import Both, Follower, tensors
from ckbench.estimate.replay import replay
from ckbench.plan import Plan, Region
from ckbench.planner.operations import BlockOperations, Operation, StepOperations, Work

ONLY_RESERVE = ("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided")
"""Operations that make storage and write nothing into it."""
ONLY_WRITE = ("aten.copy_", "aten.fill_", "aten.zero_", "aten.bernoulli_", "aten.uniform_", "aten.normal_")
"""Operations that do not read what they overwrite."""
STATES = {"sgd": 0, "adam": 2, "adamw": 2}
"""Numbers per parameter that a fused optimizer keeps."""


@dataclass
class _Row:
    """One operation of a block's forward; its result may yet be written into."""

    work: Work
    made: dict[int, int]
    """New storages: their key and bytes."""
    writes: bool
    is_mutated: bool = False


@dataclass
class _Pass:
    """One run of a block's forward."""

    block: int
    rows: list[_Row] = field(default_factory=list)
    input_bytes: int = 0
    output_storages: frozenset[int] = frozenset()


class _Tracer(TorchDispatchMode):
    """Notes operations under the block they belong to; in backward a gradient's arrival says whose turn it is."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.formulas = formulas()
        self.running: list[_Pass] = []
        self.forwards: list[_Pass] = []
        self.replays: list[_Pass] = []
        self.backward: dict[int, list[Work]] = {}
        self.rest: list[Work] = []
        self.update: list[Work] = []
        self.phase = ""
        self.block: int | None = None
        """Whose backward runs."""
        self._made_by: dict[int, _Row] = {}
        self._held: list[Any] = []
        """Storages of this step's forwards, so that no address is used twice."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        if func in UNASKED or not isinstance(func, torch._ops.OpOverload):
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [
            tensor
            for tensor in made
            if tensor.device.type == self.device_type and tensor.untyped_storage()._cdata not in known
        ]
        new = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in fresh}
        written = list(_written(func, args, kwargs))
        formula = self.formulas.get(func._overloadpacket)
        work = Work(
            name=str(func._overloadpacket),
            overload=func._overloadname,
            flops=int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0,
            moved_bytes=_moved_bytes(str(func._overloadpacket), given, fresh, written),
            dtype=next((str(x.dtype).removeprefix("torch.") for x in (*given, *made) if x.is_floating_point()), ""),
        )
        if not self.running:
            self._note_outside(work)
        else:
            n_bytes = {key: storage.nbytes() for key, storage in new.items()}
            row = _Row(work, n_bytes, bool(written))
            self.running[-1].rows.append(row)
            if self.phase == "forward":
                self._made_by.update(dict.fromkeys(new, row))
                self._held.extend(new.values())
        if self.phase == "forward":
            for tensor in written:
                writer = self._made_by.get(tensor.untyped_storage()._cdata)
                if writer is not None:
                    writer.is_mutated = True
        return result

    def _note_outside(self, work: Work) -> None:
        if self.phase == "optimizer":
            self.update.append(work)
        elif self.block is None:
            self.rest.append(work)
        else:
            self.backward.setdefault(self.block, []).append(work)

    def entered(self, block: int, is_replay: bool, args: Any) -> None:
        """Note what follows under this block."""
        (self.replays if is_replay else self.forwards).append(_Pass(block))
        self.running.append((self.replays if is_replay else self.forwards)[-1])
        self.running[-1].input_bytes = tensors(args)[0].untyped_storage().nbytes()

    def left(self, block: int, is_replay: bool, output: Any) -> None:
        """Note which storages are the block's own output."""
        self.running.pop().output_storages = frozenset(x.untyped_storage()._cdata for x in tensors(output))

    def turned(self, block: int | None) -> None:
        """Note what follows under this block's backward."""
        self.block = block

    def began(self, phase: str) -> None:
        """Note what follows under this phase."""
        self.phase, self.block = phase, None
        self._made_by.clear()
        self._held.clear()


def trace_step(config: RunConfig, kind: str) -> StepOperations:
    """Trace without data, in the semantics of ``cpu`` or ``cuda``."""
    return _trace(config, lambda asked, prepare: replay(asked, kind, prepare=prepare))


def trace_on(config: RunConfig, device: torch.device) -> StepOperations:
    """Trace on a device itself."""

    def run(asked: RunConfig, prepare: Callable[[Trial], None]) -> None:
        trial = Trial(asked, device)
        prepare(trial)
        for _ in range(2):
            trial.step(NoObserver())

    return _trace(config, run)


def _trace(config: RunConfig, run: Callable[[RunConfig, Callable[[Trial], None]], Any]) -> StepOperations:
    """Trace one micro-batch and one update under ``none``, and a recomputation of every block with early stop."""
    asked, places = least_depth(config)
    tracer, trial, saved = _traced(asked, run, recomputes=False)
    n_rerun = {found.block: len(found.rows) for found in _traced(asked, run, recomputes=True)[0].replays}
    blocks: list[BlockOperations] = []
    for i, found in enumerate(tracer.forwards):
        block = BlockOperations(
            operations=_operations(found, n_rerun[i]),
            backward=tuple(tracer.backward.get(i, ())),
            plain_bytes=saved[i] - found.input_bytes,
            n_parameters=sum(parameter.numel() for parameter in trial.model.blocks[i].parameters()),
        )
        blocks.append(next((known for known in blocks if known == block), block))
    places = places or list(range(len(blocks)))
    n_traced = sum(parameter.numel() for parameter in trial.module.parameters())
    n_whole = n_traced + sum(blocks[i].n_parameters for i in places) - sum(block.n_parameters for block in blocks)
    return StepOperations(
        blocks=tuple(blocks[i] for i in places),
        rest=tuple(tracer.rest),
        update=tuple(tracer.update) or _fused_update(trial),
        update_share=n_whole / n_traced,
        n_micro_batches=config.train.grad_accumulation,
    )


def least_depth(config: RunConfig) -> tuple[RunConfig, list[int]]:
    """Give the trial of one micro-batch under ``none`` with the fewest blocks that show every kind, and for each block
    of the stack the one like it.

    The first block stands for itself: its input may need no gradient. Models of others are left as they are, and no
    places are given.
    """
    train = config.train.model_copy(update={"grad_accumulation": 1})
    config = config.model_copy(update={"strategy": StrategySpec(name="none"), "train": train})
    if not isinstance(config.model, ModelConfig):
        return config, []
    widths = config.model.ffn_widths()
    kinds = list(dict.fromkeys(widths[1:]))
    places = [0, *(1 + kinds.index(width) for width in widths[1:])]
    d_ff = (widths[0], *kinds) if isinstance(config.model.d_ff, tuple) else config.model.d_ff
    model = config.model.model_copy(update={"n_layers": 1 + len(kinds), "d_ff": d_ff})
    return config.model_copy(update={"model": model}), places


def _traced(
    config: RunConfig, run: Callable[[RunConfig, Callable[[Trial], None]], Any], *, recomputes: bool
) -> tuple[_Tracer, Trial, tuple[int, ...]]:
    """Run two steps and trace the second, with every block recomputed or none; what blocks keep comes with it."""
    found: list[tuple[_Tracer, Trial, tuple[int, ...]]] = []

    def prepare(trial: Trial) -> None:
        with trial._autocast():
            saved = block_saved_bytes(trial.model, trial.batches[0][0])
        tracer = _Tracer(trial.device.type)
        n = len(trial.model.blocks)
        regions = tuple(Region(start=i, stop=i + 1) for i in range(n) if recomputes)
        follower = Follower(trial, Plan(n_layers=n, regions=regions), tracer)
        found.append((tracer, trial, saved))
        step = trial.step
        n_steps = itertools.count()

        def traced_step(observer: Observer) -> None:
            if next(n_steps) == 0:
                step(observer)
                return
            follower.on = True
            with tracer:
                step(Both(follower, observer))

        trial.step = traced_step  # type: ignore[method-assign]

    run(config, prepare)
    return found[0]


def _operations(found: _Pass, n_rerun: int) -> tuple[Operation, ...]:
    n_calls: Counter[str] = Counter()
    operations = []
    for i, row in enumerate(found.rows):
        n_calls[row.work.name] += 1
        own = sum(n_bytes for key, n_bytes in row.made.items() if key not in found.output_storages)
        operations.append(
            Operation(
                **asdict(row.work),
                call=n_calls[row.work.name],
                out_bytes=sum(row.made.values()),
                kept_bytes=own,
                is_view=not row.made and not row.writes,
                is_mutated=row.is_mutated,
                is_rerun=i < n_rerun,
            )
        )
    return tuple(operations)


def _moved_bytes(name: str, given: Sequence[Tensor], fresh: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Count what a kernel reads and writes, every tensor once; a view moves nothing."""
    if name in ONLY_RESERVE or not (fresh or written):
        return 0
    writes = sum(map(_touched_bytes, (*fresh, *written)))
    if name == "aten.embedding":  # reads the rows it gives, not the table
        return 2 * writes
    if name.endswith("_like") or name.startswith("aten.new_"):
        return writes
    overwritten = {id(tensor) for tensor in written} if name in ONLY_WRITE else set()
    return writes + sum(_touched_bytes(tensor) for tensor in given if id(tensor) not in overwritten)


def _touched_bytes(tensor: Tensor) -> int:
    """Give a tensor's bytes; one that repeats its storage is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that an operation writes into."""
    if not func._schema.is_mutable:
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        yield from tensors(value)


def _fused_update(trial: Trial) -> tuple[Work, ...]:
    """Give what a fused optimizer moves, which runs nothing without data: it reads parameters, gradients and state once
    and writes parameters and state. Empty for optimizers that ran in backward or on the host."""
    train = trial.train
    if train.optimizer_in_backward or train.optimizer_on_host or train.optimizer not in STATES:
        return ()
    n_bytes = sum(_touched_bytes(parameter) for parameter in trial.module.parameters() if parameter.requires_grad)
    moved = (3 + 2 * STATES[train.optimizer]) * n_bytes
    return (Work(name=f"fused {train.optimizer}", overload="", flops=0, moved_bytes=moved, dtype=""),)
