"""Reports of a harness that misread its user, or was misread: input is taken literally or refused, output is whole."""

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckbench import reporting, store, study
from ckbench.compare import compare
from ckbench.errors import ConfigError
from ckbench.ranges import parse_range
from ckbench.store import ResultStore
from ckbench.units import format_bytes, parse_size_bytes
from tests.known.conftest import Run
from tests.sample_records import record
from tests.sample_records import study as session

ROOT = Path(__file__).parents[2]
MODEL = "model: {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}\n"
TRAIN = "train: {batch_size: 2, seq_len: 16}\n"


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Load a study text; give what is wrong with it, or nothing."""
    monkeypatch.chdir(tmp_path)

    def load(text: str) -> str:
        Path("study.yaml").write_text(text)
        try:
            study.load(Path("study.yaml"))
        except ConfigError as error:
            return str(error)
        return ""

    return load


def points() -> list[study.Point]:
    """Give the points of the study that was loaded last."""
    return study.load(Path("study.yaml")).points("cpu")


def strict(text: str) -> Any:
    """Parse JSON as the standard has it."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(("text", "value"), [("1e-4", 0.0001), ("5e-4", 0.0005), ("1e3", 1000.0)])
def test_ux_01_a_number_with_an_exponent_is_a_number(faults: Callable[[str], str], text: str, value: float) -> None:
    assert faults(MODEL + f"train: {{batch_size: 2, seq_len: 16, lr: {text}}}\n") == ""
    assert points()[0].train.lr == value


@pytest.mark.parametrize(("word", "boolean"), [("off", "false"), ("on", "true"), ("no", "false")])
def test_ux_02_a_word_that_yaml_takes_for_a_boolean_is_told(
    faults: Callable[[str], str], word: str, boolean: str
) -> None:
    told = faults(MODEL + TRAIN + f"strategies: {word}\n")
    assert told.startswith("study.yaml:3: strategy got the boolean ")
    assert told.endswith(f"{boolean}; write none to keep everything (quote the word)")


@pytest.mark.parametrize(
    ("text", "told"),
    [("none", ""), ("None", ""), ('"none"', ""), ("null", "null"), ("~", "null"), ("", "null")],
)
def test_ux_03_none_is_a_strategy_and_null_is_a_mistake(faults: Callable[[str], str], text: str, told: str) -> None:
    said = faults(MODEL + TRAIN + f"strategies:\n  - {text}\n")
    if told:
        assert said == "study.yaml:4: strategy is null (~, null or empty); write the word none"
    else:
        assert said == "" and points()[0].strategies[0].label == "none"


def test_ux_04_unknown_and_misplaced_keys_are_all_named(faults: Callable[[str], str]) -> None:
    told = faults("model: {layerz: 4, d_model: 32, n_heads: 4, vocab_size: 64}\n" + TRAIN)
    assert "study.yaml:1: unknown key 'layerz' in model; did you mean 'n_layers'?" in told
    told = faults(MODEL + TRAIN + "d_model: 64\nlayers: 4\n")
    assert told.splitlines() == [
        "study.yaml:3: misplaced key 'd_model'; did you mean 'model.d_model'?",
        "study.yaml:4: unknown key 'layers'; did you mean 'model.n_layers'?",
    ]


def test_ux_05_a_key_given_twice_is_refused_and_merge_keys_work(faults: Callable[[str], str]) -> None:
    told = faults(MODEL + "train:\n  batch_size: 2\n  seq_len: 1024\n  seq_len: 262144\n")
    assert told == "study.yaml:5: key 'seq_len' is given twice, first in line 4"
    shared = "model: &base {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}\n"
    assert faults(shared + TRAIN + "on_cpu:\n  model: {<<: *base, n_layers: 2}\n") == ""
    assert (points()[0].model.n_layers, points()[0].model.d_model) == (2, 32)


def test_ux_08_a_boolean_or_half_a_block_is_no_count(faults: Callable[[str], str]) -> None:
    told = faults(MODEL.replace("n_layers: 4", "n_layers: 4.5") + "train: {batch_size: true, seq_len: 16}\n")
    assert told.splitlines() == [
        "study.yaml:1: model.n_layers must be a whole number, got 4.5",
        "study.yaml:2: train.batch_size must be a whole number, got true",
    ]


