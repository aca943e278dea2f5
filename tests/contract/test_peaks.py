"""Kept and peak bytes follow the formulas of the strategies page; the allocator's peak is counted a second way.

The terms b, a, t and h are measured on shallow stacks under none and per-block, and predict every
strategy on a deeper one. Gradients are allocated before the step, as the formulas assume.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckbench import specs
from ckbench.config import RunConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine.trial import Trial
from ckbench.plan import StackShape

MakeRun = Callable[..., RunConfig]
B, S, D, L = 4, 64, 64, 8
RNG_STATE_BYTES = 5056
"""One copy of the CPU generator's state, which each region keeps to draw its dropout masks again."""

# (family, vocabulary): one head that owns the peak, one that does not
MODELS = {"gpt, large head": ("gpt", 2048), "llama, small head": ("llama", 64)}

STRATEGIES = (
    "none",
    "per-block",
    "every-k:2",
    "every-k:3",
    "segments:3",
    "sqrt",
    "one-in-k:2",
    "first-n:2",
    "nested:2",
    "nested:4",
    "recursive",
    "full",
    "attn-only",
    "ffn-only",
)


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """Bytes of one step above parameters, buffers, gradients and the batch."""

    saved: int
    peak: int
    loss: int
    backward: int
    owner: str


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The letters of the strategies page, in bytes: h is kept by the head, h_peak adds what it needs in passing."""

    b: float
    a: float
    t: float
    h: float
    h_peak: float


def weigh(config: RunConfig) -> Weighed:
    """Allocate the gradients, then weigh one step."""
    device = Cpu("cpu", 1)
    trial = Trial(config, device.torch_device)
    for parameter in trial.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fields = device.weigh(trial)
    held = trial.holdings()
    assert sum(held.gradients.values()) == fields["gradient_bytes"] > 0
    base = held.total_bytes()
    peak, inputs = fields["peak_allocated_bytes"], sum(held.inputs.values())
    assert fields["activation_peak_bytes"] == peak - base + inputs
    return Weighed(
        saved=fields["saved_bytes"],
        peak=peak - base,
        loss=fields["peak_loss_bytes"] - base,
        backward=fields["peak_backward_bytes"] - base,
        owner=fields["peak_phase"],
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model with its measured terms and the deep stack weighed under every strategy."""

    terms: Terms
    deep: dict[str, Weighed]


@pytest.fixture(scope="module", params=MODELS)
def weighed(request: pytest.FixtureRequest, tiny_run: MakeRun) -> Model:
    """Measure the terms on two and three blocks, and every strategy on eight."""
    family, vocab_size = MODELS[request.param]

    def at(spec: str, n_layers: int) -> Weighed:
        model = {"family": family, "n_layers": n_layers, "d_model": D, "n_heads": 2, "vocab_size": vocab_size}
        train = {"batch_size": B, "seq_len": S, "optimizer": "sgd", "set_to_none": False}
        spec = spec if spec == "none" else f"{spec},preserve_rng=false"
        return weigh(tiny_run(spec, model={**model, "attention": "math"}, train=train))

    none_2, none_3, block_2, block_3 = at("none", 2), at("none", 3), at("per-block", 2), at("per-block", 3)
    plans = {spec: specs.resolve(specs.parse(spec), StackShape(n_layers=L)) for spec in STRATEGIES}
    deep: dict[str, Weighed] = {}
    for spec, plan in plans.items():
        twin = next((other for other in deep if plans[other] == plan), None)
        deep[spec] = at(spec, L) if twin is None else deep[twin]
    a, b = none_3.saved - none_2.saved, block_3.saved - block_2.saved
    terms = Terms(a=a, b=b, t=block_3.backward - 3 * b - a, h=none_2.saved - 2 * a, h_peak=none_3.loss - 3 * a)
    return Model(terms=terms, deep=deep)


