"""Prove that a strategy does no harm: a few steps beside ``none``, from equal weights and seed.

Compared after the last step: every loss, which parameters have gradients, every gradient, every
weight, every buffer, and the state of the random generators. On CPU all of it must be bit-identical.
On CUDA gradients may differ by a small multiple of what two runs of ``none`` differ by.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckbench.config import RunConfig
from ckbench.devices._oom import recognise
from ckbench.engine.trial import DTYPES, Trial, baseline_config, is_compiled
from ckbench.plan import Plan

STEPS = 2
NOISE_MULTIPLE = 4.0
"""A difference up to this multiple of the noise between two runs of none counts as noise."""
NOISE_RUNS = 2
"""Runs of none beside the first; two kernels may agree by luck, so rounding of the type is the least noise."""
COMPILED_TOLERANCE = 1e-5
"""The compiler fuses a recomputation otherwise than the first pass, so it may round otherwise: in fp32 by up to about
a hundred roundings. Measured on a CPU against none, compiled: 0. A wrong dropout mask makes 0.8."""
COMPILED_ROUNDINGS = 8
"""The same in a short type, whose intermediates the compiler may leave in fp32: in roundings of that type. Measured
with bf16 weights: 2.5, that is 0.019."""
SMALL_BATCH, SMALL_SEQ_LEN = 1, 128


class _Losses:
    """Keeps the loss of every micro-batch; a step hands it over through the loss function."""

    def __init__(self, trial: Trial) -> None:
        self.values: list[Tensor] = []
        original = trial.loss

        def keep(output: Tensor, targets: Tensor) -> Tensor:
            loss = original(output, targets)
            self.values.append(loss.detach().clone())
            return loss

        trial.loss = keep  # type: ignore[method-assign]

    def at(self, event: str) -> None:
        """Ignore the event."""


class _GradientKeeper:
    """Copies gradients to the host between backward and the update of the last step.

    Where backward itself updates and frees them, they are copied on their way into the parameters.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.gradients: dict[str, Tensor | None] = {}
        self.in_backward = trial.train.optimizer_in_backward
        if self.in_backward:
            for name, parameter in trial.module.named_parameters():
                self.gradients[name] = None
                if parameter.requires_grad:
                    parameter.register_hook(_copier(self.gradients, name))

    def at(self, event: str) -> None:
        """Copy at the end of backward."""
        if event == "optimizer" and not self.in_backward:
            self.gradients = {
                name: None if p.grad is None else p.grad.detach().to("cpu", copy=True)
                for name, p in self.trial.module.named_parameters()
            }


def _copier(gradients: dict[str, Tensor | None], name: str) -> Callable[[Tensor], None]:
    """Give a hook that copies a gradient; it holds no trial, which would live on with its own parameters."""

    def copy(gradient: Tensor) -> None:
        gradients[name] = gradient.detach().to("cpu", copy=True)

    return copy


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a few steps leave behind, on the host."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    generators: list[Tensor]


def run_steps(config: RunConfig, device: torch.device, n_steps: int = STEPS) -> Outcome:
    """Build the trial anew and run ``n_steps`` from its seed."""
    trial = Trial(config, device)
    losses = _Losses(trial)
    keeper = _GradientKeeper(trial)
    for _ in range(n_steps):
        trial.step(keeper)
    generators = [torch.get_rng_state()]
    if device.type == "cuda":
        generators.append(torch.cuda.get_rng_state(device))
    state = {
        name: tensor.detach().to("cpu", copy=True)
        for name, tensor in (*trial.module.named_parameters(), *trial.module.named_buffers())
    }
    outcome = Outcome(
        losses=[loss.cpu() for loss in losses.values], gradients=keeper.gradients, state=state, generators=generators
    )
    trial.release()
    return outcome


def differences(baseline: Outcome, other: Outcome) -> list[str]:
    """Name everything that is not bit-identical, gravest first; empty when all is."""
    found = []
    missing = [n for n, g in baseline.gradients.items() if g is not None and other.gradients[n] is None]
    extra = [n for n, g in baseline.gradients.items() if g is None and other.gradients[n] is not None]
    if missing:
        found.append(f"{len(missing)} parameters without a gradient, first {missing[0]}")
    if extra:
        found.append(f"{len(extra)} parameters with a gradient that none has not, first {extra[0]}")
    unequal_losses = [i for i, (a, b) in enumerate(zip(baseline.losses, other.losses, strict=True)) if not _same(a, b)]
    if unequal_losses:
        found.append(f"loss differs from micro-batch {unequal_losses[0]} on")
    gradients = [n for n, g in baseline.gradients.items() if g is not None and not _same(g, other.gradients[n])]
    if gradients and not missing:
        found.append(f"{len(gradients)} of {len(baseline.gradients)} gradients differ, first {gradients[0]}")
    state = [n for n, t in baseline.state.items() if not _same(t, other.state[n])]
    if state:
        found.append(f"{len(state)} weights or buffers differ after {STEPS} steps, first {state[0]}")
    if any(not torch.equal(a, b) for a, b in zip(baseline.generators, other.generators, strict=True)):
        found.append("the random generators are in another state")
    return found


