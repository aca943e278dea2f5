"""Replay a trial's steps on tensors without data, in the semantics of a device, and give its memory figures."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckbench.config import HfConfig, RunConfig
from ckbench.devices._timeline import figures
from ckbench.engine.host_optimizer import HostOptimizer
from ckbench.engine.optimizers import AfterBackward
from ckbench.engine.trial import DTYPES, Trial, is_compiled
from ckbench.estimate.substitutes import CudaOperations, NotEstimated, scratch_bytes, unpacked_positions
from ckbench.estimate.tracker import StorageTracker
from ckbench.models.base import Batch, BuiltModel

GENERATOR_STATE_BYTES = 5056
"""A saved state of PyTorch's CPU generator."""


class Semantics(Protocol):
    """How a device's step is imitated."""

    device: torch.device

    def make_tracker(self) -> StorageTracker:
        """Give a tracker of the tensors that stand for the device's."""
        ...

    def running(self, tracker: StorageTracker) -> contextlib.AbstractContextManager[None]:
        """Be in force while the trial is built and run."""
        ...

    def build(self, config: RunConfig) -> Trial:
        """Make the trial."""
        ...

    def at(self, event: str) -> None:
        """Hear where the step is."""
        ...


@contextlib.contextmanager
def _generator_states(
    tracker: StorageTracker, get_state: Callable[[], Tensor], set_state: Callable[[Tensor], None]
) -> Iterator[None]:
    """Get and set the CPU generator's state by other functions, and count the states that are kept."""
    originals = (torch.get_rng_state, torch.random.get_rng_state, torch.set_rng_state, torch.random.set_rng_state)

    def get_counted() -> Tensor:
        state = get_state()
        tracker.rename(state, "generator state")
        return state

    torch.get_rng_state = torch.random.get_rng_state = get_counted
    torch.set_rng_state = torch.random.set_rng_state = set_state  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.get_rng_state, torch.random.get_rng_state = originals[0], originals[1]
        torch.set_rng_state, torch.random.set_rng_state = originals[2], originals[3]


class CpuSemantics:
    """The processor: fake tensors take the very paths that real ones take, up to the kernels' own scratch memory."""

    def __init__(self, config: RunConfig) -> None:
        if config.train.precision == "tf32":
            raise NotEstimated("precision tf32 is arithmetic of CUDA")
        self.device = torch.device("cpu")
        self._fake = FakeTensorMode()

    def make_tracker(self) -> StorageTracker:
        """Follow CPU storages."""
        return StorageTracker("cpu")

    @contextlib.contextmanager
    def running(self, tracker: StorageTracker) -> Iterator[None]:
        """Run on fake tensors; a saved generator state is a storage like any other."""

        def get_state() -> Tensor:
            return torch.empty(GENERATOR_STATE_BYTES, dtype=torch.uint8)

        def set_state(state: Tensor) -> None:
            del state

        with _generator_states(tracker, get_state, set_state), self._fake:
            yield

    def build(self, config: RunConfig) -> Trial:
        """Make a trial whose batches are drawn with data and then lose them."""
        return _FakeTrial(config, self.device, self._fake)

    def at(self, event: str) -> None:
        """Nothing depends on it."""