def test_ux_09_a_tab_is_one_line(ckbench: Run) -> None:
    Path("study.yaml").write_text("model:\n\tn_layers: 2\n")
    outcome = ckbench("run", "study.yaml")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "study.yaml:2:1: tab not allowed for indentation; use spaces\n"


def test_ux_12_both_ends_belong_to_a_range(ckbench: Run, replay: Callable[..., str]) -> None:
    assert parse_range("2..6") == [2, 3, 4, 5, 6]
    assert parse_range("6..6") == [6]
    assert parse_range("2..48:2") == list(range(2, 49, 2))
    replay()
    for text in ("6..2", "2.."):
        outcome = ckbench("sweep", "study.yaml", "--layers", text)
        assert outcome.code == 2 and outcome.err.startswith(f"--layers: '{text}' ")
    help_text = " ".join(ckbench("sweep", "--help").out.split())
    assert "ranges include both ends" in help_text and "2..48 (both ends)" in help_text


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("12GB", 12 * 10**9), ("12GiB", 12 * 2**30), ("12 gib", 12 * 2**30), ("12884901888", 12 * 2**30)],
)
def test_ux_14_gb_and_gib_are_two_units(text: str, n_bytes: int) -> None:
    assert parse_size_bytes(text) == n_bytes
    assert (format_bytes(12 * 2**30), format_bytes(12 * 10**9), format_bytes(2**20)) == (
        "12.00 GiB",
        "11.18 GiB",
        "1.00 MiB",
    )


@pytest.mark.parametrize(("text", "told"), [("12", "no unit"), ("12g", "unknown unit 'g'"), ("-1GiB", "is not a size")])
def test_ux_14_a_size_without_a_clear_unit_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_size_bytes(text)


def test_ux_15_what_is_undefined_is_null_an_empty_cell_and_a_mark(ckbench: Run, replay: Callable[..., str]) -> None:
    failure = {"raise": "CUDA out of memory.", "type": "OutOfMemoryError"}
    device = replay({"per-block": {"fail": failure}})
    one_step = ("--rounds", "1", "--set=run.min_steps=1", "--set=run.max_steps=1", "-s", "none", "-s", "per-block")
    out = ckbench("run", "study.yaml", *one_step, "--device", device).out
    none, oom = strict(ckbench("report", "results", "--format", "json").out)
    assert none["step_s_median"] and none["step_s_low"] is None and oom["step_s_median"] is None
    for line in next(Path("results").glob("*.jsonl")).read_text().splitlines():
        strict(line)
    cells = list(csv.DictReader(io.StringIO(ckbench("report", "results", "--format", "csv").out)))
    assert (cells[0]["step_s_low"], cells[1]["step_s_median"], cells[1]["peak_allocated_bytes"]) == ("", "", "")
    assert "n/a" in out and "nan" not in out.lower() and "inf" not in out.lower().split()


def in_terminal(tmp_path: Path, columns: int, **environment: str) -> str:
    """Run ``ckbench report`` under a pseudo terminal and give what it shows."""
    ours, theirs = pty.openpty()
    program = "import sys; from ckbench.cli import main; sys.argv = ['ckbench', 'report', 'results']; main()"
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=theirs, stderr=theirs, env={**settings, **environment}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux ends a pseudo terminal so
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(30) == 0, shown
    return shown.decode()


def stored(tmp_path: Path, records: list[dict[str, Any]], name: str = "r.jsonl") -> Path:
    """Write records into a results folder."""
    folder = tmp_path / "results"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_ux_16_no_digit_is_lost_in_a_pipe_or_a_narrow_terminal(ckbench: Run, tmp_path: Path) -> None:
    stored(tmp_path, session())
    piped = ckbench("report", "results").out
    assert max(len(line) for line in piped.splitlines()) > 80
    narrow = in_terminal(tmp_path, 40).splitlines()
    assert max(len(line) for line in narrow) <= 40
    for label, step, peak in (("none", "101", "80.0"), ("per-block", "126", "50.0"), ("every-k:2", "131", "60.0")):
        for text in (piped, "\n".join(narrow)):
            assert label in text and step in text and peak in text and "…" not in text


def test_ux_17_no_colour_code_leaks(ckbench: Run, tmp_path: Path) -> None:
    stored(tmp_path, session())
    assert "\x1b" not in ckbench("report", "results").out
    assert "\x1b" not in in_terminal(tmp_path, 100, NO_COLOR="1")


