"""Prove the figures of the device cuda on this machine's GPU, then measure one study there.

    python tests/gpu/gpu_check.py [--out results/published]

Needs an interpreter that already has torch for the GPU and ckbench's other dependencies; sets nothing up and
downloads nothing. Prints one line per check. Exit code 0: all pass; 1: one failed; 2: there is no CUDA device.
Writes records.jsonl and summary.json to OUT/gpu_check_DEVICE_YYYYMM.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

try:
    from ckbench import specs
    from ckbench.config import ModelConfig, RunConfig, RunSettings, TrainConfig
    from ckbench.errors import CkbenchError
    from ckbench.launch import Launcher
    from ckbench.records import MEMORY_FIELDS, Record
    from ckbench.store import slug
    from ckbench.units import format_mib, format_ms
    from tests.gpu import gpu_features
    from tests.gpu.gpu_features import require
except ImportError as error:
    print(f"gpu-check: {sys.executable} has no module {error.name!r}; choose another interpreter with GPU_PYTHON=...")
    raise SystemExit(2) from None

STUDY = ("none", "per-block", "every-k:3", "nested:4", "ffn-only", "attn-only")
SECOND_ROUND_UNTIL_S = 130.0
"""No trial of the second round starts later than this, so that all of it stays under four minutes."""


class Checks:
    """Runs checks, prints a line for each and keeps them."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []

    def run(self, name: str, check: Callable[..., str], *args: Any) -> None:
        """Run one check: it gives a detail to show, or raises."""
        begin_s = time.perf_counter()
        try:
            passed, detail = True, check(*args)
        except Exception as error:
            passed, detail = False, f"{type(error).__name__}: {error}".replace(str(ROOT), ".")
        seconds = round(time.perf_counter() - begin_s, 2)
        self.done.append({"name": name, "passed": passed, "detail": detail, "seconds": seconds})
        print(f"{'pass' if passed else 'FAIL'}  {name}: {detail}  ({seconds:.1f} s)", flush=True)

    def failed(self) -> list[str]:
        """Name the checks that failed."""
        return [check["name"] for check in self.done if not check["passed"]]


def configure(spec: Any, device: str, *, family: str = "gpt", **changes: Any) -> RunConfig:
    """Make the configuration of a trial on a small model with dropout; ``changes`` go where the key belongs."""
    classes: dict[str, Any] = {"model": ModelConfig, "train": TrainConfig, "run": RunSettings}
    settings: dict[str, dict[str, Any]] = {
        "model": {"family": family, "n_layers": 4, "d_model": 128, "n_heads": 4, "vocab_size": 512, "dropout": 0.1},
        "train": {"batch_size": 4, "seq_len": 64},
        "run": {"device": device, "timeout_s": 90.0, "max_seconds": 2.0, "max_steps": 40},
    }
    for key, value in changes.items():
        settings[next(section for section, cls in classes.items() if key in cls.model_fields)][key] = value
    parts: dict[str, Any] = {section: cls(**settings[section]) for section, cls in classes.items()}
    return RunConfig(study="gpu_check", strategy=specs.parse(spec), **parts)


def gpt2_small(spec: str, device: str) -> RunConfig:
    """Make the configuration of a study's trial: the shape of GPT-2 small, bf16, 8 sequences of 1024 tokens."""
    shape: dict[str, Any] = {"n_layers": 12, "d_model": 768, "n_heads": 12, "vocab_size": 50304, "dropout": 0.0}
    return configure(spec, device, **shape, batch_size=8, seq_len=1024, precision="bf16")


class Session:
    """Launches trials and keeps the study's records, numbered as a session of ckbench does."""

    def __init__(self, launcher: Launcher, device: str) -> None:
        self.launcher = launcher
        self.device = device
        self.id = uuid.uuid4().hex[:16]
        self.records: list[Record] = []

    def run(self, config: RunConfig, round_number: int = 0) -> Record:
        """Run one trial in a process of its own."""
        return self.launcher.run(config, round_number, lambda phase: None)

    def study(self, begin_s: float) -> None:
        """Measure every strategy of the study, then again in opposite order while there is time."""
        for round_number, strategies in enumerate((STUDY, STUDY[::-1])):
            for spec in strategies:
                if round_number == 0 or time.perf_counter() - begin_s < SECOND_ROUND_UNTIL_S:
                    self._measure(gpt2_small(spec, self.device), round_number)

    def _measure(self, config: RunConfig, round_number: int) -> None:
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = self.run(config, round_number)
        record.record_id, record.session_id, record.started_at = uuid.uuid4().hex[:16], self.id, started_at
        record.order = len(self.records)
        self.records.append(record)
        figures = f"{format_ms(record.step_s_median)} ms, peak {format_mib(record.peak_allocated_bytes)} MiB"
        print(f"      {record.strategy}, round {round_number}: {record.status}, step {figures}", flush=True)


