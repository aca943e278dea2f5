"""How a device's step is imitated: the CPU's on fake tensors, CUDA's on meta tensors, or a real step beside them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckbench.config import HfConfig, RunConfig
from ckbench.engine.host_optimizer import HostOptimizer
from ckbench.engine.host_store import HostStore
from ckbench.engine.optimizers import AfterBackward
from ckbench.engine.trial import DTYPES, Trial
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


@contextlib.contextmanager
def _host_store_apart(tracker: StorageTracker) -> Iterator[None]:
    """Have buffers of the host store taken for memory of another kind, which they stand for beside a CPU."""
    make = HostStore._make

    def make_apart(store: HostStore, n_bytes: int) -> Tensor:
        return tracker.made_elsewhere(lambda: torch.empty(n_bytes, dtype=torch.uint8))

    HostStore._make = make_apart  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        HostStore._make = make  # type: ignore[method-assign]


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
        """Run on fake tensors; a saved generator state is a storage like any other, and the host store is apart."""

        def get_state() -> Tensor:
            return torch.empty(GENERATOR_STATE_BYTES, dtype=torch.uint8)

        def set_state(state: Tensor) -> None:
            del state

        with _host_store_apart(tracker), _generator_states(tracker, get_state, set_state), self._fake:
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
        self.scaler = None  # it would read back whether gradients are finite

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

    @contextlib.contextmanager
    def running(self, tracker: StorageTracker) -> Iterator[None]:
        """Only have saved generator states counted, which no operation makes, and the host store not."""
        with _host_store_apart(tracker), _generator_states(tracker, torch.get_rng_state, torch.set_rng_state):
            yield

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
