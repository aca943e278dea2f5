"""Apply a Plan to the blocks of any module, from outside; the only caller of torch.utils.checkpoint.

The forward of each covered module is replaced on the instance. A region over several modules works in
one pass of the model's own loop: its earlier modules only record what they were called with and hand
their input on, the last one runs them all inside one checkpoint call. So arguments that differ from
block to block survive, and the model's code knows nothing of it. A part with its pre-norm
(norm, then FFN) is such a chain of two modules. A module that stands at several places of the stack
(shared layers) gets a forward for each place, which its calls take in turn.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ckbench.errors import PlanError
from ckbench.models.base import BuiltModel
from ckbench.plan import Plan, Region

Forward = Callable[..., Any]


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

    def enter_region(self) -> None:
        """Note the start of a region's body."""
        if self.in_backward:
            self.region_calls_backward += 1
        else:
            self.region_calls_forward += 1


@dataclass
class _Call:
    """One module's arguments, its first tensor (the hidden state) taken out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_key: str | None

    def run(self, forward: Forward, hidden: Any) -> Any:
        if self.hidden_key is None:
            return forward(hidden, *self.args, **self.kwargs)
        return forward(*self.args, **{self.hidden_key: hidden}, **self.kwargs)


class AppliedPlan:
    """A plan in force on a model; ``remove`` puts every forward back."""

    def __init__(self, model: BuiltModel, plan: Plan) -> None:
        if plan.n_layers != len(model.blocks):
            raise PlanError(f"plan for {plan.n_layers} blocks, model has {len(model.blocks)}")
        self.plan = plan
        n = len(model.blocks)
        self.counts = Counts(block_calls_forward=[0] * n, block_calls_backward=[0] * n)
        self.notes: list[str] = []
        self._patched: dict[nn.Module, Any] = {}
        self._forwards = _by_place(model)
        for i, block in enumerate(model.blocks):
            self._forwards[block][i] = self._counted(i, block.forward)
        for region in plan.regions:
            if region.part == "block":
                self._cover([(model.blocks[i], i) for i in range(region.start, region.stop)], region)
            else:
                chain = model.parts[region.start].get(region.part)
                if not chain:
                    raise PlanError(f"block {region.start} has no {region.part} part")
                if len(chain) == 1 and not self.notes:
                    self.notes.append(f"{region.part} without its norm: the norm's output is used elsewhere too")
                self._cover([(module, region.start) for module in chain], region)
        for module, by_place in self._forwards.items():
            if any(forward != module.forward for forward in by_place.values()):
                self._patch(module, _in_turn(list(by_place.values())))

    def remove(self) -> None:
        """Give every module its own forward back."""
        for module, own in self._patched.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                object.__setattr__(module, "forward", own)
        self._patched.clear()
        self._forwards.clear()

    def _patch(self, module: nn.Module, forward: Forward) -> None:
        self._patched.setdefault(module, module.__dict__.get("forward"))
        object.__setattr__(module, "forward", forward)

    def _counted(self, index: int, forward: Forward) -> Forward:
        counts = self.counts

        def counted_forward(*args: Any, **kwargs: Any) -> Any:
            counts.enter_block(index)
            return forward(*args, **kwargs)

        return counted_forward

    def _cover(self, chain: Sequence[tuple[nn.Module, int]], region: Region) -> None:
        """Make ``chain``, modules with their places in the stack, run as one region."""
        forwards = [self._forwards[module][place] for module, place in chain]
        calls: list[_Call] = []

        def recording_forward(*args: Any, **kwargs: Any) -> Any:
            call, hidden = _take_hidden(args, kwargs)
            calls.append(call)
            return hidden

        def running_forward(*args: Any, **kwargs: Any) -> Any:
            call, hidden = _take_hidden(args, kwargs)
            recorded = [*calls, call]
            calls.clear()
            return self._run_region(region, region.start, forwards, recorded, hidden)

        for module, place in chain[:-1]:
            self._forwards[module][place] = recording_forward
        last, place = chain[-1]
        self._forwards[last][place] = running_forward

    def _run_region(
        self, region: Region, first: int, forwards: Sequence[Forward], calls: Sequence[_Call], hidden: Any
    ) -> Any:
        """Run one region, recomputed later from ``hidden`` and the recorded arguments.

        ``forwards[0]`` and ``calls[0]`` belong to block ``first``. The arguments go through the
        checkpoint call as one flat tuple, because its reentrant variant only follows tensors it is
        given directly.
        """
        flat, rebuild = _flatten(calls)

        def body(hidden: Any, *flat: Any) -> Any:
            self.counts.enter_region()
            inner = rebuild(flat)
            if region.part != "block":
                for forward, call in zip(forwards, inner, strict=True):
                    hidden = call.run(forward, hidden)
                return hidden
            for item in region.items():
                if isinstance(item, Region):
                    span = slice(item.start - first, item.stop - first)
                    hidden = self._run_region(item, item.start, forwards[span], inner[span], hidden)
                else:
                    hidden = inner[item - first].run(forwards[item - first], hidden)
            return hidden

        if not torch.is_grad_enabled():
            return body(hidden, *flat)  # an evaluation pass keeps nothing, so there is nothing to recompute
        if self.plan.reentrant:
            if not any(isinstance(x, Tensor) and x.requires_grad for x in (hidden, *flat)):
                raise PlanError(
                    "reentrant checkpoint whose inputs need no gradient would leave the parameters of "
                    f"blocks {region.start} to {region.stop - 1} without one; use the default variant"
                )
            return checkpoint(body, hidden, *flat, use_reentrant=True, preserve_rng_state=self.plan.preserve_rng)
        return checkpoint(
            body,
            hidden,
            *flat,
            use_reentrant=False,
            preserve_rng_state=self.plan.preserve_rng,
            early_stop=self.plan.early_stop,
        )


def _by_place(model: BuiltModel) -> dict[nn.Module, dict[int, Forward]]:
    """List the forward of every block and part by the place where it stands; shared ones stand at several."""
    forwards: dict[nn.Module, dict[int, Forward]] = {}
    for i, block in enumerate(model.blocks):
        for module in (block, *(module for chain in model.parts[i].values() for module in chain)):
            forwards.setdefault(module, {})[i] = module.forward
    return forwards


def _in_turn(forwards: Sequence[Forward]) -> Forward:
    """Make one forward of those of a module's places: the first call is at the first of them, and so on around."""
    if len(forwards) == 1:
        return forwards[0]
    turns = itertools.cycle(forwards)
    return lambda *args, **kwargs: next(turns)(*args, **kwargs)


