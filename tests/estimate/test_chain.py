"""The chain model against whole replays: the same bytes for every plan, or it says that it does not apply."""

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any
from zlib import crc32

import pytest

from ckbench.config import RunConfig
from ckbench.estimate import worker
from ckbench.estimate.chain import MIN_LAYERS, estimate_chain
from ckbench.estimate.repeats import NotAChain
from ckbench.estimate.replay import replay
from ckbench.estimate.worker import estimate, figures_of
from ckbench.plan import Plan, Region
from tests.contract.everything import all_specs

MakeRun = Callable[..., RunConfig]
L = 9
"""Deep enough to be shortened, and no multiple of four."""
EXACT = (
    "peak_requested_bytes", "static_bytes", "gradient_bytes", "saved_bytes", "peak_phase", "peaks", "n_parameters",
    "host_bytes", "host_pinned_bytes",
)  # fmt: skip
ALLOCATED_RATIO = 0.02
"""How far allocated bytes may be off on CUDA, where remainders of segments lie otherwise in the deeper stack."""

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.1},
    "llama": {"family": "llama", "n_kv_heads": 2, "dropout": 0.1},
    "bert": {"family": "bert", "dropout": 0.1},
    "vit": {"family": "vit", "dropout": 0.1},
    "reversible": {"residual": "reversible", "dropout": 0.1},
    "tied": {"tie_embeddings": True},
    "frozen": {"freeze_embedding": True},
    "eager": {"attention": "eager"},
    "without head": {"head": "none", "vocab_size": None},
}
STEPS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bf16-pure": {"precision": "bf16-pure"},
    "sgd": {"optimizer": "sgd"},
    "adam": {"optimizer": "adam"},
    "adafactor": {"optimizer": "adafactor"},
    "foreach": {"optimizer_implementation": "foreach"},
    "for-loop": {"optimizer_implementation": "for-loop"},
    "fused": {"optimizer_implementation": "fused"},
    "in backward": {"optimizer_in_backward": True},
    "on host": {"optimizer_on_host": True},
    "chunked": {"loss": "chunked_cross_entropy", "loss_chunks": 3},
    "two micro-batches": {"grad_accumulation": 2},
    "gradients stay": {"set_to_none": False},
    "two micro-batches, gradients stay": {"grad_accumulation": 2, "set_to_none": False},
}


def config_of(tiny_run: MakeRun, model: str, spec: str, step: str, n_layers: int = L, **train: Any) -> RunConfig:
    settings = dict(MODELS[model])
    loss = {"loss": "mse"} if model == "without head" else {}
    return tiny_run(
        spec, model={"d_model": 16, "n_layers": n_layers, **settings}, train={**STEPS[step], **loss, **train}
    )


def differences(config: RunConfig, kind: str, plan: Plan | None = None) -> list[str]:
    """Say where the chain's figures are not the replay's. Raises NotAChain where it gives none."""
    made = estimate_chain(config, kind, 1000, plan)
    replayed = replay(config, kind, 1000, plan=plan)
    whole = figures_of(config.strategy.label, replayed, kind)
    assert made.method == "chain" and whole.method == "replay"
    told = [
        f"{name}: {getattr(made, name)}, replayed {getattr(whole, name)}"
        for name in EXACT
        if getattr(made, name) != getattr(whole, name)
    ]
    if kind == "cpu":
        return told + [
            f"{name}: {getattr(made, name)}, replayed {getattr(whole, name)}"
            for name in ("peak_allocated_bytes", "first_step_peak_bytes")
            if getattr(made, name) != getattr(whole, name)
        ]
    for name in ("peak_allocated_bytes", "first_step_peak_bytes"):
        made_bytes, whole_bytes = getattr(made, name), getattr(whole, name)
        if abs(made_bytes - whole_bytes) > ALLOCATED_RATIO * whole_bytes:
            told.append(f"{name}: {made_bytes}, replayed {whole_bytes}")
    if made.peak_reserved_bytes is not None:
        told.append("what the allocator reserves is not known to a chain")
    return told


@pytest.mark.parametrize(
    ("kind", "model", "spec", "step"),
    [
        ("cuda", "gpt", "none", "bf16"),
        ("cuda", "gpt", "per-block", "bf16"),
        ("cuda", "llama", "segments:3", "bf16"),
        ("cuda", "gpt", "nested:2", "fp32"),
        ("cuda", "bert", "recursive", "bf16-pure"),
        ("cuda", "gpt", "full", "bf16"),
        ("cuda", "gpt", "one-in-k:2", "adafactor"),
        ("cuda", "gpt", "per-block,skip_last", "in backward"),
        ("cuda", "gpt", "every-k:2", "two micro-batches, gradients stay"),
        ("cuda", "llama", "ffn-only", "chunked"),
        ("cuda", "llama", "selective:every-2nd-matmul", "bf16"),
        ("cpu", "gpt", "per-block", "fp32"),
        ("cpu", "gpt", "none", "gradients stay"),
        ("cpu", "gpt", "full", "bf16"),
    ],
)
def test_the_chain_is_the_replay(tiny_run: MakeRun, kind: str, model: str, spec: str, step: str) -> None:
    assert differences(config_of(tiny_run, model, spec, step), kind) == []


