"""Run a study: one trial after the other, rounds alternating, each record kept the moment it exists."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from ckbench import store
from ckbench.compare import Row, compare
from ckbench.config import RunConfig, StrategySpec
from ckbench.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TRIAL_FAILED
from ckbench.launch import Launcher
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
    study: Study, *, out: Path, launcher: Launcher, watcher: Watcher, resume: bool = False, retry_oom: bool = False
) -> Session:
    """Measure every point of a study under every strategy. Ctrl-C ends it; what is finished is kept.

    ``resume`` goes on with an earlier session of the same study: finished trials are skipped, and what did not
    fit counts as finished unless ``retry_oom``.
    Raises CkbenchError before the first trial where something cannot work at all.
    """
    device, points, notes = open_study_device(study, launcher)
    jobs = list(plan_jobs(points, device["run_device"]))
    session_id, finished = _resumable(out, jobs, device, retry_oom) if resume else ("", set())
    session_id = session_id or uuid.uuid4().hex[:8]
    with ResultStore(out, study.name, session_id) as results:
        session = Session(session_id=session_id, path=results.path, device=device, notes=notes)
        todo = [job for job in jobs if _key(job.config, job.round) not in finished]
        watcher.begin(len(todo), len(jobs) - len(todo))
        try:
            _run_jobs(todo, session, results, launcher, watcher)
            for more in _more_rounds(points, device["run_device"], session):
                watcher.begin(len(more), 0)
                _run_jobs(more, session, results, launcher, watcher)
        except KeyboardInterrupt:
            session.is_interrupted = True
    if resume:
        earlier, _ = store.read(out)
        session.records = [record for record in earlier if record["session_id"] == session_id]
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
        for round_number in range(run.rounds) if rounds is None else rounds:
            for spec in firsts if round_number % 2 == 0 else reversed(firsts):
                yield Job(
                    config=replace(point, run=run).config(spec),
                    round=round_number,
                    aliases=tuple(other for other, _, alias in resolved if alias is not None and alias == spec),
                    place=place,
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


def _run_jobs(jobs: list[Job], session: Session, results: ResultStore, launcher: Launcher, watcher: Watcher) -> None:
    failed = {record["configuration_id"] for record in session.records if record["status"] != "ok"}
    begun = time.monotonic()
    done, before = 0, len(session.records)
    for position, job in enumerate(jobs):
        configuration = job.config.configuration_id()
        if configuration in failed:
            continue  # what does not fit, or fails, does so in every round
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = launcher.run(job.config, job.round, lambda phase, job=job: watcher.trial(job, phase))  # type: ignore[misc]
        record.started_at, record.session_id, record.order = started_at, session.session_id, before + position
        record.study_notes = session.notes
        if not record.environment.get("code"):
            record.environment = {**session.device["facts"], **record.environment}
            if job.config.run.threads is not None:
                record.environment["threads"] = job.config.run.threads
        if not record.device_name:
            record.device, record.device_name = session.device["label"], session.device["name"]
        _keep(record, job, session, results)
        if record.status != "ok":
            failed.add(configuration)
        done += 1
        left = sum(1 for other in jobs[position + 1 :] if other.config.configuration_id() not in failed)
        watcher.done(job, record, (time.monotonic() - begun) / done * left)


def _keep(record: Record, job: Job, session: Session, results: ResultStore) -> None:
    """Append a record, and one for each spec that shares its plan."""
    twins = [record]
    for spec in job.aliases:
        config = job.config.model_copy(update={"strategy": spec})
        twins.append(
            replace(
                record,
                strategy=spec.label,
                strategy_spec=spec.model_dump(mode="json"),
                configuration_id=config.configuration_id(),
                alias_of=record.strategy,
            )
        )
    for twin in twins:
        twin.record_id = uuid.uuid4().hex[:16]
        results.append(twin)
        session.records.append(twin.to_json())


Key = tuple[str, int]


def _key(config: RunConfig, round_number: int) -> Key:
    return config.configuration_id(), round_number


def _resumable(out: Path, jobs: list[Job], device: dict[str, Any], retry_oom: bool) -> tuple[str, set[Key]]:
    """Find what is already there for the same configs, versions, device and code.

    Gives the session to go on with, the newest one that has any of it, and its finished trials: ok, and
    oom in any round, since what does not fit will not fit again (``retry_oom``: it might). Failed ones are tried again.
    """
    if not out.exists():
        return "", set()
    records, _ = store.read(out)
    wanted = {job.config.configuration_id() for job in jobs}
    facts = device["facts"]
    decisive = ["torch", "code", "allocator"]
    if any(job.config.run.threads is None for job in jobs):  # a given number is part of the configuration
        decisive.append("threads")
    usable = [
        record
        for record in records
        if record["configuration_id"] in wanted
        and record["device_name"] == device["name"]
        and all(record["environment"].get(key) == facts.get(key) for key in decisive)
    ]
    if not usable:
        return "", set()
    newest = max(usable, key=lambda record: record["started_at"])["session_id"]
    newest_try: dict[Key, dict[str, Any]] = {}
    for record in sorted(usable, key=lambda record: record["started_at"]):
        if record["session_id"] == newest:
            newest_try[(record["configuration_id"], record["round"])] = record
    done = ("ok",) if retry_oom else FINISHED
    finished = {key for key, record in newest_try.items() if record["status"] in done}
    no_room = {r["configuration_id"] for r in newest_try.values() if r["status"] == "oom" and "oom" in done}
    finished |= {_key(job.config, job.round) for job in jobs if job.config.configuration_id() in no_room}
    return newest, finished


def exit_code(session: Session, *, strict: bool) -> int:
    """Give 130 after an interrupt, 1 where a trial failed (with ``strict`` also oom), else 0."""
    if session.is_interrupted:
        return EXIT_INTERRUPTED
    bad = {*FAILED, "oom"} if strict else set(FAILED)
    newest = {(r["configuration_id"], r["round"]): r["status"] for r in session.records}  # a retry replaces
    return EXIT_TRIAL_FAILED if bad & set(newest.values()) else EXIT_OK