def test_ux_18_the_log_has_a_line_per_case_and_the_table_its_own_stream(
    ckbench: Run, replay: Callable[..., str]
) -> None:
    outcome = ckbench("sweep", "study.yaml", "--layers", "2,4", "--rounds", "1", "--device", replay())
    lines = outcome.err.splitlines()
    assert "\r" not in outcome.err and "\x1b" not in outcome.err
    n_cases = 2 * 3
    assert len(lines) == 1 + n_cases + 1
    assert [line[: len("[1/6]")] for line in lines[1:-1]] == [f"[{i}/{n_cases}]" for i in range(1, n_cases + 1)]
    assert outcome.out.startswith("study study\nmodel: ") and "left" not in outcome.out


def test_ux_20_file_names_are_legal_everywhere(tmp_path: Path) -> None:
    for name in ("gpt: small|bf16 <v2>?", "x" * 200, "..", "名前"):
        path = ResultStore(tmp_path, name, "a1b2c3d4").path
        assert re.fullmatch(r"[A-Za-z0-9._-]+", path.name) and len(path.name) < 120, path.name


def test_ux_23_a_pipe_in_a_name_stays_in_its_cell() -> None:
    records = [record("none", model__family="a|b", study="a|b"), record("per-block", model__family="gpt", study="a|b")]
    text = reporting.draw(records, format_="md")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "study a\\|b" in text and "| a\\|b |" in text


def test_ux_24_sizes_are_ordered_as_numbers(ckbench: Run, replay: Callable[..., str]) -> None:
    sweep = ("sweep", "study.yaml", "--layers", "2,10,4,48", "-s", "none", "--rounds", "1")
    ckbench(*sweep, "--device", replay())
    out = ckbench("report", "results").out
    depths = [words[0] for words in map(str.split, out.splitlines()) if words[1:2] == ["none"] and words[0].isdigit()]
    assert depths == ["2", "4", "10", "48"]
    rows = json.loads(ckbench("report", "results", "--format", "json").out)
    assert [row["model"]["n_layers"] for row in rows] == [2, 4, 10, 48]


def test_ux_25_ratios_stay_on_one_kind_of_device() -> None:
    on_a = [record(spec, device="cuda:0", device_name="A") for spec in ("none", "every-k:2")]
    again = [record("per-block", device="cuda:4", device_name="A")]
    on_b = [record(spec, device="cuda:0", device_name="B", session_id="s2") for spec in ("none", "per-block")]
    comparison = compare([*on_a, *on_b, *again])
    assert len(comparison.baselines) == 2 and "device_name" in comparison.varied
    groups = {(row.values["device_name"], row.group) for row in comparison.rows}
    assert len(groups) == 2
    for row in comparison.rows:
        assert row.values["slowdown_ratio"] is not None
    other_type = compare([*on_a, record("per-block", device_name="A", train__precision="bf16")])
    assert len(other_type.baselines) == 2


def test_ux_27_one_broken_file_does_not_hide_the_others(ckbench: Run, tmp_path: Path) -> None:
    folder = stored(tmp_path, session(), "good.jsonl")
    (folder / "cut.jsonl").write_text(json.dumps(session()[0])[:-30])
    (folder / "empty.jsonl").write_text("")
    outcome = ckbench("report", "results")
    assert outcome.code == 0 and "every-k:2" in outcome.out
    assert "results/cut.jsonl:1: cut short (the write was interrupted)" in outcome.out
    assert "results/empty.jsonl: empty file" in outcome.out
    assert len(store.read(folder)[0]) == len(session())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_ux_28_a_missing_gpu_is_refused_and_auto_tells_what_it_took(ckbench: Run, replay: Callable[..., str]) -> None:
    replay()
    outcome = ckbench("run", "study.yaml", "--device", "cuda")
    assert outcome.code == 2 and outcome.err.startswith("device cuda is not there: ") and outcome.err.count("\n") == 1
    assert not list(Path().rglob("*.jsonl"))
    steps = ("--set=run.warmup_steps=0", "--set=run.min_steps=1", "--set=run.max_steps=1")
    quick = ("--rounds", "1", "-s", "none", "--set=run.parity=false", *steps)
    (row,) = json.loads(ckbench("run", "study.yaml", "--device", "auto", *quick, "--format", "json").out)
    assert (row["device"], row["run"]["device"], row["status"]) == ("cpu", "cpu", "ok")
