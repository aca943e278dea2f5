"""core-attn: the core of every block in a region of its own; no block runs again."""

from collections.abc import Callable

import pytest
import torch

from ckbench import specs
from ckbench.compare import compare
from ckbench.config import RunConfig
from ckbench.devices.cpu import Cpu
from ckbench.doubts import doubts
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import PlanError
from ckbench.plan import Plan, Region, StackShape
from tests.sample_records import record

PlanOf = Callable[[str, int], Plan]
MakeRun = Callable[..., RunConfig]
B, S, D, H, L = 2, 16, 32, 4, 4
SCORES = B * H * S * S * 4


def test_plan_by_hand(plan_of: PlanOf) -> None:
    plan = plan_of("core-attn", 3)
    assert plan == Plan(n_layers=3, regions=tuple(Region(start=i, stop=i + 1, part="core") for i in range(3)))
    assert plan.block_calls_backward() == (0, 0, 0)
    assert plan.part_calls_backward("core") == 3


def test_skip_last_drops_the_last_core(plan_of: PlanOf) -> None:
    assert plan_of("core-attn,skip_last", 3).regions == plan_of("core-attn", 3).regions[:2]


def test_blocks_without_a_core_are_refused() -> None:
    with pytest.raises(PlanError, match="^the blocks of this model have no core part to checkpoint$"):
        specs.resolve(specs.parse("core-attn"), StackShape(n_layers=2, parts=frozenset({"ffn", "attention"})))


def weighed(config: RunConfig) -> tuple[int, list[str]]:
    device = Cpu("cpu", 1)
    trial = Trial(config, device.torch_device)
    trial.step(NoObserver())
    return device.weigh(trial)["saved_bytes"], trial.applied.notes


@pytest.mark.parametrize(
    ("dropout", "kept"),
    [
        (0.0, SCORES),  # the softmax, which is what the second product keeps too
        (0.1, 3 * SCORES),  # the softmax, the mask of the dropout, and their product
    ],
)
def test_eager_attention_loses_its_scores(tiny_run: MakeRun, dropout: float, kept: int) -> None:
    """Each kept tensor of scores is B*H*S*S*4 bytes; the causal mask goes with them.

    Queries, keys and values stay: as one tensor here, as three copies in the order of heads without a checkpoint.
    """
    model = {"attention": "eager", "dropout": dropout}
    none, _ = weighed(tiny_run("none", model=model))
    core, notes = weighed(tiny_run("core-attn,preserve_rng=false", model=model))
    assert none - core == L * (kept + S * S)
    assert notes == [], "a core never has a norm, so there is nothing to say"


def test_fused_attention_has_no_scores_to_lose(tiny_run: MakeRun) -> None:
    """What little goes is the logarithm of each row's sum."""
    none, _ = weighed(tiny_run("none", model={"attention": "flash"}))
    core, _ = weighed(tiny_run("core-attn,preserve_rng=false", model={"attention": "flash"}))
    assert abs(none - core) <= L * B * H * S * 4


def test_the_core_runs_again_and_nothing_else(tiny_run: MakeRun) -> None:
    """Several tensors go in: queries, keys and values all get their gradients."""
    trial = Trial(
        tiny_run("core-attn", model={"family": "llama", "n_kv_heads": 2, "dropout": 0.1}), torch.device("cpu")
    )
    ran: list[object] = []
    for block in trial.model.blocks:
        block.attention.register_forward_pre_hook(lambda module, _: ran.append(module))
    trial.applied.counts.clear()
    trial.step(NoObserver())
    assert len(ran) == L
    assert trial.applied.counts.region_calls_backward == L
    assert trial.applied.counts.block_calls_backward == [0] * L


@pytest.mark.parametrize(
    ("attention", "saved", "none_saved", "is_doubted"),
    [
        ("auto", 1000, 1000, True),
        ("auto", 990, 1000, True),  # the logarithms of the sums are all that went
        ("auto", 1200, 1000, True),
        ("eager", 990, 1000, True),
        ("auto", 600, 1000, False),  # with dropout a CPU takes the math path, which stores scores
        ("eager", 600, 1000, False),
        ("flash", 600, None, True),
        ("math", 600, None, False),
    ],
)
def test_recomputing_the_core_in_vain_is_doubted(
    plan_of: PlanOf, attention: str, saved: int, none_saved: int | None, is_doubted: bool
) -> None:
    plan = plan_of("core-attn", 2).to_json()
    records = [
        record("none", saved_bytes=none_saved, model__attention=attention),
        record("core-attn", saved_bytes=saved, plan=plan, model__attention=attention),
        record("per-block", saved_bytes=saved, plan=plan_of("per-block", 2).to_json(), model__attention=attention),
    ]
    said = [str(doubt) for doubt in doubts(compare(records)) if "attention core" in str(doubt)]
    assert said == is_doubted * [
        f"core-attn: recomputes the attention core with attention: {attention} and keeps hardly less for it; a fused "
        "kernel stores no scores; the core pays with attention: eager, or in long sequences"
    ]
