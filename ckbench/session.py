"""Run a study: one trial after the other, rounds alternating, each record kept the moment it exists."""

import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from ckbench import store
from ckbench.compare import Row, compare
from ckbench.config import RunConfig, StrategySpec
from ckbench.engine.worker import blank_record
from ckbench.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TRIAL_FAILED, NothingFits, PlanError
from ckbench.forecast import Forecast, planner_for
from ckbench.launch import Launcher
from ckbench.pace import Pace, work_of
from ckbench.plan import Plan, plan_from_json
from ckbench.planning import Planner
from ckbench.records import FAILED, Record
from ckbench.store import ResultStore
from ckbench.study import Point, Study

FINISHED = ("ok", "oom")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One trial to run, and the specs that share its plan and so its figures."""

    config: RunConfig
    round: int
    aliases: tuple[StrategySpec, ...]
    place: str
    """What varies, for people: ``n_layers 4``."""
    plan: Plan | None = None
    """What the strategy means now, where that is known before the model is built: a file of a plan may have changed."""


class Watcher(Protocol):
    """Told how a session goes; the command line draws a progress bar from it."""

    def begin(self, n_jobs: int, n_resumed: int) -> None:
        """Hear how many trials there are, and how many are there from before."""
        ...

    def trial(self, job: Job, phase: str) -> None:
        """Hear that a trial has entered a phase."""
        ...

    def done(self, job: Job, record: Record, left_s: float | None) -> None:
        """Hear that a trial has ended, and about how long the rest will take."""
        ...

    def say(self, line: str) -> None:
        """Hear something that people should know at once."""
        ...


@dataclass(kw_only=True)
class Session:
    """What a session has produced."""

    session_id: str
    path: Path
    device: dict[str, Any]
    notes: list[str]
    records: list[dict[str, Any]] = field(default_factory=list)
    is_interrupted: bool = False


def open_study_device(study: Study, launcher: Launcher) -> tuple[dict[str, Any], list[Point], list[str]]:
    """Find the study's device, and give its facts, the points for it, and what the header must say.

    ``run_device`` among the facts is what trials are told: the device that auto stood for, or the script.
    """
    asked = study.device()
    device = launcher.probe(asked)
    device["run_device"] = asked if asked.startswith("replay:") else device["label"]
    kind = str(device["label"]).partition(":")[0]
    points = study.points(kind)
    notes = []
    if kind == "cpu" and study.cpu_notes():
        notes.append(f"on_cpu: this file is written for a GPU; on a CPU it measures {', '.join(study.cpu_notes())}")
    return device, points, notes


def run_session(
    study: Study,
    *,
    out: Path,
    launcher: Launcher,
    watcher: Watcher,
    resume: bool = False,
    retry_oom: bool = False,
    estimates: bool = True,
    skip_oom: bool = False,
    planner: Planner | None = None,
) -> Session:
    """Measure every point of a study under every strategy. Ctrl-C ends it; what is finished is kept.

    ``resume`` goes on with an earlier session of the same study: finished trials are skipped, and what did not
    fit counts as finished unless ``retry_oom``. ``estimates`` puts an estimated peak beside each measured one and warns
    of what cannot fit; ``skip_oom`` does not start that. ``planner`` finds the plans of ``budget:SIZE``; left out, one
    of the session's own.
    Raises CkbenchError before the first trial where something cannot work at all.
    """
    device, points, notes = open_study_device(study, launcher)
    jobs = list(plan_jobs(points, device["run_device"]))
    with ResultStore(out, study.name, uuid.uuid4().hex[:8]) as results:
        fresh = Earlier(session_id=results.session_id)
        earlier = (_earlier(out, jobs, device, retry_oom) if resume else None) or fresh
        results.continue_session(earlier.session_id)
        session = Session(
            session_id=earlier.session_id, path=results.path, device=device, notes=notes, records=earlier.records
        )
        failed, order = set(earlier.no_room), 0
        planner = planner or planner_for(device, launcher)
        forecast = Forecast(device, launcher, planner) if estimates or skip_oom else None
        try:
            for batch in itertools.chain([jobs], _more_rounds(points, device["run_device"], session)):
                todo = [(order + i, job) for i, job in enumerate(batch) if not earlier.has_finished(job)]
                order += len(batch)
                watcher.begin(len(todo), len(batch) - len(todo))
                _complete(batch, earlier, session, results)
                _run_jobs(todo, failed, session, results, launcher, watcher, planner, forecast, skip_oom)
        except KeyboardInterrupt:
            session.is_interrupted = True
    return session


def plan_jobs(points: list[Point], device_label: str, rounds: range | None = None) -> Iterator[Job]:
    """List the trials: point by point; within a point rounds alternate A B C, C B A.

    Specs with the same plan are measured once. ``rounds`` asks for others than the study's own.
    """
    for point in points:
        resolved = point.plans()
        run = point.run.model_copy(update={"device": device_label})
        firsts = [spec for spec, _, alias in resolved if alias is None]
        place = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in point.varied)
        plan_of = {spec.label: plan for spec, plan, _ in resolved}
        for round_number in range(run.rounds) if rounds is None else rounds:
            for spec in firsts if round_number % 2 == 0 else reversed(firsts):
                yield Job(
                    config=replace(point, run=run).config(spec),
                    round=round_number,
                    aliases=tuple(other for other, _, alias in resolved if alias is not None and alias == spec),
                    place=place,
                    plan=plan_of[spec.label],
                )


def _more_rounds(points: list[Point], device_label: str, session: Session) -> Iterator[list[Job]]:
    """Give one more round at a time for the points whose slowdowns are not yet known as well as asked."""
    for number in range(min(p.run.rounds for p in points), max(p.run.max_rounds or 0 for p in points)):
        rows = compare(session.records).rows
        vague = {row.values["configuration_id"] for row in rows if is_vague(row)}
        more = []
        for point in points:
            jobs = list(plan_jobs([point], device_label, range(number, number + 1)))
            if point.run.rounds <= number < (point.run.max_rounds or 0) and any(
                job.config.configuration_id() in vague for job in jobs
            ):
                more += jobs
        if more:
            yield more


def is_vague(row: Row) -> bool:
    """Tell whether a row's slowdown is known less precisely than its study asked."""
    ratio, low, high = (row.values[key] for key in ("slowdown_ratio", "slowdown_low", "slowdown_high"))
    if not row.is_ok or ratio is None:
        return False
    return low is None or high is None or bool((high - low) / 2 / ratio > row.values["run"]["precision_target"])