class _FakeTrial(Trial):
    def __init__(self, config: RunConfig, device: torch.device, fake: FakeTensorMode) -> None:
        self._fake = fake
        super().__init__(config, device)

    def cast_weights(self, model: BuiltModel, dtype: torch.dtype) -> None:
        """Cast one by one: a module's own cast would exchange the tensors' insides, which fake ones refuse."""
        cast: dict[int, Tensor] = {}
        for module in model.module.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None or not tensor.is_floating_point():
                        continue
                    if id(tensor) not in cast:
                        short = tensor.detach().to(dtype)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        cast[id(tensor)] = nn.Parameter(short, tensor.requires_grad) if is_parameter else short
                    held[name] = cast[id(tensor)]  # type: ignore[assignment]

    def draw_batches(self) -> list[Batch]:
        """Draw real ones: a choice of positions needs numbers."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from torch.utils._pytree import tree_map

        with unset_fake_temporarily():
            drawn = super().draw_batches()
        faked: list[Batch] = tree_map(
            lambda leaf: self._fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, drawn
        )
        return faked


class RealCpu:
    """The processor itself: a real step under the same tracker, to compare with."""

    def __init__(self, config: RunConfig) -> None:
        self.device = torch.device("cpu")

    def make_tracker(self) -> StorageTracker:
        """Follow CPU storages."""
        return StorageTracker("cpu")

    def running(self, tracker: StorageTracker) -> contextlib.AbstractContextManager[None]:
        """Only have saved generator states counted, which no operation makes."""
        return _generator_states(tracker, torch.get_rng_state, torch.set_rng_state)

    def build(self, config: RunConfig) -> Trial:
        """Make the ordinary trial."""
        return Trial(config, self.device)

    def at(self, event: str) -> None:
        """Nothing depends on it."""


class CudaSemantics:
    """A CUDA device: meta tensors, with what CUDA does otherwise substituted."""

    def __init__(self, config: RunConfig) -> None:
        self.device = torch.device("meta")
        self._is_hugging_face = isinstance(config.model, HfConfig)
        precision = config.train.precision
        self.operations = CudaOperations(
            DTYPES[precision] if precision in ("bf16", "fp16") else None, raises_rms_norm=_raises_rms_norm()
        )

    def make_tracker(self) -> StorageTracker:
        """Follow meta storages and kernels' scratch."""
        return StorageTracker("meta", scratch_bytes)

    @contextlib.contextmanager
    def running(self, tracker: StorageTracker) -> Iterator[None]:
        """Substitute operations all the while: recomputation in backward runs the same."""
        with self.operations, unpacked_positions(self._is_hugging_face):
            yield

    def build(self, config: RunConfig) -> Trial:
        """Make the trial with CUDA's default optimizer, which takes all parameters at once."""
        return _MetaTrial(config, self.device, self.operations)

    def at(self, event: str) -> None:
        """Autocast ends, and lets cast weights go, when backward begins; each recomputation has its own."""
        if event in ("forward", "turn", "end"):
            self.operations.forget_casts()


class _MetaTrial(Trial):
    def __init__(self, config: RunConfig, device: torch.device, operations: CudaOperations) -> None:
        self._operations = operations
        implementation = config.train.optimizer_implementation
        self._is_fused = implementation == "fused"
        if implementation in ("default", "fused"):
            train = config.train.model_copy(update={"optimizer_implementation": "foreach"})
            config = config.model_copy(update={"train": train})
        super().__init__(config, device)
        self.scaler = None
        if isinstance(getattr(self.optimizer, "optimizer", None), HostOptimizer):
            self.optimizer.step = _nothing_on_the_device  # type: ignore[method-assign]
        if self._is_fused and isinstance(self.optimizer, AfterBackward):
            self.optimizer.step = _state_only(self.optimizer)  # type: ignore[method-assign]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        self._operations.enter_autocast()
        return contextlib.nullcontext()


def _nothing_on_the_device(scaler: Any) -> bool:
    return True


def _state_only(updater: AfterBackward) -> Any:
    """Update as a fused kernel does: it makes its state and takes nothing besides."""

    def step(scaler: Any) -> bool:
        optimizer = updater.optimizer
        names = {"Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if not state and names[type(optimizer).__name__]:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    for name in names[type(optimizer).__name__]:
                        state[name] = torch.zeros_like(parameter)
        return True

    return step


def _raises_rms_norm() -> bool:
    """Tell whether this version's autocast computes rms_norm in fp32 (from 2.13 on, by autocast_mode.h)."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 13)


KINDS: dict[str, type[CpuSemantics] | type[CudaSemantics] | type[RealCpu]] = {
    "cpu": CpuSemantics,
    "cuda": CudaSemantics,
    "real": RealCpu,
}
"""Whose step is replayed; ``real`` runs it."""


@dataclass(kw_only=True)
class Replayed:
    """A replayed trial: figures of its first and of a steady step, and the steady step's timeline."""

    first: dict[str, Any]
    steady: dict[str, Any]
    described: dict[str, Any]
    tracker: StorageTracker
    trial: Trial
    begin: int
    """Index of the steady step's first event."""
    gradients: frozenset[int]
    """Numbers of the storages that hold gradients at the end of backward."""
    static: frozenset[int]
    """Numbers of parameters, buffers and optimizer state."""


def name_modules(tracker: StorageTracker, trial: Trial) -> None:
    """Tell the tracker at all times which module's forward runs, recomputation included."""
    names = {module: name for name, module in trial.module.named_modules()}
    blocks = [names[block] for block in trial.model.blocks]

    def enter(module: Any, _args: Any) -> None:
        stack.append(tracker.where)
        tracker.where = names[module]

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        tracker.where = stack.pop()

    stack: list[str] = []
    for module in names:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)  # early stop ends a recomputation by an exception
    counts = trial.applied.counts
    entered = counts.enter_block

    def enter_block(index: int) -> None:  # the engine starts recomputed blocks without their hooks
        entered(index)
        if counts.in_backward:
            stack.clear()
            tracker.where = blocks[index]

    counts.enter_block = enter_block  # type: ignore[method-assign]


