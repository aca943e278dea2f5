"""Two CUDA devices made of numbers, for what our code asks torch.cuda; every call must name its device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"


class FakeCuda:
    """Replaces torch.cuda by books of bytes; ``asked`` lists the device of every call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = {0: 0, 1: 0}
        self.peak = {0: 0, 1: 0}
        self.reserved_peak = {0: 0, 1: 0}
        self.asked: list[int] = []
        card = SimpleNamespace(name="Fake GPU", uuid=UUID, major=9, minor=0, total_memory=80 * 2**30)
        replacements = {
            "init": lambda: None,
            "device_count": lambda: 2,
            "get_device_properties": lambda device: card,
            "get_allocator_backend": lambda: "native",
            "memory_stats": self._stats,
            "reset_peak_memory_stats": self._reset,
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(torch, "set_num_threads", lambda n: None)

    def hold(self, index: int, current: int, peak: int) -> None:
        """Set what a device has allocated."""
        self.current[index], self.peak[index] = current, peak
        self.reserved_peak[index] = max(self.reserved_peak[index], peak)

    def _stats(self, device: torch.device) -> dict[str, Any]:
        self.asked.append(device.index)
        return {
            "allocated_bytes.all.current": self.current[device.index],
            "allocated_bytes.all.peak": self.peak[device.index],
            "reserved_bytes.all.current": self.reserved_peak[device.index],
            "reserved_bytes.all.peak": self.reserved_peak[device.index],
        }

    def _reset(self, device: torch.device) -> None:
        self.asked.append(device.index)
        self.peak[device.index] = self.current[device.index]
