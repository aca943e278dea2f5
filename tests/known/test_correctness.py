"""Reports of wrong gradients: each strategy computes what none computes, or says that it does not."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckbench import specs
from ckbench.compare import compare
from ckbench.config import HfConfig, RunConfig
from ckbench.doubts import doubts
from ckbench.engine import checkpointing
from ckbench.engine import parity as parity_module
from ckbench.engine.parity import Outcome, check_parity, differences, run_steps
from ckbench.engine.trial import NoObserver, Trial
from ckbench.models.base import BuiltModel
from tests.known import odd_models
from tests.known.conftest import Run
from tests.known.trials import CPU, SMALL, VECTORS, config, gradients, parity, record_of, same, trial
from tests.sample_records import study

STRATEGIES = (
    *("per-block", "every-k:2", "one-in-k:2", "segments:2", "sqrt", "nested:2", "recursive", "full"),
    *("first-n:2", "ffn-only", "attn-only"),
)
UseModel = Callable[[Callable[[], BuiltModel]], None]


@pytest.mark.parametrize("spec", STRATEGIES)
def test_cor_01_replay_draws_the_same_dropout_masks(spec: str) -> None:
    assert parity(spec, dropout=0.1) == "exact"


def test_cor_03_a_replay_leaves_the_generator_where_it_was() -> None:
    reference, other = (run_steps(config(spec, dropout=0.1), CPU, n_steps=3) for spec in ("none", "per-block"))
    assert len(reference.losses) == 3 and len({float(loss) for loss in reference.losses}) == 3
    assert differences(reference, other) == []  # losses, gradients, weights and generators after step 3


def test_cor_04_reentrant_without_a_gradient_at_its_input_is_no_normal_row() -> None:
    record = record_of("per-block,reentrant", freeze_embedding=True)
    assert record.status == "error" and record.failed_phase == "forward"
    assert "would leave the parameters of blocks 0 to 0 without one" in (record.message or "")
    fine = record_of("per-block", freeze_embedding=True)
    assert (fine.status, fine.parity) == ("ok", "exact")


@pytest.mark.parametrize("spec", ["per-block,reentrant", "per-block", "every-k:2"])
def test_cor_07_masks_by_keyword_and_none_reach_the_block(use_model: UseModel, spec: str) -> None:
    use_model(odd_models.keyword)
    assert parity(spec, **VECTORS) == "exact"


@pytest.mark.parametrize("spec", ["per-block", "segments:2", "nested:2", "every-k:2"])
def test_cor_10_replay_runs_under_the_same_autocast(spec: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert parity(spec, precision="bf16", dropout=0.1) == "exact"
    assert [str(w.message) for w in caught] == []


def test_cor_11_the_block_sees_one_dtype_in_forward_and_replay() -> None:
    seen: dict[bool, list[torch.dtype]] = {False: [], True: []}
    built = trial("per-block", precision="bf16")
    counts = built.applied.counts

    def note(_module: nn.Module, _args: Any, output: Tensor) -> None:
        seen[counts.in_backward].append(output.dtype)

    for block in built.model.blocks:
        block.attention.qkv.register_forward_hook(note)
        block.ffn.up.register_forward_hook(note)
    built.step(NoObserver())
    n_calls = 2 * len(built.model.blocks)
    assert seen == {False: [torch.bfloat16] * n_calls, True: [torch.bfloat16] * n_calls}


@pytest.mark.parametrize("spec", ["per-block", "nested:2", "ffn-only"])
def test_cor_12_an_evaluation_pass_in_the_same_autocast_region_changes_nothing(spec: str) -> None:
    def run(evaluate: bool) -> list[Tensor | None]:
        built = trial(spec, precision="bf16")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if evaluate:
                with torch.no_grad():
                    built.module(built.batches[0][0])
            return gradients(built)

    assert same(run(evaluate=True), run(evaluate=False))


def test_cor_14_a_cache_that_grows_again_on_replay_is_found_out(use_model: UseModel) -> None:
    use_model(lambda: odd_models.cached(use_cache=True))
    record = record_of("per-block", **VECTORS)
    assert record.status == "recompute_mismatch"
    shapes = ("torch.Size([2, 16, 8])", "torch.Size([2, 16, 16])")  # twice the sequence length
    assert all(shape in (record.message or "") for shape in shapes)
    use_model(lambda: odd_models.cached(use_cache=False))
    assert parity("per-block", **VECTORS) == "exact"


def test_cor_15_every_arm_of_a_library_s_model_runs_without_a_cache() -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    model = HfConfig(arch="gpt2", n_layers=2, config={"n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16})
    run = config("per-block").model_copy(update={"model": model})
    for spec in ("none", "per-block"):
        built = Trial(run.model_copy(update={"strategy": specs.parse(spec)}), CPU)
        given = built.module.model(input_ids=built.batches[0][0])
        assert built.module.model.config.use_cache is False
        assert given.past_key_values is None
    assert check_parity(run, CPU, lambda: None)["parity"] == "exact"


def test_cor_16_recomputation_is_counted_and_a_mode_cannot_switch_it_off() -> None:
    built = trial("per-block", n_layers=4)
    assert built.module.training
    for is_training in (True, False):  # the blocks are wrapped from outside, whatever their own flags say
        built.module.train(is_training)
        counted = built.count()
        assert counted["block_calls_forward"] + counted["block_calls_backward"] == 8
    idle = [dict(r, region_calls_backward=0, block_calls_backward=0) for r in study()]
    assert any("the strategy had no effect" in str(doubt) for doubt in doubts(compare(idle)))


@pytest.mark.parametrize("spec", ["per-block", "per-block,reentrant", "nested:2", "ffn-only"])
def test_cor_17_an_evaluation_pass_runs_every_block_once(spec: str) -> None:
    built = trial(spec)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        built.module(built.batches[0][0])
    counts = built.applied.counts
    assert counts.block_calls_forward == [1] * 3 and counts.block_calls_backward == [0] * 3
    assert [str(w.message) for w in caught] == []


def test_cor_18_running_statistics_moved_twice_are_a_mismatch(use_model: UseModel) -> None:
    use_model(odd_models.batch_norm)
    reference, other = (run_steps(config(spec, **VECTORS), CPU, n_steps=1) for spec in ("none", "per-block"))
    name = "blocks.0.norm.num_batches_tracked"
    assert (int(reference.state[name]), int(other.state[name])) == (1, 2)
    assert reference.losses == other.losses  # nobody would notice
    record = record_of("per-block", **VECTORS)
    assert record.status == "invalid"
    assert "9 weights or buffers differ after 2 steps, first blocks.0.norm.running_mean" in (record.message or "")


def test_cor_19_writing_in_place_is_exact_or_refused(use_model: UseModel) -> None:
    use_model(odd_models.inplace)
    for spec in ("per-block", "ffn-only", "every-k:2"):
        assert parity(spec, **VECTORS) == "exact"
    use_model(odd_models.input_inplace)
    assert record_of("none", **VECTORS).status == "ok"
    for spec in ("per-block", "every-k:2", "full"):
        record = record_of(spec, **VECTORS)
        assert record.status == "error" and "modified by an inplace operation" in (record.message or "")


def test_cor_21_experts_chosen_anew_on_replay_end_as_recompute_mismatch(
    use_model: UseModel, ckbench: Run, replay: Callable[..., str]
) -> None:
    use_model(odd_models.mixture)
    assert parity("per-block", **VECTORS) == "exact"
    record = record_of("per-block,preserve_rng=false", **VECTORS)
    assert record.status == "recompute_mismatch"
    message = record.message or ""
    assert "tensor at position 4" in message
    assert message.count("torch.Size") >= 2 and "saved metadata" in message and "recomputed metadata" in message
    outcome = ckbench(
        "run", "study.yaml", "--device", replay({"per-block": {"fail": {"raise": message, "type": "CheckpointError"}}})
    )
    assert outcome.code == 1 and "recompute_mismatch" in outcome.out and "every-k:2" in outcome.out


class ReplayedProducts(TorchDispatchMode):
    """Counts matrix products that run in a recomputed forward: backward's own run without recording gradients."""

    def __init__(self, of_trial: Trial) -> None:
        super().__init__()
        self.counts = of_trial.applied.counts
        self.n_products = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.n_products += is_product and self.counts.in_backward and torch.is_grad_enabled()
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "n_products"), [("gpt", 4), ("llama", 5)])
def test_cor_23_every_second_product_is_the_same_one_in_forward_and_replay(family: str, n_products: int) -> None:
    """An even and an odd number of products per block: the counter starts anew with every region."""
    assert parity("selective:every-2nd-matmul", family=family, dropout=0.1) == "exact"
    built = trial("selective:every-2nd-matmul,early_stop=false", family=family)
    with ReplayedProducts(built) as replayed:
        built.step(NoObserver())
    assert replayed.n_products == len(built.model.blocks) * (n_products // 2)


@pytest.mark.parametrize("spec", ["per-block", "per-block,reentrant", "every-k:2", "nested:2", "ffn-only"])
def test_cor_25_a_shared_block_gets_the_gradient_of_none(use_model: UseModel, spec: str) -> None:
    use_model(odd_models.shared)
    assert parity(spec, **VECTORS) == "exact"
    built = trial(spec, **VECTORS)
    counted, plan = built.count(), built.applied.plan
    assert counted["block_calls_forward"] == 3
    assert counted["block_calls_backward"] == sum(plan.block_calls_backward())
    built.applied.remove()
    assert all("forward" not in module.__dict__ for module in built.module.modules())


def test_cor_26_the_variant_is_always_named_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    named = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        named.append(kwargs["use_reentrant"])
        return torch.utils.checkpoint.checkpoint(*args, **kwargs)

    monkeypatch.setattr(checkpointing, "checkpoint", spy)
    record = record_of("per-block")  # warnings are errors here, so it does not warn either
    assert record.status == "ok", record.message
    assert set(named) == {False}
    assert record.plan is not None and record.plan["reentrant"] is False
    plan = record_of("per-block,reentrant").plan
    assert set(named) == {False, True} and plan is not None and plan["reentrant"] is True


def test_cor_30_a_tensor_and_its_transpose_come_back_from_the_host_as_they_were(use_model: UseModel) -> None:
    use_model(odd_models.transposed)
    square = {**VECTORS, "batch_size": 2, "seq_len": odd_models.D}
    for spec in ("offload", "per-block+offload"):
        assert parity(spec, **square) == "exact"
    moved = trial("offload", **square)
    moved.step(NoObserver())
    assert moved.applied.figures()["host_store_peak_bytes"] > 0


@pytest.mark.parametrize(("difference", "parity_is"), [(3e-6, "within_noise"), (5e-6, "failed")])
def test_cor_32_on_a_gpu_parity_means_within_the_noise_of_none(
    monkeypatch: pytest.MonkeyPatch, difference: float, parity_is: str
) -> None:
    """On a GPU: the checks `gpt STRATEGY` and `llama STRATEGY` of tests/gpu/gpu_check.py."""

    def outcome(gradient: float) -> Outcome:
        weight = torch.ones(())
        kept: dict[str, Tensor | None] = {"w": torch.tensor(gradient, dtype=torch.float64)}
        return Outcome(losses=[weight], gradients=kept, state={"w": weight}, generators=[torch.zeros(1)])

    runs_of_none: list[float] = []

    def run(config: RunConfig, device: torch.device) -> Outcome:
        if config.strategy.name != "none":
            return outcome(1.0 + difference)
        runs_of_none.append(1.0 + 1e-6 * bool(runs_of_none))  # none again differs from its first run
        return outcome(runs_of_none[-1])

    monkeypatch.setattr(parity_module, "run_steps", run)
    gpu: Any = SimpleNamespace(type="cuda")
    verdict = parity_module.check_parity(config("per-block"), gpu, lambda: None)
    assert verdict["parity"] == parity_is and len(runs_of_none) >= 2
    assert verdict["parity_noise_ratio"] == pytest.approx(1e-6)
    assert verdict["parity_detail"].endswith(f"difference {difference:.2g}, noise of none 1e-06")


@pytest.mark.parametrize(
    ("option", "hint"), [("use_reentrent", "did you mean 'reentrant'?"), ("use_reentrant", "did you mean 'reentrant'?")]
)
def test_cor_34_a_misspelt_option_of_checkpointing_is_refused_at_load(ckbench: Run, option: str, hint: str) -> None:
    Path("study.yaml").write_text(
        "model: {n_layers: 2, d_model: 32, n_heads: 4, vocab_size: 64}\ntrain: {batch_size: 2, seq_len: 16}\n"
        f"strategies:\n  - {{name: per_block, {option}: false}}\n"
    )
    outcome = ckbench("run", "study.yaml", "--device", "cpu")
    assert outcome.code == 2
    assert outcome.err == f"study.yaml:4: strategy per-block: unknown key '{option}'; {hint}\n"


@pytest.mark.parametrize(("batch_size", "n_batches", "tokens"), [(8, 1, 64), (4, 2, 64), (4, 3, 96)])
def test_cor_35_micro_batches_of_one_step_are_the_same_for_every_strategy(
    ckbench: Run, replay: Callable[..., str], batch_size: int, n_batches: int, tokens: int
) -> None:
    train = {"batch_size": batch_size, "grad_accumulation": n_batches}
    for spec in ("per-block", "nested:2"):
        assert parity(spec, **train, dropout=0.1) == "exact"
    assert config(**train).train.tokens_per_step() == tokens
    assert len(trial(**train).batches) == n_batches
    sets = [f"--set=train.{key}={value}" for key, value in {**train, "seq_len": SMALL["seq_len"]}.items()]
    out = ckbench("run", "study.yaml", "--device", replay(), *sets).out
    assert (f"grad_accumulation {n_batches}" in out) and (f"{tokens} tokens per step" in out) == (n_batches > 1)
