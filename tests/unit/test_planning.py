"""From a budget to a plan: what a budget may be, the least one that does, and predictions that hold."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ckbench import planning
from ckbench.cards import CARDS_MIB, read_budget, usable_bytes
from ckbench.config import RunConfig
from ckbench.errors import EXIT_NOTHING_FITS, ConfigError, NothingFits, PlanError
from ckbench.estimating import estimate_configs
from ckbench.launch import Launcher
from ckbench.plan import Plan, plan_from_json
from ckbench.planner.solve import floor, front
from ckbench.planning import MAX_REPLAYED, Planned, Planner, advice
from ckbench.planning_text import as_json, draw, draw_front, front_json, picture
from tests.planner.made_up import Made, made_up

MakeRun = Callable[..., RunConfig]
CARD = "A100 40GB"


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("16GiB", 16 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("80%", 800),
        (" 12.5 % ", 125),
        ("100%", 1000),
        ("a100-40gb", usable_bytes(CARDS_MIB[CARD] * 2**20)),
        ("A100 40GB", usable_bytes(CARDS_MIB[CARD] * 2**20)),
    ],
)
def test_a_budget_is_a_size_a_share_or_a_card(text: str, n_bytes: int) -> None:
    assert read_budget(text, 1000) == n_bytes


@pytest.mark.parametrize(
    ("text", "none", "told"),
    [
        ("0%", 1000, "budget '0%': a share lies above 0 and goes up to 100%"),
        ("101%", 1000, "budget '101%': a share lies above 0 and goes up to 100%"),
        ("80%", None, "budget '80%': what none takes is not known here; give a size, as 16GiB"),
        ("80", 1000, "'80' has no unit"),
        ("-3GiB", 1000, "unknown card '-3GiB'"),
        ("A100", 1000, "unknown card 'A100'"),
        ("", 1000, "unknown card ''"),
        ("%", 1000, "unknown card '%'"),
    ],
)
def test_what_is_no_budget_is_said(text: str, none: int | None, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_budget(text, none)
    assert str(caught.value).startswith(told)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def probed(request: pytest.FixtureRequest, tiny_run: MakeRun) -> Iterator[tuple[Planner, RunConfig]]:
    """A planner that has probed one small trial, with seconds counted for a card."""
    config = tiny_run(
        "none", model={"n_layers": 3, "dropout": 0.1}, train={"seq_len": 64, "optimizer": "sgd", "precision": "bf16"}
    )
    planner = Planner(request.param, Launcher(), card=CARD, costs=CARD)
    planner.probed(config)
    yield planner, config


def test_the_whole_share_is_keeping_everything(probed: tuple[Planner, RunConfig]) -> None:
    planner, config = probed
    found = planner.plan(config, planner.budget_of(config, "100%"))
    assert found.plan == Plan(n_layers=3)
    assert found.slowdown_ratio == 1.0 and found.proven_optimal and found.gap == 0.0
    assert found.faster is None and found.cheaper is not None
    assert planner.budget_of(config, "50%") == found.peak_bytes // 2


def test_the_least_budget_does_and_a_byte_less_does_not(probed: tuple[Planner, RunConfig]) -> None:
    planner, config = probed
    with pytest.raises(NothingFits) as caught:
        planner.plan(config, 1000)
    least = caught.value.least_bytes
    assert caught.value.exit_code == EXIT_NOTHING_FITS
    assert least is not None and f"({least} bytes)" in str(caught.value)
    found = planner.plan(config, least)
    assert found.peak_bytes <= least
    assert found.faster is not None and found.cheaper is None
    with pytest.raises(NothingFits):
        planner.plan(config, least - 1)


def test_more_room_is_never_slower_and_peaks_are_those_of_estimates(probed: tuple[Planner, RunConfig]) -> None:
    planner, config = probed
    chain = planner.probed(config).chain
    lowest, highest = floor(chain).peak_bytes, planner.budget_of(config, "100%")
    last: Planned | None = None
    for budget in [lowest + (highest - lowest) * i // 3 for i in range(1, 4)]:
        found = planner.plan(config, budget)
        assert found.peak_bytes <= budget
        assert last is None or found.slowdown_ratio <= last.slowdown_ratio
        assert found.estimate is not None and found.estimate.method == "replay"
        assert found.chain_peak_bytes == chain.peak_bytes(found.items)
        last = found
    assert last is not None
    asked = config.model_copy(update={"plan": last.plan.to_json()})
    (made,) = estimate_configs([asked], planner.kind, planner.launcher, CARD, lambda _made: None)
    assert made.needed_bytes() == last.peak_bytes


def test_seconds_are_said_to_be_counted(probed: tuple[Planner, RunConfig]) -> None:
    planner, config = probed
    assert planner.probed(config).source.startswith("roofline of A100 40GB (")
    assert planner.probed(config).left_out == ()


def test_where_a_link_is_known_blocks_may_wait_on_the_host(tiny_run: MakeRun) -> None:
    """The floor is lower then, its plan is what a replay takes, and files and pictures say it."""
    train = {"batch_size": 32, "seq_len": 64, "optimizer": "sgd"}
    config = tiny_run("none", model={"n_layers": 6, "d_model": 64}, train=train)
    floors, has_offload = {}, {}
    for costs in ("auto", CARD):
        planner = Planner("cuda", Launcher(), costs=costs)
        chain = planner.probed(config).chain
        floors[costs] = floor(chain).peak_bytes
        has_offload[costs] = any(item.offload for items in chain.items for item in items)
    assert has_offload == {"auto": False, CARD: True}
    assert floors[CARD] < floors["auto"]
    assert "31.5 GB/s to the host by PCIe" in planner.probed(config).source
    with pytest.raises(NothingFits) as caught:
        planner.plan(config, 1000)
    found = planner.plan(config, caught.value.least_bytes or 0)
    assert found.plan.offload_spans and found.slowdown_ratio > 1.0
    assert found.estimate is not None and found.estimate.method == "replay" and found.estimate.host_bytes
    assert plan_from_json(found.plan.to_json()) == found.plan
    assert {"^", ","} & set("".join(picture(found.items)))
    assert any("offload" in choice["choice"] for choice in as_json(found)["choices"])


@pytest.fixture
def config(tiny_run: MakeRun) -> RunConfig:
    """A trial that is never run."""
    return tiny_run("budget:80%", model={"n_layers": 4})


def test_where_the_allocator_takes_more_a_tighter_plan_is_sought(config: RunConfig) -> None:
    """With two kept blocks it takes 100 more; the answer is one kept block, and the first choice was two."""
    chain = made_up()
    budget = next(p.peak_bytes for p in front(chain) if p.items and sum(i.region is None for i in p.items) == 2)
    assert budget is not None
    planner = Made(lambda plan: 100 if plan.n_regions == 2 else 0)
    assert Made().plan(config, budget).plan.n_regions == 2
    found = planner.plan(config, budget)
    assert found.plan.n_regions > 2 and found.peak_bytes <= budget


def test_a_plan_at_the_floor_is_tried_before_nothing_fits_is_said(config: RunConfig) -> None:
    """However far over the first choice is: the floor's own plan fits, so it is the answer."""
    planner = Made(lambda plan: 0 if plan.n_regions == 4 else 10**6)
    least = floor(planner.chain).peak_bytes
    found = planner.plan(config, least + 150)
    assert found.plan.n_regions == 4 and found.peak_bytes <= least + 150


