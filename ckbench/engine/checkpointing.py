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
from functools import partial
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

    def filled(self, flat: Sequence[Any]) -> "_Call":
        """Give this call, whose arguments are slots of ``flat``, with the arguments themselves."""
        args = tuple(_put_back(slot, flat) for slot in self.args)
        return _Call(args, {key: _put_back(slot, flat) for key, slot in self.kwargs.items()}, self.hidden_key)


PLAIN = _Call((), {}, None)
"""A module called with the hidden state and nothing else."""


class AppliedPlan:
    """A plan in force on a model; ``remove`` puts every forward back."""

    def __init__(
        self, model: BuiltModel, plan: Plan, *, compiled: bool = False, offload_cap_bytes: int | None = None
    ) -> None:
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

    def figures(self) -> dict[str, Any]:
        """Give record fields that the plan's application knows."""
        return {}

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
        covered = _Covered(region, forwards, self.plan, self.counts)
        calls: list[_Call] = []
        is_chain = len(chain) > 1

        def recording_forward(*args: Any, **kwargs: Any) -> Any:
            call, hidden = _take_hidden(args, kwargs)
            calls.append(call)
            return hidden

        def running_forward(*args: Any, **kwargs: Any) -> Any:
            call, hidden = _take_hidden(args, kwargs)
            if call is PLAIN and not is_chain:
                return covered.run_plain(hidden)
            recorded = [*calls, call]
            calls.clear()
            return covered.run(recorded, hidden)

        for module, place in chain[:-1]:
            self._forwards[module][place] = recording_forward
        last, place = chain[-1]
        self._forwards[last][place] = running_forward


class _Covered:
    """A region with the forwards it runs. What does not change from call to call is made once, here: a region of a
    small model takes about as long to prepare as to compute, and what we added would be taken for the strategy's."""

    def __init__(self, region: Region, forwards: Sequence[Forward], plan: Plan, counts: Counts) -> None:
        self.region = region
        self.counts = counts
        self.reentrant = plan.reentrant
        self.options: dict[str, Any] = {"use_reentrant": plan.reentrant, "preserve_rng_state": plan.preserve_rng}
        if not plan.reentrant:
            self.options["early_stop"] = plan.early_stop
        self.steps: list[tuple[Forward | _Covered, int, int]] = []
        """What runs in order, each with its span in ``forwards``: modules, and regions inside this one."""
        for item in region.items() if region.part == "block" else range(region.start, region.start + len(forwards)):
            if isinstance(item, Region):
                start, stop = item.start - region.start, item.stop - region.start
                self.steps.append((_Covered(item, forwards[start:stop], plan, counts), start, stop))
            else:
                start = item - region.start
                self.steps.append((forwards[start], start, start + 1))
        self.plain_steps = [step.run_plain if isinstance(step, _Covered) else step for step, _, _ in self.steps]

    def run(self, calls: Sequence[_Call], hidden: Any) -> Any:
        """Run the region, recomputed later from ``hidden`` and the arguments of the modules' ``calls``.

        The arguments go through the checkpoint call as one flat tuple: its reentrant variant only
        follows tensors it is given directly, and a region around this one must see them too.
        """
        if all(call is PLAIN for call in calls):
            return self.run_plain(hidden)
        flat, slots = _flatten(calls)
        return self._checkpoint(partial(self._body, slots), hidden, *flat)

    def run_plain(self, hidden: Any) -> Any:
        """Run the region where modules take nothing but the hidden state."""
        return self._checkpoint(self._plain_body, hidden)

    def _body(self, slots: Sequence[_Call], hidden: Any, *flat: Any) -> Any:
        self.counts.enter_region()
        calls = [call.filled(flat) for call in slots]
        for step, start, stop in self.steps:
            if isinstance(step, _Covered):
                hidden = step.run(calls[start:stop], hidden)
            else:
                hidden = calls[start].run(step, hidden)
        return hidden

    def _plain_body(self, hidden: Any) -> Any:
        self.counts.enter_region()
        for step in self.plain_steps:
            hidden = step(hidden)
        return hidden

    def _checkpoint(self, body: Callable[..., Any], hidden: Any, *flat: Any) -> Any:
        if not torch.is_grad_enabled():
            return body(hidden, *flat)  # an evaluation pass keeps nothing, so there is nothing to recompute
        if self.reentrant and not any(isinstance(x, Tensor) and x.requires_grad for x in (hidden, *flat)):
            raise PlanError(
                "reentrant checkpoint whose inputs need no gradient would leave the parameters of "
                f"blocks {self.region.start} to {self.region.stop - 1} without one; use the default variant"
            )
        return checkpoint(body, hidden, *flat, **self.options)


def recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Call a function that keeps only its arguments for backward, and is run again there."""
    if not torch.is_grad_enabled():
        return function(*args)
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


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
        if len(args) == 1 and not kwargs:
            return PLAIN, args[0]
        return _Call(args[1:], kwargs, None), args[0]
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            rest = {k: v for k, v in kwargs.items() if k != key}
            return _Call((), rest, key), value
    raise PlanError("a checkpointed module was called without a tensor")


def _flatten(calls: Sequence[_Call]) -> tuple[list[Any], list[_Call]]:
    """Lay the arguments of all calls out in one list; give it, and the calls with slots of it for arguments.

    Tensors inside tuples and lists are found too: the reentrant variant must see each of them.
    """
    flat: list[Any] = []
    slots = [
        _Call(
            tuple(_lay_out(arg, flat) for arg in call.args),
            {key: _lay_out(value, flat) for key, value in call.kwargs.items()},
            call.hidden_key,
        )
        for call in calls
    ]
    return flat, slots


def _lay_out(value: Any, flat: list[Any]) -> Any:
    """Put a value into ``flat`` and give its slot, or the sequence type and slots of what is inside.

    Not a closure: one that calls itself is a cycle, and would keep every tensor in it until Python collects it.
    """
    if type(value) is tuple or isinstance(value, list):
        return type(value), [_lay_out(item, flat) for item in value]
    flat.append(value)
    return len(flat) - 1


def _put_back(slot: Any, flat: Sequence[Any]) -> Any:
    if isinstance(slot, int):
        return flat[slot]
    kind, inner = slot
    return kind(_put_back(item, flat) for item in inner)
