"""ckbench.apply_plan on models of one's own: the same gradients, the calls the plan predicts, and everything back."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckbench
from ckbench.config import AnyModel
from ckbench.errors import ConfigError, PlanError
from ckbench.models.gpt import PLUGIN as build_gpt
from ckbench.plan import Plan, Region
from ckbench.planfile import write_plan
from tests.contract.own_model import build

L = 5
PER_BLOCK = Plan(n_layers=L, regions=tuple(Region(start=i, stop=i + 1) for i in range(L)))
NESTED = Plan(
    n_layers=L,
    regions=(
        Region(start=0, stop=1, save_ops=("aten.addmm@1",)),
        Region(start=1, stop=4, children=(Region(start=1, stop=2), Region(start=2, stop=3))),
    ),
)


def model_of(kind: str = "plain", **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    return build(depth=L, kind=kind, **settings).train()


def gradients(model: nn.Module, n_steps: int = 1) -> list[Tensor]:
    """Take the same training steps, dropout included, and give the last one's gradients."""
    torch.manual_seed(7)
    tokens = torch.randint(64, (2, 8))
    for _ in range(n_steps):
        model.zero_grad()
        output = model(tokens)
        output = output[0] if isinstance(output, tuple) else output
        output.float().square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("plan", [Plan(n_layers=L), PER_BLOCK, NESTED], ids=["none", "per-block", "nested"])
@pytest.mark.parametrize("form", ["plan", "data", "file"])
def test_gradients_are_bit_identical(tmp_path: Path, plan: Plan, form: str) -> None:
    write_plan(tmp_path / "plan.yaml", plan, {})
    given = {"plan": plan, "data": plan.to_json(), "file": tmp_path / "plan.yaml"}[form]
    plain = gradients(model_of(), 2)
    model = model_of()
    applied = ckbench.apply_plan(model, given)
    assert applied.blocks == "encoder.layers" and applied.plan == plan
    assert applied.block_calls_backward == (0,) * L
    assert same(gradients(model, 2), plain)
    assert applied.block_calls_backward == tuple(2 * n for n in plan.block_calls_backward())


def test_a_path_as_text_is_a_file(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.yaml", PER_BLOCK, {})
    assert ckbench.apply_plan(model_of(), str(tmp_path / "plan.yaml")).plan == PER_BLOCK


def test_remove_puts_every_forward_back() -> None:
    model = model_of()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with ckbench.apply_plan(model, NESTED) as applied:
        gradients(model)
        assert any("forward" in module.__dict__ for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == {
        name: own.keys() for name, own in before.items()
    }
    assert not model._forward_pre_hooks
    calls = applied.block_calls_backward
    assert same(gradients(model), gradients(model_of()))
    assert applied.block_calls_backward == calls, "it counts no more"
    ckbench.apply_plan(model, PER_BLOCK).remove()


def test_a_second_plan_is_refused_until_the_first_is_off() -> None:
    model = model_of()
    applied = ckbench.apply_plan(model, PER_BLOCK)
    with pytest.raises(PlanError, match=r"^a plan is in force on this model already; call remove\(\) on what apply_p"):
        ckbench.apply_plan(model, PER_BLOCK)
    applied.remove()
    applied.remove()
    with ckbench.apply_plan(model, NESTED):
        assert same(gradients(model), gradients(model_of()))


def test_evaluation_runs_plainly() -> None:
    model, plain = model_of(), model_of()
    applied = ckbench.apply_plan(model, NESTED)
    tokens = torch.arange(8)[None]
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))
    with torch.inference_mode():
        assert torch.equal(model(tokens), plain(tokens))
    assert applied.block_calls_backward == (0,) * L
    model.train(), plain.train()
    assert same(gradients(model), gradients(plain)), "and training goes on as before"
    assert applied.block_calls_backward == NESTED.block_calls_backward()


def test_what_a_model_keeps_goes_down() -> None:
    def saved(model: nn.Module) -> int:
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(torch.zeros(2, 64, dtype=torch.long))
        del output
        return sum(held.values())

    model = model_of()
    plain = saved(model)
    ckbench.apply_plan(model, PER_BLOCK)
    assert saved(model) < 0.7 * plain


