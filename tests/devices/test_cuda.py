"""The device cuda: its pure parts, its use of torch.cuda against a stand-in, and on a GPU the real thing."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckbench.devices import _nvml, cuda
from ckbench.devices.base import Holdings, Observer
from ckbench.errors import DeviceUnavailable

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"


# --- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_cuda", "visible", "error", "words"),
    [
        (False, None, "Torch not compiled with CUDA enabled", ["2.13.0+cpu", "built without CUDA", "install"]),
        (False, "", "Torch not compiled with CUDA enabled", ["built without CUDA"]),
        (True, "", "No CUDA GPUs are available", ["CUDA_VISIBLE_DEVICES is empty", "unset it"]),
        (True, '""', "No CUDA GPUs are available", ["CUDA_VISIBLE_DEVICES", "unset it"]),
        (True, "-1", "No CUDA GPUs are available", ["CUDA_VISIBLE_DEVICES is '-1'", "hides every GPU"]),
        (True, " -1, 0", "No CUDA GPUs are available", ["hides every GPU"]),
        (True, None, "Found no NVIDIA driver on your system. Please check", ["no NVIDIA driver", "nvidia-smi"]),
        (True, None, "The NVIDIA driver on your system is too old (found version 11040).\nPlease", ["too old"]),
        (True, "5", "No CUDA GPUs are available", ["No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES is '5'"]),
        (True, "0", "", ["unknown reason"]),
    ],
)
def test_says_why_cuda_is_not_there(has_cuda: bool, visible: str | None, error: str, words: list[str]) -> None:
    text = cuda.why_unavailable("2.13.0+cpu", has_cuda, visible, error)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_says_which_devices_there_are() -> None:
    assert cuda.out_of_range(3, 1, None) == "device cuda:3 is not there: this process sees cuda:0"
    text = cuda.out_of_range(3, 2, "4,5")
    assert "cuda:0 to cuda:1" in text and "'4,5'" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_refuses_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceUnavailable, match="device cuda"):
        cuda.Cuda("cuda", None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(DeviceUnavailable, match="hides every GPU"):
        cuda.Cuda("cuda:1", None)


@pytest.mark.parametrize(("listed", "given"), [(None, None), (4096, 4096), (9999, 9999), (4095, None)])
def test_a_process_smaller_than_our_allocator_is_not_ours(listed: int | None, given: int | None) -> None:
    assert cuda.own_process_bytes(_nvml.Reading(process_bytes=listed), {"reserved_bytes.all.current": 4096}) == given


def test_an_idle_device_is_not_throttled() -> None:
    assert cuda.condition(_nvml.Reading(throttle_reasons=("gpu_idle",)), "before")["throttle_reasons_before"] == []
    assert cuda.condition(_nvml.Reading(), "before")["throttle_reasons_before"] is None


def test_step_times_add_up_over_micro_batches() -> None:
    events = ["forward", "turn", "forward", "turn", "optimizer", "end"]
    times = cuda.step_times(list(zip(events, [0.0, 1.0, 3.0, 4.5, 7.0, 7.25], strict=True)))
    assert dataclasses.astuple(times) == (7.25, 2.5, 4.5, 0.25)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_gpu_check_says_that_there_is_no_cuda(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "gpu" / "gpu_check.py"
    command = [sys.executable, str(script), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("gpu-check: device cuda is not there: ") and done.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --- the device, with torch.cuda and NVML replaced ----------------------------------------------------------------


class FakeAllocator:
    """Keeps the books of one device the way PyTorch's caching allocator does, blocks of 512 bytes."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.sizes: dict[int, int] = {}
        self.history: list[dict[str, Any]] | None = None
        self.n_allocated = self.n_freed = self.peak = 0
        self.next_address = 0x1000

    def allocated(self) -> int:
        return sum(-(-size // 512) * 512 for size in self.sizes.values())

    def allocate(self, size: int) -> int:
        address, self.next_address = self.next_address, self.next_address + 0x1000
        self.sizes[address] = size
        self.n_allocated += 1
        self.peak = max(self.peak, self.allocated())
        self._note("alloc", address, size)
        return address

    def free(self, address: int) -> None:
        size = self.sizes.pop(address)
        self.n_freed += 1
        self._note("free_requested", address, size)
        self._note("free_completed", address, size)

    def _note(self, action: str, address: int, size: int) -> None:
        if self.history is not None:
            self.history.append({"action": action, "addr": address, "size": size})

    def stats(self) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated(),
            "allocated_bytes.all.peak": self.peak,
            "requested_bytes.all.current": sum(self.sizes.values()),
            "requested_bytes.all.peak": sum(self.sizes.values()),
            "active_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": 2**21,
            "reserved_bytes.all.peak": 2**21,
            "num_alloc_retries": 3,
            "allocation.all.allocated": self.n_allocated,
            "allocation.all.freed": self.n_freed,
        }


class FakeCuda:
    """Two devices; every call must name the one of the run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices = [FakeAllocator(0), FakeAllocator(1)]
        self.current_device: Any = None
        self.now_ms = 0.0
        self.n_waits = 0
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                assert stream == "stream of 1"
                self.at_ms = fake.now_ms

            def synchronize(self) -> None:
                fake.n_waits += 1

            def elapsed_time(self, later: "Event") -> float:
                return later.at_ms - self.at_ms

        replacements: dict[str, Callable[..., Any] | type] = {
            "init": lambda: None,
            "device_count": lambda: 2,
            "get_device_properties": lambda d: SimpleNamespace(
                name="Fake GPU", uuid=UUID, major=9, minor=0, total_memory=80 * 2**30
            ),
            "get_allocator_backend": lambda: "native",
            "memory_stats": lambda d: self.devices[d.index].stats(),
            "reset_peak_memory_stats": self._reset,
            "current_stream": lambda d: f"stream of {d.index}",
            "Event": Event,
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self._snapshot)
        monkeypatch.setattr(torch, "set_num_threads", lambda n: None)

    def _reset(self, device: torch.device) -> None:
        self.devices[device.index].peak = self.devices[device.index].allocated()

    def _record(self, enabled: str | None, context: None = None, stacks: str = "all") -> None:
        for device in self.devices:
            device.history = None if enabled is None else []

    def _snapshot(self) -> dict[str, Any]:
        return {
            "device_traces": [device.history or [] for device in self.devices],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        }


class FakeSubject:
    """A step with one activation, one gradient and one temporary of backward."""

    def __init__(self, memory: FakeAllocator) -> None:
        self.memory = memory
        self.weights = memory.allocate(1000)
        self.inputs = memory.allocate(100)
        self.gradient: int | None = None

    def holdings(self) -> Holdings:
        gradients = {} if self.gradient is None else {self.gradient: 1000}
        return Holdings(static={self.weights: 1000}, gradients=gradients, inputs={self.inputs: 100})

    def observed_step(self, observer: Observer) -> None:
        memory = self.memory
        observer.at("forward")
        activation = memory.allocate(5000)
        observer.at("head")
        logits = memory.allocate(300)
        observer.at("turn")
        memory.free(logits)
        observer.at("blocks")
        self.gradient = memory.allocate(1000)
        temporary = memory.allocate(2000)
        memory.free(temporary)
        memory.free(activation)
        observer.at("optimizer")
        state = memory.allocate(4000)
        memory.free(state)
        memory.free(self.gradient)
        self.gradient = None
        observer.at("end")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace torch.cuda by two devices, and NVML by a reading of the second."""
    readings = iter([_nvml.Reading(device_bytes=11, driver_version="580.1", warnings=("W",), sm_clock_mhz=1980)])
    later = _nvml.Reading(
        device_bytes=22, process_bytes=2**22, sm_clock_mhz=1200, throttle_reasons=("gpu_idle", "sw_power_cap")
    )

    def read(uuid: str) -> _nvml.Reading:
        assert uuid == UUID
        return next(readings, later)

    monkeypatch.setattr(_nvml, "read", read)
    return FakeCuda(monkeypatch)


def test_weighs_one_step_of_the_runs_own_device(fake: FakeCuda) -> None:
    device: Any = cuda.Cuda("cuda:1", 2)
    subject: Any = FakeSubject(fake.devices[1])
    fields = device.weigh(subject)
    timeline = fields.pop("live_bytes_timeline")
    assert max(n_bytes for _, n_bytes, _ in timeline) == fields["static_bytes"] + 1000 + fields["activation_peak_bytes"]
    assert fields == {
        "static_bytes": 1000,
        "gradient_bytes": 1000,
        "saved_bytes": 5120 + 512,
        "peak_allocated_bytes": 1024 + 512 + 5120 + 1024 + 2048,
        "peak_phase": "backward",
        "peak_forward_bytes": 1024 + 512 + 5120,
        "peak_loss_bytes": 1024 + 512 + 5120 + 512,
        "peak_backward_bytes": 1024 + 512 + 5120 + 1024 + 2048,
        "peak_optimizer_bytes": 1024 + 512 + 1024 + 4096,
        "activation_peak_bytes": 100 + 5000 + 2000,
    }
    assert fake.devices[1].history is None, "recording must end"
    assert fake.devices[0].n_allocated == 0


def test_weighs_without_a_history_where_it_cannot_be_recorded(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
    device: Any = cuda.Cuda("cuda:1", None)
    subject: Any = FakeSubject(fake.devices[1])
    fields = device.weigh(subject)
    assert fields["activation_peak_bytes"] is None and fields["live_bytes_timeline"] == []
    assert fields["peak_allocated_bytes"] == 9728


def test_recording_ends_when_the_step_fails(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(observer: Observer) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    subject: Any = FakeSubject(fake.devices[1])
    monkeypatch.setattr(subject, "observed_step", fail)
    device = cuda.Cuda("cuda:1", None)
    with pytest.raises(RuntimeError) as caught:
        device.weigh(subject)
    assert fake.devices[1].history is None
    shortage = device.out_of_memory(caught.value)
    assert shortage is not None and shortage.requested_bytes == 2 * 2**30


def test_facts_and_peaks(fake: FakeCuda) -> None:
    device = cuda.Cuda("cuda:1", None)
    assert (device.label(), device.name(), device.device_used_bytes()) == ("cuda:1", "Fake GPU", 11)
    facts = device.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["driver"], facts["compute_capability"], facts["tf32_matmul"]) == ("580.1", "9.0", False)
    assert (facts["nvml_warnings"], facts["clock_before_mhz"]) == (["W"], 1980)
    assert facts["allocator_settings"] == {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
    fake.devices[1].free(fake.devices[1].allocate(600))
    device.reset_peaks()
    fields = device.peaks()
    assert (fields["peak_allocated_bytes"], fields["peak_reserved_bytes"]) == (0, 2**21)
    assert (fields["allocator_retries"], fields["nvml_process_bytes"], fields["nvml_device_bytes"]) == (3, 2**22, 22)
    assert fields["host_peak_bytes"] > 2**20
    assert device.facts_after() == {
        "clock_after_mhz": 1200,
        "temperature_after_c": None,
        "power_after_w": None,
        "throttle_reasons_after": ["sw_power_cap"],
        "nvml_warnings": [],
    }
    assert device.device_used_bytes() == 11


def test_the_clock_waits_once_for_a_window_of_steps(fake: FakeCuda) -> None:
    clock = cuda.Cuda("cuda:1", None).clock()
    for _ in range(3):
        for event, duration_ms in (("forward", 10.0), ("turn", 20.0), ("optimizer", 5.0), ("end", 1.0)):
            clock.at(event)
            fake.now_ms += duration_ms
    assert fake.n_waits == 0
    times = clock.collect()
    assert fake.n_waits == 1
    assert [dataclasses.astuple(t) for t in times] == [pytest.approx((0.035, 0.01, 0.02, 0.005))] * 3
    assert (clock.collect(), fake.n_waits) == ([], 1)


def test_refuses_a_device_out_of_range(fake: FakeCuda) -> None:
    with pytest.raises(DeviceUnavailable, match="cuda:0 to cuda:1"):
        cuda.Cuda("cuda:2", None)


# --- a real GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_gpu_sees_a_known_allocation_to_the_block() -> None:
    device = cuda.Cuda("cuda", None)
    torch.cuda.empty_cache()
    device.reset_peaks()
    before = device.peaks()["peak_allocated_bytes"]
    held = torch.empty(1000, dtype=torch.uint8, device=device.torch_device)
    assert device.peaks()["peak_allocated_bytes"] - before == 1024
    del held
    device.reset_peaks()
    assert device.peaks()["peak_allocated_bytes"] == torch.cuda.memory_allocated(device.torch_device)


@pytest.mark.gpu
@needs_gpu
def test_gpu_clock_includes_work_that_is_still_running() -> None:
    device = cuda.Cuda("cuda", None)
    clock = device.clock()
    for event in ("forward", "turn", "optimizer"):
        clock.at(event)
    torch.cuda._sleep(500_000_000)  # cycles; the call returns at once
    clock.at("end")
    (times,) = clock.collect()
    assert times.optimizer_s > 0.05


@pytest.mark.gpu
@needs_gpu
def test_gpu_nvml_is_read_for_the_same_card() -> None:
    device = cuda.Cuda("cuda", None)
    reading = _nvml.read(str(torch.cuda.get_device_properties(device.torch_device).uuid))
    if reading.warnings and reading.total_bytes is None:
        pytest.skip(reading.warnings[0])
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    assert reading.total_bytes == pytest.approx(total, rel=0.05)