def kept_by_blocks(spec: str, m: Terms) -> float:
    """Give the third column of the strategies page without h."""
    name, _, argument = spec.partition(":")
    x = int(argument or 0)
    return {
        "none": lambda: L * m.a,
        "per-block": lambda: L * m.b,
        "every-k": lambda: math.ceil(L / x) * m.b,
        "segments": lambda: x * m.b,
        "sqrt": lambda: round(math.sqrt(L)) * m.b,
        "full": lambda: m.b,
        "one-in-k": lambda: math.ceil(L / x) * m.b + (L - math.ceil(L / x)) * m.a,
        "first-n": lambda: x * m.b + (L - x) * m.a,
        "nested": lambda: L / x * m.b,
        "recursive": lambda: m.b,
    }[name]()


def backward_peak(spec: str, m: Terms) -> float:
    """Give the fourth column of the strategies page, the branch that does not hold h."""
    name, _, argument = spec.partition(":")
    x = int(argument or 0)
    kept = kept_by_blocks(spec, m)
    return {
        "none": lambda: kept + m.t,
        "per-block": lambda: kept + m.a + m.t,
        "every-k": lambda: kept + x * m.a + m.t,
        "segments": lambda: kept + math.ceil(L / x) * m.a + m.t,
        "sqrt": lambda: kept + math.ceil(L / round(math.sqrt(L))) * m.a + m.t,
        "full": lambda: m.b + L * m.a + m.t,
        "one-in-k": lambda: kept + m.t,
        "first-n": lambda: kept + m.t,
        "nested": lambda: (L / x + x - 1) * m.b + m.a + m.t,
        "recursive": lambda: (1 + math.log2(L)) * m.b + m.a + m.t,
    }[name]()


WITH_FORMULA = [spec for spec in STRATEGIES if not spec.endswith("-only")]


def test_the_terms_can_be_told_apart(weighed: Model) -> None:
    m = weighed.terms
    assert m.b == B * S * D * 4, "a boundary is batch x seq x d_model numbers, to the byte"
    assert 3 * m.b < m.t < 0.5 * m.a and m.a > 10 * m.b
    assert m.h_peak > 4 * m.a or m.h_peak < 0.5 * m.a


@pytest.mark.parametrize("spec", WITH_FORMULA)
def test_kept_bytes_follow_the_formula(weighed: Model, spec: str) -> None:
    m = weighed.terms
    assert weighed.deep[spec].saved == pytest.approx(kept_by_blocks(spec, m) + m.h, rel=1e-3)


@pytest.mark.parametrize("spec", WITH_FORMULA)
def test_peak_follows_the_formula(weighed: Model, spec: str) -> None:
    m, found = weighed.terms, weighed.deep[spec]
    loss, backward = kept_by_blocks(spec, m) + m.h_peak, backward_peak(spec, m)
    assert found.loss == pytest.approx(loss, rel=0.01)
    assert found.backward == pytest.approx(backward, rel=0.03)
    assert found.peak == pytest.approx(max(loss, backward), rel=0.03)
    if abs(loss - backward) > 0.05 * max(loss, backward):
        assert found.owner == ("loss" if loss > backward else "backward")


def test_part_strategies_keep_the_other_part(weighed: Model) -> None:
    """Attention's share and the FFN's add up: each strategy drops one and keeps a boundary for it."""
    m, deep = weighed.terms, weighed.deep
    attention, ffn = deep["attn-only"].saved - m.h, deep["ffn-only"].saved - m.h
    assert attention + ffn == pytest.approx(L * (m.a + 2 * m.b), rel=1e-3)
    for part in (attention, ffn):
        assert 0.3 * L * m.a < part < 0.8 * L * m.a


