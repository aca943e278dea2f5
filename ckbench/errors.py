"""Every failure a user can cause, each with its exit code.

CkbenchError            exit 2
  ConfigError           a study file, an override or an option that cannot be used
  PlanError             a strategy that cannot be applied to this stack
    NotYetMeasured      ... or only once something of the stack has been measured
  StoreError            a results folder that cannot be read or written
  DeviceUnavailable     the asked device is not on this machine
  NothingFits           exit 3: no strategy fits the budget
"""

from collections.abc import Sequence

from ckbench.units import one_line

EXIT_OK = 0
EXIT_TRIAL_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOTHING_FITS = 3
EXIT_INTERRUPTED = 130

MAX_FAULTS = 50


class CkbenchError(Exception):
    """A message for a person; printed as it is, without a traceback.

    Each line of it is made fit to print here, once: a name from a file or a command line may hold anything.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(map(one_line, lines)))


def reason_of(error: BaseException, most_chars: int = 400) -> str:
    """Write an error as one line: ours as it is, others with their class."""
    told = " / ".join(str(error).splitlines())
    return (told if isinstance(error, CkbenchError) else f"{type(error).__name__}: {told}")[:most_chars]


class ConfigError(CkbenchError):
    """One or more faults in a study, each a line of its own."""

    def __init__(self, faults: str | Sequence[str]) -> None:
        told = (faults,) if isinstance(faults, str) else tuple(faults)
        more = len(told) - MAX_FAULTS
        self.faults = told if more <= 0 else (*told[:MAX_FAULTS], f"and {more} more faults")
        super().__init__(*self.faults)


class PlanError(CkbenchError):
    """A strategy or an option that cannot work on this stack of blocks."""


class OtherDepth(PlanError):
    """A stored plan that is for another number of blocks: a fault of the depth that is run, not of the study."""


class NotYetMeasured(PlanError):
    """A strategy that decides by figures of the built model, which are not there yet."""


class StoreError(CkbenchError):
    """A results folder that cannot be used."""


class DeviceUnavailable(CkbenchError):
    """The device that was asked for is not there; there is no silent fallback."""


class NothingFits(CkbenchError):
    """No strategy fits the budget."""

    exit_code = EXIT_NOTHING_FITS
    least_bytes: int | None = None
    """The least budget that would do, where it is known."""
