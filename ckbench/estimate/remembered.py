"""Results of operations on tensors without data, worked out once for each kind of arguments.

Most of PyTorch's kernels for ``meta`` tensors are Python, and a step of a deep stack asks them the same thing thousands
of times. What an operation gives follows from how its arguments lie and from their types alone, so that the first
answer says how to make the second.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments and results that are compared, and given again, as they are."""

Maker = tuple[str, Any]
"""How to make a result: ("new", size, strides and type), ("given", where it stands among the arguments), ("same",
value), or ("list" or "tuple", makers)."""


class _NotComparable(Exception):
    """An argument of which only the operation itself knows what decides on the result."""


class Remembered:
    """Runs operations, those on plain ``meta`` tensors once for each kind of arguments.

    An operation whose result shares memory with an argument, or that changes how one lies, is run every time.
    """

    def __init__(self) -> None:
        self._makers: dict[Any, Maker] = {}
        self._never: set[Any] = set()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what ``func`` gives."""
        if func in self._never:
            return func(*args, **kwargs)
        try:
            key = _key(func, args, kwargs)
        except _NotComparable:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # no substitute is meant for what a kernel for meta is made of
            made = self._makers.get(key)
            if made is not None:
                return _make(made, args, kwargs)
            result = func(*args, **kwargs)
            made = _maker(result, _places(args, kwargs), set(_storages(*args, *kwargs.values())))
            if made is None or _key(func, args, kwargs) != key:
                self._never.add(func)
            else:
                self._makers[key] = made
            return result


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = tuple((name, _kind(value)) for name, value in kwargs.items()) if kwargs else ()
    return (func, torch.get_default_dtype(), named, *map(_kind, args))


def _kind(value: Any) -> Any:
    """Give what of an argument decides on the result. Raises _NotComparable."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if not value.is_meta:
            raise _NotComparable
        return (value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg())
    if kind is list or kind is tuple:
        return tuple(map(_kind, value))
    if isinstance(value, PLAIN):
        return (kind, value)
    raise _NotComparable


def _places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, tuple[Any, ...]]:
    """Give where tensors stand among arguments, by their ids: number or name, then the number in a list."""
    found: dict[int, tuple[Any, ...]] = {}
    for at, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            found.setdefault(id(value), (at,))
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                if isinstance(item, Tensor):
                    found.setdefault(id(item), (at, i))
    return found


def _storages(*values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage()._cdata
        elif isinstance(value, list | tuple):
            yield from _storages(*value)


def _maker(result: Any, given: dict[int, tuple[Any, ...]], taken: set[int]) -> Maker | None:
    """Say how to make the result again, None where that needs the operation; no closure, which would be a cycle."""
    if type(result) in (list, tuple):
        parts = [_maker(item, given, taken) for item in result]
        return None if None in parts else (type(result).__name__, parts)
    if isinstance(result, PLAIN):
        return ("same", result)
    if type(result) not in (Tensor, nn.Parameter):
        return None
    if id(result) in given:
        return ("given", given[id(result)])
    storage = result.untyped_storage()
    lies = (result.shape, result.stride())
    if not result.is_meta or storage._cdata in taken or result.storage_offset():
        return None
    taken.add(storage._cdata)
    again = torch.empty_strided(*lies, dtype=result.dtype, device="meta")
    return ("new", (*lies, result.dtype)) if again.untyped_storage().nbytes() == storage.nbytes() else None


def _make(made: Maker, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    how, what = made
    if how == "new":
        return torch.empty_strided(what[0], what[1], dtype=what[2], device="meta")
    if how == "given":
        at, *inner = what
        value = kwargs[at] if isinstance(at, str) else args[at]
        return value[inner[0]] if inner else value
    if how == "same":
        return what
    parts = [_make(part, args, kwargs) for part in what]
    return parts if how == "list" else tuple(parts)


REMEMBERED = Remembered()
"""One for the process: strategies ask the same of one model."""
