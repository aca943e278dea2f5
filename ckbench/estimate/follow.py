"""Follow a step block by block: when a forward begins and ends, and when the gradient reaches a block's output."""

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ckbench.devices.base import Observer
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.trial import Trial
from ckbench.plan import Plan

PHASES = ("forward", "turn", "optimizer", "end")
"""Events with which a part of a step begins; "turn" is where backward does."""


class Listener(Protocol):
    """Hears of the step's parts, and of blocks by their place in the stack."""

    def began(self, phase: str) -> None:
        """One of ``PHASES`` begins."""
        ...

    def entered(self, block: int, is_replay: bool, args: Any) -> None:
        """A block's forward begins."""
        ...

    def left(self, block: int, is_replay: bool, output: Any) -> None:
        """A block's forward ended; ``output`` is None where early stop ended it."""
        ...

    def turned(self, block: int | None) -> None:
        """From here on a block's backward runs; None: that of what comes before the first block, or after the last."""
        ...


class Follower:
    """Tells a listener where a trial's step is: of blocks while it is ``on``, of phases as the step's observer.

    Forwards are wrapped before a plan is applied, so that recomputations are followed too.
    """

    def __init__(self, trial: Trial, plan: Plan, listener: Listener) -> None:
        self.listener = listener
        self.on = False
        self.in_backward = False
        trial.applied.remove()
        self.trial = trial
        self._own: dict[nn.Module, Any] = {}
        blocks = trial.model.blocks
        for block in dict.fromkeys(blocks):
            self._wrap(block, [i for i, other in enumerate(blocks) if other is block])
        trial.applied = AppliedPlan(trial.model, plan)

    def remove(self) -> None:
        """Take the plan and the wrapping away."""
        self.trial.applied.remove()
        for block, own in self._own.items():
            if own is None:
                block.__dict__.pop("forward", None)
            else:
                object.__setattr__(block, "forward", own)

    def at(self, event: str) -> None:
        """Follow the step."""
        if event in PHASES:
            self.in_backward = event == "turn"
            self.listener.began(event)

    def _wrap(self, block: nn.Module, places: Sequence[int]) -> None:
        self._own[block] = block.__dict__.get("forward")
        forward = block.forward
        turn = {False: itertools.cycle(places), True: itertools.cycle(reversed(places))}

        def followed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return forward(*args, **kwargs)
            is_replay = self.in_backward
            place = next(turn[is_replay])
            output = None
            self.listener.entered(place, is_replay, (args, kwargs))
            try:
                if place == 0 and not is_replay:
                    self._on_gradient((args, kwargs), None)
                output = forward(*args, **kwargs)
                if not is_replay:
                    self._on_gradient(output, place)
                return output
            finally:
                self.listener.left(place, is_replay, output)

        object.__setattr__(block, "forward", followed)

    def _on_gradient(self, where: Any, block: int | None) -> None:
        """Have the gradient's arrival at the first tensor that gets one say whose backward runs from there on."""
        carrier = next((x for x in tensors(where) if x.requires_grad and not x.is_leaf), None)
        if carrier is not None:
            carrier.register_hook(lambda _gradient: self.listener.turned(block))


class Both:
    """Hands a step's events to two observers."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self.observers = (first, second)

    def at(self, event: str) -> None:
        """Hand an event on."""
        for observer in self.observers:
            observer.at(event)


def tensors(value: Any) -> list[Tensor]:
    """List the tensors inside nested arguments."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