def study_ends_ok(records: list[Record]) -> str:
    """Every trial of the study ended ok, with parity and the planned number of block calls."""
    for record in records:
        require(record.status == "ok", f"{record.strategy} ended {record.status}: {record.message}")
        if record.round == 0:
            require(record.parity in ("exact", "within_noise"), f"{record.strategy}: {record.parity_detail}")
            planned = record.block_calls_backward_planned
            require(record.block_calls_backward == planned, f"{record.strategy}: block calls differ from the plan")
    return f"{len(records)} trials"


def bytes_are_in_order(records: list[Record]) -> str:
    """Allocated is at most reserved, reserved at most what NVML sees of the process and of the device."""
    for record in records:
        allocated, reserved = record.peak_allocated_bytes, record.peak_reserved_bytes
        require(allocated is not None and reserved is not None, f"{record.strategy} lacks a figure")
        chain = [record.peak_requested_bytes, allocated, reserved, record.nvml_process_bytes, record.nvml_device_bytes]
        figures = [figure for figure in chain if figure is not None]
        require(figures == sorted(figures), f"{record.strategy}: out of order: {chain}")
    n_known = sum(record.nvml_process_bytes is not None for record in records)
    return f"{len(records)} records, NVML's process figure known in {n_known}"


def phases_are_consistent(records: list[Record]) -> str:
    """Static and activations fit into the weighed peak, and checkpointing lowered what is kept."""
    by_strategy: dict[str, Any] = {record.strategy: record for record in records if record.round == 0}
    for name, record in by_strategy.items():
        peaks = [getattr(record, f"peak_{phase}_bytes") for phase in ("forward", "loss", "backward", "optimizer")]
        require(None not in peaks, f"{name}: a phase has no peak: {peaks}")
        activation, static = record.activation_peak_bytes, record.static_bytes
        require(activation is not None and static is not None, f"{name}: activations at the peak are not known")
        require(static + activation <= max(peaks), f"{name}: static {static} + activations {activation} > {peaks}")
    none, per_block = by_strategy["none"], by_strategy["per-block"]
    require(per_block.saved_bytes < none.saved_bytes, "per-block keeps as much as none")
    require(per_block.peak_allocated_bytes < none.peak_allocated_bytes, "per-block peaks as high as none")
    return f"per-block keeps {per_block.saved_bytes / none.saved_bytes:.0%} of what none keeps"


def out_of_memory_is_a_record(session: Session) -> str:
    """Logits of 785 GiB do not fit any GPU; what comes before them is small."""
    shape: dict[str, Any] = {"n_layers": 1, "d_model": 32, "n_heads": 1, "vocab_size": 50304, "dropout": 0.0}
    record = session.run(configure("none", session.device, **shape, batch_size=2048, seq_len=2048, parity=False))
    require(record.status == "oom", f"ended {record.status}: {record.message}")
    names = ("requested_bytes", "free_bytes", "allocated_at_failure_bytes", "reserved_at_failure_bytes")
    lacking = [name for name in names if getattr(record, name) is None]
    require(not lacking, f"{', '.join(lacking)} not found in: {record.message}")
    return f"in {record.failed_phase}, asked for {format_mib(record.requested_bytes)} MiB"


def peaks_repeat_exactly(session: Session) -> str:
    """The same trial in two processes gives the same bytes."""
    config = configure("per-block", session.device, precision="bf16", parity=False)
    first, second = (session.run(config) for _ in range(2))
    require(first.status == second.status == "ok", f"{first.message or second.message}")
    names = (*MEMORY_FIELDS, "peak_requested_bytes")
    moved = [n for n in names if getattr(first, n) != getattr(second, n)]
    require(not moved, f"differ between two runs: {moved}")
    return f"{len(names)} figures, peak {first.peak_allocated_bytes} bytes"


