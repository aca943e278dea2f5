"""Every optimizer, wherever it updates: its bytes follow a formula, it learns, and place and time change no bit."""

import gc
import importlib.util
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckbench.config import RunConfig, TrainConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.in_backward import InBackward
from ckbench.engine.optimizers import build_optimizer, state_tensors
from ckbench.engine.parity import check_parity
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import ConfigError
from ckbench.models.base import BuiltModel
from ckbench.plan import Plan, Region

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
OURS = ("sgd", "adam", "adamw", "adafactor")
LEARNING_RATES = {"sgd": 0.5, "adam": 1e-2, "adamw": 1e-2, "adafactor": 0.3, "adamw-8bit": 1e-2}
STEP_BYTES = 4
"""Adam and Adafactor count a parameter's updates in a number of its own."""

needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao (the extra eight-bit) is not installed")
# torchao compiles its update, and the compiler of PyTorch 2.13 calls what PyTorch has deprecated
compiler_warns = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
ALL = [*OURS, pytest.param("adamw-8bit", marks=[needs_torchao, compiler_warns])]


def existing(*implementations: str) -> list[tuple[str, str]]:
    """Pair optimizers with the implementations they have; that Adafactor has no fused one is tested by itself."""
    pairs = [(optimizer, implementation) for optimizer in OURS for implementation in implementations]
    return [pair for pair in pairs if pair != ("adafactor", "fused")]


def trial_of(tiny_run: MakeRun, spec: str = "none", **train: Any) -> Trial:
    model = train.pop("model", {})
    train.setdefault("lr", LEARNING_RATES[train.get("optimizer", "adamw")])
    return Trial(tiny_run(spec, model=model, train=train), CPU)


def weights_after(trial: Trial, n_steps: int = 3) -> list[Tensor]:
    for _ in range(n_steps):
        trial.step(NoObserver())
    return [p.detach().clone() for p in trial.module.parameters()]


def all_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def static_bytes(trial: Trial) -> int:
    return sum(trial.holdings().static.values())


def held_bytes(trial: Trial) -> int:
    """Add up parameters and buffers."""
    return sum(t.nbytes for t in (*trial.module.parameters(), *trial.module.buffers()))


def expected_state_bytes(trial: Trial, optimizer: str) -> int:
    parameters = list(trial.module.parameters())
    if optimizer == "sgd":
        return 0
    if optimizer in ("adam", "adamw"):
        return sum(2 * p.nbytes + STEP_BYTES for p in parameters)
    sums = [4 * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2]) if p.dim() > 1 else p.nbytes for p in parameters]
    return sum(each + STEP_BYTES for each in sums)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("optimizer", OURS)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_state_follows_the_formula_to_the_byte(
    tiny_run: MakeRun, family: str, optimizer: str, in_backward: bool
) -> None:
    trial = trial_of(tiny_run, model={"family": family}, optimizer=optimizer, optimizer_in_backward=in_backward)
    assert static_bytes(trial) == held_bytes(trial), "there is no state before the first step"
    trial.step(NoObserver())
    assert static_bytes(trial) == held_bytes(trial) + expected_state_bytes(trial, optimizer)
    assert Cpu("cpu", 1).weigh(trial)["static_bytes"] == static_bytes(trial)


