"""Trials of the size the reports were distilled at, in this process: configs, weighed steps, gradients, records."""

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ckbench import specs
from ckbench.config import ModelConfig, RunConfig, RunSettings, TrainConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine.parity import check_parity
from ckbench.engine.trial import NoObserver, Trial
from ckbench.engine.worker import run_trial
from ckbench.records import Record

CPU = torch.device("cpu")
MIB = 2**20
SMALL: dict[str, Any] = {"n_layers": 3, "d_model": 16, "n_heads": 2, "vocab_size": 32, "batch_size": 2, "seq_len": 8}
VECTORS: dict[str, Any] = {"head": "none", "vocab_size": None, "loss": "mse"}
"""Changes for models of ``odd_models``: vectors in, vectors out."""
GUARD: dict[str, Any] = {
    **{"n_layers": 8, "d_model": 64, "n_heads": 4, "vocab_size": 64, "tie_embeddings": True},
    **{"batch_size": 8, "seq_len": 64, "optimizer": "sgd", "set_to_none": False},
}
"""The size of the guard figures: fp32, no dropout, no optimizer state, gradients allocated before the step."""


def config(spec: Any = "none", base: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """Make a trial's config from a small base and changes, each put where its key belongs."""
    values = {**(SMALL if base is None else base), **changes}
    run = {"device": "cpu", "threads": 1, "warmup_steps": 0, "min_steps": 2, "max_steps": 2}
    sections: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "run": run}
    classes = {"model": ModelConfig, "train": TrainConfig, "run": RunSettings}
    for key, value in values.items():
        sections[next(name for name, cls in classes.items() if key in cls.model_fields)][key] = value
    parts: dict[str, Any] = {name: cls(**sections[name]) for name, cls in classes.items()}
    return RunConfig(study="known", strategy=specs.parse(spec), **parts)


def trial(spec: Any = "none", base: dict[str, Any] | None = None, **changes: Any) -> Trial:
    """Build a trial on the CPU."""
    return Trial(config(spec, base, **changes), CPU)


def record_of(spec: Any = "none", base: dict[str, Any] | None = None, **changes: Any) -> Record:
    """Measure a trial in this process, as a worker does."""
    return run_trial(config(spec, base, **changes), 0, time.time(), lambda phase: None)


def parity(spec: Any, base: dict[str, Any] | None = None, **changes: Any) -> str:
    """Say how a strategy compares with none: ``exact``, or what differs."""
    verdict = check_parity(config(spec, base, **changes), CPU, lambda: None)
    return "exact" if verdict["parity"] == "exact" else str(verdict["parity_detail"])


class GradientKeeper:
    """An observer that copies the gradients at the end of backward."""

    def __init__(self, kept_trial: Trial) -> None:
        self.trial = kept_trial
        self.gradients: list[Tensor | None] = []

    def at(self, event: str) -> None:
        """Copy when backward has ended."""
        if event == "optimizer":
            parameters = self.trial.module.parameters()
            self.gradients = [None if p.grad is None else p.grad.clone() for p in parameters]


def gradients(of_trial: Trial) -> list[Tensor | None]:
    """Run one step and give the gradients of every parameter."""
    keeper = GradientKeeper(of_trial)
    of_trial.step(keeper)
    return keeper.gradients


def same(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    """Compare two lists of gradients bit by bit."""
    pairs = zip(first, second, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def weigh(of_trial: Trial, n_steps_before: int = 1) -> dict[str, Any]:
    """Give the memory fields of a steady step, with ``above_static``: the peak without weights and optimizer state."""
    for _ in range(n_steps_before):
        of_trial.step(NoObserver())
    fields = Cpu("cpu", 1).weigh(of_trial)
    return {**fields, "above_static": fields["peak_allocated_bytes"] - fields["static_bytes"]}


@cache
def guard(spec: str, **changes: Any) -> dict[str, Any]:
    """Weigh a step of the model of the guard figures, gradients allocated before it; count its block calls too."""
    built = trial(spec, GUARD, **changes)
    for parameter in built.module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    fields = weigh(built, 0)
    return {**fields, "block_calls_backward": sum(built.applied.counts.block_calls_backward)}


@cache
def guard_flops(spec: str) -> int:
    """Count the work of a step of the model of the guard figures, for one sequence of the batch."""
    counted = trial(spec, GUARD, batch_size=1).count()
    return int(counted["flops_forward"] + counted["flops_backward"])