def test_order_of_peaks(weighed: Model) -> None:
    """Deeper nesting, then shorter regions, then fewer of them: less peak in backward; none and full most."""
    deep = weighed.deep
    chain = ("recursive", "nested:4", "per-block", "every-k:2", "every-k:3", "one-in-k:2", "first-n:2", "none")
    peaks = [deep[spec].backward for spec in chain]
    assert peaks == sorted(peaks) and len(set(peaks)) == len(peaks)
    assert deep["full"].backward == pytest.approx(deep["none"].backward, rel=0.02), "one region only moves the peak"
    assert deep["full"].saved == min(found.saved for found in deep.values())


def test_a_region_keeps_one_random_state(tiny_run: MakeRun) -> None:
    """With preserve_rng each region keeps a copy of the generator's state besides its boundary."""

    def saved(spec: str) -> int:
        return weigh(tiny_run(spec, train={"optimizer": "sgd", "set_to_none": False})).saved

    for spec, n_regions in (("per-block", 4), ("every-k:2", 2), ("full", 1)):
        extra = saved(spec) - saved(f"{spec},preserve_rng=false")
        assert extra == n_regions * RNG_STATE_BYTES


class LiveBytes(TorchDispatchMode):
    """Counts storages alive by watching what every operation returns; knows nothing of the allocator."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.at_turn: int | None = None
        self.at_end: int | None = None
        self._alive: set[int] = set()
        for tensor in held:
            self.note(tensor)
        self.start = self.live

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._alive:
            self._alive.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.live -= size

    def at(self, event: str) -> None:
        if event == "turn":
            self.at_turn = self.live
        elif event == "end":
            self.at_end = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return result


def both_ways(config: RunConfig) -> tuple[dict[str, Any], LiveBytes]:
    """Weigh one step by the allocator's events, and the next, equal one, by live storages."""
    device = Cpu("cpu", 1)
    trial = Trial(config, device.torch_device)
    trial.step(device.clock())
    fields = device.weigh(trial)
    parameters = list(trial.module.parameters())
    state = trial.optimizer.device_tensors()
    gradients = [p.grad for p in parameters if p.grad is not None]
    batch = [tensor for pair in trial.batches for tensor in pair]
    counter = LiveBytes([*parameters, *trial.module.buffers(), *state, *gradients, *batch])
    del gradients
    with counter:
        trial.step(counter)
    return fields, counter


@pytest.mark.parametrize("spec", ["none", "per-block", "nested:2", "recursive", "attn-only", "every-k:2,reentrant"])
@pytest.mark.parametrize("attention", ["eager", "math"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_allocator_and_live_tensors_agree(tiny_run: MakeRun, family: str, attention: str, spec: str) -> None:
    model = {"family": family, "d_model": D, "n_heads": 2, "attention": attention, "dropout": 0.1}
    train = {"batch_size": B, "seq_len": S, "optimizer": "sgd", "set_to_none": spec != "recursive"}
    fields, counter = both_ways(tiny_run(spec, model=model, train=train))
    assert counter.at_end == counter.start, "a step leaves nothing behind"
    assert counter.peak == pytest.approx(fields["peak_allocated_bytes"], rel=0.01)
    assert counter.at_turn is not None
    states = 0 if spec == "none" else RNG_STATE_BYTES * 8  # generator states are no tensors of an operation
    assert counter.at_turn - counter.start == pytest.approx(fields["saved_bytes"], rel=1e-3, abs=states)


@pytest.mark.parametrize("spec", ["none", "per-block", "recursive", "ffn-only"])
def test_without_random_states_they_agree_to_some_bytes(tiny_run: MakeRun, spec: str) -> None:
    options = "" if spec == "none" else ",preserve_rng=false"
    for optimizer in ("sgd", "adamw"):
        train = {"batch_size": B, "seq_len": S, "optimizer": optimizer}
        fields, counter = both_ways(tiny_run(spec + options, model={"attention": "math"}, train=train))
        assert abs(counter.peak - fields["peak_allocated_bytes"]) <= 64
        assert counter.at_turn is not None
        assert abs(counter.at_turn - counter.start - fields["saved_bytes"]) <= 64
