"""Every strategy on every model family: the same numbers as none, bit by bit, and the calls its plan promises."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ckbench import specs
from ckbench.config import RunConfig
from ckbench.engine import parity
from ckbench.engine.parity import Outcome, differences, largest_relative_difference, run_steps
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import PlanError
from ckbench.plan import Plan
from tests.contract.everything import FAMILY_SETTINGS, OURS, SHAPE, L, all_specs, pairs

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
STEPS = 3

SPECS = all_specs()
ACTIVE = [spec for spec in SPECS if spec != "none"]


def plan_of(spec: str) -> Plan:
    """Resolve a spec for a stack that can do everything."""
    return specs.resolve(specs.parse(spec), SHAPE)


def takes_reentrant(spec: str) -> bool:
    """Say whether a strategy can use PyTorch's older variant: flat, over whole blocks, and recomputing everything."""
    plan = plan_of(spec)
    return bool(plan.regions) and all(
        region.part == "block" and not region.children and not region.save_ops and region.mode == "recompute"
        for region in plan.regions
    )


RECOMPUTING = [spec for spec in ACTIVE if plan_of(spec).regions and plan_of(spec).tolerance == 0]
"""Strategies with regions of ours that promise bit-identity; what the options early_stop, skip_last act on."""
FLAT = [spec for spec in RECOMPUTING if takes_reentrant(spec)]

EMBEDDING = ("tokens.", "positions.", "embedding_norm.")

_baselines: dict[str, Outcome] = {}


