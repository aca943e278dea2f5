"""Copies between device and host: at once, or on a stream beside the computation."""

from typing import Any, Protocol

import torch
from torch import Tensor

Mark = Any
"""A point in the order of copies that computation can wait for."""


class Copies(Protocol):
    """How bytes travel. Copies are done in the order they are asked for."""

    holds_sources: bool
    """Whether a source must stay as it is until a mark set after its copy has been waited for."""

    def to_host(self, source: Tensor, buffer: Tensor) -> None:
        """Copy device bytes into a host buffer of the same size."""
        ...

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Mark]:
        """Give new device bytes that will hold what the buffer holds, and when to look at them."""
        ...

    def mark(self) -> Mark:
        """Mark what has been asked for so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let the computation that is queued from now on wait for a mark."""
        ...


class AtOnce:
    """The device is the processor: a copy is done when the call returns."""

    holds_sources = False

    def to_host(self, source: Tensor, buffer: Tensor) -> None:
        """Copy."""
        buffer.copy_(source)

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Mark]:
        """Copy into memory of PyTorch's allocator, where it counts as held."""
        return torch.empty_like(buffer).copy_(buffer), None

    def mark(self) -> Mark:
        """Nothing is outstanding."""
        return None

    def wait(self, mark: Mark) -> None:
        """Nothing to wait for."""


class SideStream:
    """One CUDA stream of its own for both directions, so that a host buffer's next use follows its last.

    No memory is handed to the allocator with ``record_stream``: its figure of allocated bytes falls as soon as a
    tensor is let go, though the memory cannot be used again before the copy is done, and would flatter the strategy.
    Sources are held instead until the computation has waited, and so are counted.
    """

    holds_sources = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def to_host(self, source: Tensor, buffer: Tensor) -> None:
        """Queue a copy behind what computes the source."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            buffer.copy_(source, non_blocking=True)

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Mark]:
        """Queue a copy behind the work that may still use the memory it goes to."""
        target = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            target.copy_(buffer, non_blocking=True)
        return target, self.mark()

    def mark(self) -> Mark:
        """Record an event behind the copies queued so far."""
        return self._side.record_event()

    def wait(self, mark: Mark) -> None:
        """Put the event before what the current stream does next."""
        torch.cuda.current_stream(self._device).wait_event(mark)


class WithoutData:
    """Tensors without data stand for a CUDA device's: nothing travels, and sources are held as there."""

    holds_sources = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, source: Tensor, buffer: Tensor) -> None:
        """There is nothing to copy."""

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Mark]:
        """Give memory of the size."""
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device), None

    def mark(self) -> Mark:
        """Nothing is outstanding."""
        return None

    def wait(self, mark: Mark) -> None:
        """Nothing to wait for."""


def copies_for(device: torch.device) -> Copies:
    """Give the way bytes travel between this device and the host."""
    if device.type == "meta":
        return WithoutData(device)
    return SideStream(device) if device.type == "cuda" else AtOnce()