def _run_jobs(
    jobs: list[tuple[int, Job]],
    failed: set[str],
    session: Session,
    results: ResultStore,
    launcher: Launcher,
    watcher: Watcher,
    planner: Planner,
    forecast: Forecast | None,
    skip_oom: bool,
) -> None:
    """Run jobs, each with its place in the whole order; add to ``failed`` the configurations that did not end ok."""
    pace = Pace()
    keys = [job.config.configuration_id() for _, job in jobs]

    def left_s(position: int) -> float:
        rest = []
        for key, (_, job) in zip(keys[position + 1 :], jobs[position + 1 :], strict=True):
            made = forecast.known(key) if forecast is not None else None
            if key in failed or (skip_oom and forecast is not None and forecast.warning(made) is not None):
                continue
            rest.append((key, work_of(job.config, made)))
        return pace.left_s(rest)

    for position, (order, job) in enumerate(jobs):
        configuration = keys[position]
        if configuration in failed:
            continue  # what does not fit, or fails, does so in every round
        estimate, warning, refusal = None, None, None
        if planner.decides(job.config):
            watcher.trial(job, "plan")
            try:
                job = replace(job, config=planner.planned(job.config))
            except (NothingFits, PlanError) as error:
                refusal = str(error)
        if forecast is not None and refusal is None:
            watcher.trial(job, "estimate")
            estimate = forecast.of(job.config, (other.config for _, other in jobs))
            warning = forecast.warning(estimate)
            if warning is not None and job.round == 0 and not skip_oom:
                watcher.say(f"{job.config.strategy.label}: {warning}")
        if refusal is not None or (warning is not None and skip_oom):
            record = _skipped(job, order, session, refusal or str(warning))
        else:
            begun = time.monotonic()
            record = measure_job(job, order, session, launcher, lambda phase, job=job: watcher.trial(job, phase))  # type: ignore[misc]
            pace.note(configuration, time.monotonic() - begun, work_of(job.config, estimate))
        record.estimate_peak_bytes = estimate.peak_allocated_bytes if estimate is not None else None
        _keep(record, job, session, results)
        if record.status != "ok":
            failed.add(configuration)
        watcher.done(job, record, left_s(position))


def _skipped(job: Job, order: int, session: Session, why: str) -> Record:
    """Make the record of a trial that was not started."""
    record = blank_record(job.config, job.round)
    record.status, record.message = "skipped", f"not started: {why}"
    record.started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    record.session_id, record.order, record.study_notes = session.session_id, order, session.notes
    record.environment = dict(session.device["facts"])
    record.device, record.device_name = session.device["label"], session.device["name"]
    return record


def measure_job(job: Job, order: int, session: Session, launcher: Launcher, progress: Callable[[str], None]) -> Record:
    """Run one trial and note in its record what only the session knows."""
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    record = launcher.run(job.config, job.round, progress)
    record.started_at, record.session_id, record.order = started_at, session.session_id, order
    record.study_notes = session.notes
    if not record.environment.get("code"):
        record.environment = {**session.device["facts"], **record.environment}
        if job.config.run.threads is not None:
            record.environment["threads"] = job.config.run.threads
    if not record.device_name:
        record.device, record.device_name = session.device["label"], session.device["name"]
    return record


