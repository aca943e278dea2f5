"""Reports of wrong or misread times: late work is included, first steps are not, and what disturbed a step is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckbench import host
from ckbench.compare import compare
from ckbench.config import RunSettings
from ckbench.devices.base import Observer
from ckbench.devices.cpu import CpuClock
from ckbench.devices.cuda import CudaClock
from ckbench.doubts import doubts
from ckbench.engine.measure import time_steps
from ckbench.records import FIELDS, Record
from tests.known.conftest import Run
from tests.known.trials import config, guard_flops, record_of, trial
from tests.sample_records import study


class LateDevice:
    """A device whose work ends long after it was asked for; events get their time when it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy_until_ms = 500.0  # what was asked for before the clock started
        self.waited_until_ms = 0.0
        self.n_waits = 0
        late = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                self.at_ms = late.busy_until_ms

            def synchronize(self) -> None:
                late.waited_until_ms = self.at_ms
                late.n_waits += 1

            def elapsed_time(self, later: "Event") -> float:
                assert later.at_ms <= late.waited_until_ms, "the device has not come so far yet"
                return later.at_ms - self.at_ms

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def clock(self) -> CudaClock:
        return CudaClock(torch.device("cuda", 0))

    def step(self, observer: Observer) -> None:
        """Ask for 100 ms of work and return at once."""
        for event, work_ms in (("forward", 30.0), ("turn", 60.0), ("optimizer", 10.0)):
            observer.at(event)
            self.busy_until_ms += work_ms
        observer.at("end")


