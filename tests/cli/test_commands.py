"""Every command, its output and its exit code, as a user types it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckbench import registry
from tests.cli.conftest import Run


def test_run_prints_a_table_and_keeps_records(ckbench: Run, replay: Callable[..., str]) -> None:
    outcome = ckbench("run", "study.yaml", "--device", replay())
    assert outcome.code == 0
    assert "every-k:2" in outcome.out and "scripted" in outcome.out
    (file,) = Path("results").glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 6
    assert "\r" not in outcome.err and "\x1b" not in outcome.err + outcome.out
    assert outcome.err.count("\n") == 1 + 6 + 1


def test_report_shows_the_same_table_again(ckbench: Run, replay: Callable[..., str]) -> None:
    first = ckbench("run", "study.yaml", "--device", replay())
    again = ckbench("report", "results")
    assert again.code == 0
    assert again.out == first.out


def test_rounds_alternate_and_the_order_is_kept(ckbench: Run, replay: Callable[..., str]) -> None:
    ckbench("run", "study.yaml", "--device", replay())
    (file,) = Path("results").glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["strategy"] for r in records] == ["none", "per-block", "every-k:2", "every-k:2", "per-block", "none"]
    assert [r["order"] for r in records] == list(range(6))


def test_specs_with_one_plan_are_measured_once(ckbench: Run, replay: Callable[..., str]) -> None:
    options = ("--set", "model.n_layers=2", "-s", "none", "-s", "sqrt", "-s", "every-k:4", "-s", "full")
    outcome = ckbench("run", "study.yaml", "--device", replay(), *options)
    assert "4 trials to run" in outcome.err
    assert "every-k:4 (= sqrt)" in outcome.out and "full (= sqrt)" in outcome.out


def test_a_strategy_listed_again_is_measured_again(ckbench: Run, replay: Callable[..., str]) -> None:
    outcome = ckbench("run", "study.yaml", "--device", replay(), "-s", "none", "-s", "none", "-s", "none")
    assert "6 trials to run" in outcome.err
    assert "none#2" in outcome.out and "none#3" in outcome.out
    assert ckbench("run", "study.yaml", "--device", replay(), "-s", "none#2").code == 0


@pytest.mark.parametrize(
    ("fail", "code", "strict_code"),
    [
        ({"raise": "CUDA out of memory.", "type": "OutOfMemoryError"}, 0, 1),
        ({"raise": "a bug"}, 1, 1),
        ({"raise": "x", "type": "CheckpointError"}, 1, 1),
    ],
)
def test_exit_codes_tell_how_trials_ended(
    ckbench: Run, replay: Callable[..., str], fail: dict[str, str], code: int, strict_code: int
) -> None:
    device = replay({"per-block": {"fail": fail}})
    outcome = ckbench("run", "study.yaml", "--device", device)
    assert outcome.code == code
    assert "every-k:2" in outcome.out, "the study goes on after a failure"
    assert ckbench("run", "study.yaml", "--device", device, "--strict").code == strict_code


def test_a_failed_strategy_is_not_tried_in_every_round(ckbench: Run, replay: Callable[..., str]) -> None:
    outcome = ckbench("run", "study.yaml", "--rounds", "5", "--device", replay({"per-block": {"fail": {"raise": "x"}}}))
    assert outcome.err.count("per-block, round") == 1


def test_invalid_is_shown_and_left_out_of_ratios(ckbench: Run, replay: Callable[..., str]) -> None:
    fields = {"parity": "failed", "peak_allocated_bytes": 1}
    outcome = ckbench("run", "study.yaml", "--device", replay({"per-block": {"fields": fields}}), "--format", "json")
    assert outcome.code == 1
    row = next(r for r in json.loads(outcome.out) if r["strategy"] == "per-block")
    assert row["status"] == "invalid" and row["slowdown_ratio"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "missing.yaml"), "missing.yaml: no such file\n"),
        (("run", "."), ".: is a folder, not a study file\n"),
        (("run", "study.yaml", "--set", "train.batch_sizes=4"), "--set 'train.batch_sizes=4': unknown key 'batch_sizes' in train; did you mean 'batch_size'?\n"),
        (("run", "study.yaml", "--set", "train.batch_size"), "--set 'train.batch_size': write section.key=value, for example train.batch_size=4\n"),
        (("run", "study.yaml", "--set", "train.batch_size=no"), "--set train.batch_size: train.batch_size must be a whole number, got false\n"),
        (("run", "study.yaml", "-s", "per-blck"), "--strategy: unknown strategy 'per-blck'; did you mean 'per-block'?\n"),
        (("run", "study.yaml", "-s", "none#x"), "--strategy: strategy 'none#x': after # comes the number of the repeat, as in none#2\n"),
        (("run", "study.yaml", "--device", "tpu"), "--device 'tpu': auto, cpu, cuda or cuda:N\n"),
        (("run", "study.yaml", "--format", "pdf"), "unknown report 'pdf'; have: console, csv, html, json, latex, md, plots\n"),
        (("run", "study.yaml", "--rounds", "0"), "--set run.rounds: run.rounds must be at least 1, got 0\n"),
        (("run", "study.yaml", "--device", "replay:none.json"), "none.json: not a replay script\n"),
        (("sweep", "study.yaml"), "nothing to sweep; give at least one of --layers, --width, --batch, --seq-len, --heads, for example --layers 2..48\n"),
        (("sweep", "study.yaml", "--layers", "6..2"), "--layers: '6..2' runs downwards; write the smaller end first\n"),
        (("sweep", "study.yaml", "--layers", "2.."), "--layers: '2..' is not a range; write 2..48, 2..48:2, 2..48x2 or 2,4,8 (both ends included)\n"),
        (("sweep", "study.yaml", "--width", "30"), "study.yaml:1: d_model 30 is not a multiple of n_heads 4\n"),
        (("report", "nowhere"), "nowhere: no such results folder; `ckbench run` makes one\n"),
        (("list", "models2"), "unknown shelf 'models2'; did you mean 'models'?\n"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_bad_input_ends_in_one_line_and_exit_2(
    ckbench: Run, replay: Callable[..., str], arguments: tuple[str, ...], expected: str
) -> None:
    device = replay()
    if "study.yaml" in arguments and "--device" not in arguments:
        arguments = (*arguments, "--device", device)
    outcome = ckbench(*arguments)
    assert (outcome.code, outcome.err, outcome.out) == (2, expected, "")
    assert not list(Path().rglob("*.jsonl"))


@pytest.mark.parametrize("arguments", [("run",), ("runn", "x"), ("run", "study.yaml", "--nope"), ("report",)])
def test_usage_errors_are_exit_2_without_traceback(ckbench: Run, arguments: tuple[str, ...]) -> None:
    outcome = ckbench(*arguments)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


def test_sweep_orders_coarse_to_fine_and_sorts_rows_by_number(ckbench: Run, replay: Callable[..., str]) -> None:
    outcome = ckbench("sweep", "study.yaml", "--layers", "2..10:2", "--device", replay(), "--rounds", "1", "-s", "none")
    assert outcome.code == 0
    told = [line.partition("(n_layers ")[2].partition(")")[0] for line in outcome.err.splitlines() if "ok" in line]
    assert told == ["2", "10", "6", "4", "8"]
    cells = [line.split() for line in outcome.out.splitlines()]
    depths = [words[0] for words in cells if words[1:2] == ["none"] and words[0].isdigit()]
    assert depths == ["2", "4", "6", "8", "10"]


def test_sweep_dry_run_measures_nothing_but_tells_the_time(ckbench: Run, replay: Callable[..., str]) -> None:
    outcome = ckbench("sweep", "study.yaml", "--layers", "2..48", "--points", "4", "--dry-run", "--device", replay())
    assert outcome.code == 0
    assert "4 points, 24 trials" in outcome.out and "about" in outcome.out
    for depth in (2, 17, 33, 48):
        assert f"model.n_layers {depth}:" in outcome.out
    assert not Path("results").exists()


def test_report_groups_and_takes_another_baseline(ckbench: Run, replay: Callable[..., str]) -> None:
    ckbench("sweep", "study.yaml", "--layers", "2,4", "--device", replay())
    outcome = ckbench("report", "results", "--group-by", "n_layers", "--baseline", "per-block")
    assert outcome.out.count("baseline: per-block") == 2
    assert ckbench("report", "results", "--group-by", "nlayer").code == 2
    assert ckbench("report", "results", "--baseline", "full").err.startswith("no record has the strategy 'full'")


def test_resume_runs_only_what_is_missing_or_failed(ckbench: Run, replay: Callable[..., str]) -> None:
    device = replay(
        {"per-block": {"fail": {"raise": "x"}}, "every-k:2": {"fail": {"raise": "x", "type": "OutOfMemoryError"}}}
    )
    assert ckbench("run", "study.yaml", "--device", device).code == 1
    replay()
    outcome = ckbench("run", "study.yaml", "--device", device, "--resume")
    assert outcome.code == 0
    assert "2 trials to run, 4 are there from before" in outcome.err
    statuses = {
        row["strategy"]: row["status"] for row in json.loads(ckbench("report", "results", "--format", "json").out)
    }
    assert statuses == {"none": "ok", "per-block": "ok", "every-k:2": "oom"}


def test_list_shows_every_plug_in(ckbench: Run) -> None:
    out = ckbench("list").out
    for shelf in registry.SHELVES:
        for name in registry.names(shelf):
            assert name in out


def test_schema_describes_every_shipped_study(ckbench: Run) -> None:
    schema = json.loads(ckbench("schema").out)
    assert set(schema["properties"]) == {"name", "description", "model", "train", "run", "strategies", "vary", "on_cpu"}


def test_init_writes_examples_and_leaves_existing_files_alone(ckbench: Run) -> None:
    outcome = ckbench("init", "mine")
    assert outcome.code == 0 and Path("mine/smoke.yaml").is_file() and Path("mine/articles").is_dir()
    Path("mine/smoke.yaml").write_text("changed")
    assert "mine/smoke.yaml: exists, left alone" in ckbench("init", "mine").out
    assert Path("mine/smoke.yaml").read_text() == "changed"
    Path("file").write_text("")
    assert ckbench("init", "file/deeper").code == 2


def test_version(ckbench: Run) -> None:
    assert ckbench("--version").out.startswith("ckbench ")


def test_quick_takes_any_valid_study(ckbench: Run, replay: Callable[..., str]) -> None:
    device = replay()
    settings = ("--set", "run.min_steps=2", "--set", "run.max_steps=2", "--set", "run.max_rounds=4")
    assert ckbench("run", "study.yaml", "--device", device, *settings).code == 0
    Path("study.yaml").write_text(Path("study.yaml").read_text().replace("max_steps: 10", "max_steps: 2, min_steps: 2"))
    outcome = ckbench("run", "study.yaml", "--device", device, "--quick")
    assert outcome.code == 0, outcome.err