def drawn(*choices: Iterable[str], share: int) -> list[tuple[str, ...]]:
    """Give one of ``share`` combinations, always the same ones; with CKBENCH_WIDE=1 in the environment all of them."""
    every = list(product(*choices))
    return every if os.environ.get("CKBENCH_WIDE") else [one for one in every if crc32(repr(one).encode()) % share == 0]


SOME = ["none", "per-block", "segments:3", "nested:2", "ffn-only", "offload"]
OF_STEPS = [
    one
    for one in drawn(MODELS, SOME, STEPS, ["cuda", "cpu"], share=160)
    if one[0] != "without head" or one[2] != "chunked"  # a chunked loss is one of the head's
]
OF_STRATEGIES = [
    one
    for one in drawn(
        ["gpt", "llama", "bert", "vit", "reversible"],
        [label for label in all_specs() if label != "hf-native"],
        ["fp32", "bf16", "bf16-pure"],
        ["cuda", "cpu"],
        share=100,
    )
    if one[1] != "reversible" or one[0] == "reversible"
]


@pytest.mark.prove
@pytest.mark.parametrize(("model", "spec", "step", "kind"), OF_STEPS)
def test_every_step_is_the_replay(tiny_run: MakeRun, kind: str, model: str, spec: str, step: str) -> None:
    check_point(tiny_run, kind, model, spec, step, n_layers=11)


@pytest.mark.prove
@pytest.mark.parametrize(("model", "spec", "step", "kind"), OF_STRATEGIES)
def test_every_strategy_is_the_replay(tiny_run: MakeRun, kind: str, model: str, spec: str, step: str) -> None:
    check_point(tiny_run, kind, model, spec, step, n_layers=13)


def is_no_chain(kind: str, spec: str, step: str) -> bool:
    """Tell where a chain must refuse: what waits on the host, or is known of the built model, or is let go at once."""
    waits = "offload" in spec or step == "on host"
    return waits or spec.startswith("largest-n") or (spec == "reversible" and kind == "cpu")


def check_point(tiny_run: MakeRun, kind: str, model: str, spec: str, step: str, n_layers: int) -> None:
    """The chain is the replay; where it must refuse it does, and the estimate is a whole replay."""
    config = config_of(tiny_run, model, spec, step, n_layers=n_layers)
    if not is_no_chain(kind, spec, step):
        assert differences(config, kind) == []
        return
    with pytest.raises(NotAChain):
        estimate_chain(config, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "MIN_LAYERS", 1)
        made = estimate(config, kind)
    assert made.method == "replay" and made.reason is None


def drawn_region(draw: random.Random, start: int, stop: int, depth: int) -> Region:
    width = stop - start
    if depth and width > 1 and draw.random() < 0.6:
        size = draw.randint(1, width - 1)
        spans = [(at, at + size) for at in range(start, stop - size + 1, size)]
        children = tuple(drawn_region(draw, a, b, depth - 1) for a, b in spans if draw.random() < 0.9)
        return Region(start=start, stop=stop, children=children)
    save_ops = ("aten.mm", "aten.addmm") if width == 1 and draw.random() < 0.4 else ()
    return Region(start=start, stop=stop, save_ops=save_ops)


def drawn_plan(draw: random.Random, n_layers: int) -> Plan:
    """Draw runs of one pattern each, plain stretches between them, options and all."""
    regions: list[Region] = []
    at = 0
    while at < n_layers:
        width, times = draw.randint(1, 3), draw.choice((1, 2, 5, 6, 7))
        pattern = drawn_region(draw, 0, width, 2) if draw.random() < 0.75 else None
        for _ in range(times):
            if at + width > n_layers:
                break
            if pattern is not None:
                regions.append(pattern.moved(at))
            at += width
        else:
            continue
        break
    return Plan(n_layers=n_layers, regions=tuple(regions), early_stop=draw.random() < 0.8)


def check_drawn(tiny_run: MakeRun, seed: int, depths: tuple[int, int]) -> None:
    draw = random.Random(seed)
    plan = drawn_plan(draw, draw.randint(*depths))
    model, step = draw.choice(["gpt", "llama", "vit"]), draw.choice(["fp32", "bf16", "sgd", "two micro-batches"])
    config = config_of(tiny_run, model, "none", step, n_layers=plan.n_layers)
    assert differences(config, draw.choice(["cuda", "cuda", "cpu"]), plan) == [], plan


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_drawn_plans_are_their_replays(tiny_run: MakeRun, seed: int) -> None:
    check_drawn(tiny_run, seed, (9, 10))


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(200 if os.environ.get("CKBENCH_WIDE") else 4))
def test_many_drawn_plans_are_their_replays(tiny_run: MakeRun, seed: int) -> None:
    check_drawn(tiny_run, seed, (9, 40))


