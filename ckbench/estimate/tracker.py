"""Follow every storage from birth to death while operations run on tensors without data."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckbench.estimate.remembered import REMEMBERED

RELEASE = "release"
"""Mark before autocast lets go of what it has cast, which may belong to many blocks."""

Scratch = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Bytes that an operation's kernel takes and gives back while it runs, which no tensor shows."""


@dataclass(frozen=True, slots=True)
class Birth:
    """Where a storage came from."""

    number: int
    n_bytes: int
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: str
    """Path of the module whose forward was running, empty outside of any."""
    at: int
    """Index of its event."""
    is_forward: bool
    """Whether gradients were recorded: in backward that tells a recomputed forward from backward's own work."""


@dataclass(slots=True)
class Timeline:
    """Births (positive) and deaths (negative) of storages in order, and marks between them."""

    events: list[tuple[int, int, int]] = field(default_factory=list)
    """Index, storage number, bytes."""
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Index of the event that comes next, and what is marked."""


class StorageTracker(TorchDispatchMode):
    """Note the birth and death of every storage on one kind of device.

    A storage is born with the first tensor that an operation returns for it, and dies when the last reference to it
    goes, in Python or in autograd: then its weak reference says so. Kernels' own memory comes from ``scratch``.
    """

    def __init__(self, device_type: str, scratch: Scratch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.scratch = scratch
        self.timeline = Timeline()
        self.live: dict[int, Birth] = {}
        """What lives now, by address of the storage's own object."""
        self.births: dict[int, Birth] = {}
        """Everything that ever lived, by number."""
        self.live_bytes = 0
        self.where = ""
        self.block: int | None = None
        """Block whose work goes on, where boundaries are watched; None outside of all."""
        self.block_of: dict[int, int | None] = {}
        """Block that a storage belongs to, by its number."""
        self.follows_arguments = False
        """Whether a result belongs to the block of its operation's arguments, as in the optimizer's loops and lists."""
        self.reads_one = False
        """Whether a number may be read back from a tensor without data: it is one then, and not an error."""
        self._references: dict[int, weakref.ref[Any]] = {}
        self._elsewhere: dict[int, weakref.ref[Any]] = {}
        """Storages that stand for memory of another kind, by address of the storage's own object."""
        self._is_paused = False
        self._n_born = 0
        self._op = ""

    def add(self, tensor: Tensor, op: str | None = None, source: Any = None) -> None:
        """Count a tensor's storage from now on, unless it is counted or lies elsewhere.

        Where ``follows_arguments`` it belongs to the block of ``source``.
        """
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or key in self._elsewhere or self._is_paused:
            return
        n_bytes = storage.nbytes()
        self._n_born += 1
        birth = Birth(
            number=self._n_born,
            n_bytes=n_bytes,
            op=self._op if op is None else op,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            where=self.where,
            at=len(self.timeline.events),
            is_forward=torch.is_grad_enabled(),
        )
        self.live[key] = self.births[birth.number] = birth
        if self.follows_arguments:
            self.block = self._block_of(source)
        self.block_of[birth.number] = self.block
        self._references[key] = weakref.ref(storage, lambda _reference, key=key: self._died(key))  # type: ignore[misc]
        self._book(birth.number, n_bytes)

    def add_all(self, tensors: Iterable[Tensor], op: str) -> None:
        """Count what is there before the first operation."""
        for tensor in tensors:
            self.add(tensor, op)

    def made_elsewhere(self, make: Callable[[], Tensor]) -> Tensor:
        """Make a tensor that stands for memory of another kind, and never count it."""
        self._is_paused = True
        try:
            tensor = make()
        finally:
            self._is_paused = False
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._elsewhere[key] = weakref.ref(storage, lambda _reference: self._elsewhere.pop(key, None))
        return tensor

    def add_constant(self, n_bytes: int) -> None:
        """Count bytes that are there from now on and belong to no tensor."""
        self._n_born += 1
        self._book(self._n_born, n_bytes)

    def mark(self, name: str) -> None:
        """Note a moment."""
        self.timeline.marks.append((len(self.timeline.events), name))

    def rename(self, tensor: Tensor, op: str) -> None:
        """Call what made a tensor by another name; count it first if no operation did."""
        self.add(tensor, op)
        key = tensor.untyped_storage()._cdata
        renamed = replace(self.live[key], op=op)
        self.live[key] = self.births[renamed.number] = renamed

    def birth_of(self, tensor: Tensor) -> Birth | None:
        """Give where a tensor's storage came from, None where it is not counted."""
        return self.live.get(tensor.untyped_storage()._cdata)

    def assign(self, tensors: Iterable[Tensor], block: int) -> None:
        """Say that counted tensors belong to a block."""
        for tensor in tensors:
            birth = self.birth_of(tensor)
            if birth is not None:
                self.block_of[birth.number] = block

    def _block_of(self, source: Any) -> int | None:
        """Give the block of the first counted tensor of an argument list; one without any stays where work goes on."""
        for item in source if isinstance(source, tuple | list) else (source,):
            if isinstance(item, Tensor):
                birth = self.live.get(item.untyped_storage()._cdata)
                if birth is not None:
                    return self.block_of.get(birth.number)
        return self.block

    def _died(self, key: int) -> None:
        birth = self.live.pop(key)
        del self._references[key]
        self._book(birth.number, -birth.n_bytes)

    def _book(self, number: int, n_bytes: int) -> None:
        if n_bytes:
            self.live_bytes += n_bytes
            self.timeline.events.append((len(self.timeline.events), number, n_bytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and look at what it gives back."""
        if self.reads_one and func is torch.ops.aten._local_scalar_dense.default and _has_no_data(args[0]):
            return 1.0
        result = REMEMBERED.run(func, args, kwargs or {})
        self._op = str(func)
        if isinstance(result, Tensor):
            self.add(result, source=args)
        elif isinstance(result, tuple | list):
            is_list = bool(args) and isinstance(args[0], tuple | list) and len(args[0]) == len(result)
            for i, item in enumerate(result):
                if isinstance(item, Tensor):
                    self.add(item, source=args[0][i] if is_list else args)
                elif isinstance(item, list | tuple):
                    for inner in item:
                        if isinstance(inner, Tensor):
                            self.add(inner)
        if self.scratch is not None and (extra := self.scratch(func, args, kwargs or {})):
            self._n_born += 1
            self._book(self._n_born, extra)
            self._book(self._n_born, -extra)
        return result


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.is_meta or (isinstance(tensor, FakeTensor) and tensor.constant is None)