def visibility_is_respected(device_uuid: str) -> str:
    """A GPU named by its UUID is found; hidden GPUs are refused with a sentence."""
    program = (
        "import torch; from ckbench.devices.cuda import Cuda; from ckbench.errors import DeviceUnavailable\n"
        "try: Cuda('cuda', None); print(torch.cuda.get_device_properties(0).uuid)\n"
        "except DeviceUnavailable as error: print(error)\n"
    )

    def answer(visible: str) -> str:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() or done.stderr.strip()[-300:]

    require(any(answer(kind + device_uuid) == device_uuid for kind in ("GPU-", "MIG-")), "not found by its UUID")
    refusal = answer("-1")
    require("hides every GPU" in refusal, f"CUDA_VISIBLE_DEVICES=-1 gives: {refusal}")
    return "found by UUID, -1 refused"


def reset_sets_the_peak_to_what_is_held(device: Any) -> str:
    """Right after a reset the peak is what is allocated now."""
    import torch

    held = torch.ones(3_000_000, device=device.torch_device)
    torch.ones(5_000_000, device=device.torch_device)
    device.reset_peaks()
    peak, now = device.peaks()["peak_allocated_bytes"], torch.cuda.memory_allocated(device.torch_device)
    require(peak == now >= held.nbytes, f"peak {peak}, allocated {now}")
    return f"{peak} bytes"


def known_allocations_are_seen_to_the_block(device: Any) -> str:
    """The allocator rounds up to 512 bytes; nothing else is added."""
    import torch

    sizes = (1, 512, 1000, 300_001, 64 * 2**20 + 1)
    for size in sizes:
        torch.cuda.empty_cache()
        device.reset_peaks()
        before = torch.cuda.memory_allocated(device.torch_device)
        torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        grown = device.peaks()["peak_allocated_bytes"] - before
        require(grown == -(-size // 512) * 512, f"{size} bytes were seen as {grown}")
    return f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]} bytes"


def weighing_agrees_with_the_steps(device: Any) -> str:
    """The peak by phases, with resets and history, is the peak of a plain step; the history is whole."""
    from ckbench.engine.trial import NoObserver

    subject = device.subject(configure("per-block", device.label()), 0)
    for _ in range(3):
        subject.step(NoObserver())
    device.reset_peaks()
    subject.step(NoObserver())
    plain, weighed = device.peaks(), device.weigh(subject)
    peak = weighed["peak_allocated_bytes"]
    require(peak == plain["peak_allocated_bytes"], f"weighed {peak}, plain {plain['peak_allocated_bytes']}")
    activation = weighed["activation_peak_bytes"]
    require(activation is not None, "the allocator's history is not whole")
    least = plain["peak_requested_bytes"] - weighed["static_bytes"] - weighed["gradient_bytes"]
    most = plain["peak_requested_bytes"] - weighed["static_bytes"]
    require(least <= activation <= most, f"activations {activation} outside {least} to {most}")
    return f"peak {peak} in {weighed['peak_phase']}, activations {activation} bytes"


