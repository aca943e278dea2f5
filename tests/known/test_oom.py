"""Reports of runs that ended badly: each end has one honest status, and neither memory nor rows are lost with it."""

import gc
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckbench import launch
from ckbench.devices._oom import recognise
from ckbench.engine import parity as parity_module
from ckbench.engine import warm
from ckbench.engine.parity import check_parity, run_steps
from ckbench.engine.trial import Trial
from ckbench.launch import Launcher
from ckbench.models.base import BuiltModel
from ckbench.records import Record
from ckbench.store import ResultStore
from tests.known import odd_models
from tests.known.conftest import Run
from tests.known.trials import CPU, VECTORS, config, record_of

ROOT = Path(__file__).parents[2]
NO_ROOM = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
TOO_WIDE = 4_000_000
"""A d_model whose first matrix is larger than the address space, so that no system promises it."""
WIDE_STUDY = """\
model: {n_layers: 1, d_model: 64, n_heads: 4, head: none}
train: {batch_size: 2, seq_len: 8, loss: mse}
strategies: [none]
run: {rounds: 1, warmup_steps: 0, min_steps: 2, max_steps: 2, parity: false, threads: 1}
"""


def stored() -> list[dict[str, Any]]:
    """Read the records of the only results file."""
    (file,) = Path("results").glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_oom_01_the_memory_of_a_failed_attempt_is_free_for_the_next(
    use_model: Callable[[Callable[[], BuiltModel]], None],
) -> None:
    big: list[weakref.ref[Tensor]] = []

    class Greedy(odd_models.MixingBlock):
        def forward(self, x_BSD: Tensor) -> Tensor:
            kept = torch.cat([super().forward(x_BSD)] * 1000)
            big.append(weakref.ref(kept))
            raise RuntimeError(NO_ROOM)

    for blocks in ([odd_models.MixingBlock(), Greedy()], [Greedy(), Greedy()]):
        stack = odd_models.Stack(blocks)
        use_model(lambda stack=stack: odd_models.built(stack))  # type: ignore[misc]
        record = record_of("per-block", **VECTORS)
        assert (record.status, record.failed_phase) == ("oom", "forward")
    assert len(big) == 2 and all(ref() is None for ref in big)
    use_model(odd_models.shared)
    assert record_of("per-block", **VECTORS).status == "ok"


def test_oom_01_a_released_trial_holds_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm.torch is torch  # what a first optimizer imports keeps a frame alive, once in a process
    weights: list[weakref.ref[nn.Parameter]] = []
    build = Trial._build

    def noting(trial: Trial) -> BuiltModel:
        model = build(trial)
        weights.extend(weakref.ref(p) for p in model.module.parameters())
        return model

    monkeypatch.setattr(Trial, "_build", noting)
    gc.collect()
    gc.disable()
    try:
        run_steps(config("per-block"), CPU)
        assert len(weights) == 41 and all(ref() is None for ref in weights)
    finally:
        gc.enable()


def test_oom_02_a_size_that_does_not_fit_leaves_the_others_untouched(ckbench: Run) -> None:
    Path("study.yaml").write_text(WIDE_STUDY)

    def rows(width: str, *options: str) -> tuple[int, dict[int, dict[str, Any]]]:
        sweep = ("sweep", "study.yaml", "--width", width, "--device", "cpu", "--format", "json", "--out", width)
        outcome = ckbench(*sweep, *options)
        return outcome.code, {row["model"]["d_model"]: row for row in json.loads(outcome.out)}

    code, both = rows(f"{TOO_WIDE},64")
    assert (both[TOO_WIDE]["status"], both[64]["status"], code) == ("oom", "ok", 0)  # oom is an answer
    code, alone = rows("64", "--strict")
    assert code == 0 and alone[64]["peak_allocated_bytes"] == both[64]["peak_allocated_bytes"] > 0
    assert rows(f"{TOO_WIDE}", "--strict")[0] == 1  # unless a script must know


