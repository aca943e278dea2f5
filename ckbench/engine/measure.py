"""The order of one measurement: warm up, time, read peaks, weigh, count, prove. No torch here.

Everything timed runs before anything that could disturb it, and parity comes last, so that it can
raise no figure.
"""

import statistics
from collections.abc import Callable
from typing import Any

from ckbench.config import RunConfig
from ckbench.devices.base import Device, StepTimes, Subject
from ckbench.statistics import (
    count_outliers,
    drift,
    median_absolute_deviation,
    median_interval,
    relative_half_width,
    still_warming_up,
)

MAX_WARMUP_STEPS = 50
"""Steps beyond those asked for, to wait for an executed update (fp16 scaling skips some) and steady times."""
CHECK_EVERY = 5
"""Timed steps between two looks at the interval."""

Progress = Callable[[str], None]


class NoUpdateExecuted(RuntimeError):
    """Gradient scaling skipped every update, so there is no steady state to measure."""


def measure(
    subject: Subject, device: Device, config: RunConfig, round_number: int, progress: Progress
) -> dict[str, Any]:
    """Give the record fields of one trial.

    Round 0 takes memory, counts and parity as well as time; later rounds take time alone.
    """
    full = round_number == 0
    fields: dict[str, Any] = dict(subject.describe())
    progress("warm-up")
    first_step = _warm_up(subject, device, config, weigh_first=full)
    fields["warmup_steps_done"] = subject.executed_steps + subject.skipped_steps
    progress("timing")
    device.reset_peaks()
    times, reason = time_steps(subject, device, config)
    peaks = device.peaks()
    fields.update(summarise(times, reason, config.train.tokens_per_step()))
    fields["skipped_optimizer_steps"] = subject.skipped_steps
    if full:
        progress("memory")
        fields.update(device.weigh(subject))
        fields["first_step_peak_bytes"] = first_step.get("peak_allocated_bytes")
        progress("counts")
        fields.update(subject.count())
    fields.update(peaks)
    if full and config.run.parity:
        progress("parity")
        fields.update(subject.parity())
    elif full:
        fields["parity"] = "none"
    return fields


def _warm_up(subject: Subject, device: Device, config: RunConfig, *, weigh_first: bool) -> dict[str, Any]:
    """Run untimed steps until the asked number is done, one update was really executed, and steps have
    stopped getting faster. With none asked for, only the wait for an executed update remains."""
    first_step: dict[str, Any] = {}
    clock = device.clock()
    seconds: list[float] = []
    asked = config.run.warmup_steps
    for i in range(MAX_WARMUP_STEPS + asked):
        is_warm = asked == 0 or not still_warming_up(seconds)
        if i >= asked and subject.executed_steps > 0 and is_warm:
            break
        if i == 0 and weigh_first:
            first_step = device.weigh(subject)
            continue
        subject.step(clock)
        seconds += [times.step_s for times in clock.collect()]
    if subject.executed_steps == 0:
        raise NoUpdateExecuted(f"no optimizer step was executed in {subject.skipped_steps} warm-up steps")
    return first_step


def time_steps(subject: Subject, device: Device, config: RunConfig) -> tuple[list[StepTimes], str]:
    """Time steps until the median is known to the asked precision, or a cap is reached."""
    run = config.run
    clock = device.clock()
    times: list[StepTimes] = []
    spent_s = 0.0
    while True:
        window = min(CHECK_EVERY, max(1, run.max_steps - len(times)))
        for _ in range(window):
            subject.step(clock)
        fresh = clock.collect()
        times += fresh
        spent_s += sum(step.step_s for step in fresh)
        if len(times) >= run.max_steps:
            return times, "max_steps"
        if len(times) < run.min_steps:
            continue
        half = relative_half_width([step.step_s for step in times])
        if half is not None and half <= run.precision_target:
            return times, "precision"
        if spent_s >= run.max_seconds:
            return times, "max_seconds"


def summarise(times: list[StepTimes], reason: str, tokens_per_step: int) -> dict[str, Any]:
    """Give the record fields of time from raw samples."""
    samples = [step.step_s for step in times]
    middle, low, high = median_interval(samples)
    drifted = drift(samples)
    return {
        "step_samples_s": samples,
        "step_s_median": middle,
        "step_s_low": low,
        "step_s_high": high,
        "step_s_mad": median_absolute_deviation(samples),
        "samples": len(samples),
        "outliers": count_outliers(samples),
        "drift_ratio": drifted[0] if drifted else None,
        "drift_p_value": drifted[1] if drifted else None,
        "stop_reason": reason,
        "forward_s": statistics.median(step.forward_s for step in times),
        "backward_s": statistics.median(step.backward_s for step in times),
        "optimizer_s": statistics.median(step.optimizer_s for step in times),
        "tokens_per_s": tokens_per_step / middle if middle > 0 else None,
    }