@contextlib.contextmanager
def open_store(out: Path, name: str, device: dict[str, Any], notes: list[str]) -> Iterator[tuple[Session, ResultStore]]:
    """Open a results folder for a new session."""
    with ResultStore(out, name, uuid.uuid4().hex[:8]) as results:
        yield (
            Session(session_id=results.session_id, path=results.path, device=device, notes=notes),
            results,
        )


def _keep(record: Record, job: Job, session: Session, results: ResultStore) -> None:
    """Append a record, and one for each spec that shares its plan."""
    for each in (record, *_twins(record, job)):
        store_record(each, session, results)


def _twins(record: Record, job: Job) -> list[Record]:
    """Make the records of the specs that share a job's plan."""
    return [
        replace(
            record,
            strategy=spec.label,
            strategy_spec=spec.model_dump(mode="json"),
            configuration_id=job.config.model_copy(update={"strategy": spec}).configuration_id(),
            alias_of=record.strategy,
        )
        for spec in job.aliases
    ]


def store_record(record: Record, session: Session, results: ResultStore) -> None:
    """Append a record under a name of its own."""
    record.record_id = uuid.uuid4().hex[:16]
    results.append(record)
    session.records.append(record.to_json())


Key = tuple[str, int]


def _key(config: RunConfig, round_number: int) -> Key:
    return config.configuration_id(), round_number


@dataclass(kw_only=True)
class Earlier:
    """What is there of a session to go on with."""

    session_id: str
    records: list[dict[str, Any]] = field(default_factory=list)
    finished: dict[Key, dict[str, Any]] = field(default_factory=dict)
    """Record of every trial that need not be run again."""
    no_room: set[str] = field(default_factory=set)
    """Configurations that ended oom in some round: what did not fit will not fit in another."""

    def has_finished(self, job: Job) -> bool:
        """Tell whether a job need not run."""
        return _key(job.config, job.round) in self.finished or job.config.configuration_id() in self.no_room


def _earlier(out: Path, jobs: list[Job], device: dict[str, Any], retry_oom: bool) -> Earlier | None:
    """Find what is already there for the same configs, plans, versions, device and code.

    Takes the newest session that has any of it, None where there is none. Finished is what ended ok or, unless
    ``retry_oom``, oom; failed trials are tried again.
    """
    records, _ = store.read(out)
    wanted = {job.config.configuration_id(): job.plan for job in jobs}
    facts = device["facts"]
    decisive = ["torch", "code", "allocator"]
    if any(job.config.run.threads is None for job in jobs):  # a given number is part of the configuration
        decisive.append("threads")
    usable = [
        record
        for record in records
        if record["configuration_id"] in wanted
        and record["session_id"]
        and record["device_name"] == device["name"]
        and all(record["environment"].get(key) == facts.get(key) for key in decisive)
        and _has_plan(record, wanted[record["configuration_id"]])
    ]
    if not usable:
        return None
    newest = max(usable, key=lambda record: record["started_at"])["session_id"]
    newest_try: dict[Key, dict[str, Any]] = {}
    for record in sorted(usable, key=lambda record: record["started_at"]):
        if record["session_id"] == newest:
            newest_try[(record["configuration_id"], record["round"])] = record
    done = ("ok",) if retry_oom else FINISHED
    return Earlier(
        session_id=newest,
        records=[record for record in records if record["session_id"] == newest],
        finished={key: record for key, record in newest_try.items() if record["status"] in done},
        no_room={r["configuration_id"] for r in newest_try.values() if r["status"] == "oom" and "oom" in done},
    )


def _has_plan(record: dict[str, Any], plan: Plan | None) -> bool:
    """Tell whether a record is of this plan, as far as both are known."""
    return plan is None or record["plan"] is None or plan_from_json(record["plan"]) == plan


def _complete(jobs: list[Job], earlier: Earlier, session: Session, results: ResultStore) -> None:
    """Append the twins of finished trials that are missing because the tool was killed between two lines."""
    there = {(record["configuration_id"], record["round"]) for record in earlier.records}
    for job in jobs:
        record = earlier.finished.get(_key(job.config, job.round))
        for twin in _twins(Record(**record), job) if record is not None else ():
            if (twin.configuration_id, twin.round) not in there:
                store_record(twin, session, results)


def exit_code(session: Session, *, strict: bool) -> int:
    """Give 130 after an interrupt, 1 where a trial failed (with ``strict`` also oom), else 0."""
    if session.is_interrupted:
        return EXIT_INTERRUPTED
    bad = {*FAILED, "oom"} if strict else set(FAILED)
    newest = {(r["configuration_id"], r["round"]): r["status"] for r in session.records}  # a retry replaces
    return EXIT_TRIAL_FAILED if bad & set(newest.values()) else EXIT_OK
