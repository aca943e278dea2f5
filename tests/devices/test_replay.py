"""The scripted device answers as scripted, and its noise is the noise asked for."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from ckbench.config import ModelConfig, RunConfig, RunSettings, StrategySpec, TrainConfig
from ckbench.devices.replay import Replay
from ckbench.engine.worker import run_trial
from ckbench.errors import DeviceUnavailable
from ckbench.records import Record


def trial(folder: Path, script: dict[str, Any], strategy: str = "none", round_number: int = 0, **run: Any) -> Record:
    path = folder / "script.json"
    path.write_text(json.dumps({"device_name": "scripted", "strategies": script}))
    config = RunConfig(
        study="replayed",
        model=ModelConfig(n_layers=2, d_model=32, n_heads=4, vocab_size=64),
        train=TrainConfig(batch_size=2, seq_len=16),
        strategy=StrategySpec(name=strategy),
        run=RunSettings(device=f"replay:{path}", **run),
    )
    return run_trial(config, round_number, 0.0, lambda phase: None)


def test_steps_come_as_scripted(tmp_path: Path) -> None:
    record = trial(tmp_path, {"none": {"step_s": [0.1, 0.2]}}, max_steps=20)
    assert record.status == "ok" and record.device_name == "scripted"
    assert set(record.step_samples_s) == {0.1, 0.2}


def test_scripted_fields_reach_the_record(tmp_path: Path) -> None:
    record = trial(tmp_path, {"*": {"fields": {"peak_allocated_bytes": 7, "parity": "within_noise"}}})
    assert record.peak_allocated_bytes == 7 and record.parity == "within_noise"


@pytest.mark.parametrize(
    ("fail", "status"),
    [
        ({"raise": "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"}, "oom"),
        ({"raise": "CUDA out of memory. Tried to allocate 2.00 GiB.", "type": "OutOfMemoryError"}, "oom"),
        ({"raise": "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"}, "error"),
        ({"raise": "A different number of tensors was saved", "type": "CheckpointError"}, "recompute_mismatch"),
    ],
)
def test_failures_get_their_status(tmp_path: Path, fail: dict[str, Any], status: str) -> None:
    record = trial(tmp_path, {"none": {"fail": fail}})
    assert record.status == status
    assert record.message is not None and str(fail["raise"])[:20] in record.message
    assert record.failed_phase == "forward"


def test_numbers_of_an_out_of_memory_message_are_kept(tmp_path: Path) -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
        "1.94 GiB is free. Of the allocated memory 74.50 GiB is allocated by PyTorch, and 1.25 GiB is reserved "
        "by PyTorch but unallocated."
    )
    record = trial(tmp_path, {"none": {"fail": {"raise": text, "type": "OutOfMemoryError"}}})
    assert record.requested_bytes == 2.5 * 2**30
    assert record.free_bytes == round(1.94 * 2**30)
    assert record.allocated_at_failure_bytes == 74.5 * 2**30
    assert record.reserved_at_failure_bytes == 75.75 * 2**30


def test_noise_between_processes_differs_by_round_and_is_the_same_again(tmp_path: Path) -> None:
    script = {"none": {"step_s": 0.1, "noise": {"process": 0.1}}}
    medians = [trial(tmp_path, script, round_number=i).step_s_median for i in range(40)]
    assert medians == [trial(tmp_path, script, round_number=i).step_s_median for i in range(40)]
    assert 0.05 < statistics.stdev(m / 0.1 for m in medians if m) < 0.2


def test_a_missing_script_is_an_unavailable_device(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="not a replay script"):
        Replay(f"replay:{tmp_path / 'no.json'}", None)
