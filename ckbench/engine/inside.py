"""Regions inside compiled blocks: written so that torch.compile traces them, checkpoint call and all.

Regions of whole blocks stay outside of compiled code, where their replays can be counted. Parts of a block lie inside
it anyway; and a region that keeps the results of operations must, for a compiled block is one operation to a policy.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint

from ckbench.engine.calls import Forward, take_hidden
from ckbench.engine.selective import Selection
from ckbench.plan import Region


def lies_inside(region: Region) -> bool:
    """Tell whether a region lies inside the compiled code of its block."""
    return region.part != "block" or bool(region.save_ops)


class Inside:
    """Makes the forwards of such regions. Those that do the same share all but their modules, so that blocks share
    compiled code."""

    def __init__(self) -> None:
        self._selections: dict[tuple[Any, ...], tuple[Selection, Callable[[], Any]]] = {}
        self._made: dict[tuple[Any, ...], Forward] = {}

    def region(self, region: Region, forwards: Sequence[Forward]) -> Forward:
        """Give the forward of a region over these forwards, one after the other."""
        contexts = self._contexts(region) if region.save_ops else None
        key = (tuple(forwards), contexts)
        if key not in self._made:
            self._made[key] = _traced(tuple(forwards), contexts)
        return self._made[key]

    def checked(self, forward: Forward) -> Forward:
        """Make a compiled forward say so when its regions found nothing to keep."""
        selections = [selection for selection, _ in self._selections.values()]
        if not selections:
            return forward

        def checked_forward(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            for selection in selections:
                selection.check()
            return result

        return checked_forward

    def _contexts(self, region: Region) -> Callable[[], Any]:
        choice = (region.save_ops, region.save_every)
        if choice not in self._selections:
            selection = Selection(region)

            def contexts() -> Any:  # a function: of a method the compiler would lose the object
                return selection.compiled_contexts()

            self._selections[choice] = (selection, contexts)
        return self._selections[choice][1]


def hand_on(hidden: Any) -> Any:
    """Stand in for a norm that runs inside the region behind it."""
    return hidden


def _traced(forwards: tuple[Forward, ...], contexts: Callable[[], Any] | None) -> Forward:
    """Put forwards into one checkpoint. The compiler keeps random numbers right and knows no early stop, so neither
    is an option here."""
    *before, last = forwards

    def body(*args: Any, **kwargs: Any) -> Any:
        if not before:
            return last(*args, **kwargs)
        call, hidden = take_hidden(args, kwargs)
        for forward in before:
            hidden = forward(hidden)
        return call.run(last, hidden)

    if contexts is None:
        return lambda *args, **kwargs: checkpoint(body, *args, use_reentrant=False, **kwargs)
    return lambda *args, **kwargs: checkpoint(body, *args, use_reentrant=False, context_fn=contexts, **kwargs)
