"""ckbench from Python: run a study, load results, without a command line and without printing.

The names are those of the package, ``ckbench.run`` and the like; they load with their first use, so that
``import ckbench`` stays cheap. Everything that a user can cause is a ``ckbench.errors.CkbenchError``.
"""

import contextlib
import dataclasses
import json
import math
import numbers
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckbench import session, store, study
from ckbench.errors import ConfigError
from ckbench.frames import frame
from ckbench.launch import Launcher
from ckbench.marked_yaml import MAX_DEPTH, Marked
from ckbench.progress import opening, outcome
from ckbench.records import Record
from ckbench.study import Study

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["frame", "load", "run"]

Config = str | os.PathLike[str] | Mapping[str, Any] | Study
Tell = Callable[[str], object]


def run(
    config: Config,
    *,
    strategies: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    device: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    retry_oom: bool = False,
    estimates: bool = True,
    skip_oom: bool = False,
    tell: Tell | None = None,
) -> list[Record]:
    """Measure a study and give its records, one per trial (strategy x round x point of the grid), in order.

    ``config`` is the path of a study file, or a mapping as the file holds it, or a Study. ``strategies`` replace
    those of the study: specs as typed (``"every-k:4,skip_last"``) or as mappings. ``device`` is auto, cpu, cuda or
    cuda:N. ``overrides`` replace single keys: ``{"train.batch_size": 4, "run.rounds": 3}``.

    ``out`` is a results folder that keeps the records too, each the moment its trial ends; without it they are only
    given back. ``resume`` goes on with what ``out`` holds of the same study; ``retry_oom`` tries again what did not
    fit.
    ``estimates`` puts an estimated peak into each record; ``skip_oom`` does not start what by its estimate cannot fit.
    ``tell`` is called with one line per trial and per warning, for example ``print``; nothing is printed without it.

    Figures are raw: bytes in fields that end in ``_bytes``, seconds in ``_s``, None for unknown; ``docs/records.md``
    has them all. A trial that fails, or runs out of memory, is a record whose ``status`` says so, not an exception.

    Trials run in processes of their own, which import neither the calling script nor the notebook: a script needs no
    ``if __name__ == "__main__"``, and a model of family custom must live in a module that can be imported.

    Raises ConfigError where the study, a strategy or an override cannot be used, DeviceUnavailable where the device is
    not there, StoreError where ``out`` cannot be written, all before the first trial; and KeyboardInterrupt after
    Ctrl-C (what had finished by then is in ``out``).
    """
    if out is None and (resume or retry_oom):
        raise ConfigError("resume and retry_oom need the results folder of the earlier run; give out")
    if retry_oom and not resume:
        raise ConfigError("retry_oom needs resume=True")
    with _named_as_arguments():
        loaded = _study(config, _specs(strategies), device, overrides or {})
    launcher = Launcher(loaded.points("cuda")[0].run.start_method)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckbench-")) if out is None else out
        done = session.run_session(
            loaded,
            out=Path(folder),
            launcher=launcher,
            watcher=_Told(tell),
            resume=resume,
            retry_oom=retry_oom,
            estimates=estimates,
            skip_oom=skip_oom,
        )
    if done.is_interrupted:
        raise KeyboardInterrupt
    return [Record(**record) for record in done.records]


def load(results: str | os.PathLike[str], *, pooled: bool = False, baseline: str | None = None) -> "pd.DataFrame":
    """Give stored results as a pandas DataFrame: every trial below a folder, or in one ``.jsonl`` file.

    Shape and columns as ``frame`` says: one row per trial, or with ``pooled`` one per strategy and configuration, with
    ratios to ``baseline``. Lines that cannot be used are named in a UserWarning and in ``attrs["not_used"]``; the rest
    is loaded. Raises StoreError where there is no folder or no record in it, and ConfigError for a baseline that is
    not there.
    """
    path = Path(results)
    records, skipped = store.read_some(path, maker="ckbench.run(config, out=...)")
    not_used = [str(skip) for skip in skipped]
    made = frame(records, pooled=pooled, baseline=baseline)
    made.attrs["not_used"] = not_used
    if not_used:
        more = f" and {len(not_used) - 1} more" if len(not_used) > 1 else ""
        warnings.warn(f"not used: {not_used[0]}{more}", UserWarning, stacklevel=2)
    return made


class _Told:
    """Passes on how a session goes, line by line, to whoever wants to know."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell

    def say(self, line: str) -> None:
        if self._tell is not None:
            self._tell(line)

    def begin(self, n_jobs: int, n_resumed: int) -> None:
        self.say(opening(n_jobs, n_resumed))

    def trial(self, job: session.Job, phase: str) -> None:
        pass

    def done(self, job: session.Job, record: Record, left_s: float | None) -> None:
        self.say(outcome(job, record))


def _study(config: Config, strategies: tuple[Any, ...], device: str | None, overrides: Mapping[str, Any]) -> Study:
    given = {**overrides, **({"run.device": device} if device is not None else {})}
    sets = tuple(f"{key}={json.dumps(_plain(value, str(key)))}" for key, value in given.items())
    if isinstance(config, Study):
        changed = dataclasses.replace(
            config,
            overrides=(*config.overrides, *map(study.parse_set, sets)),
            strategies=strategies or config.strategies,
        )
        for kind in ("cuda", "cpu"):
            changed.points(kind)
        return changed
    if isinstance(config, Mapping):
        marked = Marked(source="config", data=_plain(config, "config"))
        return study.load(marked, sets=sets, strategies=strategies)
    if isinstance(config, str | os.PathLike):
        return study.load(Path(config), sets=sets, strategies=strategies)
    raise ConfigError(f"config is a path, a mapping or a Study, got {type(config).__name__}")


def _specs(given: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None) -> tuple[Any, ...]:
    if given is None:
        return ()
    specs = tuple([given] if isinstance(given, str | Mapping) else given)
    if not specs:
        raise ConfigError("strategies is empty; name at least one, or leave it out")
    return tuple(_plain(spec, "strategies") for spec in specs)


def _plain(value: Any, place: str, depth: int = 0) -> Any:
    """Give a value as YAML could hold it: tuples, ranges and numpy's numbers included.

    Raises ConfigError naming the place of anything else.
    """
    if depth > MAX_DEPTH:
        raise ConfigError(f"{place}: too deeply nested for a study")
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is not None:
            raise ConfigError(f"{place}: the key {odd!r} is no word; write {str(odd)!r}")
        return {key: _plain(item, f"{place}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(item, f"{place}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ConfigError(f"{place}: {value!r} is nothing that a study holds; write a word, a number, a list or a mapping")


@contextlib.contextmanager
def _named_as_arguments() -> Iterator[None]:
    """Let faults name the arguments of ``run`` where they would name options of the command line."""
    try:
        yield
    except ConfigError as error:
        names = {"--set ": "overrides ", "--strategy: ": "strategies: "}
        told = list(error.faults)
        for option, name in names.items():
            told = [name + fault.removeprefix(option) if fault.startswith(option) else fault for fault in told]
        raise ConfigError(told) from None