@needs_torchao
@compiler_warns
def test_eight_bit_state_is_two_bytes_and_a_scale(tiny_run: MakeRun) -> None:
    trial = trial_of(tiny_run, optimizer="adamw-8bit", model={"d_model": 128, "vocab_size": 256})
    trial.step(NoObserver())
    packed = [p for p in trial.module.parameters() if p.numel() >= 4096 and p.numel() % 256 == 0]
    plain = [p for p in trial.module.parameters() if all(p is not other for other in packed)]
    per_packed = sum(2 * (p.numel() + p.numel() // 256 * 4) for p in packed)
    state = static_bytes(trial) - held_bytes(trial)
    tables = 2 * 256 * 4  # one code book for each of the two moments
    counters = STEP_BYTES * len([*packed, *plain])
    assert per_packed + sum(2 * p.nbytes for p in plain) <= state
    assert state <= per_packed + sum(2 * p.nbytes for p in plain) + counters + len(packed) * tables
    assert sum(p.numel() for p in packed) > 0.95 * sum(p.numel() for p in trial.module.parameters())
    assert trial.describe()["optimizer_implementation"] == "torchao 8-bit"


@pytest.mark.parametrize("where", ["after backward", "in backward", "on host"])
@pytest.mark.parametrize("optimizer", ALL)
def test_the_loss_falls(tiny_run: MakeRun, optimizer: str, where: str) -> None:
    places = {"in backward": {"optimizer_in_backward": True}, "on host": {"optimizer_on_host": True}}
    if optimizer == "adamw-8bit" and where == "on host":
        with pytest.raises(ValueError, match="optimizer_on_host"):
            trial_of(tiny_run, optimizer=optimizer, **places[where])
        return
    trial = trial_of(tiny_run, optimizer=optimizer, **places.get(where, {}))
    inputs, targets = trial.batches[0]

    def loss() -> float:
        with torch.no_grad():
            return float(trial.loss(trial.module(inputs), targets))

    before = loss()
    for _ in range(20):
        trial.step(NoObserver())
    assert trial.executed_steps == 20
    assert loss() < 0.9 * before


@pytest.mark.parametrize("implementation", ["default", "for-loop", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", OURS)
def test_implementations_run_and_agree(tiny_run: MakeRun, optimizer: str, implementation: str) -> None:
    if (optimizer, implementation) == ("adafactor", "fused"):
        with pytest.raises(ValueError, match="adafactor has no fused implementation"):
            trial_of(tiny_run, optimizer=optimizer, optimizer_implementation=implementation)
        return
    trial = trial_of(tiny_run, optimizer=optimizer, optimizer_implementation=implementation)
    group = trial.optimizer.optimizer.param_groups[0]  # type: ignore[attr-defined]
    switched = {"for-loop": (False, False), "foreach": (True, None), "fused": (None, True)}.get(implementation)
    if switched is not None:
        assert (group["foreach"], group.get("fused", switched[1])) == switched
    # One step, from equal gradients: later ones differ by rounding, and Adam divides noise by noise.
    expected = weights_after(trial_of(tiny_run, optimizer=optimizer, optimizer_implementation="for-loop"), 1)
    for a, b in zip(weights_after(trial, 1), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    named = "for-loop" if implementation == "default" else implementation
    assert trial.describe()["optimizer_implementation"] == named


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_what_pytorch_chooses_on_cuda_is_named(optimizer: str) -> None:
    """Told from torch's documents, since no CUDA is needed to build: foreach, but for Adafactor."""
    module = nn.Linear(2, 2)
    train = TrainConfig(batch_size=1, seq_len=1, optimizer=optimizer)  # type: ignore[arg-type]
    built = build_optimizer(module, train, torch.device("cuda"))
    assert built.implementation == ("for-loop" if optimizer == "adafactor" else "foreach")


@pytest.mark.parametrize(("optimizer", "implementation"), existing("for-loop", "fused"))
@pytest.mark.parametrize("tied", [False, True])
def test_in_backward_changes_no_bit(tiny_run: MakeRun, optimizer: str, tied: bool, implementation: str) -> None:
    settings = {"optimizer": optimizer, "optimizer_implementation": implementation, "model": {"tie_embeddings": tied}}
    after = trial_of(tiny_run, **settings)
    during = trial_of(tiny_run, **settings, optimizer_in_backward=True)
    assert all_equal(weights_after(after), weights_after(during))
    assert during.describe()["optimizer_implementation"] == f"{implementation}, in backward"
    assert all(p.grad is None for p in during.module.parameters())


@pytest.mark.parametrize(
    "spec", ["per-block", "per-block,reentrant", "nested:2", "recursive", "ffn-only", "every-k:3", "per-block+offload"]
)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_no_strategy_sees_weights_updated_in_backward(tiny_run: MakeRun, family: str, spec: str) -> None:
    """A recomputation behind an update would use other weights than the first pass."""
    model = {"family": family, "n_layers": 5, "dropout": 0.1, "tie_embeddings": True}
    none, other = (
        weights_after(trial_of(tiny_run, each, model=model, optimizer_in_backward=True)) for each in ("none", spec)
    )
    assert all_equal(none, other)


def test_parity_of_updates_in_backward(tiny_run: MakeRun) -> None:
    def verdict(spec: str, dropout: float) -> str:
        model, train = {"dropout": dropout}, {"optimizer_in_backward": True}
        return str(check_parity(tiny_run(spec, model=model, train=train), CPU, lambda: None)["parity"])

    assert verdict("per-block", 0.1) == "exact"
    assert verdict("per-block,preserve_rng=false", 0.1) == "failed"


def test_gradients_are_freed_in_backward(tiny_run: MakeRun) -> None:
    """With sgd nothing but the gradients differs: they are gone when backward ends, and so is their share of the peak."""
    model = {"n_layers": 6, "d_model": 128, "vocab_size": 64}

    def weighed(in_backward: bool) -> dict[str, Any]:
        step = {"optimizer": "sgd", "batch_size": 1, "seq_len": 8, "optimizer_in_backward": in_backward}
        trial = trial_of(tiny_run, model=model, **step)
        trial.step(NoObserver())
        return Cpu("cpu", 1).weigh(trial)

    after, during = weighed(False), weighed(True)
    assert during["gradient_bytes"] == 0 and after["gradient_bytes"] == after["static_bytes"]
    assert after["peak_allocated_bytes"] - during["peak_allocated_bytes"] > 0.75 * after["gradient_bytes"]
    assert during["saved_bytes"] == after["saved_bytes"]


class Shared(nn.Module):
    """One block at two places of the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x).sigmoid())  # type: ignore[no-any-return]


def test_a_second_gradient_of_a_step_is_refused() -> None:
    for reentrant in (False, True):
        module = Shared()
        blocks = (module.block, module.block)
        model = BuiltModel(module=module, blocks=blocks, parts=({}, {}))
        regions = (Region(start=0, stop=1), Region(start=1, stop=2))
        AppliedPlan(model, Plan(n_layers=2, regions=regions, reentrant=reentrant))
        hooked = InBackward(list(module.parameters()), lambda some: torch.optim.SGD(some, lr=0.1))
        loss = module(torch.randn(3, 4, requires_grad=True)).sum()
        if reentrant:
            with pytest.raises(ConfigError, match=r"second gradient for a shared parameter \(4, 4\)|\(4,\)"):
                loss.backward()
        else:
            loss.backward()
            assert hooked.end_step() == 2 and hooked.end_step() == 0


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": True}, {"freeze_embedding": True}], ids=str)
@pytest.mark.parametrize(("optimizer", "implementation"), existing("for-loop", "foreach", "fused"))
def test_on_host_changes_no_bit(
    tiny_run: MakeRun, optimizer: str, implementation: str, settings: dict[str, Any]
) -> None:
    keys = {"optimizer": optimizer, "optimizer_implementation": implementation, "model": settings}
    here, there = trial_of(tiny_run, **keys), trial_of(tiny_run, **keys, optimizer_on_host=True)
    assert all_equal(weights_after(here), weights_after(there))
    assert there.describe()["optimizer_implementation"] == f"{implementation}, on host"


@pytest.mark.parametrize("optimizer", OURS)
def test_on_host_the_device_holds_parameters_only(tiny_run: MakeRun, optimizer: str) -> None:
    trial = trial_of(tiny_run, optimizer=optimizer, optimizer_on_host=True)
    trial.step(NoObserver())
    weighed = Cpu("cpu", 1).weigh(trial)
    parameters = sum(p.nbytes for p in trial.module.parameters())
    assert weighed["static_bytes"] == held_bytes(trial)
    assert weighed["gradient_bytes"] == parameters
    on_host = trial.count()["host_store_peak_bytes"]
    assert on_host == 2 * parameters + expected_state_bytes(trial, optimizer), "masters, gradients and state"


def test_the_first_step_makes_state_on_the_host_only(tiny_run: MakeRun) -> None:
    """State comes into being one parameter at a time, so the first step's peak holds little of it."""

    def first(on_host: bool) -> dict[str, Any]:
        model = {"d_model": 128, "n_layers": 6}
        return Cpu("cpu", 1).weigh(trial_of(tiny_run, model=model, optimizer_on_host=on_host))

    here, there = first(False), first(True)
    state = here["static_bytes"] - there["static_bytes"]
    assert there["peak_optimizer_bytes"] < here["peak_optimizer_bytes"] - 0.85 * state


def test_activations_and_optimizer_share_the_host(tiny_run: MakeRun) -> None:
    def on_host(spec: str, there: bool) -> int:
        return int(trial_of(tiny_run, spec, optimizer_on_host=there).count()["host_store_peak_bytes"])

    assert on_host("offload", True) == on_host("offload", False) + on_host("none", True)


def test_a_parameter_without_a_gradient_keeps_its_weight(tiny_run: MakeRun) -> None:
    """First without, then with, then without: as the ordinary optimizer, momentum and decay wait."""
    outcomes = []
    for on_host in (False, True):
        trial = trial_of(tiny_run, optimizer_on_host=on_host)
        first = next(trial.module.parameters())
        trial.optimizer.zero_grad(set_to_none=True)
        for is_missing in (True, False, True, False):
            trial.loss(trial.module(trial.batches[0][0]), trial.batches[0][1]).backward()
            if is_missing:
                first.grad = None
            trial.optimizer.step(None)
            trial.optimizer.zero_grad(set_to_none=True)
        outcomes.append([p.detach().clone() for p in trial.module.parameters()])
    assert all_equal(*outcomes)


def test_scaling_skips_on_the_host_as_it_does_here(tiny_run: MakeRun) -> None:
    trials = [trial_of(tiny_run, precision="fp16", optimizer_on_host=on_host) for on_host in (False, True)]
    for trial in trials:
        assert trial.scaler is not None
        trial.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    weights = [weights_after(trial, 30) for trial in trials]
    assert trials[0].skipped_steps == trials[1].skipped_steps > 0
    assert trials[0].executed_steps == trials[1].executed_steps > 0
    assert all_equal(*weights)


def test_short_weights_have_fp32_masters_on_the_host(tiny_run: MakeRun) -> None:
    """A step below the short type's resolution is lost in it, and adds up in a master weight."""
    keys = {"precision": "bf16-pure", "lr": 1e-4, "optimizer": "adam"}
    here, there = trial_of(tiny_run, **keys), trial_of(tiny_run, **keys, optimizer_on_host=True)
    before = [p.detach().clone() for p in there.module.parameters()]
    ones = [i for i, p in enumerate(before) if bool((p == 1).all())]
    assert ones, "weights of the norms begin at 1"
    stuck, moved = weights_after(here, 50), weights_after(there, 50)
    assert all(torch.equal(stuck[i], before[i]) for i in ones)
    assert any(not torch.equal(moved[i], before[i]) for i in ones)
    parameters = sum(p.nbytes for p in there.module.parameters())
    fp32 = 2 * parameters
    on_host = there.optimizer.figures()["host_store_peak_bytes"]
    n = len(before)
    assert on_host == 4 * fp32 + parameters + n * STEP_BYTES, "master, gradient, two moments; one copy in transit"


@pytest.mark.parametrize("spec", ["per-block", "per-block+offload"])
def test_parity_on_the_host(tiny_run: MakeRun, spec: str) -> None:
    config = tiny_run(spec, model={"dropout": 0.1}, train={"optimizer_on_host": True})
    assert check_parity(config, CPU, lambda: None)["parity"] == "exact"


@pytest.mark.parametrize("keys", [{}, {"optimizer_in_backward": True}, {"optimizer_on_host": True}], ids=str)
def test_a_released_trial_lets_its_weights_go(tiny_run: MakeRun, keys: dict[str, Any]) -> None:
    trial = trial_of(tiny_run, **keys)
    trial.step(NoObserver())
    weight = weakref.ref(next(trial.module.parameters()))
    gc.disable()
    try:
        trial.release()
        assert weight() is None
    finally:
        gc.enable()


def test_without_torchao_the_message_says_what_to_install(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError) as told:
        trial_of(tiny_run, optimizer="adamw-8bit")
    assert str(told.value) == "optimizer adamw-8bit needs torchao; pip install 'ckbench[eight-bit]'"


def test_no_trainable_parameter_is_refused() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of this model needs a gradient"):
        build_optimizer(module, TrainConfig(batch_size=1, seq_len=1), CPU)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"optimizer_in_backward": True, "grad_accumulation": 2}, "grad_accumulation must be 1"),
        ({"optimizer_in_backward": True, "precision": "fp16"}, "use bf16"),
        ({"optimizer_in_backward": True, "optimizer_on_host": True}, "nor with adamw-8bit; drop one"),
        ({"optimizer_in_backward": True, "set_to_none": False}, "set_to_none cannot be false"),
        ({"optimizer": "adamw-8bit", "optimizer_on_host": True}, "nor with adamw-8bit; drop one"),
        ({"optimizer": "adamw-8bit", "optimizer_implementation": "foreach"}, "adamw-8bit has no foreach"),
        ({"optimizer": "adafactor", "optimizer_implementation": "fused"}, "adafactor has no fused"),
    ],
)
def test_what_cannot_work_is_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainConfig(batch_size=1, seq_len=1, **keys)


def test_tensors_inside_packed_state_are_listed() -> None:
    """A packed state (torchao's) is a tensor without memory of its own; what counts is inside."""
    from torch.testing._internal.two_tensor import TwoTensor

    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    inside = torch.zeros(4), torch.zeros(4)
    optimizer.state[parameter] = {"step": 3, "moment": TwoTensor(*inside)}
    assert {t.data_ptr() for t in state_tensors(optimizer)} == {t.data_ptr() for t in inside}