class _Marks:
    """Writes a step's events into the timeline, and notes the gradients at the end of backward."""

    def __init__(self, tracker: StorageTracker, trial: Trial, semantics: Semantics) -> None:
        self.tracker = tracker
        self.trial = trial
        self.semantics = semantics
        self.gradients: dict[int, int] = {}

    def at(self, event: str) -> None:
        if event == "optimizer":
            self.gradients = _by_number(self.tracker, (p.grad for p in self.trial.module.parameters()))
        self.semantics.at(event)
        self.tracker.mark(event)
        updates = ("turn", "blocks", "optimizer") if self.trial.train.optimizer_in_backward else ("optimizer",)
        self.tracker.reads_zero = event in updates
        if event in ("turn", "blocks", "optimizer"):
            self.tracker.where = ""


def _by_number(tracker: StorageTracker, tensors: Any) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        birth = None if tensor is None else tracker.birth_of(tensor)
        if birth is not None:
            found[birth.number] = birth.n_bytes
    return found


def replay(
    config: RunConfig,
    kind: str,
    workspace_bytes: int = 0,
    *,
    names_modules: bool = False,
    prepare: Callable[[Trial], None] | None = None,
) -> Replayed:
    """Run two steps of a trial without data: the first makes the optimizer's state, the second is steady.

    ``workspace_bytes`` is what libraries hold on the device all the while (cuBLAS). ``prepare`` may change the built
    trial before its first step.
    Raises NotEstimated where a step cannot run without data.
    """
    semantics: Semantics = KINDS[kind](config)
    tracker = semantics.make_tracker()
    with semantics.running(tracker):
        trial = semantics.build(config)
        if kind != "real" and is_compiled(config, trial.applied.plan):
            raise NotEstimated("what compiled blocks keep is decided by the compiler, which needs the device")
        if prepare is not None:
            prepare(trial)
        tracker.add_constant(workspace_bytes)
        tracker.add_all(trial.module.parameters(), "parameter")
        tracker.add_all(trial.module.buffers(), "buffer")
        tracker.add_all(_leaves(trial.batches), "input")
        tracker.add_all(trial.optimizer.device_tensors(), "optimizer state")
        steps = []
        if names_modules:
            name_modules(tracker, trial)
        with tracker:
            for _ in range(2):
                gc.collect()
                steps.append(_one_step(tracker, trial, semantics))
    first, steady = steps
    return Replayed(
        first=first[0],
        steady=steady[0],
        described=trial.describe(),
        tracker=tracker,
        trial=trial,
        begin=steady[1],
        gradients=steady[2],
        static=steady[3],
    )


def _one_step(
    tracker: StorageTracker, trial: Trial, semantics: Semantics
) -> tuple[dict[str, Any], int, frozenset[int], frozenset[int]]:
    begin, mark = len(tracker.timeline.events), len(tracker.timeline.marks)
    at_start = _by_number(tracker, (p.grad for p in trial.module.parameters()))
    live = tracker.live_bytes
    marks = _Marks(tracker, trial, semantics)
    trial.observed_step(marks)
    static = _by_number(
        tracker, (*trial.module.parameters(), *trial.module.buffers(), *trial.optimizer.device_tensors())
    )
    values = figures(
        tracker.timeline.events[begin:],
        tracker.timeline.marks[mark:],
        live_at_start_bytes=live,
        static_bytes=sum(static.values()),
        gradients=marks.gradients,
        gradients_at_start=at_start,
    )
    return values, begin, frozenset(marks.gradients), frozenset(static)


def _leaves(batches: Any) -> Iterator[Tensor]:
    from torch.utils._pytree import tree_leaves

    return (leaf for leaf in tree_leaves(batches) if isinstance(leaf, Tensor))
