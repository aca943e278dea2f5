"""One process, one trial: a request as JSON in, messages and one record as JSON out.

The contract knows no framework: an engine for another one is a sibling of this package.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from ckbench import host, registry
from ckbench.config import RunConfig
from ckbench.devices.base import Device, Subject
from ckbench.engine.environment import environment
from ckbench.engine.measure import measure
from ckbench.errors import CkbenchError
from ckbench.records import Record

MAX_MESSAGE_CHARS = 2000

Progress = Callable[[str], None]


def serve(connection: Connection, request_text: str) -> None:
    """Run one trial in this process; send ``{"phase": ...}`` messages, then ``{"record": ...}``."""
    request = json.loads(request_text)

    def progress(phase: str) -> None:
        connection.send_bytes(json.dumps({"phase": phase}).encode())

    config = RunConfig.model_validate_json(json.dumps(request["config"]))
    record = run_trial(config, request["round"], request["requested_at"], progress)
    connection.send_bytes(json.dumps({"record": record.to_json()}).encode())
    connection.close()


def probe(connection: Connection, device_name: str) -> None:
    """Say whether a device is there and what it is, in a process that ends afterwards."""
    try:
        device = open_device(device_name, None)
        answer = {"label": device.label(), "name": device.name(), "facts": environment(device)}
    except CkbenchError as error:
        answer = {"error": str(error)}
    connection.send_bytes(json.dumps(answer).encode())
    connection.close()


def open_device(name: str, threads: int | None) -> Device:
    """Open a device by its name: cpu, cuda, cuda:1, replay:FILE; auto takes CUDA where there is one.

    Raises DeviceUnavailable; there is no silent fallback.
    """
    if name == "auto":
        import torch

        name = "cuda" if torch.cuda.is_available() else "cpu"
    device: Device = registry.load("devices", name.partition(":")[0])(name, threads)
    return device


def blank_record(config: RunConfig, round_number: int) -> Record:
    """Give a record that says what was asked, with nothing measured yet."""
    return Record(
        study=config.study,
        strategy=config.strategy.label,
        strategy_spec=config.strategy.model_dump(mode="json"),
        configuration_id=config.configuration_id(),
        round=round_number,
        device=config.run.device,
        model=config.model.model_dump(mode="json"),
        train=config.train.model_dump(mode="json"),
        run=config.run.model_dump(mode="json"),
    )


def run_trial(config: RunConfig, round_number: int, requested_at: float, progress: Progress) -> Record:
    """Measure one strategy. Every failure becomes a record with its status; nothing is raised but exits."""
    record = blank_record(config, round_number)
    stage = "build"
    device: Device | None = None
    subject: Subject | None = None

    def enter(name: str) -> None:
        nonlocal stage
        stage = name
        progress(name)

    try:
        enter("build")
        if config.run.pin:
            host.pin(config.run.threads or host.available_threads())
        device = open_device(config.run.device, config.run.threads)
        record.device, record.device_name = device.label(), device.name()
        record.environment = environment(device)
        record.nvml_device_before_bytes = device.device_used_bytes()
        subject = device.subject(config, round_number)
        record.startup_s = time.time() - requested_at
        for name, value in measure(subject, device, config, round_number, enter).items():
            setattr(record, name, value)
        record.environment.update(device.facts_after())
        if record.parity == "failed":
            record.status, record.message = "invalid", record.parity_detail
        elif record.n_regions and record.region_calls_backward == 0:
            record.status, record.message = "error", "the strategy had no effect: no region was recomputed"
        elif (record.plan or {}).get("native") and record.block_calls_backward == 0:
            record.status, record.message = "error", "the library's own checkpointing recomputed no block"
    except Exception as error:
        record.status, numbers = classify(error, device)
        for name, value in numbers.items():
            setattr(record, name, value)
        record.message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]
        record.failed_phase = _failed_phase(stage, subject)
        del error  # its traceback holds the frames, and they hold what did not fit
        gc.collect()
    return record


def classify(error: BaseException, device: Device | None) -> tuple[str, dict[str, Any]]:
    """Give status and numbers of a failure: oom, recompute_mismatch or error."""
    shortage = device.out_of_memory(error) if device is not None else None
    if shortage is not None:
        return "oom", asdict(shortage)
    if any(cls.__name__ == "CheckpointError" for cls in type(error).__mro__):
        return "recompute_mismatch", {}
    return "error", {}


def _failed_phase(stage: str, subject: Subject | None) -> str:
    """Name where a trial ended: the phase of the step it was in, or the stage outside of steps."""
    if stage in ("build", "parity") or subject is None:
        return stage
    return subject.phase
