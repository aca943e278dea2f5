"""Activations on the host: the same numbers as none, every byte accounted for, and two blocks at most in backward."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckbench import specs
from ckbench.config import RunConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine.offload import MIN_BYTES, Offloader
from ckbench.engine.parity import differences, run_steps
from ckbench.engine.trial import NoObserver, Trial, baseline_config
from tests.contract.everything import FAMILY_SETTINGS

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")

FORMS = (
    "per-block+offload",
    "per-block+offload,skip_last",
    "per-block+offload,early_stop=false",
    "per-block+offload,reentrant",
    "every-k:2+offload",
    "nested:2+offload",
    "recursive+offload",
    "full+offload",
    "one-in-k:2+offload",
    "ffn-only+offload",
    "attn-only+offload",
)
DEEP: dict[str, Any] = {"n_layers": 12, "d_model": 64, "n_heads": 2, "vocab_size": 64}
STEP: dict[str, Any] = {"batch_size": 4, "seq_len": 64, "optimizer": "sgd", "set_to_none": False}
HIDDEN_BYTES = 4 * 64 * 64 * 4


@pytest.mark.parametrize("spec", FORMS)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_bit_identical_to_none(tiny_run: MakeRun, family: str, spec: str) -> None:
    config = tiny_run(spec, model=FAMILY_SETTINGS[family])
    assert differences(run_steps(baseline_config(config), CPU, 3), run_steps(config, CPU, 3)) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"grad_accumulation": 3}},
        {"train": {"precision": "bf16"}},
        {"train": {"precision": "bf16-pure"}},
        {"train": {"offload_cap_bytes": 20_000}},
        {"train": {"loss": "chunked_cross_entropy"}},
        {"model": {"attention": "eager"}},
        {"model": {"attention": "math"}},
        {"model": {"norm_position": "post"}},
        {"model": {"tie_embeddings": True}},
        {"model": {"head": "none", "vocab_size": None}, "train": {"loss": "mse"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", ["offload", "per-block+offload", "ffn-only+offload"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_bit_identical_to_none_for_other_models(
    tiny_run: MakeRun, family: str, spec: str, settings: dict[str, dict[str, Any]]
) -> None:
    model = {**FAMILY_SETTINGS[family], **settings.get("model", {})}
    config = tiny_run(spec, model=model, train=settings.get("train"))
    assert differences(run_steps(baseline_config(config), CPU, 2), run_steps(config, CPU, 2)) == []


def weigh(config: RunConfig) -> tuple[dict[str, Any], Trial]:
    """Weigh a step whose gradients are allocated."""
    device = Cpu("cpu", 1)
    trial = Trial(config, device.torch_device)
    for parameter in trial.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fields = device.weigh(trial)
    fields["above_bytes"] = fields["peak_allocated_bytes"] - trial.holdings().total_bytes()
    return fields, trial


def offloader(trial: Trial) -> Offloader:
    found = trial.applied._offloader
    assert found is not None
    return found


@pytest.mark.parametrize("attention", ["auto", "math", "eager"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("regions", ["none", "per-block", "ffn-only", "every-k:3"])
def test_the_host_holds_to_the_byte_what_the_device_no_longer_keeps(
    tiny_run: MakeRun, family: str, attention: str, regions: str
) -> None:
    model = {**DEEP, "family": family, "attention": attention}
    options = "" if regions == "none" else ",preserve_rng=false"
    kept, _ = weigh(tiny_run(regions + options, model=model, train=STEP))
    spec = "offload" if regions == "none" else f"{regions}+offload{options}"
    moved, trial = weigh(tiny_run(spec, model=model, train=STEP))
    on_host = offloader(trial).store.peak_bytes
    assert on_host > 0.4 * kept["saved_bytes"]
    assert kept["saved_bytes"] == moved["saved_bytes"] + on_host
    if regions == "per-block":
        assert on_host == 12 * HIDDEN_BYTES, "one boundary per block"


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_device_keeps_what_head_and_loss_keep(tiny_run: MakeRun, family: str) -> None:
    """h is measured from none on two and three blocks; beside it only tensors under the least size stay."""
    model = {**DEEP, "family": family}

    def saved(spec: str, n_layers: int) -> int:
        found, _ = weigh(tiny_run(spec, model={**model, "n_layers": n_layers}, train=STEP))
        return int(found["saved_bytes"])

    none_2, none_3 = saved("none", 2), saved("none", 3)
    a = none_3 - none_2
    h = none_2 - 2 * a
    small = 12 * 8 * MIN_BYTES
    assert h <= saved("offload", 12) <= h + small
    assert h <= saved("per-block+offload,preserve_rng=false", 12) <= h + 12 * 64
    assert small < 0.1 * (none_2 + 10 * a)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_peak_of_a_deep_narrow_stack(tiny_run: MakeRun, family: str) -> None:
    peaks = {
        spec: weigh(tiny_run(spec, model={**DEEP, "family": family}, train=STEP))[0]["above_bytes"]
        for spec in ("none", "per-block", "offload", "per-block+offload")
    }
    assert peaks["offload"] < 0.35 * peaks["none"]
    assert peaks["per-block+offload"] < peaks["per-block"] - 9 * HIDDEN_BYTES
    assert peaks["per-block+offload"] < peaks["offload"]


def test_backward_holds_two_blocks_at_most(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tiny_run("offload", model={**DEEP}, train=STEP), CPU)
    there: list[int] = []
    turned: list[int] = []
    own = offloader(trial)
    original = Offloader.turn_to

    def watched(self: Offloader, group: Any) -> None:
        is_new = group is not self._turned_to
        original(self, group)
        if is_new:
            turned.append(sum(reference() is not None for reference in group.stored))
            there.append(len({id(g) for s in self._on_device for g in s.groups if s._back is not None}))

    monkeypatch.setattr(Offloader, "turn_to", watched)
    trial.step(NoObserver())
    assert len(turned) == 12 and all(n > 3 for n in turned), "each block was turned to once, while it was needed"
    assert there == [2] * 11 + [1]
    assert own.store.live_bytes == 0 and len(own._on_device) == 0


def test_the_block_before_is_fetched_ahead(tiny_run: MakeRun) -> None:
    """When a block's first tensor is asked for, copies of the block before it have been asked for as well."""
    trial = Trial(tiny_run("offload", model={"n_layers": 3}), CPU)
    loss = trial.loss(trial.module(trial.batches[0][0]), trial.batches[0][1])
    own = offloader(trial)
    last = own._newest
    assert last is not None and last.earlier is not None and last.earlier.earlier is not None
    assert len(own._on_device) == 0
    own.turn_to(last)
    for group, is_there in ((last, True), (last.earlier, True), (last.earlier.earlier, False)):
        found = [reference() for reference in group.stored]
        own_alone = [s for s in found if s is not None and s.groups == [group]]
        assert own_alone and all((s._back is not None) == is_there for s in own_alone)
    loss.backward()


