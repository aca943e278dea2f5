"""Recognise an out-of-memory error by its text, and read its numbers. No torch here.

Texts are those of PyTorch 2.9 to 2.14: ``c10/cuda/CUDACachingAllocator.cpp``, ``c10/core/impl/alloc_cpu.cpp``,
and the status names of cuBLAS and cuDNN.
"""

import re

from ckbench.devices.base import OutOfMemory

_SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def recognise(error: BaseException) -> OutOfMemory | None:
    """Give the numbers of an out-of-memory error; None for any other error."""
    text = str(error)
    names = {cls.__name__ for cls in type(error).__mro__}
    if not names & {"OutOfMemoryError", "MemoryError"} and not any(sign in text for sign in _SIGNS):
        return None
    allocated = _size(rf"{_SIZE} is allocated by PyTorch", text)
    unallocated = _size(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    return OutOfMemory(
        requested_bytes=_size(rf"[Tt]ried to allocate {_SIZE}", text),
        free_bytes=_size(rf"of which {_SIZE} is free", text),
        allocated_at_failure_bytes=allocated,
        reserved_at_failure_bytes=None if allocated is None or unallocated is None else allocated + unallocated,
    )


def _size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return None if match is None else round(float(match.group(1)) * _UNITS[match.group(2)])
