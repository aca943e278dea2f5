"""Apply a Plan to the blocks of any module, from outside; the only caller of torch.utils.checkpoint.checkpoint.

The forward of each covered module is replaced on the instance. A region over several modules works in
one pass of the model's own loop: its earlier modules only record what they were called with and hand
their input on, the last one runs them all inside one checkpoint call. So arguments that differ from
block to block survive, and the model's code knows nothing of it. A part with its pre-norm
(norm, then FFN) is such a chain of two modules. A module that stands at several places of the stack
(shared layers) gets a forward for each place, which its calls take in turn.

Compiled blocks: regions of whole blocks lie around the compiled code, others inside it (``inside.py``).
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ckbench.engine.calls import PLAIN, Call, Forward, flatten, take_hidden
from ckbench.engine.counts import Counts
from ckbench.engine.inside import Inside, hand_on, lies_inside
from ckbench.engine.offload import Offloader
from ckbench.engine.reversible import Inverted
from ckbench.engine.selective import Selection
from ckbench.errors import PlanError
from ckbench.models.base import BuiltModel, Counted
from ckbench.plan import Plan, Region

if TYPE_CHECKING:
    from ckbench.engine.compiling import BlockCompiler

HAVE_NORMS = ("ffn", "attention")
"""Parts that come with a norm of their own, where its output feeds them alone."""


GUARD = "_ckbench_plan_in_force"
"""Name under which a module whose forward is replaced holds what refuses its copies."""


class _NotCopied:
    """Lies in a module whose forward is replaced: a copy's replaced forward would run the original's weights."""

    def __deepcopy__(self, _memo: Any) -> Any:
        raise PlanError("a plan is in force on this model: a copy would run the original's blocks; remove() it first")

    def __reduce__(self) -> Any:
        raise PlanError("a plan is in force on this model, which cannot be pickled; remove() it, or save state_dict()")


class AppliedPlan:
    """A plan in force on a model; ``remove`` puts every forward back."""

    def __init__(
        self, model: BuiltModel, plan: Plan, *, compiled: bool = False, offload_cap_bytes: int | None = None
    ) -> None:
        if plan.n_layers != len(model.blocks):
            raise PlanError(f"plan for {plan.n_layers} blocks, model has {len(model.blocks)}")
        if model.apart and any(region.n_blocks > 1 for region in plan.walk()):
            raise PlanError(f"a region cannot span several blocks of this model: {model.apart}")
        self.plan = plan
        n = len(model.blocks)
        self.counts = Counts(block_calls_forward=[0] * n, block_calls_backward=[0] * n)
        self.notes: list[str] = []
        self._patched: dict[nn.Module, Any] = {}
        self._forwards = _by_place(model)
        compiled = compiled or plan.compile_budget is not None
        inside = [region for region in plan.regions if compiled and lies_inside(region)]
        make = Inside()
        for region in inside:
            self._put_inside(self._chain(model, region), region, make)
        self._compiler = _build_compiler(model, plan) if compiled else None
        for i, block in enumerate(model.blocks):
            forward = self._forwards[block][i]
            if self._compiler is not None:
                forward = make.checked(self._compiler.compile(forward))
            self._forwards[block][i] = forward if plan.native else self._counted(i, forward)
        for region in plan.regions:
            if region not in inside:
                self._cover(self._chain(model, region), region)
        if plan.compile_budget is not None and plan.compile_budget < 1 and _drops(model.module):
            self.notes.append(
                "with dropout PyTorch's partitioner may draw other masks again, and gradients are wrong then "
                "(pytorch/pytorch#190758); parity tells"
            )
        self._offloader = Offloader(model, plan.host_spans, offload_cap_bytes) if plan.host_spans else None
        if self._offloader is not None:
            for i in (i for start, stop in plan.host_spans for i in range(start, stop)):
                by_place = self._forwards[model.blocks[i]]
                by_place[i] = self._offloader.wrap(i, by_place[i])
        for module, by_place in self._forwards.items():
            if any(forward != module.forward for forward in by_place.values()):
                self._patch(module, _in_turn(list(by_place.values())))
        self._disable_native = _enable_native(model, plan, self._counted)

    def remove(self) -> None:
        """Give every module its own forward back."""
        for module, own in self._patched.items():
            module.__dict__.pop(GUARD, None)
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                object.__setattr__(module, "forward", own)
        self._patched.clear()
        self._forwards.clear()
        if self._disable_native is not None:
            self._disable_native()
            self._disable_native = None
        if self._compiler is not None:
            self._compiler.remove()

    def start_step(self) -> None:
        """Let go of what an interrupted step may have left on the host."""
        if self._offloader is not None:
            self._offloader.start_step()

    def figures(self) -> dict[str, Any]:
        """Give record fields that the plan's application knows, once steps have run.

        What runs inside compiled code cannot be counted, so it is unknown.
        """
        figures = {} if self._offloader is None else self._offloader.figures()
        if self._compiler is not None:
            figures |= {"compile_s": self._compiler.seconds(), "notes": self._compiler.notes()}
            inside = [region for region in self.plan.regions if lies_inside(region)]
            if inside:
                figures["region_calls_backward"] = None
            if self.plan.compile_budget is not None or any(region.part == "block" for region in inside):
                figures["block_calls_backward"] = None
        return figures

    def _chain(self, model: BuiltModel, region: Region) -> list[tuple[nn.Module, int]]:
        """List the modules that a region covers, with their places in the stack, in the order they run."""
        if region.part == "block":
            return [(model.blocks[i], i) for i in range(region.start, region.stop)]
        chain = model.parts[region.start].get(region.part)
        if not chain:
            raise PlanError(f"block {region.start} has no {region.part} part")
        if len(chain) == 1 and region.part in HAVE_NORMS and not self.notes:
            self.notes.append(f"{region.part} without its norm: the norm's output is used elsewhere too")
        return [(module, region.start) for module in chain]

    def _put_inside(self, chain: Sequence[tuple[nn.Module, int]], region: Region, make: Inside) -> None:
        """Make ``chain`` run as one region inside the compiled code of its block."""
        if not (self.plan.early_stop and self.plan.preserve_rng):
            note = "inside compiled code a region has no early stop, and its random numbers are always kept"
            self.notes += [] if note in self.notes else [note]
        forward = make.region(region, [self._forwards[module][place] for module, place in chain])
        for module, place in chain[:-1]:
            self._forwards[module][place] = hand_on
        last, place = chain[-1]
        self._forwards[last][place] = forward

    def _patch(self, module: nn.Module, forward: Forward) -> None:
        self._patched.setdefault(module, module.__dict__.get("forward"))
        object.__setattr__(module, GUARD, _NotCopied())  # first: pickle goes in this order
        object.__setattr__(module, "forward", forward)

    def _counted(self, index: int, forward: Forward) -> Forward:
        counts = self.counts

        def counted_forward(*args: Any, **kwargs: Any) -> Any:
            counts.enter_block(index)
            output = forward(*args, **kwargs)
            counts.leave_block(index, output)
            return output

        return counted_forward

    def _cover(self, chain: Sequence[tuple[nn.Module, int]], region: Region) -> None:
        """Make ``chain``, modules with their places in the stack, run as one region.

        Raises PlanError where a forward hook would see what a module that only records hands on.
        """
        hooked = [place for module, place in chain[:-1] if module._forward_hooks]
        if hooked:
            raise PlanError(
                f"block {hooked[0]} has a forward hook, which a region over several modules would call out of turn; "
                "take the hook away or choose per-block"
            )
        forwards = [self._forwards[module][place] for module, place in chain]
        covered: _Covered | Inverted
        if region.mode == "invert":
            modules = [module for module, _ in chain]
            covered = Inverted(modules, region.start, self.counts, preserve_rng=self.plan.preserve_rng)
        else:
            covered = _Covered(region, forwards, self.plan, self.counts)
        calls: list[Call] = []
        is_chain = len(chain) > 1

        def recording_forward(*args: Any, **kwargs: Any) -> Any:
            call, hidden = take_hidden(args, kwargs)
            calls.append(call)
            return hidden

        def running_forward(*args: Any, **kwargs: Any) -> Any:
            call, hidden = take_hidden(args, kwargs)
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
        self.selection = Selection(region) if region.save_ops else None
        self.options: dict[str, Any] = {"use_reentrant": plan.reentrant, "preserve_rng_state": plan.preserve_rng}
        if not plan.reentrant:
            self.options["early_stop"] = plan.early_stop
        if self.selection is not None:
            self.options["context_fn"] = self.selection.contexts
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

    def run(self, calls: Sequence[Call], hidden: Any) -> Any:
        """Run the region, recomputed later from ``hidden`` and the arguments of the modules' ``calls``.

        The arguments go through the checkpoint call as one flat tuple: its reentrant variant only
        follows tensors it is given directly, and a region around this one must see them too.
        """
        if all(call is PLAIN for call in calls):
            return self.run_plain(hidden)
        flat, slots = flatten(calls)
        return self._checkpoint(partial(self._body, slots), hidden, *flat)

    def run_plain(self, hidden: Any) -> Any:
        """Run the region where modules take nothing but the hidden state."""
        return self._checkpoint(self._plain_body, hidden)

    def _body(self, slots: Sequence[Call], hidden: Any, *flat: Any) -> Any:
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
        result = checkpoint(body, hidden, *flat, **self.options)
        if self.selection is not None:
            self.selection.check()
        return result


def _enable_native(model: BuiltModel, plan: Plan, counted: Counted) -> Callable[[], None] | None:
    """Let the library checkpoint where the plan says so; it runs blocks from inside, so they are counted there."""
    if not plan.native:
        return None
    if model.enable_native is None:
        raise PlanError("this model's library has no checkpointing of its own")
    return model.enable_native(counted)


def _build_compiler(model: BuiltModel, plan: Plan) -> "BlockCompiler":
    """Make the compiler of a plan's blocks. Raises PlanError for a plan that it cannot work on."""
    for region in plan.walk():
        if region.mode == "invert":
            raise PlanError("a reversible stack runs its blocks in pieces, which train.compile cannot take; drop it")
        if region.save_ops and region.n_blocks > 1:
            raise PlanError("a compiled region that keeps results lies inside one block; drop train.compile")
    from ckbench.engine.compiling import BlockCompiler  # torch's compiler takes a second to come in

    device = next((parameter.device for parameter in model.module.parameters()), torch.device("cpu"))
    return BlockCompiler(plan, device.type)


def recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Call a function that keeps only its arguments for backward, and is run again there."""
    if not torch.is_grad_enabled():
        return function(*args)
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def _drops(module: nn.Module) -> bool:
    """Tell whether a module has dropout in force."""
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())


def _by_place(model: BuiltModel) -> dict[nn.Module, dict[int, Forward]]:
    """List the forward of every block and part by the place where it stands; shared ones stand at several."""
    forwards: dict[nn.Module, dict[int, Forward]] = {}
    for i, block in enumerate(model.blocks):
        for module in (block, *(module for chain in model.parts[i].values() for module in chain)):
            forwards.setdefault(module, {})[i] = module.forward
    return forwards


def _in_turn(forwards: Sequence[Forward]) -> Forward:
    """Make one forward of those of a module's places: the first call is at the first of them, and so on around."""
    if len(set(forwards)) == 1:
        return forwards[0]
    turns = itertools.cycle(forwards)
    return lambda *args, **kwargs: next(turns)(*args, **kwargs)
