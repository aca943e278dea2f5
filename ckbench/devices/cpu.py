"""cpu: exact peaks from the profiler's allocator events; RSS beside them, never compared."""

import gc
import os
import platform
import time
import warnings
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from ckbench.config import RunConfig
from ckbench.devices._oom import recognise
from ckbench.devices._timeline import Allocation, Mark, figures, live_bytes_timeline
from ckbench.devices.base import Holdings, OutOfMemory, StepTimes, Subject
from ckbench.host import available_threads, peak_rss_bytes

_MARK = "ckbench::"


class CpuClock:
    """perf_counter around each step and at the turns between its phases."""

    def __init__(self) -> None:
        self._times: list[StepTimes] = []
        self._seconds = {"forward": 0.0, "turn": 0.0, "optimizer": 0.0}
        self._first = self._last = 0.0
        self._event: str | None = None

    def at(self, event: str) -> None:
        """Add the time since the last event to the phase that ends here."""
        now = time.perf_counter()
        if self._event is None:
            self._first = now
        else:
            self._seconds[self._event] += now - self._last
        self._event, self._last = event, now
        if event == "end":
            seconds = self._seconds
            self._times.append(
                StepTimes(
                    step_s=now - self._first,
                    forward_s=seconds["forward"],
                    backward_s=seconds["turn"],
                    optimizer_s=seconds["optimizer"],
                )
            )
            self._seconds = dict.fromkeys(seconds, 0.0)
            self._event = None

    def collect(self) -> list[StepTimes]:
        """Give the steps since the last call."""
        times, self._times = self._times, []
        return times


class Cpu:
    """The host processor."""

    kind = "cpu"
    isolated = True

    def __init__(self, name: str, threads: int | None) -> None:
        self.torch_device = torch.device(name)
        torch.set_num_threads(threads or available_threads())

    def name(self) -> str:
        """Name the processor, with the number of logical cores."""
        return f"{_processor()} ({os.cpu_count()} cores)"

    def label(self) -> str:
        """Give cpu."""
        return "cpu"

    def device_used_bytes(self) -> int | None:
        """Unknown: the host's memory is shared with everything else."""
        return None

    def facts(self) -> dict[str, Any]:
        """Say which vector instructions PyTorch uses."""
        return {"cpu_capability": torch.backends.cpu.get_cpu_capability()}

    def facts_after(self) -> dict[str, Any]:
        """Give nothing: a processor does not tell its condition."""
        return {}

    def clock(self) -> CpuClock:
        """Make a perf_counter clock."""
        return CpuClock()

    def reset_peaks(self) -> None:
        """Nothing to forget: peaks come from ``weigh``."""

    def peaks(self) -> dict[str, Any]:
        """Give the peak resident size of this process."""
        return {"host_peak_bytes": peak_rss_bytes()}

    def weigh(self, subject: Subject) -> dict[str, Any]:
        """Run one step under the profiler's allocator events and add them up.

        Every allocation of PyTorch's CPU allocator is an event, kernel temporaries included; the sum
        of all events on top of what the trial holds before is the exact allocated size over time.
        """
        gc.collect()  # garbage of before the step must not be given back in it
        before = subject.holdings()
        recorder = _Recorder(subject)
        with warnings.catch_warnings():
            # before 2.13 torch warns that only one cycle is kept, and one is all there is
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                subject.observed_step(recorder)
        events, marks = _read(profiler)
        live = before.total_bytes()
        fields = figures(
            events,
            marks,
            live_at_start_bytes=live,
            static_bytes=sum(subject.holdings().static.values()),
            gradients=recorder.gradients,
            gradients_at_start=before.gradients,
        )
        return {**fields, "live_bytes_timeline": live_bytes_timeline(events, marks, live_at_start_bytes=live)}

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """Recognise the allocator's plain RuntimeError and Python's MemoryError."""
        return recognise(error)

    def subject(self, config: RunConfig, round_number: int) -> Subject:
        """Build model, plan and optimizer on this device."""
        from ckbench.engine.trial import Trial  # the engine is a floor above; it comes in with the first trial

        return Trial(config, self.torch_device)


class _Recorder:
    """Writes each event of a step into the profiler's own timeline, and notes the gradients."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.gradients: dict[int, int] = {}

    def at(self, event: str) -> None:
        if event == "optimizer":
            holdings: Holdings = self.subject.holdings()
            self.gradients = holdings.gradients
        with record_function(_MARK + event):
            pass


def _read(profiler: profile) -> tuple[list[Allocation], list[Mark]]:
    """Give allocations and marks from one profile, in time order."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    results = profiler.profiler.kineto_results
    events: list[Allocation] = []
    stack = list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        extra: Any = event.extra_fields  # a union of one type per tag, which the annotations do not tie to the tag
        if event.tag == _EventType.Allocation and extra.device.type == "cpu":
            events.append((event.start_time_ns, extra.ptr or 0, extra.alloc_size))
    marks = [
        (event.start_ns(), event.name().removeprefix(_MARK))
        for event in results.events()
        if event.name().startswith(_MARK)
    ]
    return sorted(events), sorted(marks)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.lower().startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"


PLUGIN = Cpu