def test_oom_03_a_library_without_room_is_out_of_memory(ckbench: Run, replay: Callable[..., str]) -> None:
    text = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ckbench("run", "study.yaml", "-s", "none", "--rounds", "1", "--device", replay({"none": {"fail": {"raise": text}}}))
    (record,) = stored()
    assert record["status"] == "oom" and "CUBLAS_STATUS_ALLOC_FAILED" in record["message"]


def test_oom_05_a_bug_is_no_shortage_of_memory(ckbench: Run, replay: Callable[..., str]) -> None:
    text = "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"
    outcome = ckbench(
        "run", "study.yaml", "--rounds", "1", "--device", replay({"per-block": {"fail": {"raise": text}}})
    )
    assert outcome.code == 1
    assert [r["status"] for r in stored()] == ["ok", "error", "ok"]
    assert stored()[1]["message"] == f"RuntimeError: {text}" and text in outcome.out


def test_oom_06_a_plain_error_of_the_host_allocator_is_out_of_memory() -> None:
    record = record_of("none", d_model=TOO_WIDE, n_layers=1, n_heads=4, **VECTORS)
    assert (record.status, record.failed_phase) == ("oom", "build")
    assert (record.message or "").startswith("RuntimeError: ")
    assert record.requested_bytes == 3 * TOO_WIDE**2 * 4
    assert record.free_bytes is None and record.allocated_at_failure_bytes is None


def test_oom_06_a_baseline_without_room_on_the_host_is_compared_at_a_smaller_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_little_room(config: Any, device: torch.device, n_steps: int = 2) -> Any:
        if config.strategy.name == "none" and config.train.batch_size > 1:
            raise RuntimeError(NO_ROOM)
        return run_steps(config, device, n_steps)

    monkeypatch.setattr(parity_module, "run_steps", with_little_room)
    verdict = check_parity(config("per-block"), CPU, lambda: None)
    assert (verdict["parity"], verdict["parity_detail"][:23]) == ("exact", "2 steps, batch 1 x 8: l")


def test_oom_07_a_killed_trial_takes_nothing_else_with_it(ckbench: Run, replay: Callable[..., str]) -> None:
    device = replay({"per-block": {"fail": {"signal": 9}}}, isolated=True)
    outcome = ckbench("run", "study.yaml", "--rounds", "1", "--device", device)
    assert outcome.code == 1
    assert [(r["status"], r["signal"]) for r in stored()] == [("ok", None), ("killed", 9), ("ok", None)]
    assert stored()[0]["environment"]["start_method"] in ("forkserver", "spawn")


def test_oom_13_the_numbers_of_a_message_are_kept() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 24.00 GiB of which 2.00 GiB "
        "is free. Including non-PyTorch memory, this process has 21.50 GiB memory in use. Of the allocated memory "
        "18.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated."
    )
    found = recognise(type("OutOfMemoryError", (RuntimeError,), {})(text))
    assert found is not None
    assert (found.requested_bytes, found.free_bytes) == (2**29, 2**31)
    assert (found.allocated_at_failure_bytes, found.reserved_at_failure_bytes) == (18 * 2**30, 21 * 2**30)
    bare = recognise(RuntimeError("CUDA error: out of memory"))
    assert bare is not None and set(vars(bare).values()) == {None}


PARENT = """
import sys
from ckbench.cli import main
sys.argv = ["ckbench", "run", "study.yaml", "--rounds", "1", "-s", "none", "--device", sys.argv[1]]
if __name__ == "__main__":
    try:
        main()
    finally:
        print("torch in the parent:", "torch" in sys.modules, file=sys.stderr)
"""


def test_oom_15_the_parent_never_touches_a_device(tmp_path: Path, replay: Callable[..., str]) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "parent.py", replay()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "torch in the parent: False" in done.stderr, done.stderr
    assert not any("torch.cuda" in line for line in inspect.getsource(launch).splitlines())
    assert Launcher().start_method in ("forkserver", "spawn") and Launcher("spawn").start_method == "spawn"


