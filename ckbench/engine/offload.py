"""Keep what a stack saves for backward in host memory.

Saved-tensor hooks are in force while a block's outermost forward runs. They see what the block's operations save,
and the inputs of a checkpoint region: its non-reentrant and its reentrant variant keep tensor arguments with
``save_for_backward``. What a region drops never comes here, nor what it rebuilds in backward.

Autograd checks the version of a saved tensor when it needs it, and finds out that it was modified in place. Under
hooks it does not. A copy made when the tensor is saved needs no check: it holds the value that was used. What stays
on the device (parameters, buffers, small tensors, what is over the cap) is checked here in autograd's place.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from ckbench.engine.copies import Copies, Mark, copies_for
from ckbench.engine.host_store import HostStore
from ckbench.models.base import BuiltModel
from ckbench.units import format_bytes

MIN_BYTES = 1024
"""Smaller storages stay on the device: a copy costs more than they hold."""


class Offloader:
    """Moves what spans of one model's blocks save to a host store and brings it back, one block ahead of backward.

    Spans keep to themselves: behind the last block of one the step waits for its copies, and in backward nothing of a
    span is fetched before that reaches it.
    """

    def __init__(
        self,
        model: BuiltModel,
        spans: Sequence[tuple[int, int]],
        cap_bytes: int | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._module = weakref.ref(model.module)
        self._cap_bytes = cap_bytes
        self._settle(copies)
        self._firsts = {start for start, _ in spans}
        self._lasts = {stop - 1 for _, stop in spans}
        self._seen: dict[int, tuple[weakref.ref[Any], weakref.ref[_Stored] | None]] = {}
        """What was done with a storage, by the address of its object: stored, or too much for the cap."""
        self._alive: weakref.WeakSet[_Stored] = weakref.WeakSet()
        self._on_device: weakref.WeakSet[_Stored] = weakref.WeakSet()
        self._copying: list[_Group] = []
        self._previous = -1
        self._group = _Group(None)
        self._newest: _Group | None = None
        self._turned_to: _Group | None = None
        self._stayed_bytes = 0
        self.most_stayed_bytes = 0
        """Bytes of one pass that the cap left on the device, at most."""

    def _settle(self, copies: Copies | None = None) -> None:
        """Learn where the model is and what memory is its own; it may be moved after the plan was applied."""
        module = self._module()
        assert module is not None, "its blocks are running"
        self._device = next(module.parameters()).device
        self.store = HostStore(self._device, self._cap_bytes)
        self._copies = copies or copies_for(self._device)
        storages = [t.untyped_storage() for t in (*module.parameters(), *module.buffers())]
        self._owned = {storage._cdata: weakref.ref(storage) for storage in storages}
        """Weak, because a released model must be free to go, and its addresses are then others'."""

    def wrap(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Give a block's forward whose saved tensors wait on the host."""

        def offloaded_forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self._enter(index)
            with saved_tensors_hooks(self._pack, _unpack):
                output = forward(*args, **kwargs)
            self._leave(index)
            return output

        return offloaded_forward

    def start_step(self) -> None:
        """Let go of all that an interrupted step left behind: its graph may live on in a traceback."""
        for left in list(self._alive):
            left.release()
        self._alive.clear()
        self._seen.clear()
        self._copying.clear()
        self._previous = -1
        self._stayed_bytes = 0
        self._group, self._newest, self._turned_to = _Group(None), None, None

    def figures(self) -> dict[str, Any]:
        """Give record fields, and a note where the cap left bytes on the device."""
        notes = []
        if self.most_stayed_bytes:
            notes.append(f"offload_cap_bytes left {format_bytes(self.most_stayed_bytes)} of a pass on the device")
        return {"host_store_peak_bytes": self.store.peak_bytes, "notes": notes}

    def _enter(self, index: int) -> None:
        if index <= self._previous:  # the blocks start over: another micro-batch, another graph
            self._newest = None
            self._stayed_bytes = 0
            self._seen = {key: (at, copy) for key, (at, copy) in self._seen.items() if copy is not None and copy()}
        if index in self._firsts:
            self._newest = None
            module = self._module()
            if module is not None and next(module.parameters()).device != self._device:
                self._settle()
        self._previous = index
        self._group = _Group(self._newest)

    def _leave(self, index: int) -> None:
        """Wait for the copies of the block before, which ran beside this one; behind a span's last block for all."""
        group = self._group
        if group.stored:
            self._newest = group
        if group.sources:
            group.sent = self._copies.mark()
            self._copying.append(group)
        while len(self._copying) > (0 if index in self._lasts else 1):
            self._copying.pop(0).let_sources_go(self._copies)

    def _pack(self, tensor: Tensor) -> "_Kept | _View":
        if not self._moves(tensor):
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        stored = self._store(storage, tensor)
        if stored is None:
            return _Kept(tensor)
        if self._group not in stored.groups:
            stored.groups.append(self._group)
            self._group.stored.append(weakref.ref(stored))
        return _View(self, stored, self._group, tensor)

    def _moves(self, tensor: Tensor) -> bool:
        """Say whether a tensor is ordinary memory of the device that nobody keeps anyway."""
        return (
            type(tensor) in (Tensor, nn.Parameter, FakeTensor)
            and tensor.device.type == self._device.type
            and tensor.layout == torch.strided
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes() >= MIN_BYTES
            and not self._is_owned(tensor.untyped_storage())
        )

    def _is_owned(self, storage: Any) -> bool:
        owned = self._owned.get(storage._cdata)
        return owned is not None and owned() is storage

    def _store(self, storage: Any, tensor: Tensor) -> "_Stored | None":
        """Give the copy of a storage, made now where there is none of its present content; None over the cap."""
        key = storage._cdata
        seen = self._seen.get(key)
        if seen is not None and seen[0]() is storage:
            if seen[1] is None:
                return None
            stored = seen[1]()
            if stored is not None and stored.version == tensor._version:
                return stored
        buffer = self.store.take(storage.nbytes())
        if buffer is None:
            self._stayed_bytes += storage.nbytes()
            self.most_stayed_bytes = max(self.most_stayed_bytes, self._stayed_bytes)
            self._seen[key] = (weakref.ref(storage), None)
            return None
        if not isinstance(tensor, FakeTensor):  # one that an estimate replays has nothing to copy
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
            self._copies.to_host(source, buffer)
        if self._copies.holds_sources:
            self._group.sources.append((tensor.detach(), tensor._version))
        stored = _Stored(self.store, self._copies, buffer, tensor._version)
        self._seen[key] = (weakref.ref(storage), weakref.ref(stored))
        self._alive.add(stored)
        return stored

    def turn_to(self, group: "_Group") -> None:
        """Bring a block's tensors and start to bring those of the block that backward reaches next.

        What neither of the two needs leaves the device; it is there only if its graph is to be used once more.
        """
        if group is self._turned_to:
            return
        self._turned_to = group
        window = [group] if group.earlier is None else [group, group.earlier]
        for stored in list(self._on_device):
            if not any(needed in stored.groups for needed in window):
                stored.drop()
                self._on_device.discard(stored)
        for needed in window:
            for reference in reversed(needed.stored):  # backward needs first what was saved last
                wanted = reference()
                if wanted is not None:
                    wanted.fetch()
                    self._on_device.add(wanted)


class _Group:
    """What one block saved in one pass. ``earlier``: the last block before it that saved anything."""

    def __init__(self, earlier: "_Group | None") -> None:
        self.earlier = earlier
        self.stored: list[weakref.ref[_Stored]] = []
        self.sources: list[tuple[Tensor, int]] = []
        """Tensors whose copies may not be done, with their versions."""
        self.sent: Mark = None

    def let_sources_go(self, copies: Copies) -> None:
        """Wait for the copies, then free their sources. Raises RuntimeError where one was modified before."""
        copies.wait(self.sent)
        for tensor, version in self.sources:
            _check_version(tensor, version)
        self.sources.clear()


class _Stored:
    """One storage's content on the host, while autograd's graph refers to it."""

    def __init__(self, store: HostStore, copies: Copies, buffer: Tensor, version: int) -> None:
        self.version = version
        self.groups: list[_Group] = []
        self._store = store
        self._copies = copies
        self._buffer: Tensor | None = buffer
        self._back: Tensor | None = None
        self._arriving: Mark = None

    def fetch(self) -> None:
        """Start to bring the bytes back, if they are not there. Raises RuntimeError after ``release``."""
        if self._buffer is None:
            raise RuntimeError("backward through a step that was given up: its tensors have left the host store")
        if self._back is None:
            self._back, self._arriving = self._copies.to_device(self._buffer)

    def bytes_on_device(self) -> Tensor:
        """Give the bytes, there for all work from now on."""
        self.fetch()
        self._await()
        assert self._back is not None
        return self._back

    def drop(self) -> None:
        """Let the device's bytes go; the host still has them."""
        self._await()  # else the memory's next owner could write before the copy does
        self._back = None

    def release(self) -> None:
        """Give the host buffer back as well."""
        self.drop()
        if self._buffer is not None:
            self._store.give_back(self._buffer)
            self._buffer = None

    def __del__(self) -> None:
        self.release()

    def _await(self) -> None:
        if self._arriving is not None:
            self._copies.wait(self._arriving)
            self._arriving = None


class _View:
    """A tensor as it lay in its storage."""

    def __init__(self, offloader: Offloader, stored: _Stored, group: _Group, tensor: Tensor) -> None:
        self._offloader = offloader
        self._stored = stored
        self._group = group
        self._dtype = tensor.dtype
        self._layout = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(self) -> Tensor:
        """Give the same view of the storage that came back."""
        self._offloader.turn_to(self._group)
        back = self._stored.bytes_on_device()
        whole = back.numel() // self._dtype.itemsize * self._dtype.itemsize
        return back[:whole].view(self._dtype).as_strided(*self._layout)


class _Kept:
    """A tensor that stays on the device, without its graph: holding that would be a cycle."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def restore(self) -> Tensor:
        """Give the tensor. Raises RuntimeError where it was modified since."""
        _check_version(self._tensor, self._version)
        return self._tensor


def _unpack(packed: _Kept | _View) -> Tensor:
    return packed.restore()


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor {tuple(tensor.shape)} that backward needs was modified in place after it was saved "
            f"(version {tensor._version}, saved {version})"
        )