def _take_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Call, Any]:
    """Split a call into its hidden state, which flows from module to module, and the rest."""
    if args:
        return _Call(args[1:], dict(kwargs), None), args[0]
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            rest = {k: v for k, v in kwargs.items() if k != key}
            return _Call((), rest, key), value
    raise PlanError("a checkpointed module was called without a tensor")


def _flatten(calls: Sequence[_Call]) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], list[_Call]]]:
    """Lay the arguments of all calls out as one tuple, and say how to put them back.

    Tensors inside tuples and lists are found too: the reentrant variant must see each of them.
    """
    flat: list[Any] = []

    def take(value: Any) -> Any:
        if isinstance(value, tuple) and type(value) is tuple or isinstance(value, list):
            return ("sequence", type(value), [take(item) for item in value])
        flat.append(value)
        return len(flat) - 1

    shapes = [
        ([take(arg) for arg in call.args], {k: take(v) for k, v in call.kwargs.items()}, call.hidden_key)
        for call in calls
    ]

    def rebuild(values: tuple[Any, ...]) -> list[_Call]:
        def give(shape: Any) -> Any:
            return values[shape] if isinstance(shape, int) else shape[1](give(item) for item in shape[2])

        return [
            _Call(tuple(give(a) for a in args), {k: give(v) for k, v in kwargs.items()}, key)
            for args, kwargs, key in shapes
        ]

    return tuple(flat), rebuild