def clock_counts_work_still_running(device: Any) -> str:
    """Event time is wall time around a synchronised stretch of work that was queued much faster."""
    import torch

    a = torch.randn(4096, 4096, device=device.torch_device, dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def stretch(n: int) -> tuple[float, float, float]:
        clock = device.clock()
        torch.cuda.synchronize(device.torch_device)
        begin_s = time.perf_counter()
        clock.at("forward")
        for _ in range(n):
            torch.matmul(a, a, out=out)
        queued_s = time.perf_counter() - begin_s
        for event in ("turn", "optimizer", "end"):
            clock.at(event)
        (times,) = clock.collect()
        return times.step_s, time.perf_counter() - begin_s, queued_s

    stretch(10)
    n = max(20, min(500, round(0.2 * 20 / stretch(20)[0])))
    event_s, wall_s, queued_s = stretch(n)
    require(abs(event_s - wall_s) < 0.05 * wall_s + 0.001, f"events {event_s:.4f} s, wall {wall_s:.4f} s")
    require(queued_s < 0.5 * wall_s, f"queueing took {queued_s:.4f} of {wall_s:.4f} s, so nothing was asynchronous")
    return f"events {event_s * 1000:.1f} ms, wall {wall_s * 1000:.1f} ms, queued in {queued_s * 1000:.1f} ms"


def nvml_is_matched_by_uuid(device: Any, device_uuid: str) -> str:
    """NVML's device is torch's: same UUID, same size, and it sees a GiB that torch takes."""
    import torch

    from ckbench.devices import _nvml

    before: Any = _nvml.read(device_uuid)
    require(before.uuid is not None, f"NVML cannot be read: {' '.join(before.warnings)}")
    require(before.uuid in ("GPU-" + device_uuid, "MIG-" + device_uuid), f"NVML gave {before.uuid}")
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    require(abs(before.total_bytes - total) < 0.05 * total, f"NVML total {before.total_bytes}, torch {total}")
    held = torch.ones(2**30, dtype=torch.uint8, device=device.torch_device)
    torch.cuda.synchronize(device.torch_device)
    after: Any = _nvml.read(device_uuid)
    own, reserved = after.process_bytes, torch.cuda.memory_reserved(device.torch_device)
    grown = after.device_bytes - before.device_bytes
    require(grown >= 2**30 - 2**21, f"torch took {held.nbytes} bytes, NVML saw {grown}")
    require(own is None or own >= reserved, f"NVML process {own} < reserved {reserved}")
    process = "process not listed" if own is None else f"process {own} >= reserved {reserved} bytes"
    return "; ".join([process, *after.warnings])


def checks_in_process(checks: Checks) -> str:
    """Run everything that needs the device in this process."""
    import torch

    from ckbench.devices.cuda import Cuda

    device = Cuda("cuda", None)
    device_uuid = str(torch.cuda.get_device_properties(device.torch_device).uuid)
    checks.run("CUDA_VISIBLE_DEVICES", visibility_is_respected, device_uuid)
    checks.run("peak after a reset", reset_sets_the_peak_to_what_is_held, device)
    checks.run("known allocation", known_allocations_are_seen_to_the_block, device)
    checks.run("asynchronous work", clock_counts_work_still_running, device)
    checks.run("NVML by UUID", nvml_is_matched_by_uuid, device, device_uuid)
    checks.run("weighing", weighing_agrees_with_the_steps, device)
    for family, spec in gpu_features.pairs():
        checks.run(f"{family} {spec}", gpu_features.strategy_does_no_harm, spec, family, device.label())
    return "all of them ran"


def write_results(folder: Path, session: Session, checks: Checks, probe: dict[str, Any], seconds: float) -> None:
    """Write the study's records, and what was checked on which device."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record.to_json()) + "\n" for record in session.records]
    (folder / "records.jsonl").write_text("".join(lines), encoding="utf-8")
    summary = {
        "date": datetime.now(UTC).date().isoformat(),
        "passed": not checks.failed(),
        "seconds": round(seconds, 1),
        "device": probe["name"],
        "environment": probe["facts"],
        "checks": checks.done,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Run all checks; give the exit code."""
    parser = argparse.ArgumentParser(description="Check the figures on a CUDA device, then measure one study there.")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "published", help="folder for the results")
    out = parser.parse_args().out.resolve()
    # The fork server is a fresh interpreter: without this it would not find a ckbench that is not installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    begin_s = time.perf_counter()
    launcher = Launcher()
    try:
        probe = launcher.probe("cuda")
    except CkbenchError as error:
        print(f"gpu-check: {error}")
        return 2
    print(f"{probe['name']}, torch {probe['facts']['torch']}, driver {probe['facts']['driver']}", flush=True)

    checks, session = Checks(), Session(launcher, "cuda")
    session.study(begin_s)
    checks.run("study", study_ends_ok, session.records)
    checks.run("allocated <= reserved <= NVML", bytes_are_in_order, session.records)
    checks.run("peaks by phase", phases_are_consistent, session.records)
    checks.run("out of memory", out_of_memory_is_a_record, session)
    checks.run("deterministic peaks", peaks_repeat_exactly, session)
    checks.run("estimates", gpu_features.estimates_are_near, session.records, probe["name"])
    for step in gpu_features.STEPS:
        checks.run(step, gpu_features.step_ends_ok, session, step)

    # Last, because until here this process has no part in what the device does.
    checks.run("in one process", checks_in_process, checks)
    folder = out / f"gpu_check_{slug(probe['name']).lower()}_{datetime.now(UTC):%Y%m}"
    seconds = time.perf_counter() - begin_s
    write_results(folder, session, checks, probe, seconds)
    failed, n_checks = checks.failed(), len(checks.done)
    verdict = f"{len(failed)} of {n_checks} checks failed: {', '.join(failed)}" if failed else f"all {n_checks} pass"
    print(f"{verdict} in {seconds:.0f} s; results in {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
