"""How long the rest of a session will take, by what its trials took so far and by what is estimated of the others."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckbench.config import RunConfig
from ckbench.estimates import Estimate
from ckbench.statistics import fit_line


@dataclass(kw_only=True)
class Pace:
    """Seconds of finished trials, by configuration, and the work that a step of each does."""

    _taken_s: dict[str, list[float]] = field(default_factory=dict)
    _work: dict[str, float] = field(default_factory=dict)

    def note(self, key: str, seconds: float, work: float | None) -> None:
        """Note what a trial of the configuration with this id took."""
        self._taken_s.setdefault(key, []).append(seconds)
        if work is not None:
            self._work[key] = work

    def left_s(self, rest: Iterable[tuple[str, float | None]]) -> float:
        """Predict what trials will take: as before where a configuration ran before, else by the work of its step.

        Trials take some time whatever they do, so seconds are a straight line over work, fitted to what has run; where
        that is too little for a line, or no estimate tells the work, they take what others took on average.
        """
        known = {key: statistics.fmean(seconds) for key, seconds in self._taken_s.items()}
        if not known:
            return 0.0
        points = [(work, known[key]) for key, work in self._work.items()]
        line = fit_line(*zip(*points, strict=True)) if len({work for work, _ in points}) > 1 else None
        usual, shortest = statistics.fmean(known.values()), min(known.values())
        left = 0.0
        for key, work in rest:
            if key in known:
                left += known[key]
            elif line is None or work is None or line.slope <= 0:
                left += usual
            else:
                left += max(shortest, line.start + line.slope * work)
        return left


def work_of(config: RunConfig, estimate: Estimate | None) -> float | None:
    """Give parameters times tokens of a step, which its FLOPs go with; None where no estimate tells the parameters."""
    train = config.train
    if estimate is None or estimate.n_parameters is None or train.seq_len is None:
        return None
    return float(estimate.n_parameters) * train.batch_size * train.seq_len * train.grad_accumulation
