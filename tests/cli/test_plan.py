"""ckbench plan: the answers hold when they are tried, and what cannot be asked is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckbench import cli_plan, store
from ckbench.errors import EXIT_NOTHING_FITS
from ckbench.plan import Plan
from ckbench.planfile import read_plan, write_plan
from ckbench.planner.solve import floor
from tests.cli.conftest import Run
from tests.planner.made_up import Made

STUDY = """\
model: {n_layers: 3, d_model: 64, n_heads: 4, vocab_size: 32}
train: {batch_size: 2, seq_len: 64, optimizer: sgd}
strategies: [none, per-block]
run: {rounds: 1, threads: 1, min_steps: 1, max_steps: 1, warmup_steps: 0}
"""


def rows(text: str) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in json.loads(text)}


def test_the_largest_batch_fits_and_the_next_does_not(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    budget = 12 * 2**20
    options = ("--device", "cpu", "--budget", "12MiB", "--format", "json")
    outcome = ckbench("plan", "study.yaml", "--max", "batch", *options)
    assert outcome.code == 0
    found = rows(outcome.out)
    for row in found.values():
        assert row["needed_bytes"] <= budget < row["next_bytes"]
        assert row["next_size"] == row["largest"] + 1
        assert row["tokens_per_s"] > 0 and row["parity"] == "exact"
    assert found["per-block"]["largest"] > 1.5 * found["none"]["largest"], "what checkpointing is for"
    assert found["per-block"]["times_none"] == found["per-block"]["largest"] / found["none"]["largest"]
    # a plain run at both sizes tells the same
    for size, fits in ((found["none"]["largest"], True), (found["none"]["next_size"], False)):
        again = ckbench(
            "run",
            "study.yaml",
            "--device",
            "cpu",
            "-s",
            "none",
            "--set",
            f"train.batch_size={size}",
            "--format",
            "json",
        )
        (row,) = json.loads(again.out)
        assert (max(row["peak_allocated_bytes"], row["first_step_peak_bytes"]) <= budget) is fits


def test_layers_and_the_table(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    outcome = ckbench("plan", "study.yaml", "--max", "layers", "--device", "cpu", "--budget", "6MiB", "--step", "4")
    assert outcome.code == 0
    assert "largest layers within 6.00 MiB" in outcome.out
    assert "none: layers 4 needs" in outcome.err
    report = ckbench("report", "results")
    assert report.code == 0 and "per-block" in report.out, "the measured trials are ordinary records"


def test_nothing_fits_is_exit_3_with_the_least_budget(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    outcome = ckbench("plan", "study.yaml", "--max", "batch", "--device", "cpu", "--budget", "100KiB")
    assert outcome.code == 3
    assert "no strategy fits at any batch; the smallest size needs" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--max", "width", "--budget", "1GiB"), "--max 'width'; have: batch, seq-len, layers"),
        (("--max", "batch", "--budget", "16"), "--budget: '16' has no unit"),
        (("--max", "batch"), "without a GPU memory has no end of its own; give --budget"),
        (("--max", "batch", "--budget", "1GiB", "--format", "csv"), "--format 'csv'; have: console, md, json"),
    ],
)
def test_what_cannot_be_asked_is_said(
    ckbench: Run, replay: Callable[..., str], arguments: tuple[str, ...], told: str
) -> None:
    outcome = ckbench("plan", "study.yaml", "--device", replay(), *arguments)
    assert outcome.code == 2
    assert told in outcome.err


def test_a_grid_is_refused(ckbench: Run, replay: Callable[..., str]) -> None:
    device = replay()
    with Path("study.yaml").open("a") as file:
        file.write("vary: {train.batch_size: [1, 2]}\n")
    outcome = ckbench("plan", "study.yaml", "--device", device, "--max", "batch", "--budget", "1GiB")
    assert outcome.code == 2 and "take vary out of the study" in outcome.err


def test_a_failing_strategy_is_a_row_with_its_reason(ckbench: Run, replay: Callable[..., str]) -> None:
    device = replay({"none": {"fail": {"raise": "a bug"}}})
    asked = ("plan", "study.yaml", "--device", device, "--max", "batch", "--budget", "1GiB")
    outcome = ckbench(*asked)
    assert outcome.code == 0
    assert "none: batch 2 ended error: RuntimeError: a bug" in outcome.out
    found = rows(ckbench(*asked, "--format", "json").out)
    assert found["none"]["status"] == "failed"
    assert found["per-block"]["largest"] == 1_000_000, "the others are searched all the same"
    alone = ckbench(*asked, "-s", "none")
    assert alone.code == 2 and "none: batch 2 ended error: RuntimeError: a bug" in alone.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--max", "batch", "--step", "2000000"), "--step 2000000 is beyond the largest batch that is tried, 1000000"),
        (("--max", "layers", "--set", "model.d_ff=[32,64,96,32]"), "layers cannot vary in this study: with 1, "),
    ],
)
def test_what_cannot_vary_is_refused_before_the_first_trial(
    ckbench: Run, replay: Callable[..., str], arguments: tuple[str, ...], told: str
) -> None:
    outcome = ckbench("plan", "study.yaml", "--device", replay(), "--budget", "1GiB", *arguments)
    assert outcome.code == 2 and told in outcome.err
    assert "needs" not in outcome.err


def test_the_largest_size_by_estimate_is_that_by_trials(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    options = ("--max", "batch", "--budget", "12MiB", "--device", "cpu", "--format", "json")
    tried = rows(ckbench("plan", "study.yaml", *options).out)
    estimated = rows(ckbench("plan", "study.yaml", *options, "--estimate").out)
    for spec, row in estimated.items():
        assert (row["largest"], row["next_size"]) == (tried[spec]["largest"], tried[spec]["next_size"])
        assert abs(row["needed_bytes"] - tried[spec]["needed_bytes"]) <= 64
        assert row["status"] == "estimated" and row["tokens_per_s"] is None


def test_by_estimate_a_card_is_a_budget_without_a_gpu(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    outcome = ckbench(
        "plan",
        "study.yaml",
        "--max",
        "layers",
        "--estimate",
        "--budget",
        "T4",
        "--step",
        "64",
        "--set",
        "train.batch_size=4096",
    )
    assert outcome.code == 0 and "estimated: no step was run" in outcome.out
    refused = ckbench("plan", "study.yaml", "--max", "layers", "--estimate")
    assert refused.code == 2 and "--estimate needs --budget" in refused.err


# From here on: a plan for a budget.

COSTS = ("--costs", "A100 40GB")
KEYS = (
    "feasible",
    "predicted_peak_bytes",
    "predicted_slowdown_ratio",
    "floor_bytes",
    "proven_optimal",
    "gap",
    "choices",
)


def test_a_plan_is_measured_within_its_budget_and_runs_again_from_its_file(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    options = ("--device", "cpu", *COSTS, "--verify", "--save", "plan.yaml", "--format", "json")
    outcome = ckbench("plan", "study.yaml", "--budget", "80%", *options)
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert all(key in found for key in KEYS) and found["feasible"] is True
    assert found["predicted_peak_bytes"] <= found["budget_bytes"]
    assert found["predicted_slowdown_ratio"] > 1 and found["seconds_from"].startswith("roofline of A100 40GB")
    assert found["choices"][-1]["stop"] == 3
    assert abs(found["measured"]["peak_allocated_bytes"] - found["predicted_peak_bytes"]) <= 64
    assert found["measured"]["parity"] == "exact"
    plan = read_plan(Path("plan.yaml"))
    assert plan.n_layers == 3 and plan.regions
    again = ckbench("run", "study.yaml", "--device", "cpu", "-s", "plan:plan.yaml", "--format", "json")
    (row,) = json.loads(again.out)
    assert row["parity"] == "exact" and row["status"] == "ok"
    assert row["peak_allocated_bytes"] <= found["budget_bytes"]
    records, _ = store.read(Path("results"))
    by_label = {record["strategy"]: record for record in records}
    assert {key for key in by_label if key.startswith("budget:")} == {"budget:80%"}
    assert by_label["plan:plan.yaml"]["block_calls_backward"] == sum(plan.block_calls_backward())
    asked = ("run", "study.yaml", "--device", "cpu", "-s", "plan:plan.yaml", "--resume", "--format", "json")
    n_before = len(records)
    assert json.loads(ckbench(*asked).out) == [row] and len(store.read(Path("results"))[0]) == n_before
    write_plan(Path("plan.yaml"), Plan(n_layers=3), {})
    (other,) = json.loads(ckbench(*asked).out)
    assert other["plan"]["regions"] == [] and other["block_calls_backward"] == 0, "the file has changed since"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """A planner of a made-up chain in place of one that probes, and the study that it stands for."""
    planner = Made()
    monkeypatch.setattr(cli_plan, "_planner", lambda *_args: planner)
    return planner


def test_the_answer_on_the_console_and_as_a_file(ckbench: Run, made: Made) -> None:
    Path("study.yaml").write_text(STUDY)
    least = floor(made.chain).peak_bytes
    outcome = ckbench("plan", "study.yaml", "--budget", f"{least + 100}B", "--save", "plan.yaml")
    assert outcome.code == 0
    assert "fastest plan within" in outcome.out and "seconds   made up" in outcome.out
    assert "plan: plan.yaml" in outcome.err
    assert "made_for" in Path("plan.yaml").read_text()
    assert read_plan(Path("plan.yaml")).n_layers == 4
    full = ckbench("plan", "study.yaml", "--budget", "100%", "--format", "json")
    assert json.loads(full.out)["predicted_slowdown_ratio"] == 1.0
    assert json.loads(full.out)["measured"] is None


def test_nothing_fits_is_exit_3_in_words_and_as_data(ckbench: Run, made: Made) -> None:
    Path("study.yaml").write_text(STUDY)
    least = floor(made.chain).peak_bytes
    words = ckbench("plan", "study.yaml", "--budget", f"{least - 1}B", "--save", "plan.yaml")
    assert words.code == EXIT_NOTHING_FITS == 3
    assert f"({least} bytes)" in words.err and not Path("plan.yaml").exists()
    data = ckbench("plan", "study.yaml", "--budget", f"{least - 1}B", "--format", "json")
    assert data.code == 3
    found = json.loads(data.out)
    assert found["feasible"] is False and found["least_budget_bytes"] == least
    assert ckbench("plan", "study.yaml", "--budget", f"{least}B").code == 0


def test_the_front(ckbench: Run, made: Made) -> None:
    Path("study.yaml").write_text(STUDY)
    outcome = ckbench("plan", "study.yaml", "--front")
    assert outcome.code == 0 and "plans that no other beats in both" in outcome.out
    points = json.loads(ckbench("plan", "study.yaml", "--front", "--format", "json").out)["points"]
    assert points[0]["peak_bytes"] == floor(made.chain).peak_bytes and points[-1]["predicted_slowdown_ratio"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), 'give --budget, as 16GiB, 80% or "A100 40GB"; or --front, or --max'),
        (("--budget", "16"), "'16' has no unit"),
        (("--budget", "120%"), "budget '120%': a share lies above 0 and goes up to 100%"),
        (("--budget", "banana"), "unknown card 'banana'"),
        (
            ("--budget", "4090"),
            "'4090' has no unit; write 4090GiB, 4090GB, 4090MiB or 4090B; or did you mean 'RTX 4090'?",
        ),
        (("--budget", "99999999999999999999GiB"), "is more than any memory"),
        (("--budget", "1GiB", "--save", "."), "--save .: a directory, or in none"),
        (("--budget", "1GiB", "--format", "md"), "--format 'md'; have: console, json"),
        (("--budget", "1GiB", "--step", "2"), "--step has nothing to do beside a plan; leave it out"),
        (("--budget", "1GiB", "--estimate"), "--estimate has nothing to do beside a plan; leave it out"),
        (("--budget", "1GiB", "-s", "none"), "--strategy has nothing to do here"),
        (("--budget", "1GiB", "--device", "replay:x"), "--device 'replay:x': a plan is for cuda or cpu"),
        (("--front", "--budget", "1GiB"), "--budget has nothing to do beside --front; leave it out"),
        (("--front", "--save", "x.yaml"), "--save has nothing to do beside --front; leave it out"),
        (("--max", "batch", "--front"), "--front has nothing to do beside --max; leave it out"),
        (("--max", "batch", "--verify"), "--verify has nothing to do beside --max; leave it out"),
        (("--max", "batch", "--save", "x.yaml"), "--save has nothing to do beside --max; leave it out"),
        (("--max", "batch", "--costs", "T4"), "--costs has nothing to do beside --max; leave it out"),
        (("--budget", "1GiB", "--costs", "24GiB"), "--costs '24GiB': auto, measured, the name of a card, or a results"),
        (
            ("--budget", "1GiB", "--costs", "absent"),
            "--costs 'absent': auto, measured, the name of a card, or a results",
        ),
    ],
)
def test_what_cannot_be_planned_is_said_at_once(
    ckbench: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    from ckbench.planning import Planner

    monkeypatch.setattr(Planner, "_ask", lambda *_args, **_more: pytest.fail("probed all the same"))
    Path("study.yaml").write_text(STUDY)
    outcome = ckbench("plan", "study.yaml", *arguments)
    assert outcome.code == 2
    assert told in " ".join(outcome.err.split()), outcome.err
    assert "probing" not in outcome.err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{n_layers: x, regions: []}", "n_layers is a whole number of at least 1, not 'x'"),
        ("{n_layers: 3, regions: 3}", "regions is a list, not 3"),
        ("{n_layers: 4, regions: []}", "plan.yaml is a plan for 4 blocks, the model has 3"),
    ],
)
def test_a_bad_plan_file_is_a_sentence_and_exit_2(ckbench: Run, text: str, told: str) -> None:
    Path("study.yaml").write_text(STUDY)
    Path("plan.yaml").write_text(f"ckbench_plan: 1\nplan: {text}\n")
    outcome = ckbench("run", "study.yaml", "--device", "cpu", "-s", "plan:plan.yaml")
    assert outcome.code == 2 and told in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


def test_a_budget_is_a_strategy_of_any_study(ckbench: Run) -> None:
    """Its plan is found before its trial; what no plan reaches is a row that says so; resumed, nothing runs again."""
    Path("study.yaml").write_text(STUDY)
    asked = ("run", "study.yaml", "--device", "cpu", "-s", "none", "-s", "budget:80%", "-s", "budget:20%")
    outcome = ckbench(*asked, "--format", "json")
    found = rows(outcome.out)
    none, planned, nothing = (found[label] for label in ("none", "budget:80%", "budget:20%"))
    peak = max(none["peak_allocated_bytes"], none["first_step_peak_bytes"])
    assert planned["status"] == "ok" and planned["parity"] == "exact"
    assert max(planned["peak_allocated_bytes"], planned["first_step_peak_bytes"]) <= 0.8 * peak + 64
    assert planned["block_calls_backward"] == planned["block_calls_backward_planned"]
    assert nothing["status"] == "skipped" and nothing["peak_allocated_bytes"] is None
    assert nothing["message"].startswith("not started: no plan fits ")
    assert "the least budget that would do is" in nothing["message"]
    before, _ = store.read(Path("results"))
    assert {r["strategy"]: bool(r["plan"] and r["plan"]["regions"]) for r in before if r["status"] == "ok"} == {
        "none": False, "budget:80%": True,
    }  # fmt: skip
    again = ckbench(*asked, "--resume", "--format", "json")
    after, _ = store.read(Path("results"))
    done = [record for record in after if record["status"] == "ok"]
    assert len(done) == 2, "what is finished is not measured again"
    assert rows(again.out)["budget:80%"]["peak_allocated_bytes"] == planned["peak_allocated_bytes"]


def test_the_budget_s_card_is_the_one_it_runs_on_and_the_costs_card_counts_seconds(tmp_path: Path) -> None:
    planner = cli_plan._planner("cuda", "A100 40GB", "H100 80GB")
    assert (planner.card, planner.costs) == ("H100 80GB", "A100 40GB")
    assert cli_plan._planner("cuda", "A100 40GB", "16GiB").card == "A100 40GB"
    assert cli_plan._planner("cuda", "auto", "80%").card is None
    read = cli_plan._planner("cpu", str(tmp_path), "T4")
    assert read.records == [] and read.card == "T4"


@pytest.mark.parametrize(("size", "code"), [("2000B", 0), ("1001B", 3)])
def test_the_largest_batch_has_a_plan_of_its_own_at_every_size(
    ckbench: Run, replay: Callable[..., str], monkeypatch: pytest.MonkeyPatch, size: str, code: int
) -> None:
    """The planner is asked per size; where no plan fits the strategy's own budget the size does not fit."""
    from ckbench import largest

    planner, device = Made(), replay()
    asked: list[int] = []
    planned = planner.planned
    monkeypatch.setattr(planner, "planned", lambda config: asked.append(config.train.batch_size) or planned(config))
    monkeypatch.setattr(largest, "planner_for", lambda *_args: planner)
    options = ("--max", "batch", "--step", "400000", "--budget", "1GiB", "-s", f"budget:{size}", "--format", "json")
    outcome = ckbench("plan", "study.yaml", "--device", device, *options)
    assert outcome.code == code, outcome.err
    assert 400_000 in asked
    if code == 0:
        assert rows(outcome.out)[f"budget:{size}"]["largest"] == 800_000
    else:
        assert "no strategy fits at any batch" in outcome.err
