"""The largest batch, sequence or depth that fits a budget, per strategy, found by real trials."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckbench.compare import Row
from ckbench.config import MAX_LAYERS, RunConfig, StrategySpec
from ckbench.errors import ConfigError, NothingFits, PlanError
from ckbench.estimating import estimate_configs
from ckbench.forecast import planner_for
from ckbench.launch import Launcher
from ckbench.planning import Planner
from ckbench.records import Record
from ckbench.session import Job, Session, measure_job, open_store, open_study_device, store_record
from ckbench.study import Study
from ckbench.table import Column, Table
from ckbench.units import UNKNOWN, format_bytes, format_count, format_mib

AXES = {
    "batch": ("train.batch_size", 1, 1_000_000),
    "seq-len": ("train.seq_len", 64, 10_000_000),
    "layers": ("model.n_layers", 1, MAX_LAYERS),
}
"""Per axis: the key, the step between sizes, and the largest size that is tried."""
GROWTH = 4
"""A guess goes at most this much beyond the largest size known to fit: a straight line through two small sizes may
mislead, and a trial far too large takes long to fail."""
NEEDS_ROOM = ("oom", "killed")

Weigh = Callable[[int], int | None]
"""Bytes that a size needs, None where it did not run for want of memory."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search ended with: the largest size that fits (0: none does) and the next one, which does not."""

    size: int
    size_bytes: int | None
    next_size: int | None
    """None where the axis itself ended."""
    next_bytes: int | None
    """None where the next size ran out of memory, or no plan fits it."""
    n_trials: int


def search(weigh: Weigh, *, start: int, step: int, most: int, budget_bytes: int | None) -> Found:
    """Find the largest multiple of ``step`` up to ``most`` whose need is within the budget.

    Assumes that a larger size never needs less. The answer rests on trials of both neighbours of the limit, whatever
    the guesses between were; guesses come from a straight line through the two largest sizes that fit, since peaks
    grow about linearly along every axis, and from halving where the line does not settle it.
    """
    needs: dict[int, int | None] = {}

    def fits(n: int) -> bool:
        needed = needs[n] = weigh(n * step)
        return needed is not None and (budget_bytes is None or needed <= budget_bytes)

    last = most // step
    low, high = 0, last + 1
    guess = max(1, min(round(start / step), last))
    fitting: list[int] = []
    while high - low > 1:
        width = high - low
        if fits(guess):
            low = guess
            fitting.append(guess)
        else:
            high = guess
        if high - low <= 1:
            break
        on_line = _on_line(fitting, needs, budget_bytes)
        if on_line is not None and (high > last or high - low < width / 2 or len(needs) % 2):
            guess = on_line
        elif high > last:
            guess = 2 * low
        else:
            guess = (low + high) // 2
        guess = max(low + 1, min(guess, high - 1, GROWTH * max(low, 1)))
    known = needs.get(high)
    return Found(
        size=low * step,
        size_bytes=needs.get(low),
        next_size=high * step if high <= last else None,
        next_bytes=known,
        n_trials=len(needs),
    )


def _on_line(fitting: list[int], needs: dict[int, int | None], budget_bytes: int | None) -> int | None:
    """Guess where a line through the two largest fitting sizes meets the budget."""
    if budget_bytes is None or len(fitting) < 2:
        return None
    first, second = sorted(fitting)[-2:]
    first_bytes, second_bytes = needs[first], needs[second]
    if first_bytes is None or second_bytes is None or second_bytes <= first_bytes:
        return None
    return second + int((budget_bytes - second_bytes) * (second - first) / (second_bytes - first_bytes))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One strategy's largest size, and a measured trial there."""

    strategy: str
    found: Found
    record: Record | None
    failure: str | None = None
    """Why the search under this strategy ended without an answer."""


def find_largest(
    study: Study,
    axis: str,
    *,
    budget_bytes: int | None,
    step: int | None,
    out: Path,
    launcher: Launcher,
    tell: Callable[[str], None],
) -> tuple[list[Answer], Session]:
    """Search the axis by trials under every strategy of a study, then measure each at its largest size.

    Without a budget the device itself is the limit. Raises ConfigError for a study with a grid, for a processor
    without a budget, and where the sizes cannot be trained at all; NothingFits where no strategy fits at any size.
    """
    device, points, notes = open_study_device(study, launcher)
    kind = str(device["label"]).partition(":")[0]
    if budget_bytes is None and kind != "cuda":
        raise ConfigError("without a GPU memory has no end of its own; give --budget, for example --budget 2GiB")

    planner = planner_for(device, launcher)

    def weigh(config: RunConfig) -> int | None:
        planned = _planned(planner, config)
        if planned is None:
            return None
        record = launcher.run(_briefly(planned), 0, lambda phase: None)
        if record.status not in ("ok", *NEEDS_ROOM):
            raise ConfigError(f"ended {record.status}: {record.message}")
        return needed_bytes(record)

    answers = []
    with open_store(out, f"{study.name}-max-{axis}", device, notes) as (session, results):
        search = _Search(study, axis, kind, device["run_device"], budget_bytes, step, weigh, tell)
        for order, spec in enumerate(search.strategies):
            found, failure = search.run(spec)
            record = None
            if found.size and failure is None:
                config = planner.planned(search.config(spec, found.size))
                job = Job(config=config, round=0, aliases=(), place=f"{axis} {found.size}")
                record = measure_job(job, order, session, launcher, lambda phase: None)
                store_record(record, session, results)
            answers.append(Answer(strategy=spec.label, found=found, record=record, failure=failure))
    return _some_fit(answers, axis), session