def test_what_lies_on_the_host_is_not_guessed(tiny_run: MakeRun) -> None:
    """A cap that a short stack never reaches decides in the deep one."""
    for spec, step in (("offload", "fp32"), ("none", "on host")):
        config = config_of(tiny_run, "gpt", spec, step, offload_cap_bytes=100_000 if spec == "offload" else None)
        with pytest.raises(NotAChain):
            estimate_chain(config, "cuda")
        assert estimate(config, "cuda", method="chain").reason is not None


def test_what_is_let_go_for_all_blocks_at_once_is_no_chain(tiny_run: MakeRun) -> None:
    """Generator states of a reversible stack go when its whole backward has ended, however many there are."""
    config = config_of(tiny_run, "reversible", "reversible", "fp32")
    with pytest.raises(NotAChain, match="^what many equal blocks hold is let go at once$"):
        estimate_chain(config, "cpu")
    assert differences(config, "cuda") == [], "on CUDA they are no device memory"


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        ("largest-n:2", {"n_layers": L}),
        ("none", {"n_layers": 5, "d_ff": (16, 64, 32, 48, 16)}),
    ],
)
def test_where_no_chain_applies_the_replay_answers(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, spec: str, model: dict[str, Any]
) -> None:
    monkeypatch.setattr(worker, "MIN_LAYERS", 1)
    config = tiny_run(spec, model={"d_model": 16, **model})
    with pytest.raises(NotAChain):
        estimate_chain(config, "cuda")
    assert estimate(config, "cuda", method="auto") == estimate(config, "cuda", method="replay")
    refused = estimate(config, "cuda", method="chain")
    assert refused.peak_allocated_bytes is None and refused.reason


def test_foreign_models_are_not_taken_for_equal(tiny_run: MakeRun) -> None:
    build = {"family": "custom", "build": "tests.contract.own_model:build", "args": {"depth": 5}, "vocab_size": 64}
    refused = estimate(tiny_run("none", model=build), "cuda", method="chain")
    assert refused.reason == "only stacks of equal blocks of our own families are known to be equal beforehand"


def test_deep_stacks_take_the_chain_and_others_the_replay(tiny_run: MakeRun) -> None:
    made = [estimate(config_of(tiny_run, "gpt", "none", "sgd", n), "cuda") for n in (4, MIN_LAYERS, 1000)]
    assert [each.method for each in made] == ["replay", "chain", "chain"]
    peaks = [each.peak_requested_bytes or 0 for each in made]
    assert peaks[0] < peaks[1] < peaks[2]


def test_growth_with_depth_is_even(tiny_run: MakeRun) -> None:
    """From 100 to 200 to 300 layers every figure grows by the same."""
    made = [estimate_chain(config_of(tiny_run, "gpt", "per-block", "bf16", n), "cuda") for n in (100, 200, 300)]
    for field in ("static_bytes", "gradient_bytes", "saved_bytes", "n_parameters", "peak_requested_bytes"):
        one, two, three = (getattr(each, field) for each in made)
        assert two - one == three - two > 0, field


def test_a_planner_s_plan_in_the_config_is_the_one_that_counts(tiny_run: MakeRun) -> None:
    plan = Plan(n_layers=L, regions=tuple(Region(start=i, stop=i + 1) for i in range(3, L)))
    config = config_of(tiny_run, "gpt", "budget:1GiB", "bf16").model_copy(update={"plan": plan.to_json()})
    assert differences(config, "cuda") == []
    assert replay(config, "cuda", n_steps=1).trial.applied.plan == plan


def test_a_wrong_block_is_noticed(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block in the middle that keeps more than its neighbour: refused, and the estimate falls back."""
    from ckbench.estimate import chain

    real: Callable[..., Any] = chain.spans

    def uneven(*args: Any) -> Any:
        found = real(*args)
        at = max(i for i, span in enumerate(found) if span.mark == "call 2")
        found[at] = replace(found[at], added_bytes=found[at].added_bytes + 512)
        return found

    monkeypatch.setattr(chain, "spans", uneven)
    monkeypatch.setattr(worker, "MIN_LAYERS", 1)
    config = config_of(tiny_run, "gpt", "none", "sgd")
    with pytest.raises(NotAChain, match="^two equal blocks in a row differ: "):
        estimate_chain(config, "cuda")
    made = estimate(config, "cuda")
    assert made.method == "replay" and made.reason is None
