"""Host memory for tensors that leave the device: counted, capped, and used again from step to step."""

import numpy
import torch
from torch import Tensor


class HostStore:
    """Byte buffers on the host, with the bytes in use now and at most.

    Beside a CUDA device they are pinned, so that copies need not wait. Where the device is the CPU itself they are
    numpy's: that memory is no event of PyTorch's allocator, so what lies there is not taken for held on the device.
    A buffer that is given back waits for the next of its size, because fresh pages and pinning are slow.
    """

    def __init__(self, device: torch.device, cap_bytes: int | None = None) -> None:
        self.cap_bytes = cap_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._is_pinned = device.type == "cuda"
        self._idle: dict[int, list[Tensor]] = {}

    def take(self, n_bytes: int) -> Tensor | None:
        """Give a buffer (n_bytes,) of unsigned bytes with anything in it; None where the cap leaves no room."""
        if self.cap_bytes is not None and self.live_bytes + n_bytes > self.cap_bytes:
            return None
        idle = self._idle.get(n_bytes)
        buffer = idle.pop() if idle else self._make(n_bytes)
        self.live_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back; its next user may write into it at once."""
        self.live_bytes -= buffer.nbytes
        self._idle.setdefault(buffer.nbytes, []).append(buffer)

    def copy_of(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Keep a copy of a tensor for good, contiguous, in another type where one is given; no cap applies here."""
        copy = self.empty_like(tensor, dtype)
        copy.copy_(tensor.detach())
        return copy

    def empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Keep room for a tensor of this shape for good."""
        dtype = dtype or tensor.dtype
        assert self.cap_bytes is None, "what is kept for good cannot stay on the device instead"
        buffer = self.take(tensor.numel() * dtype.itemsize)
        assert buffer is not None
        return buffer.view(dtype).view(tensor.shape)

    def _make(self, n_bytes: int) -> Tensor:
        if self._is_pinned:
            return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        return torch.from_numpy(numpy.empty(n_bytes, dtype=numpy.uint8))