def test_what_the_allocator_adds_is_part_of_the_least_budget(config: RunConfig) -> None:
    planner = Made(lambda _plan: 30)
    with pytest.raises(NothingFits) as caught:
        planner.plan(config, floor(planner.chain).peak_bytes + 29)
    assert caught.value.least_bytes == floor(planner.chain).peak_bytes + 30
    assert planner.plan(config, caught.value.least_bytes).peak_bytes == caught.value.least_bytes


def test_a_strategy_s_plan_is_found_once(config: RunConfig, tiny_run: MakeRun) -> None:
    planner = Made()
    other = tiny_run("per-block", model={"n_layers": 4})
    assert planner.planned(other) is other
    one = planner.planned(config)
    assert one.plan is not None and plan_from_json(one.plan).n_layers == 4
    assert one.configuration_id() == config.configuration_id(), "a plan is found from the rest"
    n_replays = planner.n_replays
    assert planner.planned(config) == one and planner.n_replays == n_replays
    assert planner.planned(one) is one and not planner.decides(one)
    again = RunConfig.model_validate_json(one.model_dump_json())
    assert again.plan is not None and plan_from_json(again.plan) == plan_from_json(one.plan)


def test_a_stack_too_deep_to_replay_is_said_so(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Made(n_blocks=MAX_REPLAYED + 1)
    monkeypatch.setattr(planner, "_replayed", lambda _config, _plan: None)  # as where the short stack is too deep too
    found = planner.plan(tiny_run("budget:1GiB", model={"n_layers": MAX_REPLAYED + 1}), 10**6)
    assert found.estimate is None
    assert "added up from its blocks: too deep to replay" in " ".join(draw(found).split())


def test_the_picture_and_the_figures(config: RunConfig) -> None:
    budget = floor(made_up()).peak_bytes + 100
    found = Made().plan(config, budget)
    text = draw(found)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert f"step time {found.slowdown_ratio:.3f} times that of keeping everything, predicted" in text
    assert "seconds   made up" in text and "proven optimal among its choices" in text
    assert "cheaper   " in text and "faster    " in text
    (cells, *_) = picture(found.items)
    assert cells.split()[1] == "".join("#" if item.region is None else "." for item in found.items)


def test_a_plan_close_to_its_floor_has_advice(config: RunConfig) -> None:
    head = Made()
    head.chain = replace(head.chain, head_peak_bytes=5000)
    found = head.plan(config, floor(head.chain).peak_bytes)
    assert found.floor_owner == "head and loss"
    told = " ".join(draw(found).split())
    assert "advice" in told and "a chunked loss (train.loss: chunked_cross_entropy)" in told
    fixed = Made()
    fixed.chain = replace(fixed.chain, fixed_peak_bytes=9000)
    with pytest.raises(NothingFits, match="its peak is in embedding or optimizer; an optimizer with less state"):
        fixed.plan(config, 8999)
    assert "a smaller batch or sequence" in advice("backward of block 3")


def test_plain_data_is_plain(config: RunConfig) -> None:
    found = Made().plan(config, floor(made_up()).peak_bytes + 100)
    data = json.loads(json.dumps(as_json(found)))
    assert {
        "feasible", "predicted_peak_bytes", "predicted_slowdown_ratio", "floor_bytes", "proven_optimal", "gap", "choices",
    } <= data.keys()  # fmt: skip
    assert data["feasible"] is True and data["predicted_peak_bytes"] == found.peak_bytes
    assert [(c["start"], c["stop"]) for c in data["choices"]] == [(i, i + 1) for i in range(4)]
    assert {c["choice"] for c in data["choices"]} == {"save", "recompute"}
    assert data["cheaper"]["peak_bytes"] < data["chain_peak_bytes"] < data["faster"]["peak_bytes"]
    assert data["cheaper"]["predicted_slowdown_ratio"] > data["predicted_slowdown_ratio"]


def test_the_front_from_the_least_peak_to_the_fastest(config: RunConfig) -> None:
    probed = Made().probed(config)
    points = front(probed.chain)
    text = draw_front(probed, points)
    assert f"{len(points)} plans that no other beats in both" in text and "seconds: made up" in text
    data = json.loads(json.dumps(front_json(probed, points)))["points"]
    peaks, ratios = ([point[key] for point in data] for key in ("peak_bytes", "predicted_slowdown_ratio"))
    assert peaks == sorted(peaks) and ratios == sorted(ratios, reverse=True) and ratios[-1] == 1.0
    assert peaks[0] == floor(probed.chain).peak_bytes


def test_a_child_that_ends_or_refuses_is_a_sentence(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner("cpu", Launcher())

    class Ended:
        exitcode = -9

    monkeypatch.setattr(planner.launcher, "converse", lambda *_args: (None, Ended(), ""))
    with pytest.raises(PlanError, match="^the planner's process ended: exit code -9$"):
        planner.probed(config)
    monkeypatch.setattr(planner.launcher, "converse", lambda *_args: ({"reason": "no data"}, Ended(), ""))
    with pytest.raises(PlanError, match="^cannot plan this trial: no data$"):
        planner.probed(config)
    assert planning.MAX_TRIES > 1