def test_oom_16_nothing_that_a_timed_out_trial_started_stays(ckbench: Run, replay: Callable[..., str]) -> None:
    sleep_s = round(300 + random.random() * 100, 6)
    device = replay({"per-block": {"fail": {"child_s": sleep_s, "hang_s": 60}}}, isolated=True)
    begun = time.monotonic()
    ckbench("run", "study.yaml", "--rounds", "1", "--set=run.timeout_s=3", "--device", device)
    assert [r["status"] for r in stored()] == ["ok", "timeout", "ok"]
    assert time.monotonic() - begun < 45
    for _ in range(50):
        if not is_running(f"time.sleep({sleep_s})"):
            break
        time.sleep(0.1)
    assert not is_running(f"time.sleep({sleep_s})")


def is_running(text: str) -> bool:
    """Say whether a living process has this text in its command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def test_oom_17_an_interrupt_keeps_what_is_finished(
    ckbench: Run, replay: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That no process is left behind is proven with real workers in tests/launch."""
    run, calls = Launcher.run, []

    def interrupted(*args: Any) -> Record:
        calls.append(args)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return run(*args)

    monkeypatch.setattr(Launcher, "run", interrupted)
    five = [word for spec in ("none", "per-block", "every-k:2", "nested:2", "full") for word in ("-s", spec)]
    outcome = ckbench("run", "study.yaml", "--rounds", "1", *five, "--device", replay())
    assert outcome.code == 130
    assert "interrupted: the table is incomplete; --resume goes on with it" in outcome.err
    assert [r["strategy"] for r in stored()] == ["none", "per-block"]
    assert ckbench("report", "results").code == 0


def test_oom_18_a_line_cut_short_costs_its_own_trial_only(
    ckbench: Run, replay: Callable[..., str], tmp_path: Path
) -> None:
    device = replay()
    ckbench("run", "study.yaml", "--rounds", "1", "--device", device)
    (file,) = Path("results").glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-40])
    outcome = ckbench("run", "study.yaml", "--rounds", "1", "--device", device, "--resume")
    assert outcome.code == 0 and "1 trials to run, 2 are there from before" in outcome.err
    report = ckbench("report", "results")
    assert "cut short (the write was interrupted)" in report.out or "not JSON" in report.out
    rows = json.loads(ckbench("report", "results", "--format", "json").out)
    assert [row["status"] for row in rows] == ["ok"] * 3
    with ResultStore(tmp_path / "other", "study", "s") as results:
        results.path.write_text('{"schema": 1, "strat')
        results.append(Record(strategy="none"))
        assert results.path.read_text().startswith('{"schema": 1, "strat\n{')


def test_oom_20_failures_are_tried_again_and_oom_when_asked(ckbench: Run, replay: Callable[..., str]) -> None:
    specs = ("none", "per-block", "every-k:2", "nested:2", "full")
    arguments = ["run", "study.yaml", "--rounds", "1", "--device", replay()]
    arguments += [word for spec in specs for word in ("-s", spec)]
    ckbench(*arguments)
    (file,) = Path("results").glob("*.jsonl")
    ended = dict(zip(specs, ("ok", "error", "killed", "timeout", "oom"), strict=True))
    changed = [{**record, "status": ended[record["strategy"]]} for record in stored()]
    file.write_text("".join(json.dumps(record) + "\n" for record in changed))
    assert ckbench(*arguments, "--retry-oom").err == "--retry-oom needs --resume\n"
    assert "3 trials to run, 2 are there from before" in ckbench(*arguments, "--resume").err
    assert "1 trials to run, 4 are there from before" in ckbench(*arguments, "--resume", "--retry-oom").err
    rows = json.loads(ckbench("report", "results", "--format", "json").out)
    assert {row["strategy"]: row["status"] for row in rows} == dict.fromkeys(specs, "ok")
