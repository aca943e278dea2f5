"""Reports of NVML figures that were wrong, missing or fatal: matched by UUID, None where unknown, one sentence why."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckbench import reporting
from ckbench.config import RunConfig
from ckbench.devices import _nvml
from ckbench.devices.cuda import own_process_bytes, why_unavailable
from ckbench.launch import Launcher
from tests.known.conftest import Run
from tests.known.trials import MIB, config
from tests.sample_records import record

ROOT = Path(__file__).parents[2]
GIB = 2**30
CARDS = [f"GPU-{digit * 8}-0000-1111-2222-333344445555" for digit in "abcd"]
PART = "MIG-377e6a3c-9c5b-5c1b-8d2e-0c4a7b3f1d2e"
FIGURES = ("process_bytes", "device_bytes", "total_bytes", "sm_clock_mhz", "temperature_c", "power_w")


class FakeNvml:
    """Four cards, the third with a partition, in place of the module pynvml; card i has i + 1 GiB in use."""

    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = nvmlMemory_v2 = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[SimpleNamespace] = []
        self.refused: dict[str, Exception] = {}
        monkeypatch.setitem(sys.modules, "pynvml", self)

    def __getattribute__(self, name: str) -> Any:
        refused = object.__getattribute__(self, "__dict__").get("refused", {})
        if name in refused:

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise refused[name]

            return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(CARDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return CARDS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (*CARDS, PART):
            raise RuntimeError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 1 if handle == CARDS[2] else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        return PART

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 0) -> Any:
        used = GIB // 2 if handle == PART else (CARDS.index(handle) + 1) * GIB
        return SimpleNamespace(used=used, total=80 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 123456

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return self.processes

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return []

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1500

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 41


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Replace the module pynvml."""
    return FakeNvml(monkeypatch)


def process(pid: int, n_bytes: int | None) -> SimpleNamespace:
    """Make an entry of NVML's process list."""
    return SimpleNamespace(pid=pid, usedGpuMemory=n_bytes)


def shown(**fields: Any) -> str:
    """Draw a row of a GPU with these NVML figures."""
    return reporting.draw([record("none", device="cuda:0", peak_reserved_bytes=100 * MIB, **fields)])


