"""replay: scripted answers instead of a device, so that tests and simulations need no hardware and no waiting.

The script is a JSON file: ``{"device_name": ..., "isolated": false, "facts": {...}, "facts_after": {...},
"strategies": {LABEL: {...}}}``. Both kinds of facts go into the record's environment. Per strategy label (``*``
for any other): ``step_s`` (a number, or a list that is repeated), ``noise`` (see ``Noise``), ``fields`` (record
fields to give back), and ``fail``: one of ``{"raise": TEXT}``, ``{"raise": TEXT, "type": NAME}``,
``{"signal": N}``, ``{"exit": N}``, ``{"hang_s": S}``, with ``round`` to fail in one round only.
"""

import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckbench.config import RunConfig
from ckbench.devices._oom import recognise
from ckbench.devices.base import Holdings, Observer, OutOfMemory, StepTimes, Subject
from ckbench.errors import DeviceUnavailable

SHARES = {"forward": 0.35, "backward": 0.6, "optimizer": 0.05}


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How a machine disturbs step times; all relative to the step.

    ``process``: spread (standard deviation of the logarithm) between processes. ``round``: spread between
    rounds that all strategies of a round share, as when a machine slowly warms up. ``step``: spread between
    steps. ``drift``: change from the first to the last of 100 steps. ``burst_probability`` and
    ``burst_factor``: rare slow stretches. ``tail``: degrees of freedom of Student's t for the step
    spread; few mean heavy tails.
    """

    process: float = 0.0
    round: float = 0.0
    step: float = 0.0
    drift: float = 0.0
    burst_probability: float = 0.0
    burst_factor: float = 1.0
    tail: float | None = None


class ReplayClock:
    """Hands out the step times the subject scripted."""

    def __init__(self) -> None:
        self.times: list[StepTimes] = []

    def at(self, event: str) -> None:
        """Ignore the event; scripted steps book their time themselves."""

    def collect(self) -> list[StepTimes]:
        """Give the steps since the last call."""
        times, self.times = self.times, []
        return times


class ReplaySubject:
    """A strategy whose every answer is scripted."""

    def __init__(self, script: dict[str, Any], config: RunConfig, round_number: int) -> None:
        self.script = script
        self.phase = "build"
        self.executed_steps = 0
        self.skipped_steps = 0
        steps = script.get("step_s", 0.01)
        self.steps: list[float] = steps if isinstance(steps, list) else [steps]
        self.noise = Noise(**script.get("noise", {}))
        self.random = random.Random(f"{config.run.seed}/{config.strategy.label}/{round_number}/{script.get('salt')}")
        shared = random.Random(f"{config.run.seed}/{round_number}")
        spread = self.random.gauss(0.0, self.noise.process) + shared.gauss(0.0, self.noise.round)
        self.process_factor = math.exp(spread)
        fail = script.get("fail")
        self.fail = fail if fail and fail.get("round", round_number) == round_number else None

    def step(self, observer: Observer) -> None:
        """Book one scripted step."""
        self.phase = (self.fail or {}).get("phase", "forward")
        if self.fail:
            _fail(self.fail)
        step_s = self._next_step_s()
        self.executed_steps += 1
        if isinstance(observer, ReplayClock):
            parts = {f"{name}_s": share * step_s for name, share in SHARES.items()}
            observer.times.append(StepTimes(step_s=step_s, **parts))

    def _next_step_s(self) -> float:
        noise, draw = self.noise, self.random
        base = self.steps[self.executed_steps % len(self.steps)] * self.process_factor
        spread = draw.gauss(0.0, 1.0)
        if noise.tail is not None:
            spread /= math.sqrt(draw.gammavariate(noise.tail / 2, 2 / noise.tail))
        factor = math.exp(noise.step * spread) * (1 + noise.drift * self.executed_steps / 100)
        if draw.random() < noise.burst_probability:
            factor *= noise.burst_factor
        return base * factor

    def observed_step(self, observer: Observer) -> None:
        """Book one scripted step."""
        self.step(observer)

    def holdings(self) -> Holdings:
        """Hold nothing."""
        return Holdings(static={}, gradients={}, inputs={})

    def describe(self) -> dict[str, Any]:
        """Give the scripted fields."""
        return dict(self.script.get("fields", {}))

    def count(self) -> dict[str, Any]:
        """Give nothing beyond the scripted fields."""
        return {}

    def parity(self) -> dict[str, Any]:
        """Give the scripted outcome, exact unless the script says otherwise."""
        return {"parity": self.script.get("fields", {}).get("parity", "exact")}


class Replay:
    """The device whose answers are a file."""

    kind = "replay"

    def __init__(self, name: str, threads: int | None) -> None:
        path = Path(name.partition(":")[2])
        try:
            self.script: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            self.strategies: dict[str, Any] = self.script["strategies"]
        except (OSError, ValueError, KeyError, TypeError):
            raise DeviceUnavailable(f"{path}: not a replay script") from None
        self.isolated = bool(self.script.get("isolated", False))

    def name(self) -> str:
        """Give the scripted name."""
        return str(self.script.get("device_name", "replay"))

    def label(self) -> str:
        """Give replay."""
        return "replay"

    def device_used_bytes(self) -> int | None:
        """Unknown."""
        return None

    def facts(self) -> dict[str, Any]:
        """Give the scripted facts."""
        return dict(self.script.get("facts", {}))

    def facts_after(self) -> dict[str, Any]:
        """Give the scripted facts of the end."""
        return dict(self.script.get("facts_after", {}))

    def clock(self) -> ReplayClock:
        """Make a clock that takes scripted times."""
        return ReplayClock()

    def reset_peaks(self) -> None:
        """Nothing to forget."""

    def peaks(self) -> dict[str, Any]:
        """Nothing to give."""
        return {}

    def weigh(self, subject: Subject) -> dict[str, Any]:
        """Run one scripted step; its memory is among the scripted fields."""
        subject.step(self.clock())
        return {}

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """Recognise the texts of real devices."""
        return recognise(error)

    def subject(self, config: RunConfig, round_number: int) -> Subject:
        """Give the scripted strategy."""
        script = self.strategies.get(config.strategy.label, self.strategies.get("*"))
        if script is None:
            raise DeviceUnavailable(f"the replay script has no strategy {config.strategy.label!r}")
        return ReplaySubject(script, config, round_number)


def _fail(how: dict[str, Any]) -> None:
    """Fail for real, in the scripted way."""
    if "child_s" in how:
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({float(how['child_s'])})"])
    if "hang_s" in how:
        time.sleep(float(how["hang_s"]))
    if "signal" in how:
        os.kill(os.getpid(), int(how["signal"]))
        time.sleep(60)
    if "exit" in how:
        os._exit(int(how["exit"]))
    if "raise" in how:
        raise type(how.get("type", "RuntimeError"), (RuntimeError,), {})(how["raise"])


PLUGIN = Replay
