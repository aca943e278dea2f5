"""Measure and estimate everything that claims are judged by, into one folder."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckbench import estimating, examples, largest, study
from ckbench.claims.catalogue import ESTIMATED, SEARCHED, STUDIES
from ckbench.claims.drawing import command
from ckbench.claims.evidence import ESTIMATES_NAME
from ckbench.errors import ConfigError, StoreError
from ckbench.launch import Launcher
from ckbench.registry import did_you_mean
from ckbench.session import Session, Watcher, run_session

BUDGET_BYTES = 24 * 2**30
BATCHES = (1, 16, 64)
"""Micro-batches of 1024 tokens at which the largest model is searched for."""
KEPT = ("saved_bytes", "peak_allocated_bytes", "static_bytes", "gradient_bytes", "n_parameters", "reason")

Tell = Callable[[str], None]


def chosen(only: list[str] | None) -> tuple[str, ...]:
    """Give the studies that are asked for, all of them by default. Raises ConfigError for an unknown one."""
    for name in only or ():
        if name not in STUDIES:
            raise ConfigError(
                f"--only {name!r}: no such study{did_you_mean(name, STUDIES)} (have: {', '.join(STUDIES)})"
            )
    return tuple(name for name in STUDIES if not only or name in only)


def measure(
    names: tuple[str, ...],
    *,
    out: Path,
    sets: tuple[str, ...],
    launcher: Launcher,
    watching: Callable[[], AbstractContextManager[Watcher]],
    tell: Tell,
    resume: bool,
) -> list[Session]:
    """Run the studies that are run, one session each. An interrupted one is the last."""
    sessions = []
    for name in names:
        if name in ESTIMATED + SEARCHED:
            continue
        tell(f"study {name}")
        loaded = study.load(examples.path(f"articles/{name}.yaml"), sets=sets)
        with watching() as watcher:
            session = run_session(loaded, out=out, launcher=launcher, watcher=watcher, resume=resume, estimates=False)
        sessions.append(session)
        if session.is_interrupted:
            break
    return sessions


def estimate(names: tuple[str, ...], *, out: Path, launcher: Launcher, tell: Tell) -> Path | None:
    """Estimate the studies that are estimated, for CUDA, and write them beside the records.

    Estimates of studies that were not asked for stay as they are. Gives the file, None where nothing was asked.
    """
    wanted = [name for name in names if name in ESTIMATED + SEARCHED]
    if not wanted:
        return None
    rows: list[dict[str, Any]] = []
    for name in wanted:
        tell(f"estimates of {name}")
        rows += _searched(name, launcher, tell) if name in SEARCHED else _estimated(name, launcher, tell)
    path = out / ESTIMATES_NAME
    facts = launcher.probe("cpu")["facts"]
    made_by = {key: facts.get(key) for key in ("ckbench", "code", "torch")}
    try:
        out.mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
        kept = [row for row in old if row["study"] not in wanted]
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"made_by": made_by, "made_at": stamp, "rows": [*kept, *rows]}
        path.write_text(json.dumps(content, separators=(",", ":")).replace('{"study"', '\n{"study"') + "\n", "utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be written ({error}); remove it, or use --out elsewhere") from None
    return path


def _estimated(name: str, launcher: Launcher, tell: Tell) -> list[dict[str, Any]]:
    loaded = study.load(examples.path(f"articles/{name}.yaml"))
    made = estimating.estimate_study(loaded, "cuda", launcher, None, lambda each: tell(estimating.told(each)))
    return [
        {
            "study": name,
            "command": command(name),
            "strategy": each.config.strategy.label,
            "model": each.config.model.model_dump(mode="json"),
            "train": each.config.train.model_dump(mode="json"),
            **{key: getattr(each.estimate, key) for key in KEPT},
        }
        for each in made
    ]


def _searched(name: str, launcher: Launcher, tell: Tell) -> list[dict[str, Any]]:
    rows = []
    for batch in BATCHES:
        path = examples.path(f"articles/{name}.yaml")
        loaded = study.load(path, sets=(f"train.batch_size={batch}",))
        point = loaded.points("cuda")[0]
        answers = largest.estimate_largest(
            loaded, "layers", "cuda", budget_bytes=BUDGET_BYTES, card=None, step=None, launcher=launcher, tell=tell
        )
        rows += [
            {
                "study": name,
                "command": f"{command(name)} --set train.batch_size={batch}",
                "strategy": answer.strategy,
                "model": point.model.model_dump(mode="json"),
                "train": point.train.model_dump(mode="json"),
                **largest.answer_json(answer, "layers", None),
            }
            for answer in answers
        ]
    return rows
