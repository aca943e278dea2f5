"""How much memory graphics cards have, and what of it a process cannot use."""

import re

from ckbench.errors import ConfigError
from ckbench.registry import did_you_mean
from ckbench.units import MIB_BYTES, parse_size_bytes

CARDS_MIB = {
    "T4": 15360,
    "V100 16GB": 16160,
    "L4": 23034,
    "RTX 3090": 24576,
    "RTX 4090": 24564,
    "RTX 5090": 32607,
    "A100 40GB": 40960,
    "A40": 46068,
    "L40S": 46068,
    "RTX A6000": 49140,
    "A100 80GB": 81920,
    "H100 80GB": 81559,
    "H200": 143771,
    "B200": 183359,
}
"""Total memory that nvidia-smi reports, MiB (T4, A40 and L40S with error correction on). Source: its output as
printed in public logs and bug reports."""
CONTEXT_MIB = 500
"""What a process takes before its first tensor: CUDA context and loaded kernels. 0.47 GiB were measured on an A100 with
PyTorch 2.1 and lazy loading (ml-engineering, training/performance); it differs by card and driver, so it is a margin
and part of no figure."""
MEASURED_CONTEXTS_MIB = {
    "V100, PyTorch 1.10, CUDA 11.2": 1343,
    "A100, PyTorch 1.10.2": 1823,
    "A100, PyTorch 1.13.1": 922,
    "A100, PyTorch 2.1.1, all kernels loaded": 942,
    "A100, PyTorch 2.1.1, kernels loaded when needed": 481,
}
"""Contexts that others measured before the first large tensor: the driver's figure after one number was moved to the
device (transformers 4.21, perf_train_gpu_one; the others from ml-engineering, training/performance)."""
CUBLAS_WORKSPACE_BYTES = {"Hopper": 32 * 2**20, "before Hopper": 8_519_680}
"""Workspace of cuBLAS, taken from PyTorch's allocator by the first product and kept: ``:4096:2:16:8`` is 8 519 680
bytes, and 32 MiB from Hopper on (aten/src/ATen/cuda/CublasHandlePool.cpp of PyTorch 2.13; the variable
CUBLAS_WORKSPACE_CONFIG changes it)."""
N_WORKSPACES = 2
"""One per thread that multiplies: that of forward, and autograd's thread of the device, which runs backward. A recorded
profile shows the second (785.27 MiB before, 793.39 MiB after; row S01-5 of docs/estimator.md)."""
HOPPER_AND_LATER = ("H100 80GB", "H200", "B200", "RTX 5090")


def workspace_bytes(card: str | None) -> int:
    """Give what cuBLAS holds on a card once backward has run; an unknown card is taken for one before Hopper."""
    return N_WORKSPACES * CUBLAS_WORKSPACE_BYTES["Hopper" if card in HOPPER_AND_LATER else "before Hopper"]


def card_bytes(text: str) -> tuple[str, int]:
    """Read a card's name, or a size, and give name and bytes of memory.

    >>> card_bytes("a100-40gb"), card_bytes("24GiB")
    (('A100 40GB', 42949672960), ('24GiB', 25769803776))

    Raises ConfigError naming the nearest card.
    """
    name = card_name(text)
    if name is not None:
        return name, CARDS_MIB[name] * MIB_BYTES
    if re.match(r"\s*\d", text):
        try:
            return text, parse_size_bytes(text)
        except ValueError as error:
            digits = _plain(text)  # two of them are a size without its unit, as in 16
            named = [card for card in CARDS_MIB if len(digits) > 2 and digits in _plain(card)]
            hint = f"; or did you mean {named[0]!r}?" if named else ""
            raise ConfigError(f"{error}{hint}") from None
    raise ConfigError(f"unknown card {text!r}{did_you_mean(text, CARDS_MIB)} (or a size, as 24GiB)")


def card_name(text: str) -> str | None:
    """Give the name of the card that is meant, None where there is none of that name."""
    return next((name for name in CARDS_MIB if _plain(name) == _plain(text)), None)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower().replace("nvidia", "").replace("geforce", ""))


def usable_bytes(total_bytes: int) -> int:
    """Give what is left of a card for tensors."""
    return max(0, total_bytes - CONTEXT_MIB * MIB_BYTES)


def read_budget(text: str, none_peak_bytes: int | None) -> int:
    """Read a budget: a size (16GiB), a card ("A100 40GB", of which a process gets all but its context), or a share of
    what keeping everything takes (80%).

    Raises ConfigError.
    """
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if share:
        if not 0 < float(share[1]) <= 100:
            raise ConfigError(f"budget {text!r}: a share lies above 0 and goes up to 100%")
        if none_peak_bytes is None:
            raise ConfigError(f"budget {text!r}: what none takes is not known here; give a size, as 16GiB")
        return int(none_peak_bytes * float(share[1]) / 100)
    return room(text)[1]


def room(text: str) -> tuple[str | None, int]:
    """Read what tensors may take: a size as it is, a card less the context; give the card, None for a size, and bytes.

    Raises ConfigError.
    """
    name, n_bytes = card_bytes(text)
    return (name, usable_bytes(n_bytes)) if name in CARDS_MIB else (None, n_bytes)
