"""cuda: allocator statistics, event timing and NVML figures of one CUDA device, always named explicitly."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckbench import host
from ckbench.config import RunConfig
from ckbench.devices import _nvml
from ckbench.devices._allocator import (
    Moment,
    Stats,
    allocator_peaks,
    history_figures,
    moment,
    phase_figures,
    trace_events,
)
from ckbench.devices._oom import recognise
from ckbench.devices.base import OutOfMemory, StepTimes, Subject
from ckbench.errors import DeviceUnavailable


class CudaClock:
    """A CUDA event at every turn of a step; the device is waited for once, in ``collect``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[list[tuple[str, torch.cuda.Event]]] = [[]]

    def at(self, event: str) -> None:
        """Put an event into the device's queue; it gets its time when the work before it is done."""
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        self._steps[-1].append((event, mark))
        if event == "end":
            self._steps.append([])

    def collect(self) -> list[StepTimes]:
        """Wait for the last step and give the steps since the last call."""
        *steps, unfinished = self._steps
        self._steps = [unfinished]
        if steps:
            steps[-1][-1][1].synchronize()
        return [step_times([(event, step[0][1].elapsed_time(mark) / 1000) for event, mark in step]) for step in steps]


class Cuda:
    """One CUDA device."""

    kind = "cuda"
    isolated = True

    def __init__(self, name: str, threads: int | None) -> None:
        """Open ``cuda`` (the first device) or ``cuda:N``. Raises DeviceUnavailable."""
        index = int(name.partition(":")[2] or 0)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            torch.cuda.init()
        except Exception as error:
            built = torch.backends.cuda.is_built()
            raise DeviceUnavailable(why_unavailable(torch.__version__, built, visible, str(error))) from None
        if index >= torch.cuda.device_count():
            raise DeviceUnavailable(out_of_range(index, torch.cuda.device_count(), visible))
        self.torch_device = torch.device("cuda", index)
        self._properties: Any = torch.cuda.get_device_properties(self.torch_device)
        # Nothing so far has made a context, so this reading does not count this process yet.
        self._before = self._after = self._read_nvml()
        torch.set_num_threads(threads or host.available_threads())

    def name(self) -> str:
        """Name the card."""
        return str(self._properties.name)

    def label(self) -> str:
        """Give cuda:N."""
        return str(self.torch_device)

    def device_used_bytes(self) -> int | None:
        """Give what NVML saw in use on the whole device before this process had a context there."""
        return self._before.device_bytes

    def facts(self) -> dict[str, Any]:
        """Give what decides whether two records compare, and the device's condition before the trial."""
        return {
            "driver": self._before.driver_version,
            "cuda": torch.version.cuda,
            "compute_capability": f"{self._properties.major}.{self._properties.minor}",
            "device_total_bytes": self._properties.total_memory,
            "allocator_backend": torch.cuda.get_allocator_backend(),
            "allocator_settings": _allocator_settings(),
            "tf32_matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
            "max_clock_mhz": self._before.max_sm_clock_mhz,
            "other_processes": self._before.n_other_processes,
            **condition(self._before, "before"),
            "nvml_warnings": list(self._before.warnings),
        }

    def facts_after(self) -> dict[str, Any]:
        """Give the device's condition as it was when ``peaks`` last looked, and why figures of NVML are n/a."""
        warnings = list(self._after.warnings)
        if not warnings and self._after.process_bytes is None:
            warnings.append("NVML does not list this process, as in most containers")
        return {**condition(self._after, "after"), "nvml_warnings": warnings}

    def clock(self) -> CudaClock:
        """Make a clock of CUDA events."""
        return CudaClock(self.torch_device)

    def reset_peaks(self) -> None:
        """Set the allocator's peaks to what is held now."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peaks(self) -> dict[str, Any]:
        """Give the allocator's peaks since the reset, and NVML's figures of this moment.

        The caching allocator gives nothing back during a trial, so NVML now is the high-water mark.
        """
        stats = torch.cuda.memory_stats(self.torch_device)
        self._after = self._read_nvml()
        return {
            **allocator_peaks(stats),
            "nvml_process_bytes": own_process_bytes(self._after, stats),
            "nvml_device_bytes": self._after.device_bytes,
            "host_peak_bytes": host.peak_rss_bytes(),
        }

    def weigh(self, subject: Subject) -> dict[str, Any]:
        """Run one step; read and reset the allocator's peak at each event, and record its history.

        Bytes are the allocator's own, rounded up to its blocks. ``activation_peak_bytes`` and the timeline come
        from the history, in bytes as asked for; the former counts all that is neither static nor gradient:
        batches and the workspaces of cuBLAS too.
        """
        before = subject.holdings()
        recorder = _Recorder(subject, self.torch_device)
        with _history() as recording:
            start = moment("start", torch.cuda.memory_stats(self.torch_device))
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            subject.observed_step(recorder)
            end = moment("over", torch.cuda.memory_stats(self.torch_device))
            trace = _trace(self.torch_device) if recording else []
        static_bytes = sum(subject.holdings().static.values())
        return {
            "static_bytes": static_bytes,
            "gradient_bytes": sum(recorder.gradients.values()),
            **phase_figures(start, recorder.moments),
            **history_figures(
                trace_events(trace),
                start,
                recorder.moments,
                end,
                static_bytes=static_bytes,
                gradients=recorder.gradients,
                gradients_at_start=before.gradients,
            ),
        }

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """Recognise the allocator's OutOfMemoryError and the libraries' own messages."""
        return recognise(error)

    def subject(self, config: RunConfig, round_number: int) -> Subject:
        """Build model, plan and optimizer on this device."""
        from ckbench.engine.trial import Trial  # the engine is a floor above; it comes in with the first trial

        # Libraries that ask for the current device must not open a context on another card.
        torch.cuda.set_device(self.torch_device)
        return Trial(config, self.torch_device)

    def _read_nvml(self) -> _nvml.Reading:
        return _nvml.read(str(getattr(self._properties, "uuid", "")))


class _Recorder:
    """Reads the allocator at each event and resets its peak, and notes the gradients."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self._subject = subject
        self._device = device
        self.moments: list[Moment] = []
        self.gradients: dict[int, int] = {}

    def at(self, event: str) -> None:
        self.moments.append(moment(event, torch.cuda.memory_stats(self._device)))
        torch.cuda.reset_peak_memory_stats(self._device)
        if event == "optimizer":
            self.gradients = self._subject.holdings().gradients


