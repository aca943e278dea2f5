"""Read NVML's figures of one GPU, found by its UUID; the only importer of pynvml. Nothing here raises.

A device is never looked up by index: CUDA numbers the devices it may see, NVML all there are.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_NOT_AVAILABLE = (2**64 - 1, 2**32 - 1)
"""What NVML writes into an unsigned number it does not know."""

_THROTTLE_WORDS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of nvml.h, nvmlClocksThrottleReason*, called nvmlClocksEventReason* since driver 535."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Figures of one device at one moment, each None where NVML does not tell."""

    uuid: str | None = None
    """The device these figures are of, as NVML spells it: GPU-... or MIG-..."""
    driver_version: str | None = None
    process_bytes: int | None = None
    """Held by this process; None where it is not listed, as in most containers."""
    device_bytes: int | None = None
    """In use by all processes; the driver's own reserve is left out, but not by drivers before 510."""
    total_bytes: int | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """Why the clock is what it is; empty where nothing holds it back."""
    n_other_processes: int | None = None
    """Processes on the device but this one; one listed under another PID counts as another."""
    warnings: tuple[str, ...] = ()
    """At most one sentence on what could not be read, and why."""


def read(uuid: str) -> Reading:
    """Read one device, given its UUID in full or by its beginning, with or without GPU- or MIG- before it."""
    try:
        import pynvml
    except Exception:  # also a pynvml that breaks while it is imported
        return _unread("the module pynvml (package nvidia-ml-py) cannot be imported")
    try:
        pynvml.nvmlInit()
    except Exception as error:
        return _unread(_reason(error))
    try:
        return _read_device(pynvml, uuid)
    except Exception as error:
        return _unread(_reason(error))
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


class _Asker:
    """Asks for one figure after the other; a refusal gives None and is kept for the warning."""

    def __init__(self) -> None:
        self.refusals: dict[str, list[str]] = {}

    def ask(self, figure: str, *calls: Callable[[], Any]) -> Any:
        """Give the answer of the first call that has one."""
        reason = ""
        for call in calls:
            try:
                return call()
            except Exception as error:
                reason = reason or _reason(error)
        self.refuse(figure, reason)
        return None

    def number(self, figure: str, *calls: Callable[[], Any]) -> int | None:
        """Give a whole number; NVML's marks for an unknown one count as a refusal."""
        value = self.ask(figure, *calls)
        if value is None:
            return None
        return self.known(figure, value)

    def known(self, figure: str, value: Any) -> int | None:
        """Tell a number from text such as N/A and from NVML's marks."""
        if isinstance(value, int) and 0 <= value and value not in _NOT_AVAILABLE:
            return value
        self.refuse(figure, "N/A")
        return None

    def refuse(self, figure: str, reason: str) -> None:
        """Note that a figure is not to be had."""
        figures = self.refusals.setdefault(reason, [])
        if figure not in figures:
            figures.append(figure)

    def warnings(self) -> tuple[str, ...]:
        """Say in one sentence what was refused."""
        parts = [f"{', '.join(figures)} ({reason})" for reason, figures in self.refusals.items()]
        return (f"NVML does not give {'; '.join(parts)}",) if parts else ()


def _read_device(nvml: Any, uuid: str) -> Reading:
    asker = _Asker()
    driver_version = asker.ask("driver version", nvml.nvmlSystemGetDriverVersion)
    handles = _find(nvml, uuid)
    if len(handles) != 1:
        which = "no device" if not handles else f"{len(handles)} devices"
        return Reading(
            driver_version=driver_version, warnings=(f"NVML figures are n/a: {which} with the UUID {uuid!r}",)
        )
    handle = handles[0]
    memory = asker.ask(
        "device memory",
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2),
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle),
    )
    power_mw = asker.number("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    bits = asker.number(
        "throttle reasons",
        lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )
    process_bytes, n_other_processes = _processes(nvml, handle, asker)
    return Reading(
        uuid=asker.ask("UUID", lambda: nvml.nvmlDeviceGetUUID(handle)),
        driver_version=driver_version,
        process_bytes=process_bytes,
        device_bytes=None if memory is None else asker.known("device memory", memory.used),
        total_bytes=None if memory is None else asker.known("device memory", memory.total),
        sm_clock_mhz=asker.number("SM clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        max_sm_clock_mhz=asker.number(
            "maximum SM clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
        ),
        temperature_c=asker.number(
            "temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
        power_w=None if power_mw is None else power_mw / 1000,
        throttle_reasons=None if bits is None else throttle_words(bits),
        n_other_processes=n_other_processes,
        warnings=asker.warnings(),
    )


def _processes(nvml: Any, handle: Any, asker: _Asker) -> tuple[int | None, int | None]:
    """Give the bytes of this process, and the number of others.

    A process that computes and draws stands in both lists with the same total, hence the maximum.
    """
    lists = [
        asker.ask("compute processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        asker.ask("graphics processes", lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)),
    ]
    listed = [process for processes in lists for process in processes or ()]
    own = [asker.known("process memory", p.usedGpuMemory) for p in listed if p.pid == os.getpid()]
    known = [value for value in own if value is not None]
    others = {process.pid for process in listed} - {os.getpid()}
    return max(known, default=None), None if lists[0] is None else len(others)


def _find(nvml: Any, uuid: str) -> list[Any]:
    """Give the handles of all devices that the UUID may mean: one, if it is told in full."""
    kinds = [kind for kind in ("GPU-", "MIG-") if uuid.startswith(kind)]
    bare = uuid.removeprefix(kinds[0]) if kinds else uuid
    names = [kind + bare for kind in kinds or ("GPU-", "MIG-")]
    if not bare:
        return []
    for name in names:
        with contextlib.suppress(Exception):
            return [nvml.nvmlDeviceGetHandleByUUID(name)]
    beginnings = tuple(name.lower() for name in names)
    return [handle for handle, name in _all_devices(nvml) if name.lower().startswith(beginnings)]


def _all_devices(nvml: Any) -> Iterator[tuple[Any, str]]:
    """Yield every card and every partition of one, with its UUID; those that cannot be asked are left out."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(Exception):
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            yield card, nvml.nvmlDeviceGetUUID(card)
            for part_index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
                with contextlib.suppress(Exception):
                    part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, part_index)
                    yield part, nvml.nvmlDeviceGetUUID(part)


def throttle_words(bits: int) -> tuple[str, ...]:
    """Spell NVML's bit mask of reasons as words.

    >>> throttle_words(0x24)
    ('sw_power_cap', 'sw_thermal_slowdown')
    """
    set_bits = [1 << i for i in range(bits.bit_length()) if bits >> i & 1]
    return tuple(_THROTTLE_WORDS.get(bit, f"bit_{bit:#x}") for bit in set_bits)


def _unread(reason: str) -> Reading:
    return Reading(warnings=(f"NVML figures are n/a: {reason}",))


def _reason(error: Exception) -> str:
    """Give an error's text on one line; NVML's own text may need the library that has just failed."""
    try:
        text = " ".join(str(error).split()).rstrip(".")
    except Exception:
        text = ""
    return text or type(error).__name__
