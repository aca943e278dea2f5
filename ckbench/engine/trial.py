"""One strategy on one model: build it, run training steps, say what it holds and what ran."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckbench import registry, specs
from ckbench.config import RunConfig, StrategySpec, TrainConfig
from ckbench.devices.base import Holdings, Observer
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.flops import FlopCounter
from ckbench.engine.optimizers import build_optimizer
from ckbench.models.base import BuiltModel
from ckbench.plan import StackShape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16, "fp16-pure": torch.float16}


class NoObserver:
    """An observer that does nothing."""

    def at(self, event: str) -> None:
        """Ignore the event."""


class Trial:
    """A built model under a plan, with its optimizer and its batches."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.train = config.train
        torch.manual_seed(config.run.seed)
        self.model: BuiltModel = self._build()
        self.module = self.model.module.train()
        plan = specs.resolve(config.strategy, StackShape(n_layers=len(self.model.blocks)))
        self.applied = AppliedPlan(self.model, plan)
        self.optimizer, self.optimizer_implementation = build_optimizer(self.module, config.train, device.type)
        self.batches = _draw_batches(config, device)
        self.scaler = _build_scaler(config.train, device.type)
        self.phase = "build"
        self.executed_steps = 0
        self.skipped_steps = 0
        torch.manual_seed(config.run.seed + 1)

    def _build(self) -> BuiltModel:
        build = registry.load("models", self.config.model.family)
        with self.device:
            model: BuiltModel = build(self.config.model, self.train.seq_len)
        if self.train.precision.endswith("-pure"):
            model.module.to(DTYPES[self.train.precision])
        return model

    def step(self, observer: Observer) -> None:
        """Run one training step: every micro-batch forward and backward, then the optimizer."""
        counts = self.applied.counts
        for inputs, targets in self.batches:
            self.phase = "forward"
            observer.at("forward")
            with self._autocast():
                output = self.module(inputs)
                self.phase = "loss"
                loss = self.loss(output, targets)
                del output  # else the logits would live through backward
            counts.in_backward = True
            self.phase = "backward"
            observer.at("turn")
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            counts.in_backward = False
            del loss
        self.phase = "optimizer"
        observer.at("optimizer")
        self._update()
        self.optimizer.zero_grad(set_to_none=self.train.set_to_none)
        observer.at("end")

    def observed_step(self, observer: Observer) -> None:
        """Run one step that also reports where the head begins and where the gradient leaves it."""
        last_block = self.model.blocks[-1]

        def on_output(_module: nn.Module, _args: Any, output: Any) -> None:
            observer.at("head")
            hidden = output if isinstance(output, Tensor) else output[0]
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: observer.at("blocks"))

        handle = last_block.register_forward_hook(on_output)
        try:
            self.step(observer)
        finally:
            handle.remove()

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss of one micro-batch, divided by their number."""
        if self.train.loss == "mse":
            loss = F.mse_loss(output, targets.to(output.dtype))
        else:
            loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())
        return loss if len(self.batches) == 1 else loss / len(self.batches)

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
            self.executed_steps += 1
            return
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < scale:
            self.skipped_steps += 1
        else:
            self.executed_steps += 1

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.train.precision not in ("bf16", "fp16"):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.train.precision])

    def holdings(self) -> Holdings:
        """List storages held on the device: parameters, buffers and optimizer state; gradients; batches."""
        parameters = list(self.module.parameters())
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        static = self._storages([*parameters, *self.module.buffers(), *state])
        gradients = self._storages(p.grad for p in parameters if p.grad is not None)
        inputs = self._storages(tensor for batch in self.batches for tensor in batch)
        return Holdings(static=static, gradients=gradients, inputs=inputs)

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        found = {}
        for tensor in tensors:
            if tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
        return found

    def describe(self) -> dict[str, Any]:
        """Give record fields that are known from the build."""
        plan = self.applied.plan
        return {
            "plan": plan.to_json(),
            "n_parameters": sum(p.numel() for p in self.module.parameters()),
            "optimizer_implementation": self.optimizer_implementation,
            "notes": [*self.model.notes, *self.applied.notes],
            "n_regions": plan.n_regions,
            "block_calls_backward_planned": sum(plan.block_calls_backward()) * self.train.grad_accumulation,
        }

    def count(self) -> dict[str, Any]:
        """Run one untimed step; count block calls, region replays and FLOPs, split at the turn."""
        counts = self.applied.counts
        counts.clear()
        with FlopCounter() as flops:
            self.step(flops)
        return {
            "flops_forward": flops.forward,
            "flops_backward": flops.backward,
            "block_calls_forward": sum(counts.block_calls_forward),
            "block_calls_backward": sum(counts.block_calls_backward),
            "region_calls_backward": counts.region_calls_backward,
        }

    def parity(self) -> dict[str, Any]:
        """Compare with ``none`` from equal weights and seed, after everything else."""
        from ckbench.engine.parity import check_parity

        return check_parity(self.config, self.device, self.release)

    def release(self) -> None:
        """Let go of model, optimizer and batches, so that a parity check has the room."""
        self.applied.remove()
        self.batches = []
        del self.model, self.module, self.optimizer  # the optimizer's groups would keep every weight


def baseline_config(config: RunConfig) -> RunConfig:
    """Give the same trial under ``none``."""
    return config.model_copy(update={"strategy": StrategySpec(name="none")})


def _draw_batches(config: RunConfig, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Draw synthetic inputs and targets once, from a generator of their own.

    Tokens and targets are uniform over the vocabulary, (B, S). Without a vocabulary inputs are normal
    vectors (B, S, D), in the weights' type. Targets of the mean-squared loss are normal (B, S, D).
    """
    model, train = config.model, config.train
    generator = torch.Generator().manual_seed(config.run.seed)
    shape = (train.batch_size, train.seq_len)
    dtype = DTYPES[train.precision] if train.precision.endswith("-pure") else torch.float32

    def tokens() -> Tensor:
        assert model.vocab_size is not None
        return torch.randint(model.vocab_size, shape, generator=generator).to(device)

    def vectors() -> Tensor:
        return torch.randn((*shape, model.d_model), generator=generator).to(device, dtype)

    batches = []
    for _ in range(train.grad_accumulation):
        inputs = tokens() if model.vocab_size is not None else vectors()
        batches.append((inputs, vectors() if train.loss == "mse" else tokens()))
    return batches


def _build_scaler(train: TrainConfig, device_type: str) -> "torch.amp.GradScaler | None":
    """Scale the loss for fp16 autocast; pure fp16 weights have fp16 gradients, which cannot be unscaled."""
    if train.precision != "fp16":
        return None
    return torch.amp.GradScaler(device_type)
