"""Estimate trials in a process of its own: requests as JSON in, one message per trial out."""

import json
import warnings
from multiprocessing.connection import Connection

from ckbench.config import RunConfig
from ckbench.errors import reason_of
from ckbench.estimate.allocator import CachingAllocator
from ckbench.estimate.chain import MIN_LAYERS, estimate_chain
from ckbench.estimate.repeats import NotAChain
from ckbench.estimate.replay import Replayed, replay
from ckbench.estimates import Estimate
from ckbench.records import PHASES


def serve(connection: Connection, text: str) -> None:
    """Estimate every config of a request; send each as a ``phase`` when it is done."""
    request = json.loads(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about devices that are not there
        for config_data in request["configs"]:
            config = RunConfig.model_validate_json(json.dumps(config_data))
            made = estimate(config, request["kind"], request["workspace_bytes"], request["method"])
            connection.send_bytes(json.dumps({"phase": json.dumps(vars(made))}).encode())
    connection.send_bytes(json.dumps({"done": len(request["configs"])}).encode())
    connection.close()


def estimate(config: RunConfig, kind: str, workspace_bytes: int = 0, method: str = "auto") -> Estimate:
    """Estimate one trial in the semantics of ``cpu`` or ``cuda``; whatever stops it becomes the reason.

    ``method``: ``replay`` runs the whole stack without data, ``chain`` a short one; ``auto`` takes the chain for deep
    stacks, where it applies.
    """
    label = config.strategy.label
    try:
        if method == "chain" or (method == "auto" and (config.model.n_layers or 0) >= MIN_LAYERS):
            try:
                return estimate_chain(config, kind, workspace_bytes)
            except NotAChain:
                if method == "chain":
                    raise
        replayed = replay(config, kind, workspace_bytes)
    except Exception as error:
        return Estimate(strategy=label, reason=reason_of(error))
    return figures_of(label, replayed, kind)


def figures_of(label: str, replayed: Replayed, kind: str) -> Estimate:
    """Give the figures of a replay; on CUDA its timeline goes through the allocator."""
    steady, first = replayed.steady, replayed.first
    result = Estimate(
        strategy=label,
        peak_allocated_bytes=steady["peak_allocated_bytes"],
        peak_requested_bytes=steady["peak_allocated_bytes"],
        first_step_peak_bytes=first["peak_allocated_bytes"],
        static_bytes=steady["static_bytes"],
        gradient_bytes=steady["gradient_bytes"],
        saved_bytes=steady["saved_bytes"],
        peak_phase=steady["peak_phase"],
        peaks={phase: steady[f"peak_{phase}_bytes"] for phase in PHASES},
        n_parameters=replayed.described["n_parameters"],
        host_bytes=replayed.host_bytes,
        host_pinned_bytes=replayed.host_pinned_bytes,
    )
    if kind == "cuda":
        events = replayed.tracker.timeline.events
        allocator = CachingAllocator()
        allocator.replay(events[: replayed.begin])
        result.first_step_peak_bytes = allocator.peak_allocated
        allocator.reset_peaks()
        allocator.replay(events[replayed.begin :])
        result.peak_allocated_bytes = allocator.peak_allocated
        result.peak_reserved_bytes = allocator.peak_reserved
    return result