@pytest.fixture(params=FAMILY_SETTINGS)
def family(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The model section of a family."""
    return FAMILY_SETTINGS[request.param]


@pytest.fixture(params=OURS)
def our_family(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The model section of a family of ours, which has the keys of ModelConfig."""
    return FAMILY_SETTINGS[request.param]


def of_family(name: str) -> dict[str, Any]:
    return FAMILY_SETTINGS[name]


def baseline(config: RunConfig) -> Outcome:
    """Run none once per model and step."""
    config = config.model_copy(update={"strategy": specs.parse("none")})
    key = config.model_dump_json()
    if key not in _baselines:
        _baselines[key] = run_steps(config, CPU, STEPS)
    return _baselines[key]


def assert_same_as_none(config: RunConfig) -> None:
    """Compare losses, gradients, weights, buffers and generators after three steps, bit by bit."""
    reference = baseline(config)
    assert len(reference.losses) == STEPS * config.train.grad_accumulation
    assert all(g is not None and bool(g.abs().sum() > 0) for g in reference.gradients.values())
    assert differences(reference, run_steps(config, CPU, STEPS)) == []


def counted_step(config: RunConfig) -> Trial:
    trial = Trial(config, CPU)
    trial.step(NoObserver())
    trial.applied.counts.clear()
    trial.step(NoObserver())
    return trial


@pytest.mark.parametrize(("name", "spec"), pairs([spec for spec in SPECS if plan_of(spec).tolerance == 0]))
def test_bit_identical_to_none(tiny_run: MakeRun, name: str, spec: str) -> None:
    assert_same_as_none(tiny_run(spec, model=of_family(name)))


@pytest.mark.parametrize(("name", "spec"), pairs([spec for spec in SPECS if plan_of(spec).tolerance > 0]))
def test_within_the_stated_tolerance_of_none(tiny_run: MakeRun, name: str, spec: str) -> None:
    config = tiny_run(spec, model=of_family(name))
    reference, other = baseline(config), run_steps(config, CPU, STEPS)
    assert largest_relative_difference(reference, other) <= plan_of(spec).tolerance
    assert [n for n, g in other.gradients.items() if g is None] == []
    assert all(torch.equal(a, b) for a, b in zip(reference.generators, other.generators, strict=True))


@pytest.mark.parametrize(("name", "spec"), pairs(RECOMPUTING))
def test_bit_identical_to_none_without_early_stop(tiny_run: MakeRun, name: str, spec: str) -> None:
    assert_same_as_none(tiny_run(f"{spec},early_stop=false", model=of_family(name)))


@pytest.mark.parametrize(("name", "spec"), pairs(RECOMPUTING))
def test_bit_identical_to_none_with_skip_last(tiny_run: MakeRun, name: str, spec: str) -> None:
    assert_same_as_none(tiny_run(f"{spec},skip_last", model=of_family(name)))


@pytest.mark.parametrize(("name", "spec"), pairs(FLAT))
def test_bit_identical_to_none_when_reentrant(tiny_run: MakeRun, name: str, spec: str) -> None:
    assert_same_as_none(tiny_run(f"{spec},reentrant", model=of_family(name)))


@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"grad_accumulation": 2}},
        {"train": {"set_to_none": False, "optimizer": "sgd"}},
        {"train": {"precision": "bf16"}},
        {"train": {"precision": "bf16-pure"}},
        {"model": {"norm_position": "post"}},
        {"model": {"attention": "eager"}},
        {"model": {"attention": "math", "activation": "relu"}},
        {"model": {"tie_embeddings": True}},
        {"model": {"d_ff": (16, 64, 32, 128, 48)}},
        {"model": {"head": "none", "vocab_size": None}, "train": {"loss": "mse"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", ["per-block", "nested:2", "ffn-only", "attn-only"])
def test_bit_identical_to_none_for_other_models(
    tiny_run: MakeRun, our_family: dict[str, Any], spec: str, settings: dict[str, dict[str, Any]]
) -> None:
    model = {**our_family, **settings.get("model", {})}
    assert_same_as_none(tiny_run(spec, model=model, train=settings.get("train")))


def test_frozen_embedding(tiny_run: MakeRun, our_family: dict[str, Any]) -> None:
    """The first block's input needs no gradient; its parameters still get theirs, and embeddings none."""
    config = tiny_run("per-block", model={**our_family, "freeze_embedding": True})
    reference, other = baseline(config), run_steps(config, CPU, STEPS)
    assert differences(reference, other) == []
    without = {name for name, gradient in other.gradients.items() if gradient is None}
    assert without == {name for name in other.gradients if name.startswith(EMBEDDING)} != set()


@pytest.mark.parametrize(("name", "spec"), pairs([*SPECS, *(f"{spec},early_stop=false" for spec in RECOMPUTING)]))
def test_calls_are_those_of_the_plan(tiny_run: MakeRun, name: str, spec: str) -> None:
    trial = counted_step(tiny_run(spec, model=of_family(name)))
    plan, counts = trial.applied.plan, trial.applied.counts
    assert counts.block_calls_forward == [1] * L
    assert tuple(counts.block_calls_backward) == plan.block_calls_backward()
    assert counts.region_calls_forward == plan.n_regions
    assert counts.region_calls_backward == plan.region_calls_backward()


@pytest.mark.parametrize("spec", FLAT)
def test_calls_are_those_of_the_plan_when_reentrant(tiny_run: MakeRun, spec: str) -> None:
    trial = counted_step(tiny_run(f"{spec},reentrant", model={"n_layers": L}))
    plan, counts = trial.applied.plan, trial.applied.counts
    assert plan.reentrant
    assert tuple(counts.block_calls_backward) == plan.block_calls_backward()
    assert counts.region_calls_backward == plan.region_calls_backward()


@pytest.mark.parametrize("spec", [spec for spec in RECOMPUTING if spec not in FLAT])
def test_reentrant_is_refused_for_the_rest(spec: str) -> None:
    with pytest.raises(PlanError, match="^reentrant checkpoints (cannot be nested|of a part of a block|keep nothing)"):
        plan_of(f"{spec},reentrant")


@pytest.mark.parametrize(("name", "spec"), pairs(SPECS))
def test_micro_batches_multiply_the_calls(tiny_run: MakeRun, name: str, spec: str) -> None:
    trial = Trial(tiny_run(spec, model=of_family(name), train={"grad_accumulation": 3}), CPU)
    counted = trial.count()
    assert counted["block_calls_forward"] == 3 * L
    assert counted["block_calls_backward"] == trial.describe()["block_calls_backward_planned"]
    assert counted["region_calls_backward"] == 3 * trial.applied.plan.region_calls_backward()


@pytest.mark.parametrize(("name", "spec"), pairs(SPECS))
def test_remove_gives_every_module_its_forward_back(tiny_run: MakeRun, name: str, spec: str) -> None:
    trial = Trial(tiny_run(spec, model=of_family(name)), CPU)
    patched = [module for module in trial.module.modules() if "forward" in module.__dict__]
    assert trial.applied.plan.native or len(patched) >= L, "a library is told to count, and no forward is replaced"
    trial.applied.remove()
    assert [module for module in trial.module.modules() if "forward" in module.__dict__] == []
    trial.applied.counts.clear()
    trial.step(NoObserver())
    assert trial.applied.counts.block_calls_forward == [0] * L, "a removed plan counts nothing any more"


@pytest.mark.parametrize(
    "model",
    [{"head": "none", "vocab_size": None}, {"freeze_embedding": True}],
    ids=["no embedding", "frozen embedding"],
)
@pytest.mark.parametrize("spec", ["per-block", "every-k:2", "full"])
def test_reentrant_is_refused_where_it_would_lose_gradients(
    tiny_run: MakeRun, our_family: dict[str, Any], model: dict[str, Any], spec: str
) -> None:
    loss = "mse" if model.get("head") == "none" else "cross_entropy"
    trial = Trial(tiny_run(f"{spec},reentrant", model={**our_family, **model}, train={"loss": loss}), CPU)
    with pytest.raises(PlanError) as told:
        trial.step(NoObserver())
    last = trial.applied.plan.regions[0].stop - 1
    assert str(told.value) == (
        "reentrant checkpoint whose inputs need no gradient would leave the parameters of "
        f"blocks 0 to {last} without one; use the default variant"
    )


@pytest.mark.parametrize("spec", RECOMPUTING)
def test_dropout_without_its_random_state_is_found_out(
    tiny_run: MakeRun, our_family: dict[str, Any], spec: str
) -> None:
    """The parity check can fail: other dropout masks in the replay are other gradients."""
    careless = tiny_run(f"{spec},preserve_rng=false", model=our_family)
    verdict = parity.check_parity(careless, CPU, lambda: None)
    assert verdict["parity"] == "failed"
    assert verdict["parity_detail"].startswith("2 steps, batch 2 x 16: ")
    assert "gradients differ" in verdict["parity_detail"]


@pytest.mark.parametrize("spec", ["per-block", "nested:2", "ffn-only"])
def test_parity_is_exact_with_the_random_state_or_without_dropout(
    tiny_run: MakeRun, our_family: dict[str, Any], spec: str
) -> None:
    for options, dropout in (("", 0.1), (",preserve_rng=false", 0.0)):
        verdict = parity.check_parity(
            tiny_run(spec + options, model={**our_family, "dropout": dropout}), CPU, lambda: None
        )
        assert verdict == {
            "parity": "exact",
            "parity_detail": "2 steps, batch 2 x 16: loss, gradients, weights, generators bit-identical",
        }


def test_parity_sees_the_smallest_differences(tiny_run: MakeRun) -> None:
    reference = run_steps(tiny_run("none"), CPU, 2)
    assert differences(reference, reference) == []
    name = next(iter(reference.gradients))

    def told(change: Callable[[Tensor], None]) -> list[str]:
        gradient = reference.gradients[name]
        assert gradient is not None
        changed = gradient.clone()
        change(changed)
        return differences(reference, replace(reference, gradients={**reference.gradients, name: changed}))

    total = len(reference.gradients)
    one = [f"1 of {total} gradients differ, first {name}"]
    assert told(lambda g: g.view(-1)[0].copy_(torch.nextafter(g.view(-1)[0], torch.tensor(1.0)))) == one
    assert told(lambda g: None) == []
    zero = replace(reference, gradients={**reference.gradients, name: torch.zeros(3)})
    minus = replace(reference, gradients={**reference.gradients, name: -torch.zeros(3)})
    assert differences(zero, minus) == one, "0.0 is not -0.0"
    nan = replace(reference, gradients={**reference.gradients, name: torch.full((3,), torch.nan)})
    assert differences(nan, nan) == [], "NaN equals itself"
    lost = replace(reference, gradients={**reference.gradients, name: None})
    assert differences(reference, lost) == [f"1 parameters without a gradient, first {name}"]
    assert differences(lost, reference) == [f"1 parameters with a gradient that none has not, first {name}"]
    late = replace(reference, losses=[reference.losses[0], reference.losses[1] + 1])
    assert differences(reference, late) == ["loss differs from micro-batch 1 on"]
    stirred = replace(reference, generators=[reference.generators[0].flip(0)])
    assert differences(reference, stirred) == ["the random generators are in another state"]
