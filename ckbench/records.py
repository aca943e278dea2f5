"""What one trial leaves behind: a flat record of plain values, raw bytes and seconds, None for unknown.

The field names are a promise: the same in the JSON lines, in ``report --format json`` and in the
DataFrame. A change of meaning raises SCHEMA.
"""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

SCHEMA = 1

STATUSES = ("ok", "skipped", "oom", "killed", "timeout", "recompute_mismatch", "invalid", "error")
FAILED = ("killed", "timeout", "recompute_mismatch", "invalid", "error")
PHASES = ("forward", "loss", "backward", "optimizer")


@dataclass(kw_only=True)
class Record:
    """One trial: a strategy, in one round, in one fresh process."""

    schema: int = SCHEMA
    """Version of this record's meaning."""
    record_id: str = ""
    """Random name of this trial."""
    session_id: str = ""
    """Name of the invocation; rounds of one session are paired in ratios."""
    configuration_id: str = ""
    """Hash of model, train, strategy, seed, threads and device: equal for all rounds."""
    study: str = ""
    """Name of the study."""
    study_notes: list[str] = field(default_factory=list)
    """What a reader must know of the study: which keys on_cpu replaced."""
    strategy: str = ""
    """The spec as it can be typed, e.g. every-k:4,skip_last."""
    strategy_spec: dict[str, Any] = field(default_factory=dict)
    """The spec as data: name, params, options."""
    plan: dict[str, Any] | None = None
    """The resolved plan: regions, early_stop, preserve_rng, reentrant."""
    alias_of: str | None = None
    """An earlier strategy with the very same plan, whose figures these are."""
    round: int = 0
    """Round number, from 0. Memory, counts and parity are taken in round 0."""
    order: int = 0
    """Position of the trial in its session, from 0: the order of measurement."""
    status: str = "ok"
    """ok, oom, killed, timeout, recompute_mismatch, invalid, error, or skipped (not started: it could not fit)."""
    message: str | None = None
    """Why the trial did not end ok."""
    failed_phase: str | None = None
    """Where it ended: build, forward, loss, backward, optimizer, parity, ..."""
    signal: int | None = None
    """Signal that ended the process."""
    requested_bytes: int | None = None
    """Out of memory: bytes asked for."""
    free_bytes: int | None = None
    """Out of memory: bytes free on the device."""
    allocated_at_failure_bytes: int | None = None
    """Out of memory: tensor bytes allocated then."""
    reserved_at_failure_bytes: int | None = None
    """Out of memory: bytes the allocator held then."""
    started_at: str = ""
    """UTC, ISO 8601."""
    trial_s: float | None = None
    """Wall time of the whole trial, process start included."""
    startup_s: float | None = None
    """From the request to the first step: process start, build of model and optimizer."""
    device: str = ""
    """Device as used: cpu, cuda:0, replay."""
    device_name: str = ""
    """Name of the processor or card."""
    model: dict[str, Any] = field(default_factory=dict)
    """Model section as used."""
    train: dict[str, Any] = field(default_factory=dict)
    """Train section as used."""
    run: dict[str, Any] = field(default_factory=dict)
    """Run section as used."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, threads, allocator settings, load."""
    n_parameters: int | None = None
    """Parameters, shared ones once."""
    optimizer_implementation: str | None = None
    """Which variant of the optimizer ran: for-loop, foreach, fused, ..."""
    notes: list[str] = field(default_factory=list)
    """Remarks on how the strategy was applied."""
    parity: str | None = None
    """Against none: exact, within_noise (CUDA), within_tolerance (a stated one), failed; none if not checked."""
    parity_detail: str | None = None
    """What was compared, at which shape, and the largest difference."""
    parity_noise_ratio: float | None = None
    """Largest relative gradient difference between two runs of none (CUDA)."""
    static_bytes: int | None = None
    """Parameters, buffers, optimizer state; each storage once."""
    gradient_bytes: int | None = None
    """Gradients at the end of backward."""
    saved_bytes: int | None = None
    """Held for backward at the turn from forward to backward."""
    peak_allocated_bytes: int | None = None
    """Peak of tensor bytes over a steady step."""
    peak_phase: str | None = None
    """Phase that owns the peak: forward, loss (head and loss, both ways), backward, optimizer."""
    peak_forward_bytes: int | None = None
    peak_loss_bytes: int | None = None
    peak_backward_bytes: int | None = None
    peak_optimizer_bytes: int | None = None
    activation_peak_bytes: int | None = None
    """Live at the peak and neither static nor gradient, counted storage by storage."""
    live_bytes_timeline: list[list[float]] = field(default_factory=list)
    """Live bytes over a steady step, at most 200 points of [share of the step's allocations and frees, bytes, number of
    the phase: 0 forward, 1 loss, 2 backward, 3 optimizer], the peak among them. CUDA: bytes as asked for, before
    rounding. Empty where no history is known, as in records before ckbench had this field."""
    first_step_peak_bytes: int | None = None
    """Peak of the very first step, before optimizer state exists."""
    peak_reserved_bytes: int | None = None
    """Peak of what the caching allocator held (CUDA)."""
    peak_active_bytes: int | None = None
    """Peak of allocated and not yet reusable bytes (CUDA)."""
    peak_requested_bytes: int | None = None
    """Peak of bytes asked for, before rounding (CUDA)."""
    allocator_retries: int | None = None
    """Times the allocator had to free cached memory and try again (CUDA)."""
    nvml_process_bytes: int | None = None
    """NVML: this process on the device, after the timed steps."""
    nvml_device_bytes: int | None = None
    """NVML: all of the device in use, after the timed steps."""
    nvml_device_before_bytes: int | None = None
    """NVML: device memory in use before the trial touched it."""
    host_peak_bytes: int | None = None
    """Peak resident size of the process; never compared between strategies."""
    host_store_peak_bytes: int | None = None
    """Most that the trial itself moved to host memory at one time: offloaded activations and optimizer state."""
    compile_s: float | None = None
    """Time inside torch.compile, none of it running the step; a warm compiler cache shortens it."""
    warmup_steps_done: int | None = None
    """Untimed steps, at least one of them with an executed optimizer step."""
    skipped_optimizer_steps: int | None = None
    """Steps whose update gradient scaling skipped (fp16)."""
    step_samples_s: list[float] = field(default_factory=list)
    """Every timed step, in order."""
    step_s_median: float | None = None
    step_s_low: float | None = None
    """Lower end of the 95 % interval of the median."""
    step_s_high: float | None = None
    step_s_mad: float | None = None
    """Median absolute deviation."""
    samples: int | None = None
    """Number of timed steps."""
    outliers: int | None = None
    """Steps flagged as outliers; none is dropped."""
    drift_ratio: float | None = None
    """Change of the step time from the first to the last timed step, relative (Theil-Sen)."""
    drift_p_value: float | None = None
    """How likely chance alone makes such a drift (Mann-Kendall)."""
    stop_reason: str | None = None
    """Why timing ended: precision, max_steps or max_seconds."""
    forward_s: float | None = None
    """Median of the forward passes of a step, loss included."""
    backward_s: float | None = None
    optimizer_s: float | None = None
    tokens_per_s: float | None = None
    flops_forward: int | None = None
    """Counted floating-point operations of matrix products and attention, forward."""
    flops_backward: int | None = None
    """The same for backward, recomputation included."""
    block_calls_forward: int | None = None
    """Starts of a block's forward before the turn, all blocks together."""
    block_calls_backward: int | None = None
    """Starts during backward: recomputation."""
    block_calls_backward_planned: int | None = None
    """What the plan predicts for them."""
    region_calls_backward: int | None = None
    """Starts of a region's body during backward."""
    n_regions: int | None = None
    slowdown_ratio: float | None = None
    """Step time over the baseline's; filled when rows are compared."""
    slowdown_low: float | None = None
    slowdown_high: float | None = None
    flops_ratio: float | None = None
    """FLOPs of a step over the baseline's; filled when rows are compared."""
    estimate_peak_bytes: int | None = None
    """Estimated peak of a steady step, as peak_allocated_bytes; None where it could not be estimated."""

    def to_json(self) -> dict[str, Any]:
        """Give the record as plain data; a number that is none (a gradient that is not finite) is unknown."""
        values: dict[str, Any] = _finite(asdict(self))
        return values


def _finite(value: Any) -> Any:
    """Replace what JSON has no word for by None, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


FIELDS = tuple(f.name for f in fields(Record))
MEMORY_FIELDS = (
    "static_bytes",
    "gradient_bytes",
    "saved_bytes",
    "peak_allocated_bytes",
    "peak_phase",
    *(f"peak_{phase}_bytes" for phase in PHASES),
    "activation_peak_bytes",
    "first_step_peak_bytes",
)
