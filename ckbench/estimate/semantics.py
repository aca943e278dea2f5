"""How a device's step is imitated: the CPU's on fake tensors, CUDA's on meta tensors, or a real step beside them."""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckbench import host
from ckbench.config import HfConfig, RunConfig
from ckbench.engine.host_optimizer import HostOptimizer
from ckbench.engine.host_store import HostStore
from ckbench.engine.optimizers import AfterBackward
from ckbench.engine.trial import DTYPES, Trial
from ckbench.estimate import scratch
from ckbench.estimate.substitutes import CudaOperations, NotEstimated, unpacked_positions
from ckbench.estimate.tracker import RELEASE, StorageTracker
from ckbench.models.base import Batch, BuiltModel
from ckbench.plan import Plan

GENERATOR_STATE_BYTES = 5056
"""A saved state of PyTorch's CPU generator."""


class Semantics(Protocol):
    """How a device's step is imitated."""

    device: torch.device
    pinned_bytes: int | None
    """Host memory that pinning has taken so far, None where nothing is pinned."""

    def make_tracker(self) -> StorageTracker:
        """Give a tracker of the tensors that stand for the device's."""
        ...

    def running(self, tracker: StorageTracker) -> contextlib.AbstractContextManager[None]:
        """Be in force while the trial is built and run."""
        ...

    def build(self, config: RunConfig, plan: Plan | None = None) -> Trial:
        """Make the trial, under ``plan`` instead of its strategy's where one is given."""
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


@contextlib.contextmanager
def _heard_clear(tracker: StorageTracker, hear: Callable[[], None]) -> Iterator[None]:
    """Hear where the outermost autocast ends and PyTorch lets go of what it has cast (torch/amp/autocast_mode.py)."""
    clear = torch.clear_autocast_cache

    def clear_and_tell() -> None:
        tracker.mark(RELEASE)
        clear()
        hear()

    torch.clear_autocast_cache = clear_and_tell
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear


def _threads(config: RunConfig) -> int:
    """Give the threads of a trial's worker."""
    return config.run.threads or host.available_threads()


class CpuSemantics:
    """The processor: fake tensors take the very paths that real ones take, up to the kernels' own scratch memory."""

    pinned_bytes: int | None = None

    def __init__(self, config: RunConfig) -> None:
        if config.train.precision == "tf32":
            raise NotEstimated("precision tf32 is arithmetic of CUDA")
        self.device = torch.device("cpu")
        self._n_threads = _threads(config)
        self._fake = FakeTensorMode()

    def make_tracker(self) -> StorageTracker:
        """Follow CPU storages, and what kernels take where it is known."""
        return StorageTracker("cpu", scratch.cpu_bytes(self._n_threads))

    @contextlib.contextmanager
    def running(self, tracker: StorageTracker) -> Iterator[None]:
        """Run on fake tensors; a saved generator state is a storage like any other, and the host store is apart."""

        def get_state() -> Tensor:
            return torch.empty(GENERATOR_STATE_BYTES, dtype=torch.uint8)

        def set_state(state: Tensor) -> None:
            del state

        with contextlib.ExitStack() as stack:
            stack.enter_context(_host_store_apart(tracker))
            stack.enter_context(_generator_states(tracker, get_state, set_state))
            stack.enter_context(_heard_clear(tracker, lambda: None))
            stack.enter_context(self._fake)
            yield

    def build(self, config: RunConfig, plan: Plan | None = None) -> Trial:
        """Make a trial whose batches are drawn with data and then lose them."""
        return _FakeTrial(config, self.device, self._fake, plan)

    def at(self, event: str) -> None:
        """Nothing depends on it."""


class _FakeTrial(Trial):
    def __init__(self, config: RunConfig, device: torch.device, fake: FakeTensorMode, plan: Plan | None) -> None:
        self._fake = fake
        super().__init__(config, device, plan)
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

    pinned_bytes: int | None = None

    def __init__(self, config: RunConfig) -> None:
        self.device = torch.device("cpu")
        self._n_threads = _threads(config)

    def make_tracker(self) -> StorageTracker:
        """Follow CPU storages, and what kernels take where it is known."""
        return StorageTracker("cpu", scratch.cpu_bytes(self._n_threads))

    @contextlib.contextmanager
    def running(self, tracker: StorageTracker) -> Iterator[None]:
        """Only have saved generator states counted, which no operation makes, and the host store not."""
        with _host_store_apart(tracker), _generator_states(tracker, torch.get_rng_state, torch.set_rng_state):
            yield

    def build(self, config: RunConfig, plan: Plan | None = None) -> Trial:
        """Make the ordinary trial."""
        return Trial(config, self.device, plan)

    def at(self, event: str) -> None:
        """Nothing depends on it."""