def estimate_largest(
    study: Study,
    axis: str,
    kind: str,
    *,
    budget_bytes: int,
    card: str | None,
    step: int | None,
    launcher: Launcher,
    tell: Callable[[str], None],
) -> list[Answer]:
    """Search the axis by estimates for ``cuda`` or ``cpu``: no step is run, so there is no throughput.

    Raises ConfigError where a strategy cannot be estimated, and as ``find_largest``.
    """

    planner = Planner(kind, launcher, card=card)

    def weigh(config: RunConfig) -> int | None:
        planned = _planned(planner, config)
        if planned is None:
            return None
        (made,) = estimate_configs([planned], kind, launcher, card, lambda _made: None)
        if made.reason is not None:
            raise ConfigError(f"cannot be estimated: {made.reason}")
        known = [n for n in (made.peak_reserved_bytes, made.needed_bytes()) if n is not None]
        return max(known)

    search = _Search(study, axis, kind, kind, budget_bytes, step, weigh, tell)
    answers = []
    for spec in search.strategies:
        found, failure = search.run(spec)
        answers.append(Answer(strategy=spec.label, found=found, record=None, failure=failure))
    return _some_fit(answers, axis)


def _planned(planner: Planner, config: RunConfig) -> RunConfig | None:
    """Give a config with the planner's plan where it needs one; None where no plan fits the strategy's own budget."""
    try:
        return planner.planned(config)
    except NothingFits:
        return None
    except PlanError as error:
        raise ConfigError(str(error)) from None


class _Search:
    """One axis of one study: makes the configs, asks what they need, and tells people on the way."""

    def __init__(
        self,
        study: Study,
        axis: str,
        kind: str,
        device: str,
        budget_bytes: int | None,
        step: int | None,
        weigh: Callable[[RunConfig], int | None],
        tell: Callable[[str], None],
    ) -> None:
        self.study, self.axis, self.kind, self.device = study, axis, kind, device
        self.budget_bytes, self.weigh, self.tell = budget_bytes, weigh, tell
        self.key, usual_step, self.most = AXES[axis]
        self.step = step or usual_step
        points = study.points(kind)
        if len(points) > 1:
            raise ConfigError(f"{study.source}: --max varies {self.key} itself; take vary out of the study")
        if self.step > self.most:
            raise ConfigError(f"--step {self.step} is beyond the largest {axis} that is tried, {self.most}")
        self.strategies = points[0].strategies
        self.start = _start(points[0].config(self.strategies[0]), self.key)
        for size in (self.step, 2 * max(self.start, self.step)):  # what cannot vary is known before the first trial
            for spec in self.strategies:
                try:
                    self.config(spec, size)
                except ConfigError as error:
                    raise ConfigError(f"{axis} cannot vary in this study: with {size}, {error}") from None

    def config(self, spec: StrategySpec, size: int) -> RunConfig:
        """Give the trial of a strategy at a size."""
        at_size = replace(self.study, overrides=(*self.study.overrides, (self.key, size)))
        point = at_size.points(self.kind)[0]
        return replace(point, run=point.run.model_copy(update={"device": self.device})).config(spec)

    def run(self, spec: StrategySpec) -> tuple[Found, str | None]:
        """Find the largest size that fits under one strategy, or say what ended the search."""
        try:
            return self._search(spec), None
        except ConfigError as error:
            nothing = Found(size=0, size_bytes=None, next_size=None, next_bytes=None, n_trials=0)
            self.tell(f"{spec.label}: {error}")
            return nothing, str(error)

    def _search(self, spec: StrategySpec) -> Found:
        def weigh(size: int) -> int | None:
            try:
                needed = self.weigh(self.config(spec, size))
            except ConfigError as error:
                raise ConfigError(f"{self.axis} {size} {error}") from None
            verdict = "does not fit" if needed is None else f"needs {format_bytes(needed)}"
            self.tell(f"{spec.label}: {self.axis} {size} {verdict}")
            return needed

        return search(weigh, start=self.start, step=self.step, most=self.most, budget_bytes=self.budget_bytes)