def test_tim_01_work_that_is_still_running_is_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: the check `asynchronous work` of tests/gpu/gpu_check.py."""
    late: Any = LateDevice(monkeypatch)
    times, _ = time_steps(late, late, config(min_steps=3, max_steps=3))
    assert [t.step_s for t in times] == pytest.approx([0.1] * 3)  # neither nothing nor the 500 ms before
    assert [t.backward_s for t in times] == pytest.approx([0.06] * 3)
    assert (late.n_waits, late.waited_until_ms) == (1, 800.0)


def test_tim_02_the_phases_add_up_to_the_step() -> None:
    built, clock = trial(grad_accumulation=2), CpuClock()
    for _ in range(3):
        built.step(clock)
    times = clock.collect()
    assert len(times) == 3
    for t in times:
        assert min(t.forward_s, t.backward_s, t.optimizer_s) > 0
        assert t.forward_s + t.backward_s + t.optimizer_s == pytest.approx(t.step_s, rel=1e-6)


def test_tim_03_first_steps_never_enter_the_statistics(ckbench: Run, replay: Callable[..., str]) -> None:
    assert RunSettings().warmup_steps == 3
    device = replay({"*": {"step_s": [79, 5.6, 0.6] + [0.1] * 60}})
    sets = ("--set=run.min_steps=3", "--set=run.max_steps=3", "--rounds=1", "-s", "none", "--device", device)
    (row,) = json.loads(ckbench("run", "study.yaml", *sets, "--format", "json").out)
    assert row["step_samples_s"] == [0.1, 0.1, 0.1] and row["warmup_steps_done"] >= 3
    outcome = ckbench("run", "study.yaml", *sets, "--set=run.warmup_steps=0", "--out", "cold")
    assert outcome.code == 0
    assert "none: only 0 warm-up steps were asked for; first steps are slower; ask for at least 3" in outcome.out
    (row,) = json.loads(ckbench("report", "cold", "--format", "json").out)
    assert row["step_samples_s"] == [5.6, 0.6, 0.1]  # one step is needed all the same, for the optimizer's state


@pytest.mark.parametrize(("clock_mhz", "is_flagged"), [(1200, True), (1980, False), (1700, False)])
def test_tim_07_a_clock_below_its_highest_is_recorded_and_flagged(
    ckbench: Run, replay: Callable[..., str], clock_mhz: int, is_flagged: bool
) -> None:
    before = {"clock_before_mhz": 1980, "max_clock_mhz": 1980}
    device = replay(facts=before, facts_after={"clock_after_mhz": clock_mhz, "throttle_reasons_after": []})
    out = ckbench("run", "study.yaml", "--device", device).out
    assert ("throttled or ran below 80% of its highest clock" in out) == is_flagged
    (file,) = Path("results").glob("*.jsonl")
    for line in file.read_text().splitlines():
        facts = json.loads(line)["environment"]
        assert (facts["clock_before_mhz"], facts["clock_after_mhz"]) == (1980, clock_mhz)


def test_tim_09_the_same_strategy_twice_is_no_difference(ckbench: Run, replay: Callable[..., str]) -> None:
    noise = {"process": 0.02, "step": 0.01, "drift": 0.05}
    device = replay({"*": {"step_s": 0.01, "noise": noise}})
    rows = json.loads(
        ckbench("run", "study.yaml", "-s", "none", "-s", "none", "--rounds", "4", "--device", device,
                "--format", "json").out
    )  # fmt: skip
    assert [row["strategy"] for row in rows] == ["none", "none#2"]
    assert rows[1]["slowdown_low"] < 1 < rows[1]["slowdown_high"]
    assert abs(rows[1]["slowdown_ratio"] - 1) < 0.05
    (file,) = Path("results").glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["strategy"] for r in records] == ["none", "none#2", "none#2", "none"] * 2  # rounds alternate
    assert [r["order"] for r in records] == list(range(8))


def test_tim_11_one_slow_step_does_not_rule_the_figure(ckbench: Run, replay: Callable[..., str]) -> None:
    device = replay({"*": {"step_s": [0.01] * 8 + [0.1]}})
    sets = ("--set=run.min_steps=9", "--set=run.max_steps=9", "--rounds=1", "-s", "none", "--device", device)
    (row,) = json.loads(ckbench("run", "study.yaml", *sets, "--format", "json").out)
    assert [row[f"step_s_{key}"] for key in ("median", "low", "high")] == pytest.approx([0.01] * 3)
    assert row["step_s_mad"] == 0
    (file,) = Path("results").glob("*.jsonl")
    record = json.loads(file.read_text())
    assert sorted(record["step_samples_s"]) == [0.01] * 8 + [0.1] and record["outliers"] == 1


def test_tim_12_counted_work_stands_beside_measured_time() -> None:
    none = guard_flops("none")
    ratios = {"per-block": 1.22, "per-block,early_stop=false": 1.33, "nested:4": 1.47}
    assert {spec: guard_flops(spec) / none for spec in ratios} == pytest.approx(ratios, rel=0.01)
    slow = [dict(r, step_s_median=0.375) if r["strategy"] == "per-block" else r for r in study()]
    row = compare(slow).rows[1].values
    assert (row["slowdown_ratio"], row["flops_ratio"]) == pytest.approx((3.71, 1.233), abs=0.005)
    told = [str(doubt) for doubt in doubts(compare(slow))]
    assert any("3.71 times the baseline's step where counted work says 1.23" in text for text in told)
    assert not any("counted work" in str(doubt) for doubt in doubts(compare(study())))


def test_tim_14_recomputed_work_is_no_throughput() -> None:
    """ckbench shows no MFU; tokens per second count each token once, and hardware FLOPs are figures of their own."""
    none, per_block = (record_of(spec, parity=False) for spec in ("none", "per-block"))
    for record in (none, per_block):
        assert record.tokens_per_s == pytest.approx(2 * 8 / (record.step_s_median or 0))
    assert per_block.flops_forward == none.flops_forward
    assert (per_block.flops_backward or 0) > (none.flops_backward or 0) > 0
    assert not any("mfu" in field for field in FIELDS)


def test_tim_15_micro_batches_count_as_tokens_and_work() -> None:
    one, four = (record_of(grad_accumulation=n, parity=False, max_steps=5, min_steps=5) for n in (1, 4))
    for record, tokens in ((one, 16), (four, 64)):
        assert record.tokens_per_s == pytest.approx(tokens / (record.step_s_median or 0))
    assert 0.2 < (four.tokens_per_s or 0) / (one.tokens_per_s or 1) < 5
    assert four.flops_forward == 4 * (one.flops_forward or 0)


@pytest.mark.parametrize(
    ("file", "text", "threads"),
    [
        ("cpu.max", "400000 100000\n", 4),
        ("cpu.max", "450000 100000\n", 4),
        ("cpu.max", "50000 100000\n", 1),
        ("cpu.max", "max 100000\n", 64),
        ("cpu/cpu.cfs_quota_us", "400000\n", 4),
    ],
)
def test_tim_18_threads_follow_the_container(tmp_path: Path, file: str, text: str, threads: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / file).write_text(text)
    assert host.available_threads(tmp_path, 64) == threads


def test_tim_18_threads_are_recorded_and_can_be_given() -> None:
    facts = record_of(threads=2, parity=False).environment
    assert (facts["threads"], facts["usable_threads"]) == (2, host.available_threads())


@pytest.fixture(scope="module")
def compiled_record() -> Record:
    """Measure a compiled trial of one tiny block."""
    pytest.importorskip("torch._inductor")
    return record_of("per-block", n_layers=1, compile=True, min_steps=6, max_steps=6)


def test_tim_04_compile_time_is_a_figure_of_its_own(compiled_record: Record) -> None:
    assert compiled_record.status == "ok", compiled_record.message
    assert compiled_record.compile_s is not None and compiled_record.step_s_median is not None
    assert compiled_record.compile_s > 10 * compiled_record.step_s_median


def test_tim_05_nothing_is_compiled_in_a_timed_step(compiled_record: Record) -> None:
    """Warm-up has the shapes, types and gradient mode of the timed steps; one compilation would outlast all of them."""
    assert compiled_record.compile_s is not None
    assert len(compiled_record.step_samples_s) == 6
    assert max(compiled_record.step_samples_s) < compiled_record.compile_s / 4