class CudaSemantics:
    """A CUDA device: meta tensors, with what CUDA does otherwise substituted."""

    def __init__(self, config: RunConfig) -> None:
        self.device = torch.device("meta")
        self.pinned_bytes: int | None = 0
        self._is_backward = False
        self._is_hugging_face = isinstance(config.model, HfConfig)
        precision = config.train.precision
        self.operations = CudaOperations(
            DTYPES[precision] if precision in ("bf16", "fp16") else None, raises_rms_norm=_raises_rms_norm()
        )

    def make_tracker(self) -> StorageTracker:
        """Follow meta storages and kernels' scratch."""
        return StorageTracker("meta", scratch.cuda_bytes)

    @contextlib.contextmanager
    def running(self, tracker: StorageTracker) -> Iterator[None]:
        """Substitute operations all the while: recomputation in backward runs the same."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._counted_pinning())
            stack.enter_context(self.operations)
            stack.enter_context(unpacked_positions(self._is_hugging_face))
            stack.enter_context(_heard_clear(tracker, self._recomputed))
            yield

    @contextlib.contextmanager
    def _counted_pinning(self) -> Iterator[None]:
        """Count what pinning takes for the host store's buffers, which it keeps: the next power of two of each.

        Source: aten/src/ATen/core/CachingHostAllocator.h of PyTorch 2.13 (allocate; blocks are never split).
        """
        make = HostStore._make

        def make_counted(store: HostStore, n_bytes: int) -> Tensor:
            assert self.pinned_bytes is not None
            self.pinned_bytes += 1 << (n_bytes - 1).bit_length() if n_bytes else 0
            return make(store, n_bytes)

        HostStore._make = make_counted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            HostStore._make = make  # type: ignore[method-assign]

    def build(self, config: RunConfig, plan: Plan | None = None) -> Trial:
        """Make the trial with CUDA's default optimizer, which takes all parameters at once."""
        return _MetaTrial(config, self.device, self.operations, plan)

    def at(self, event: str) -> None:
        """Autocast ends, and lets cast weights go, when backward begins."""
        if event in ("forward", "turn", "end"):
            self.operations.forget_casts()
        if event in ("forward", "turn"):
            self._is_backward = event == "turn"

    def _recomputed(self) -> None:
        """Let cast weights go: a recomputation has an autocast of its own, the outermost one in backward."""
        if self._is_backward:
            self.operations.forget_casts()


class _MetaTrial(Trial):
    def __init__(self, config: RunConfig, device: torch.device, operations: CudaOperations, plan: Plan | None) -> None:
        self._operations = operations
        implementation = config.train.optimizer_implementation
        self._is_fused = implementation == "fused"
        if implementation in ("default", "fused"):
            train = config.train.model_copy(update={"optimizer_implementation": "foreach"})
            config = config.model_copy(update={"train": train})
        super().__init__(config, device, plan)
        self.scaler = None
        on_host = getattr(self.optimizer, "optimizer", None)
        if isinstance(on_host, HostOptimizer):
            for n_bytes in _state_sizes(on_host):
                on_host.store.take(n_bytes)
            self.optimizer.step = _nothing_on_the_device  # type: ignore[method-assign]
        if self._is_fused and isinstance(self.optimizer, AfterBackward):
            self.optimizer.step = _state_only(self.optimizer)  # type: ignore[method-assign]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        self._operations.enter_autocast()
        return contextlib.nullcontext()


def _nothing_on_the_device(scaler: Any) -> bool:
    return True


def _state_sizes(on_host: HostOptimizer) -> list[int]:
    """Give the bytes of each tensor of state that the host's optimizer makes at its first update."""
    inner = on_host._inner
    again = copy.copy(inner)
    again.state = defaultdict(dict)
    stand_ins = [torch.empty_like(master, device="meta") for master in on_host._masters]
    for stand_in in stand_ins:
        stand_in.grad = torch.empty_like(stand_in)
    again.param_groups = [{**inner.param_groups[0], "params": stand_ins, "foreach": False, "fused": False}]
    with StorageTracker("meta") as reader:
        reader.reads_one = True
        again.step()
    return [value.nbytes for state in again.state.values() for value in state.values() if isinstance(value, Tensor)]


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