def _some_fit(answers: list[Answer], axis: str) -> list[Answer]:
    """Give the answers back, unless no strategy fits at all."""
    failed = [answer for answer in answers if answer.failure is not None]
    if any(answer.found.size for answer in answers):
        return answers
    if len(failed) == len(answers):
        raise ConfigError([f"{answer.strategy}: {answer.failure}" for answer in failed])
    least = min((a.found.next_bytes for a in answers if a.found.next_bytes is not None), default=None)
    smallest = f"; the smallest size needs {format_bytes(least)}" if least is not None else ""
    raise NothingFits(f"no strategy fits at any {axis}{smallest}")


def needed_bytes(record: Record) -> int | None:
    """Give what a trial needs of a device: what its allocator had to hold, or the peak where nothing else is known."""
    if record.status != "ok":
        return None
    held = [record.peak_reserved_bytes, record.peak_allocated_bytes, record.first_step_peak_bytes]
    known = [n_bytes for n_bytes in held if n_bytes is not None]
    return max(known) if known else None


def _start(config: RunConfig, key: str) -> int:
    section, _, name = key.partition(".")
    size = getattr(getattr(config, section), name, None)
    if not isinstance(size, int):
        raise ConfigError(f"this study has no {key} to vary")
    return size


def _briefly(config: RunConfig) -> RunConfig:
    """Ask for no more than the memory figures need: the first step, a steady one, and no proof."""
    run = config.run.model_copy(
        update={"warmup_steps": 0, "min_steps": 1, "max_steps": 1, "rounds": 1, "max_rounds": None, "parity": False}
    )
    return config.model_copy(update={"run": run})


def table(answers: list[Answer], axis: str, session: Session | None, budget_bytes: int | None) -> Table:
    """Lay the answers out; without a session they are estimates."""
    base = next((a for a in answers if a.strategy == "none" and a.found.size), None)
    limit = "the device's memory" if budget_bytes is None else format_bytes(budget_bytes)
    if session is None:
        header = [f"largest {axis} within {limit}, estimated: no step was run"]
    else:
        header = [
            f"largest {axis} within {limit}, by trials of it and of the next size",
            f"device: {session.device['name']}",
            *session.notes,
            "tokens/s: one trial each at its largest size; `ckbench run` compares strategies at one size",
        ]
    rows = [
        Row(values=values, rounds={}, group="", records=[])
        for values in (answer_json(answer, axis, base) for answer in answers)
    ]
    return Table(
        header=header, columns=_columns(axis), rows=rows, failures=list(_failures(answers)), doubts=[], skipped=[]
    )


def _failures(answers: list[Answer]) -> Iterator[str]:
    for answer in answers:
        if answer.failure is not None:
            yield f"{answer.strategy}: {answer.failure}"
        if answer.record is not None and answer.record.status != "ok":
            yield f"{answer.strategy}: {answer.record.status}: {answer.record.message}"


def _columns(axis: str) -> list[Column]:
    def text(key: str, write: Callable[[Any], str]) -> Callable[[dict[str, Any]], str]:
        return lambda values: UNKNOWN if values[key] is None else write(values[key])

    return [
        Column(key="strategy", head="strategy", text=lambda v: str(v["strategy"]), priority=0, is_number=False),
        Column(
            key="largest",
            head=f"largest {axis}",
            text=lambda v: str(v["largest"] or (UNKNOWN if v["status"] == "failed" else "none fits")),
            priority=1,
        ),
        Column(key="times_none", head="x none", text=text("times_none", "{:.2f}".format), priority=3),
        Column(key="needed_bytes", head="needs MiB", text=text("needed_bytes", format_mib), priority=2),
        Column(key="next_size", head="next", text=text("next_size", str), priority=5),
        Column(
            key="next_bytes",
            head="next needs MiB",
            text=lambda v: (
                "oom" if v["next_bytes"] is None and v["next_size"] is not None else format_mib(v["next_bytes"])
            ),
            priority=6,
        ),
        Column(key="tokens_per_s", head="tokens/s", text=text("tokens_per_s", format_count), priority=2),
        Column(key="trials", head="trials", text=text("trials", str), priority=7),
    ]


def answer_json(answer: Answer, axis: str, base: Answer | None) -> dict[str, Any]:
    """Give one answer as plain data."""
    found, record = answer.found, answer.record
    return {
        "strategy": answer.strategy,
        "axis": axis,
        "largest": found.size or None,
        "needed_bytes": found.size_bytes,
        "next_size": found.next_size,
        "next_bytes": found.next_bytes,
        "times_none": found.size / base.found.size if base is not None and found.size else None,
        "tokens_per_s": None if record is None else record.tokens_per_s,
        "step_s_median": None if record is None else record.step_s_median,
        "parity": None if record is None else record.parity,
        "status": _status(answer),
        "trials": found.n_trials,
    }


def _status(answer: Answer) -> str:
    if answer.failure is not None:
        return "failed"
    if answer.record is not None:
        return answer.record.status
    return "estimated" if answer.found.size else "none fits"
