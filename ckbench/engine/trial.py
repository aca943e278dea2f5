"""One strategy on one model: build it, run training steps, say what it holds and what ran."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ckbench import registry, specs
from ckbench.config import RunConfig, StrategySpec, TrainConfig
from ckbench.devices.base import Holdings, Observer
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.flops import FlopCounter
from ckbench.engine.losses import build_loss
from ckbench.engine.optimizers import build_optimizer
from ckbench.engine.saved import block_saved_bytes
from ckbench.errors import ConfigError, NotYetMeasured
from ckbench.models.base import Batch, BuiltModel, call, draw_tokens
from ckbench.plan import Plan, plan_from_json

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16, "fp16-pure": torch.float16}


class NoObserver:
    """An observer that does nothing."""

    def at(self, event: str) -> None:
        """Ignore the event."""


class Trial:
    """A built model under a plan, with its optimizer and its batches."""

    def __init__(self, config: RunConfig, device: torch.device, plan: Plan | None = None) -> None:
        """Build everything; ``plan`` is applied instead of the one that the config's strategy decides."""
        self.config = config
        self.device = device
        self.train = config.train
        _set_tf32(config.train.precision, device)
        torch.manual_seed(config.run.seed)
        self.model: BuiltModel = self._build()
        self.module = self.model.module.train()
        self.batches = self.draw_batches()
        self.compute_loss = build_loss(self.model, config.train)
        plan, train = plan or self._plan(), self.train
        self.applied = AppliedPlan(self.model, plan, compiled=train.compile, offload_cap_bytes=train.offload_cap_bytes)
        self.optimizer = build_optimizer(self.module, config.train, device)
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
            self.cast_weights(model, DTYPES[self.train.precision])
        return model

    def cast_weights(self, model: BuiltModel, dtype: torch.dtype) -> None:
        """Bring weights and buffers to the short type of a pure precision."""
        model.module.to(dtype)

    def draw_batches(self) -> list[Batch]:
        """Draw the micro-batches that every step uses."""
        return _draw_batches(self.model, self.config, self.device)

    def _plan(self) -> Plan:
        """Resolve the strategy; one that decides by what blocks keep has that measured first, in a pass of its own."""
        if self.config.plan is not None:
            return plan_from_json(self.config.plan)
        shape = replace(self.model.shape(), precision=self.train.precision)
        try:
            return specs.resolve(self.config.strategy, shape)
        except NotYetMeasured:
            with self._autocast():
                measured = block_saved_bytes(self.model, self.batches[0][0])
            return specs.resolve(self.config.strategy, replace(shape, block_saved_bytes=measured))

    def step(self, observer: Observer) -> None:
        """Run one training step: every micro-batch forward and backward, then the optimizer."""
        counts = self.applied.counts
        self.applied.start_step()
        for inputs, targets in self.batches:
            self.phase = "forward"
            observer.at("forward")
            with self._autocast():
                output = call(self.module, inputs)
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
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            hidden = next((tensor for tensor in tensors if tensor.requires_grad), None)
            if hidden is not None:
                hidden.register_hook(lambda _gradient: observer.at("blocks"))

        handle = last_block.register_forward_hook(on_output)
        try:
            self.step(observer)
        finally:
            handle.remove()

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        """Give the mean loss of one micro-batch, divided by their number."""
        loss = self.compute_loss(output, targets)
        return loss if len(self.batches) == 1 else loss / len(self.batches)

    def _update(self) -> None:
        if self.optimizer.step(self.scaler):
            self.executed_steps += 1
        else:
            self.skipped_steps += 1

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.train.precision not in ("bf16", "fp16"):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.train.precision])

    def holdings(self) -> Holdings:
        """List storages held on the device: parameters, buffers and optimizer state; gradients; batches."""
        parameters = list(self.module.parameters())
        state = self.optimizer.device_tensors()
        static = self._storages([*parameters, *self.module.buffers(), *state])
        gradients = self._storages(p.grad for p in parameters if p.grad is not None)
        inputs = self._storages(leaf for leaf in tree_leaves(self.batches) if isinstance(leaf, Tensor))
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
            "optimizer_implementation": self.optimizer.implementation,
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
            **self._figures(),
        }

    def _figures(self) -> dict[str, Any]:
        """Give record fields of plan and optimizer; what both have on the host is there at the same time."""
        plan, optimizer = self.applied.figures(), self.optimizer.figures()
        figures = {**plan, **optimizer, "notes": [*self.describe()["notes"], *plan.get("notes", [])]}
        for field in plan.keys() & optimizer.keys():
            figures[field] = plan[field] + optimizer[field]
        return figures

    def parity(self) -> dict[str, Any]:
        """Compare with ``none`` from equal weights and seed, after everything else."""
        from ckbench.engine.parity import check_parity

        return check_parity(self.config, self.device, self.release, self.applied.plan)

    def release(self) -> None:
        """Let go of model, optimizer and batches, so that a parity check has the room."""
        self.applied.remove()
        self.batches = []
        del self.model, self.module, self.optimizer  # the optimizer's groups would keep every weight


def is_compiled(config: RunConfig, plan: Plan | None) -> bool:
    """Tell whether torch.compile works on the blocks, because the study or the plan says so."""
    return config.train.compile or (plan is not None and plan.compile_budget is not None)


def baseline_config(config: RunConfig, plan: Plan | None = None) -> RunConfig:
    """Give the same trial under ``none``, compiled where the plan has the compiler decide."""
    train = config.train.model_copy(update={"compile": is_compiled(config, plan)})
    return config.model_copy(update={"strategy": StrategySpec(name="none"), "train": train, "plan": None})


def _draw_batches(model: BuiltModel, config: RunConfig, device: torch.device) -> list[Batch]:
    """Draw synthetic inputs and targets once, from a generator of their own; every step uses the same."""
    generator = torch.Generator().manual_seed(config.run.seed)
    precision = config.train.precision
    dtype = DTYPES[precision] if precision.endswith("-pure") else torch.float32
    draw = model.draw or draw_tokens
    drawn = [draw(config, generator, dtype) for _ in range(config.train.grad_accumulation)]
    moved: list[Batch] = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, drawn)
    return moved


def _set_tf32(precision: str, device: torch.device) -> None:
    """Say for this process whether CUDA may round the factors of fp32 products to 10 bits.

    Raises ConfigError for tf32 elsewhere: other devices have no such arithmetic.
    """
    if precision == "tf32" and device.type not in ("cuda", "meta"):  # a replay's bytes are those of fp32
        raise ConfigError(f"precision tf32 is arithmetic of CUDA; {device.type} computes fp32 either way")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _build_scaler(train: TrainConfig, device_type: str) -> "torch.amp.GradScaler | None":
    """Scale the loss for fp16 autocast; pure fp16 weights have fp16 gradients, which cannot be unscaled."""
    if train.precision != "fp16":
        return None
    return torch.amp.GradScaler(device_type)