def largest_relative_difference(baseline: Outcome, other: Outcome) -> float:
    """Give the largest gradient difference over the norm of that gradient (infinite where one lacks)."""
    largest = 0.0
    for name, gradient in baseline.gradients.items():
        twin = other.gradients[name]
        if gradient is None and twin is None:
            continue
        if gradient is None or twin is None:
            return float("inf")
        norm = float(gradient.double().norm()) or 1.0
        difference = float((gradient.double() - twin.double()).norm()) / norm
        if difference != difference:
            return float("inf")
        largest = max(largest, difference)
    return largest


def _same(a: Tensor, b: Tensor | None) -> bool:
    """Compare bit by bit, so that NaN equals itself and 0.0 does not equal -0.0."""
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else _same(a.reshape(1), b.reshape(1))
    )


def check_parity(
    config: RunConfig, device: torch.device, release: Callable[[], None], plan: Plan | None = None
) -> dict[str, Any]:
    """Give the record fields of parity; ``release`` frees the measured trial first.

    A difference passes within the tolerance of the trial's plan, where it states one; on CUDA also within the noise
    between runs of none.
    """
    release()
    baseline_run, config, shape = _first_that_fits(config, device, plan)
    other = run_steps(config, device)
    found = differences(baseline_run, other)
    shape = f"{STEPS} steps, {shape}"
    if not found:
        return {"parity": "exact", "parity_detail": f"{shape}: loss, gradients, weights, generators bit-identical"}
    detail = f"{shape}: {'; '.join(found)}"
    if any("without a gradient" in text or "generators" in text for text in found):
        return {"parity": "failed", "parity_detail": detail}
    difference = largest_relative_difference(baseline_run, other)
    detail += f"; largest relative gradient difference {difference:.2g}"
    tolerance = plan_tolerance(config, plan)
    if tolerance > 0:
        detail += f", stated tolerance {tolerance:.2g}"
    if 0 < tolerance and difference <= tolerance:
        return {"parity": "within_tolerance", "parity_detail": detail}
    if device.type == "cpu":
        return {"parity": "failed", "parity_detail": detail}
    again = (run_steps(baseline_config(config, plan), device) for _ in range(NOISE_RUNS))
    rounding = torch.finfo(DTYPES.get(config.train.precision, torch.float32)).eps
    noise = max(rounding, *(largest_relative_difference(baseline_run, other_none) for other_none in again))
    detail += f", noise of none {noise:.2g}"
    within = difference <= NOISE_MULTIPLE * noise
    return {
        "parity": "within_noise" if within else "failed",
        "parity_detail": detail,
        "parity_noise_ratio": noise,
    }


def plan_tolerance(config: RunConfig, plan: Plan | None) -> float:
    """Give the largest relative gradient difference that is no fault: the plan's, or the compiler's."""
    stated = plan.tolerance if plan else 0.0
    if not is_compiled(config, plan):
        return stated
    short = DTYPES.get(config.train.precision)
    return max(stated, COMPILED_TOLERANCE, COMPILED_ROUNDINGS * torch.finfo(short).eps if short else 0.0)


def _first_that_fits(config: RunConfig, device: torch.device, plan: Plan | None) -> tuple[Outcome, RunConfig, str]:
    """Run ``none`` at the trial's own shape, or at a smaller one where none runs out of memory."""
    train = config.train
    shapes = [(train.batch_size, train.seq_len), (SMALL_BATCH, min(SMALL_SEQ_LEN, train.seq_len))]
    if config.model.own_seq_len() is not None:
        shapes[1] = (SMALL_BATCH, train.seq_len)
    for batch_size, seq_len in shapes:
        smaller = train.model_copy(update={"batch_size": batch_size, "seq_len": seq_len})
        config = config.model_copy(update={"train": smaller})
        try:
            return run_steps(baseline_config(config, plan), device), config, f"batch {batch_size} x {seq_len}"
        except Exception as error:  # on a CPU it is a plain RuntimeError
            if recognise(error) is None or (batch_size, seq_len) == shapes[-1]:
                raise
        torch.cuda.empty_cache()
    raise AssertionError("the loop returns or raises")
