"""Every kind of plan on models of the transformers library: bit-identical to none, and the calls it promises."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ckbench import specs
from ckbench.config import RunConfig
from ckbench.devices.cpu import PLUGIN as CpuDevice
from ckbench.engine.parity import Outcome, differences, run_steps
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import PlanError

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
L = 3
WIDE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TEXT = {**WIDE, "vocab_size": 48, "max_position_embeddings": 32}
DROP = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_head": 2, "vocab_size": 48, "n_positions": 32},  # drops 10 % by default
    "llama": {**TEXT, "num_key_value_heads": 1, "attention_dropout": 0.1},
    "bert": {**TEXT, **DROP},
    "vit": {**WIDE, **DROP, "image_size": 8, "patch_size": 2, "num_labels": 5},
    "qwen3": {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "attention_dropout": 0.1},
    "phi": {**TEXT, "num_key_value_heads": 2, "resid_pdrop": 0.1},
}
SPECS = [
    "per-block",
    "every-k:2",
    "nested:2",
    "full",
    "ffn-only",
    "attn-only",
    "first-n:1",
    "hf-native",
    "offload",
    "per-block+offload",
]
WITHOUT_EARLY_STOP = [f"{spec},early_stop=false" for spec in SPECS if spec not in ("hf-native", "offload")]

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra hf is not installed")

_baselines: dict[str, Outcome] = {}


def section(arch: str, **keys: Any) -> dict[str, Any]:
    return {"family": "hf", "arch": arch, "n_layers": L, "config": CONFIGS[arch], **keys}


def is_native(trial: Trial) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in trial.module.modules())


def assert_same_as_none(tiny_run: MakeRun, spec: str, model: dict[str, Any], **train: Any) -> None:
    config = tiny_run("none", model=model, train=train)
    key = config.model_dump_json()
    if key not in _baselines:
        _baselines[key] = run_steps(config, CPU)
    reference = _baselines[key]
    assert all(g is None or bool(g.abs().sum() > 0) for g in reference.gradients.values())
    assert sum(g is not None for g in reference.gradients.values()) >= 10 * L
    assert differences(reference, run_steps(tiny_run(spec, model=model, train=train), CPU)) == []


@pytest.mark.parametrize("spec", [*SPECS, *WITHOUT_EARLY_STOP])
@pytest.mark.parametrize("arch", CONFIGS)
def test_bit_identical_to_none(tiny_run: MakeRun, arch: str, spec: str) -> None:
    assert_same_as_none(tiny_run, spec, section(arch))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("spec", ["every-k:2", "attn-only", "hf-native"])
@pytest.mark.parametrize("arch", ["gpt2", "bert"])
def test_bit_identical_with_either_attention(tiny_run: MakeRun, arch: str, spec: str, attention: str) -> None:
    assert_same_as_none(tiny_run, spec, section(arch, attention=attention))


@pytest.mark.parametrize("spec", ["per-block", "every-k:2", "ffn-only", "hf-native"])
def test_bit_identical_with_the_chunked_loss_and_micro_batches(tiny_run: MakeRun, spec: str) -> None:
    assert_same_as_none(tiny_run, spec, section("gpt2"), loss="chunked_cross_entropy", grad_accumulation=2)


@pytest.mark.parametrize("spec", ["per-block,reentrant", "every-k:2,reentrant"])
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_bit_identical_when_reentrant(tiny_run: MakeRun, arch: str, spec: str) -> None:
    assert_same_as_none(tiny_run, spec, section(arch))


@pytest.mark.parametrize("spec", ["none", *SPECS])
@pytest.mark.parametrize("arch", CONFIGS)
def test_calls_are_those_of_the_plan(tiny_run: MakeRun, arch: str, spec: str) -> None:
    trial = Trial(tiny_run(spec, model=section(arch)), CPU)
    plan, counts = trial.applied.plan, trial.applied.counts
    trial.step(NoObserver())
    assert counts.block_calls_forward == [1] * L
    assert tuple(counts.block_calls_backward) == plan.block_calls_backward()
    assert counts.region_calls_backward == plan.region_calls_backward()


@pytest.mark.parametrize("arch", CONFIGS)
def test_the_library_keeps_what_per_block_keeps(tiny_run: MakeRun, arch: str) -> None:
    """One region per block both: equal bytes after forward; where not, the difference is named here."""
    kept: dict[str, int] = {}
    for spec in ("none", "per-block", "hf-native"):
        config = tiny_run(spec, model=section(arch))
        trial = Trial(config, CPU)
        trial.step(NoObserver())
        kept[spec] = CpuDevice("cpu", 1).weigh(trial)["saved_bytes"]
    assert kept["none"] > kept["per-block"] > 0
    assert kept["hf-native"] == kept["per-block"], kept


def test_native_checkpointing_ends_with_its_plan(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("hf-native", model=section("gpt2")), CPU)
    assert is_native(trial)
    trial.applied.remove()
    assert not is_native(trial)
    assert not any(m._forward_hooks for m in trial.module.modules())
    trial.applied.counts.clear()
    trial.step(NoObserver())
    assert trial.applied.counts.block_calls_forward == trial.applied.counts.block_calls_backward == [0] * L


@pytest.mark.parametrize("spec", ["none", "per-block", "every-k:2"])
def test_the_library_s_own_is_off_unless_asked_for(tiny_run: MakeRun, spec: str) -> None:
    assert not is_native(Trial(tiny_run(spec, model=section("gpt2")), CPU))


def test_a_part_that_is_not_there_is_a_sentence(tiny_run: MakeRun) -> None:
    with pytest.raises(PlanError, match="core"):
        Trial(tiny_run("core-attn", model=section("gpt2")), CPU)


def test_hf_native_needs_the_library(tiny_run: MakeRun) -> None:
    with pytest.raises(PlanError, match="this model has none; write per-block"):
        specs.resolve(specs.parse("hf-native"), Trial(tiny_run("none"), CPU).model.shape())
