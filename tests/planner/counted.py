"""FLOPs of a replayed step's backward, counted as a real run counts them."""

from dataclasses import dataclass

from ckbench.config import RunConfig
from ckbench.engine.flops import FlopCounter
from ckbench.engine.trial import Trial
from ckbench.estimate.follow import Both
from ckbench.estimate.replay import replay
from ckbench.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a plan keeps after forward, and what its backward computes."""

    saved_bytes: int
    backward_flops: int


def counted(config: RunConfig, kind: str, plan: Plan, n_steps: int = 2) -> Counted:
    """Replay a trial under a plan and count the last step."""
    flops: list[FlopCounter] = []

    def prepare(trial: Trial) -> None:
        step = trial.step

        def counted_step(observer: object) -> None:
            with FlopCounter() as counter:
                step(Both(counter, observer))  # type: ignore[arg-type]
            flops.append(counter)

        trial.step = counted_step  # type: ignore[method-assign]

    replayed = replay(config, kind, plan=plan, prepare=prepare, n_steps=n_steps)
    return Counted(saved_bytes=replayed.steady["saved_bytes"], backward_flops=flops[-1].backward)