def step_times(marks: Sequence[tuple[str, float]]) -> StepTimes:
    """Add up the phases of one step from its events, each with its seconds since the first."""
    seconds = {"forward": 0.0, "turn": 0.0, "optimizer": 0.0}
    for (event, since), (_, until) in zip(marks, marks[1:], strict=False):
        seconds[event] += until - since
    return StepTimes(
        step_s=marks[-1][1] - marks[0][1],
        forward_s=seconds["forward"],
        backward_s=seconds["turn"],
        optimizer_s=seconds["optimizer"],
    )


def own_process_bytes(reading: _nvml.Reading, stats: Stats) -> int | None:
    """Give NVML's figure of this process, unless it cannot be this one.

    In a container NVML may list PIDs of the host, and one of them may happen to be ours: a process with
    less than our allocator holds is somebody else. One with less than it held since the reset has given
    memory back, and the figure is no high-water mark.
    """
    held = max(stats.get(f"reserved_bytes.all.{when}", 0) for when in ("current", "peak"))
    return None if reading.process_bytes is None or reading.process_bytes < held else reading.process_bytes


def condition(reading: _nvml.Reading, when: str) -> dict[str, Any]:
    """Give what may disturb timing, as plain data; ``when`` (before, after) goes into the names.

    An idle device has a low clock for that reason alone, which is no throttling.
    """
    reasons = reading.throttle_reasons
    return {
        f"clock_{when}_mhz": reading.sm_clock_mhz,
        f"temperature_{when}_c": reading.temperature_c,
        f"power_{when}_w": reading.power_w,
        f"throttle_reasons_{when}": None if reasons is None else [r for r in reasons if r != "gpu_idle"],
    }


def why_unavailable(torch_version: str, has_cuda: bool, visible: str | None, error: str) -> str:
    """Say why CUDA cannot be used, and what to do; ``visible`` is CUDA_VISIBLE_DEVICES."""
    if not has_cuda:
        return (
            f"device cuda is not there: this PyTorch ({torch_version}) is built without CUDA; install a CUDA build "
            "(https://pytorch.org/get-started/locally) or use device cpu"
        )
    if visible is not None and visible.strip(" ,\"'").partition(",")[0].strip() in ("", "-1"):
        state = f"is {visible!r}" if visible.strip() else "is empty"
        return (
            f"device cuda is not there: CUDA_VISIBLE_DEVICES {state}, which hides every GPU; unset it, "
            "give it the number or UUID of a GPU, or use device cpu"
        )
    if "no NVIDIA driver" in error:
        return (
            "device cuda is not there: no NVIDIA driver is found; install one and see that nvidia-smi lists the GPU "
            "(a container must be started with its GPUs), or use device cpu"
        )
    first_line = (error.strip().splitlines() or ["unknown reason"])[0].rstrip(".")
    hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return f"device cuda cannot be used: {first_line}{hint}"


def out_of_range(index: int, n_devices: int, visible: str | None) -> str:
    """Say that there is no device of this number, and which there are."""
    have = "cuda:0" if n_devices == 1 else f"cuda:0 to cuda:{n_devices - 1}"
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r} and devices are counted within it"
    return f"device cuda:{index} is not there: this process sees {have}{hint}"


def _allocator_settings() -> dict[str, Any]:
    """Give the settings in force, as PyTorch understood them; empty where it does not tell."""
    with contextlib.suppress(Exception):
        settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
        return {str(key): value for key, value in settings.items()}
    return {}


@contextlib.contextmanager
def _history() -> Iterator[bool]:
    """Record the allocator's history, without stack traces; gives False where it cannot be recorded."""
    try:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
        recording = True
    except Exception:  # cudaMallocAsync has none, and the call is private: it may change
        recording = False
    try:
        yield recording
    finally:
        if recording:
            torch.cuda.memory._record_memory_history(None)


def _trace(device: torch.device) -> list[Mapping[str, Any]]:
    """Give the recorded history of one device; empty where there is none."""
    with contextlib.suppress(Exception):
        return list(torch.cuda.memory._snapshot()["device_traces"][device.index])
    return []


PLUGIN = Cuda