def test_ours_without_a_study(tiny_model: Callable[..., AnyModel]) -> None:
    """A model of the harness is a module like any other."""
    built = [build_gpt(tiny_model(n_layers=L, dropout=0.1), 8).module.train() for _ in range(2)]
    built[1].load_state_dict(built[0].state_dict())
    with ckbench.apply_plan(built[1], NESTED) as applied:
        assert same(gradients(built[0]), gradients(built[1]))
        assert applied.block_calls_backward == NESTED.block_calls_backward()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"between": "scaled"}, "what block 0 gives is not handed straight to block 1 and to nothing else"),
        ({"kind": "tuple"}, "blocks give a tuple, not a tensor"),
    ],
)
def test_a_region_over_blocks_that_the_model_stands_between_is_refused(settings: dict[str, Any], told: str) -> None:
    """It would hand the hidden state straight on, and so compute another model."""
    model = model_of(**settings)
    ckbench.apply_plan(model, NESTED)
    with pytest.raises(PlanError, match=f"^a region cannot span several blocks of this model: {told}; the plan is "):
        gradients(model)
    assert same(gradients(model), gradients(model_of(**settings))), "the plan is off"
    with ckbench.apply_plan(model, PER_BLOCK) as applied:
        assert same(gradients(model), gradients(model_of(**settings)))
        assert applied.block_calls_backward == (1,) * L


def test_blocks_may_be_named() -> None:
    model = model_of()
    probes = Plan(n_layers=9, regions=(Region(start=2, stop=3),))
    with ckbench.apply_plan(model, probes, blocks="probes") as applied:
        assert applied.blocks == "probes"
        assert same(gradients(model), gradients(model_of()))
        assert applied.block_calls_backward == probes.block_calls_backward()
    with pytest.raises(ConfigError, match="has no 'encoder.layer'; did you mean 'encoder.layers'"):
        ckbench.apply_plan(model, PER_BLOCK, blocks="encoder.layer")


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="^the plan is for 4 blocks, encoder.layers has 5$"):
        ckbench.apply_plan(model_of(), Plan(n_layers=4))
    parts = Plan(n_layers=L, regions=(Region(start=0, stop=1, part="ffn"),))
    for plan in (parts, Plan(n_layers=L, native=True)):
        with pytest.raises(PlanError, match="^this plan covers parts of blocks, or leaves it to the library; apply a "):
            ckbench.apply_plan(model_of(), plan)
    with pytest.raises(ConfigError, match="^no blocks found in Linear: "):
        ckbench.apply_plan(nn.Linear(2, 2), PER_BLOCK)
    with pytest.raises(PlanError, match="plan.yaml: cannot read the plan: No such file or directory$"):
        ckbench.apply_plan(model_of(), tmp_path / "plan.yaml")
    with pytest.raises(PlanError, match="^n_layers is a whole number of at least 1, not 'x'$"):
        ckbench.apply_plan(model_of(), {"n_layers": "x", "regions": []})
    model = model_of()
    with pytest.raises(PlanError):
        ckbench.apply_plan(model, parts)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.skipif(find_spec("transformers") is None, reason="the extra hf is not installed")
@pytest.mark.parametrize(
    "plan",
    [PER_BLOCK, NESTED, Plan(n_layers=L, regions=(Region(start=1, stop=4),))],
    ids=["per-block", "nested", "segment"],
)
def test_a_model_of_the_library(plan: Plan) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(n_layer=L, n_embd=16, n_head=2, vocab_size=64, n_positions=16, use_cache=False)

    def logits_only(applies: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)
        model = GPT2LMHeadModel(sizes).train()
        applied = ckbench.apply_plan(model, plan) if applies else None
        torch.manual_seed(7)
        tokens = torch.randint(64, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()], applied

    (plain, _), (found, applied) = logits_only(False), logits_only(True)
    assert same(plain, found)
    assert applied.blocks == "transformer.h"
    assert applied.block_calls_backward == plan.block_calls_backward()
