"""How a block or part was called: its hidden state, which flows from module to module, and the rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ckbench.errors import PlanError

Forward = Callable[..., Any]


@dataclass
class Call:
    """One module's arguments, its first tensor (the hidden state) taken out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_key: str | None

    def run(self, forward: Forward, hidden: Any) -> Any:
        """Call a forward with these arguments and a hidden state."""
        if self.hidden_key is None:
            return forward(hidden, *self.args, **self.kwargs)
        return forward(*self.args, **{self.hidden_key: hidden}, **self.kwargs)

    def filled(self, flat: Sequence[Any]) -> "Call":
        """Give this call, whose arguments are slots of ``flat``, with the arguments themselves."""
        args = tuple(_put_back(slot, flat) for slot in self.args)
        return Call(args, {key: _put_back(slot, flat) for key, slot in self.kwargs.items()}, self.hidden_key)


PLAIN = Call((), {}, None)
"""A module called with the hidden state and nothing else."""


def take_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Any]:
    """Split a call into its hidden state, the first positional argument or the first tensor, and the rest.

    Raises PlanError for a call without a tensor.
    """
    if args:
        if len(args) == 1 and not kwargs:
            return PLAIN, args[0]
        return Call(args[1:], kwargs, None), args[0]
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            rest = {k: v for k, v in kwargs.items() if k != key}
            return Call((), rest, key), value
    raise PlanError("a checkpointed module was called without a tensor")


def flatten(calls: Sequence[Call]) -> tuple[list[Any], list[Call]]:
    """Lay the arguments of all calls out in one list; give it, and the calls with slots of it for arguments.

    Tensors inside tuples and lists are found too: the reentrant variant must see each of them.
    """
    flat: list[Any] = []
    slots = [
        Call(
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
