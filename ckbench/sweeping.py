"""The ranges of ``ckbench sweep``, and how long a grid will take."""

from typing import Any

from ckbench.config import ModelConfig
from ckbench.errors import ConfigError
from ckbench.launch import Launcher
from ckbench.ranges import parse_range, thin
from ckbench.session import Job, open_study_device, plan_jobs
from ckbench.study import Study
from ckbench.units import format_duration

AXES = {
    "layers": "model.n_layers",
    "width": "model.d_model",
    "batch": "train.batch_size",
    "seq-len": "train.seq_len",
    "heads": "model.n_heads",
}


def parse_axes(given: dict[str, str | None], n_points: int | None) -> dict[str, list[Any]]:
    """Read the options of a sweep into axes by dotted key. Raises ConfigError naming the option."""
    axes: dict[str, list[Any]] = {}
    for option, text in given.items():
        if text is None:
            continue
        try:
            values = parse_range(text)
        except ConfigError as error:
            raise ConfigError(f"--{option}: {error}") from None
        axes[AXES[option]] = thin(values, n_points) if n_points else values
    if not axes:
        options = ", ".join(f"--{option}" for option in AXES)
        raise ConfigError(f"nothing to sweep; give at least one of {options}, for example --layers 2..48")
    return axes


def _size(job: Job) -> tuple[int, ...]:
    """Order trials by what they take, as far as the study tells."""
    model, train = job.config.model, job.config.train
    width = model.d_model if isinstance(model, ModelConfig) else 0
    return (model.n_layers or 0, width, train.batch_size, train.seq_len)


def describe(study: Study, launcher: Launcher) -> str:
    """List the grid in the order it will be measured, and time it by one trial of its middle."""
    device, points, notes = open_study_device(study, launcher)
    jobs = list(plan_jobs(points, device["run_device"]))
    lines = [f"study {study.name} on {device['name']}", *notes]
    for point in points:
        place = ", ".join(f"{key} {value}" for key, value in point.varied)
        specs = [spec.label if alias is None else f"{spec.label} (= {alias.label})" for spec, _, alias in point.plans()]
        lines.append(f"  {place}: {', '.join(specs)}")
    sizes = sorted(jobs, key=_size)
    full = next(job for job in sizes[len(sizes) // 2 :] + sizes if job.round == 0)
    record = launcher.run(full.config, 0, lambda phase: None)
    n_full = sum(1 for job in jobs if job.round == 0)
    lines.append(f"{len(points)} points, {len(jobs)} trials")
    if record.status != "ok" or record.trial_s is None:
        lines.append(f"a trial of the middle ended {record.status}, so the time cannot be told: {record.message}")
    else:
        later = launcher.run(full.config, 1, lambda phase: None)
        seconds = n_full * record.trial_s + (len(jobs) - n_full) * (later.trial_s or record.trial_s)
        lines.append(
            f"about {format_duration(seconds)}, judged by two trials of the middle "
            f"({full.config.strategy.label}, {full.place})"
        )
    return "\n".join(lines) + "\n"