def test_tables_of_the_model_stay(tiny_run: MakeRun) -> None:
    """llama's rotary tables are buffers: regions are given them and keep them, and no byte of them is moved."""
    seen: list[int] = []
    trial = Trial(tiny_run("per-block+offload", model={"family": "llama"}, train={"seq_len": 64}), CPU)
    own = offloader(trial)
    take = own.store.take
    own.store.take = lambda n: (seen.append(n), take(n))[1]  # type: ignore[method-assign,func-returns-value]
    trial.step(NoObserver())
    table_bytes, hidden_bytes = trial.module.cos_SK.nbytes, 2 * 64 * 32 * 4
    assert table_bytes >= MIN_BYTES and table_bytes != hidden_bytes
    assert seen == [hidden_bytes] * 4


@pytest.mark.parametrize("where", ["in a block", "in the loss"])
def test_an_interrupted_step_leaves_nothing(tiny_run: MakeRun, where: str) -> None:
    trial = Trial(tiny_run("offload", model={"n_layers": 4}), CPU)
    own = offloader(trial)
    trial.step(NoObserver())
    peak = own.store.peak_bytes

    def fail(*_: Any) -> None:
        raise RuntimeError("interrupted")

    handle = trial.model.blocks[2].register_forward_pre_hook(fail) if where == "in a block" else None
    loss = trial.loss
    if handle is None:
        trial.loss = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="interrupted") as told:
        trial.step(NoObserver())
    assert own.store.live_bytes > 0, "the traceback holds the graph"
    if handle is not None:
        handle.remove()
    trial.loss = loss  # type: ignore[method-assign]
    trial.step(NoObserver())
    assert own.store.live_bytes == 0 and own.store.peak_bytes == peak
    assert told is not None


def test_the_cap_holds_and_what_is_over_it_is_told(tiny_run: MakeRun) -> None:
    model = {**DEEP, "n_layers": 4}
    free, _ = weigh(tiny_run("offload", model=model, train=STEP))
    full = Trial(tiny_run("offload", model=model, train=STEP), CPU).count()["host_store_peak_bytes"]
    cap = full // 2
    capped, trial = weigh(tiny_run("offload", model=model, train={**STEP, "offload_cap_bytes": cap}))
    counted = trial.count()
    own = offloader(trial)
    assert cap - 8 * HIDDEN_BYTES < counted["host_store_peak_bytes"] <= cap
    assert own.most_stayed_bytes == full - counted["host_store_peak_bytes"]
    assert capped["saved_bytes"] == free["saved_bytes"] + own.most_stayed_bytes
    assert [note for note in counted["notes"] if note.startswith("offload_cap_bytes left ")]
    assert not [note for note in Trial(tiny_run("offload"), CPU).count()["notes"] if "cap" in note]


def test_micro_batches_need_no_more_room(tiny_run: MakeRun) -> None:
    peaks = {
        n: Trial(tiny_run("offload", train={"grad_accumulation": n}), CPU).count()["host_store_peak_bytes"]
        for n in (1, 3)
    }
    assert peaks[1] == peaks[3] > 0
    assert "host_store_peak_bytes" not in Trial(tiny_run("none"), CPU).count()


def test_buffers_are_used_again(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("offload"), CPU)
    made: list[int] = []
    store = offloader(trial).store
    original = store._make
    store._make = lambda n: (made.append(n), original(n))[1]  # type: ignore[method-assign,func-returns-value]
    trial.step(NoObserver())
    n_first = len(made)
    trial.step(NoObserver())
    assert n_first > 10 and len(made) == n_first
    assert sum(made) == store.peak_bytes


def test_an_evaluation_stores_nothing(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("offload"), CPU)
    with torch.no_grad():
        trial.module(trial.batches[0][0])
    assert offloader(trial).store.peak_bytes == 0


def test_a_released_trial_lets_its_weights_go(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("offload"), CPU)
    trial.step(NoObserver())
    weight = weakref.ref(next(trial.module.parameters()))
    gc.disable()
    try:
        trial.release()
        assert weight() is None
    finally:
        gc.enable()


def test_regions_of_any_strategy_resolve_with_offload() -> None:
    assert all(specs.parse(spec).options["offload"] for spec in FORMS)