def test_nv_01_the_uuid_decides_and_no_index(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA_VISIBLE_DEVICES=2 torch's device 0 is the third card; torch tells its UUID without GPU-."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    reading = _nvml.read(CARDS[2].removeprefix("GPU-"))
    assert (reading.uuid, reading.device_bytes) == (CARDS[2], 3 * GIB)


@pytest.mark.parametrize(
    ("uuid", "found"),
    [(PART, PART), ("MIG-377e", PART), ("GPU-bbbb", CARDS[1]), ("bbbb", CARDS[1]), ("", None), ("-1", None)],
)
def test_nv_03_every_form_of_a_uuid_resolves_or_is_unknown(nvml: FakeNvml, uuid: str, found: str | None) -> None:
    reading = _nvml.read(uuid)
    assert reading.uuid == found
    assert len(reading.warnings) == (found is None)


@pytest.mark.parametrize("visible", ["", '""', "-1"])
def test_nv_03_hidden_devices_are_refused_with_the_reason(visible: str) -> None:
    """On a GPU: the check `CUDA_VISIBLE_DEVICES` of tests/gpu/gpu_check.py."""
    text = why_unavailable("2.13.0", True, visible, "No CUDA GPUs are available")
    assert "hides every GPU; unset it" in text and "\n" not in text
    assert "CUDA_VISIBLE_DEVICES is '\" 0, 1 \"'" in why_unavailable("2.13.0", True, '" 0, 1 "', "No CUDA GPUs")


def test_nv_04_figures_that_are_not_supported_are_unknown(
    nvml: FakeNvml, ckbench: Run, replay: Callable[..., str]
) -> None:
    refused = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetComputeRunningProcesses")
    nvml.refused = {name: RuntimeError("Not Supported") for name in refused}
    reading = _nvml.read(PART)
    assert [getattr(reading, figure) for figure in FIGURES] == [None, None, None, 1500, 41, None]
    (warning,) = reading.warnings
    assert warning == "NVML does not give device memory, power, compute processes (Not Supported)"
    outcome = ckbench("run", "study.yaml", "--device", replay(facts_after={"nvml_warnings": [warning]}))
    assert outcome.code == 0 and outcome.out.count(warning) == 1


def test_nv_05_a_process_that_nvml_does_not_list_is_unknown_and_growth_is_labelled(nvml: FakeNvml) -> None:
    nvml.processes = [process(1, 6 * GIB)]
    reading = _nvml.read(CARDS[0])
    assert (reading.process_bytes, reading.device_bytes, reading.n_other_processes) == (None, GIB, 1)
    text = shown(nvml_device_bytes=900 * MIB, nvml_device_before_bytes=200 * MIB)
    assert "NVML grown MiB" in text and "700.0" in text and "NVML process MiB" not in text


@pytest.mark.parametrize("mark", [None, 2**64 - 1])
def test_nv_07_an_unavailable_figure_is_no_huge_number(nvml: FakeNvml, mark: int | None) -> None:
    nvml.processes = [process(os.getpid(), mark)]
    reading = _nvml.read(CARDS[0])
    assert reading.process_bytes is None
    assert all((getattr(reading, figure) or 0) < 2**40 for figure in FIGURES)


@pytest.mark.parametrize("reason", ["RM has detected an NVML/RM version mismatch.", "NVML Shared Library Not Found"])
def test_nv_09_an_nvml_that_cannot_start_costs_its_columns_only(
    nvml: FakeNvml, ckbench: Run, replay: Callable[..., str], reason: str
) -> None:
    nvml.refused = {"nvmlInit": RuntimeError(reason)}
    reading = _nvml.read(CARDS[0])
    assert all(getattr(reading, figure) is None for figure in FIGURES)
    assert reading.warnings == (f"NVML figures are n/a: {reason.rstrip('.')}",)
    fields = {"peak_allocated_bytes": MIB, "peak_reserved_bytes": 2 * MIB}
    device = replay({"*": {"fields": fields}}, facts_after={"nvml_warnings": list(reading.warnings)})
    outcome = ckbench("run", "study.yaml", "--device", device)
    assert outcome.code == 0 and "reserved MiB" in outcome.out and "NVML process" not in outcome.out
    assert outcome.out.count(reading.warnings[0]) == 1


def test_nv_10_a_platform_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (warning,) = _nvml.read(CARDS[0]).warnings
    assert warning == "NVML figures are n/a: the module pynvml (package nvidia-ml-py) cannot be imported"
    program = "import sys; from ckbench.devices import _nvml; print('pynvml' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(("listed", "given"), [(900, 900), (800, 800), (799, None), (None, None)])
def test_nv_14_nothing_below_what_our_allocator_held_is_shown_as_our_peak(
    listed: int | None, given: int | None
) -> None:
    """There is no sampling: the figure is read once at the end, when the caching allocator still holds its most."""
    stats = {"reserved_bytes.all.current": 500, "reserved_bytes.all.peak": 800}
    assert own_process_bytes(_nvml.Reading(process_bytes=listed), stats) == given


def test_nv_15_memory_of_others_is_told_apart(nvml: FakeNvml) -> None:
    nvml.processes = [process(77, 6 * GIB), process(os.getpid(), GIB)]
    reading = _nvml.read(CARDS[0])
    assert (reading.process_bytes, reading.n_other_processes) == (GIB, 1)
    text = shown(nvml_device_bytes=7 * GIB, nvml_device_before_bytes=6 * GIB)
    assert "none: 6.00 GiB of the device were in use before the trial" in text
    assert "1024.0" in text  # grown MiB
    assert "before the trial" not in shown(nvml_device_bytes=2 * GIB, nvml_device_before_bytes=GIB // 2)
    assert "other processes were on the device" in shown(environment__other_processes=1)


def test_nv_16_no_thread_keeps_a_failed_trial_alive(tmp_path: Path, replay: Callable[..., str]) -> None:
    device = replay({"none": {"fail": {"raise": "in step 1"}}}, isolated=True)
    settings = config("none")
    trial: RunConfig = settings.model_copy(update={"run": settings.run.model_copy(update={"device": device})})
    ended_at = []

    class Watching(Launcher):
        def converse(self, *args: Any) -> Any:
            answer, process, tail = super().converse(*args)
            ended_at.append((time.monotonic(), process.exitcode))
            return answer, process, tail

    phases: list[float] = []
    record_ = Watching().run(trial, 0, lambda phase: phases.append(time.monotonic()))
    assert record_.status == "error" and "in step 1" in (record_.message or "")
    ((ended, exit_code),) = ended_at
    assert exit_code is not None and ended - phases[-1] < 2.0
    assert all("nvml" not in thread.name.lower() for thread in threading.enumerate())
