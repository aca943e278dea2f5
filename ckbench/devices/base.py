"""What the harness asks of a device and of the thing it measures. No torch here."""

from dataclasses import dataclass
from typing import Any, Protocol

from ckbench.config import RunConfig


class Observer(Protocol):
    """Told by a step where it is: forward, head (the last block is left), turn (backward is about to
    start), blocks (the gradient has reached the last block's output), optimizer, end."""

    def at(self, event: str) -> None:
        """Note one event."""
        ...


class Clock(Observer, Protocol):
    """An observer that times steps; ``collect`` waits for the device and gives what was timed."""

    def collect(self) -> list["StepTimes"]:
        """Give the steps since the last call."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one step and of its phases."""

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The numbers of a failed allocation, each None when the message does not tell."""

    requested_bytes: int | None = None
    free_bytes: int | None = None
    allocated_at_failure_bytes: int | None = None
    reserved_at_failure_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Bytes a trial holds on the device by storage address, each storage once."""

    static: dict[int, int]
    gradients: dict[int, int]
    inputs: dict[int, int]

    def total_bytes(self) -> int:
        """Add up distinct storages."""
        return sum({**self.static, **self.gradients, **self.inputs}.values())


class Subject(Protocol):
    """One strategy on one model, ready to run steps."""

    executed_steps: int
    skipped_steps: int
    phase: str
    """Where the step is: build, forward, loss, backward or optimizer."""

    def step(self, observer: Observer) -> None:
        """Run one whole training step, nothing else."""
        ...

    def observed_step(self, observer: Observer) -> None:
        """Run one step that also reports head and blocks; not for timing."""
        ...

    def holdings(self) -> Holdings:
        """List what is held on the device right now."""
        ...

    def describe(self) -> dict[str, Any]:
        """Give record fields that are known without running."""
        ...

    def count(self) -> dict[str, Any]:
        """Run one untimed step and count calls and FLOPs."""
        ...

    def parity(self) -> dict[str, Any]:
        """Compare with ``none`` from equal weights and seed."""
        ...


class Device(Protocol):
    """One file of this shelf."""

    kind: str
    isolated: bool
    """Whether a trial needs a process of its own."""

    def name(self) -> str:
        """Name the processor or card."""
        ...

    def label(self) -> str:
        """Name the device as a record does: cpu, cuda:0."""
        ...

    def device_used_bytes(self) -> int | None:
        """Give what the whole device has in use, this process not yet counted; None where unknown."""
        ...

    def facts(self) -> dict[str, Any]:
        """Give environment facts that only the device knows: driver, clocks, allocator settings."""
        ...

    def facts_after(self) -> dict[str, Any]:
        """Give the device's condition after the timed steps, as environment facts of other names than ``facts``
        has, but for warnings, which replace those from before."""
        ...

    def clock(self) -> Clock:
        """Make a clock for steps on this device."""
        ...

    def reset_peaks(self) -> None:
        """Forget peaks seen so far."""
        ...

    def peaks(self) -> dict[str, Any]:
        """Give record fields of peaks since the reset, without running anything."""
        ...

    def weigh(self, subject: Subject) -> dict[str, Any]:
        """Run one untimed step and give its memory figures by phase (record fields)."""
        ...

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """Tell whether an error is the device out of memory, with its numbers."""
        ...

    def subject(self, config: RunConfig, round_number: int) -> Subject:
        """Build what is measured."""
        ...
