"""custom: a module of the user's own; what is found, what is named, and every way it can go wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckbench import registry
from ckbench.config import CustomConfig, RunConfig
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.parity import differences, run_steps
from ckbench.engine.trial import Trial
from ckbench.errors import ConfigError, PlanError
from ckbench.models._locate import locate
from ckbench.models.base import BuiltModel
from ckbench.plan import Plan, Region
from tests.contract import own_model

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
HERE = "tests.contract.own_model"
S = 16


def section(**keys: Any) -> dict[str, Any]:
    args = keys.pop("args", {"depth": 3})
    return {"family": "custom", "build": f"{HERE}:build", "args": args, "vocab_size": 64, **keys}


def built(**keys: Any) -> BuiltModel:
    model: BuiltModel = registry.load("models", "custom")(CustomConfig(**section(**keys)), S)
    return model


def told(**keys: Any) -> str:
    with pytest.raises(ConfigError) as error:
        built(**keys)
    return str(error.value)


def lengths(model: BuiltModel) -> list[dict[str, int]]:
    return [{part: len(chain) for part, chain in parts.items()} for parts in model.parts]


def test_blocks_and_parts_are_found() -> None:
    model = built()
    layers = list(model.module.encoder.layers)
    assert list(model.blocks) == layers, "the longer list of plain layers is not taken for blocks"
    assert [parts["attention"] for parts in model.parts] == [(layer.norm1, layer.attn) for layer in layers]
    assert [parts["ffn"] for parts in model.parts] == [(layer.norm2, layer.mlp) for layer in layers]
    assert model.apart == "" and model.shape().n_layers == 3


def test_blocks_and_parts_can_be_named() -> None:
    model = built(blocks="encoder.layers", attention_part="attn.qkv", ffn_part="mlp.2", n_layers=3)
    layers = list(model.module.encoder.layers)
    assert list(model.blocks) == layers
    assert [parts["attention"][-1] for parts in model.parts] == [layer.attn.qkv for layer in layers]
    assert [parts["ffn"] for parts in model.parts] == [(layer.mlp[2],) for layer in layers]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("plain", {"attention": 2, "ffn": 2}),
        ("parallel", {"attention": 1, "ffn": 1}),  # one norm feeds both
        ("from norm", {"attention": 1, "ffn": 2}),  # the residual sum reads the norm too
        ("late", {"attention": 1, "ffn": 1}),  # a dropout stands between
        ("torch", {"attention": 1, "ffn": 2}),  # query, key and value are the norm's output
    ],
)
@pytest.mark.parametrize("spec", ["none", "ffn-only", "attn-only"])
def test_a_norm_joins_its_part_only_where_it_feeds_nothing_else(
    tiny_run: MakeRun, kind: str, wanted: dict[str, int], spec: str
) -> None:
    model = section(args={"depth": 2, "kind": kind})
    assert lengths(built(args=model["args"])) == [wanted] * 2
    config = tiny_run(spec, model=model)
    assert differences(run_steps(tiny_run("none", model=model), CPU), run_steps(config, CPU)) == []


def test_the_search_leaves_everything_as_it_was() -> None:
    torch.manual_seed(5)
    plain = own_model.build(depth=3)
    drawn = torch.get_rng_state()
    torch.manual_seed(5)
    model = built()
    assert torch.equal(torch.get_rng_state(), drawn), "the pass has dropout, and its numbers are given back"
    assert all(torch.equal(a, b) for a, b in zip(model.module.parameters(), plain.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules())
    assert all(m.training for m in model.module.modules())


def test_the_search_moves_no_running_statistics_and_no_mode() -> None:
    blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)) for _ in range(2))
    module = torch.nn.ModuleDict({"blocks": blocks})
    blocks[1].eval()
    x = torch.randn(8, 4) + 5

    def run() -> Tensor:
        return blocks[1](blocks[0](x))

    stack = locate(module, run)
    assert stack.blocks == tuple(blocks) and stack.path == "blocks"
    assert [block[0].running_mean.abs().sum().item() for block in blocks] == [0.0, 0.0]
    assert [block[0].num_batches_tracked.item() for block in blocks] == [0, 0]
    assert [block.training for block in blocks] == [True, False]
    blocks[0](x)
    assert blocks[0][0].running_mean.abs().sum().item() > 0, "a step of training does move them"


@pytest.mark.parametrize("output", ["tensor", "tuple", "object"])
@pytest.mark.parametrize("spec", ["per-block", "every-k:2", "nested:2"])
def test_logits_are_taken_from_whatever_comes(tiny_run: MakeRun, output: str, spec: str) -> None:
    model = section(args={"depth": 3, "output": output})
    reference = run_steps(tiny_run("none", model=model), CPU)
    assert differences(reference, run_steps(tiny_run(spec, model=model), CPU)) == []


def test_an_output_without_logits_is_refused() -> None:
    assert told(args={"depth": 2, "output": "text"}) == (
        "the model gives a str: no tensor, no tuple with one in front, nothing with .logits; write model.loss"
    )


def test_batch_and_loss_of_the_user(tiny_run: MakeRun) -> None:
    model = section(batch=f"{HERE}:batch", loss=f"{HERE}:loss", vocab_size=None, args={"depth": 3, "output": "tuple"})
    config = tiny_run("none", model=model)
    trial = Trial(config, CPU)
    (inputs, targets) = trial.batches[0]
    assert set(inputs) == {"tokens", "scale"} and targets.shape == (2,)
    output = trial.module(**inputs)
    assert torch.equal(trial.loss(output, targets), own_model.loss(output, targets))
    reference = run_steps(config, CPU)
    assert differences(reference, run_steps(tiny_run("per-block", model=model), CPU)) == []
    pure = Trial(tiny_run("none", model=model, train={"precision": "bf16-pure"}), CPU)
    assert pure.batches[0][0]["scale"].dtype == torch.bfloat16
    assert pure.batches[0][0]["tokens"].dtype == torch.int64


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"depth": 3, "kind": "tuple"}, "blocks give a tuple, not a tensor"),
        (
            {"depth": 3, "between": "scaled"},
            "what block 0 gives is not handed straight to block 1 and to nothing else",
        ),
    ],
    ids=["tuple", "scaled"],
)
def test_regions_over_several_blocks_are_refused_where_they_would_be_wrong(
    tiny_run: MakeRun, args: dict[str, Any], reason: str
) -> None:
    model = section(args=args)
    for spec in ("every-k:2", "nested:2", "full"):
        with pytest.raises(PlanError) as error:
            Trial(tiny_run(spec, model=model), CPU)
        assert str(error.value) == f"a region cannot span several blocks of this model: {reason}"
    reference = run_steps(tiny_run("none", model=model), CPU)
    for spec in ("per-block", "first-n:1", "ffn-only", "every-k:1", "offload", "per-block+offload"):
        assert differences(reference, run_steps(tiny_run(spec, model=model), CPU)) == []


def test_the_refusal_is_needed(tiny_run: MakeRun) -> None:
    """Without it a region over two blocks would leave out what stands between them."""
    model = built(args={"depth": 2, "between": "scaled", "dropout": 0.0})
    tokens = torch.randint(64, (2, S))
    wanted = model.module(tokens)
    object.__setattr__(model, "apart", "")
    AppliedPlan(model, Plan(n_layers=2, regions=(Region(start=0, stop=2),)))
    assert not torch.allclose(wanted, model.module(tokens))


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "module": (
        {"build": "no_such_thing:build"},
        "model.build: no module 'no_such_thing' in the current directory or installed",
    ),
    "inner module": (
        {"build": "tests.contract.no_such_thing:build"},
        "model.build: no module 'tests.contract.no_such_thing' in the current directory or installed",
    ),
    "function": (
        {"build": f"{HERE}:bild"},
        f"model.build: {HERE} has no 'bild'; did you mean 'build'?",
    ),
    "no function": (
        {"build": f"{HERE}:NOT_A_FUNCTION"},
        f"model.build: {HERE}:NOT_A_FUNCTION is a int, not a function",
    ),
    "missing argument": (
        {"args": {}},
        f"model.args do not fit {HERE}:build: missing a required argument: 'depth'",
    ),
    "unknown argument": (
        {"args": {"depth": 2, "depht": 3}},
        f"model.args do not fit {HERE}:build: got an unexpected keyword argument 'depht'",
    ),
    "no module": ({"build": f"{HERE}:no_module"}, f"model.build: {HERE}:no_module gave a list, not an nn.Module"),
    "depth": ({"n_layers": 5}, "n_layers is 5, but the model has 3 blocks (encoder.layers)"),
    "blocks": (
        {"blocks": "encoder.layer"},
        "model.blocks: Model has no 'encoder.layer'; did you mean 'encoder.layers'?",
    ),
    "blocks that are none": (
        {"blocks": "head"},
        "model.blocks: 'head' is a Linear, not an nn.ModuleList of blocks",
    ),
    "attention": (
        {"attention_part": "atn"},
        "model.attention_part: Layer has no 'atn'; did you mean 'attn'?",
    ),
    "ffn": (
        {"ffn_part": "mlp.7"},
        "model.ffn_part: Layer has no 'mlp.7'; did you mean 'mlp.2' or 'mlp.1' or 'mlp.0'?",
    ),
    "batch": (
        {"batch": f"{HERE}:one_thing"},
        f"model.batch: {HERE}:one_thing must give two things, inputs and a tensor of targets",
    ),
    "batch arguments": (
        {"batch": f"{HERE}:loss"},
        f"model.batch: {HERE}:loss is called with batch_size, seq_len and a generator: too many positional arguments",
    ),
    "loss arguments": (
        {"loss": f"{HERE}:batch"},
        f"model.loss: {HERE}:batch is called with output and targets: missing a required argument: 'generator'",
    ),
    "loss": ({"loss": f"{HERE}:los"}, f"model.loss: {HERE} has no 'los'; did you mean 'loss'?"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults(case: str) -> None:
    keys, sentence = FAULTS[case]
    assert told(**keys) == sentence


def test_no_blocks_at_all() -> None:
    with pytest.raises(ConfigError) as error:
        registry.load("models", "custom")(CustomConfig(family="custom", build=f"{HERE}:no_blocks", vocab_size=4), S)
    assert str(error.value) == (
        "no blocks found in Linear: it has no nn.ModuleList of modules of one class with layers inside"
    )


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    Path("needs_more.py").write_text("import no_such_package_of_mine\n")
    Path("broken_syntax.py").write_text("def build(:\n")
    assert told(build="needs_more:build") == (
        "model.build: needs_more cannot be imported: No module named 'no_such_package_of_mine'"
    )
    assert told(build="broken_syntax:build").startswith(
        "model.build: broken_syntax cannot be imported: SyntaxError: invalid syntax"
    )


def test_the_current_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    source = "from tests.contract.own_model import build as inner\ndef build():\n    return inner(depth=2)\n"
    Path("model_of_the_current_directory.py").write_text(source)
    model = built(build="model_of_the_current_directory:build", args={})
    assert len(model.blocks) == 2


def test_a_failure_inside_the_function_is_its_own(tiny_run: MakeRun) -> None:
    from ckbench.engine import worker

    config = tiny_run("none", model=section(build=f"{HERE}:raises", args={}))
    record = worker.run_trial(config, 0, 0.0, lambda phase: None)
    assert (record.status, record.failed_phase) == ("error", "build")
    assert (
        record.message
        == "ConfigError: model.build: tests.contract.own_model:raises failed with ValueError: width must be even"
    )


def test_targets_and_tokens_follow_the_seed(tiny_run: MakeRun) -> None:
    first, second = (Trial(tiny_run("none", model=section()), CPU).batches[0] for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert isinstance(first[0], Tensor) and first[0].shape == (2, S) and int(first[0].max()) < 64


def test_a_record_of_it_is_plain_data(tiny_run: MakeRun) -> None:
    config = tiny_run("none", model=section())
    assert json.loads(config.model_dump_json())["model"]["args"] == {"depth": 3}
