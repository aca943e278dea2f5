"""Inputs that once ended in a traceback, a hang or a spoilt terminal, kept so that they cannot do so again."""

import csv
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckbench import config, errors, reporting, store
from ckbench.records import Record
from tests.prove import entry
from tests.sample_records import record, study

GOOD = "model: {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}\ntrain: {batch_size: 2, seq_len: 16}\n"


def refusal(content: bytes | str, *more: str, name: str = "study.yaml") -> str:
    """Run one study file that must be refused; give what is said."""
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogateescape"))
    answer = entry.call("run", name, "--device", "replay:script.json", *more)
    entry.check_manners(answer)
    assert answer.code == 2 and entry.records_below(Path()) == []
    return answer.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('name: "\\UFFFFFFFF"', "study.yaml: not readable as YAML (OverflowError)"),
        ('name: "\\U00110000"', "study.yaml: not readable as YAML (ValueError)"),
        ('name: "\\ud800"', "study.yaml:1: half a surrogate pair is no character"),
        ('"\\ud800": 1', "study.yaml:1: half a surrogate pair is no character"),
        (GOOD + 'name: "\\x9b2J"', "study.yaml:3: name must be one line of 1 to 200 characters"),
        (GOOD + 'name: "a\\u2028b"', "study.yaml:3: name must be one line of 1 to 200 characters"),
        (GOOD + 'strategies: ["\\u202e"]', "study.yaml:3: unknown strategy '\\u202e'"),
        (GOOD.replace("16}", '16, loss: "\\x85\\xa0"}'), "study.yaml:2: train.loss must be 'cross_entropy', 'chunked_cross_entropy' or 'mse', got \" ?\""),
        ("a: [" + "[" * 5_000, "study.yaml: not readable as YAML (RecursionError)"),
        ("x" * 200_000, "study.yaml: larger than 100000 bytes, not a study file"),
        (GOOD.replace("4", "1000000000000", 1), "study.yaml:1: model.n_layers must be at most 10000, got 1000000000000"),
    ],
    ids=lambda value: str(value)[-40:],
)  # fmt: skip
def test_studies(folder: Path, content: str, said: str) -> None:
    assert refusal(content).startswith(said)


def test_a_thousand_faults_do_not_flood_the_terminal(folder: Path) -> None:
    told = refusal(GOOD + "".join(f"key{i}: 1\n" for i in range(1000))).splitlines()
    assert len(told) == errors.MAX_FAULTS + 1
    assert told[-1] == f"and {1000 - errors.MAX_FAULTS} more faults"


def test_a_name_of_a_megabyte_keeps_both_ends_of_its_line(folder: Path) -> None:
    (line,) = refusal(GOOD, "--strategy", "x" * 100_000).splitlines()
    assert line.startswith("--strategy: unknown strategy 'xxx") and "have: attn-only" in line


def test_a_grid_too_deep_to_plan_is_refused_at_once(folder: Path) -> None:
    begun = time.process_time()
    Path("study.yaml").write_text(GOOD)
    answer = entry.call("sweep", "study.yaml", "--layers", "1..9999", "--device", "replay:script.json")
    assert answer.code == 2 and "blocks in all, more than 1000000; thin it" in answer.err
    assert time.process_time() - begun < 5


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_study_without_end(folder: Path) -> None:
    assert entry.call("run", "/dev/zero").err == "/dev/zero: larger than 100000 bytes, not a study file\n"


@pytest.mark.parametrize(
    "path", ["x" * 5000, "a\nb", "\x1b[2J", "\udcff", "/dev/null"], ids=lambda path: repr(path)[:12]
)
@pytest.mark.parametrize("command", ["run", "report"])
def test_paths(folder: Path, command: str, path: str) -> None:
    answer = entry.call(command, path)
    entry.check_manners(answer)
    assert answer.code == 2 and answer.err.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs file names that are bytes")
def test_a_study_whose_file_name_is_no_text(folder: Path) -> None:
    Path("st\udcff.yaml").write_text(GOOD)
    answer = entry.call("run", "st\udcff.yaml", "--device", "replay:script.json", *entry.CAPS)
    entry.check_manners(answer)
    assert answer.code == 0 and "study st?" in answer.out


@pytest.mark.parametrize("arguments", [("--no\x1b[2Jpe",), ("run", "a", "b\x9b\n"), ("\u202e",), ("list", "--\x07")])
def test_words_on_the_command_line_do_not_steer_the_terminal(folder: Path, arguments: tuple[str, ...]) -> None:
    answer = entry.call(*arguments)
    entry.check_manners(answer)
    assert answer.code == 2


def shown(*records: dict[str, Any]) -> dict[str, str]:
    """Store records, report them in every format, and give the texts."""
    Path("stored").mkdir()
    Path("stored/s.jsonl").write_text("".join(json.dumps(values) + "\n" for values in records))
    texts = {}
    for format_ in ("console", "md", "csv", "json"):
        answer = entry.call("report", "stored", "--format", format_)
        entry.check_manners(answer)
        assert answer.code == 0, answer
        texts[format_] = answer.out
    return texts


@pytest.mark.parametrize(
    "changes",
    [
        {"step_s_median": -1.0},
        {"step_s_median": 1e-320},
        {"step_s_median": 1e308},
        {"step_samples_s": ["x"]},
        {"step_samples_s": [10**400]},
        {"model__n_layers": 10**400},
        {"train__batch_size": 10**4000},
        {"environment__load_1min": 10**400},
        {"environment__nvml_warnings": 5},
        {"environment__nvml_warnings": [["x"], {"y": 1}]},
        {"train__grad_accumulation": "x"},
        {"run__precision_target": 1e308, "step_s_high": 1e308},
        {"peak_allocated_bytes": -1},
        {"flops_forward": 2**63},
        {"session_id": "", "started_at": "z"},
        {"started_at": "\x1b[31m2026"},
        {"peak_phase": "\x1b[2J"},
        {"failed_phase": "\x1b[2J", "status": "error", "message": "a\r\nb\x9b"},
        {"parity_detail": "\x07", "status": "invalid"},
        {"notes": ["\x1b]0;x\x07", {"a": [1]}]},
        {"record_id": "\x1b[2J"},
        {"model__\x1b[7m": 1},
    ],
    ids=str,
)
def test_result_files(folder: Path, changes: dict[str, Any]) -> None:
    """Every one of these numbers and words stands once among good records, for the first and for every strategy."""
    texts = shown(*study(), record("none", **{"record_id": "a", "order": 7, **changes}))
    json.loads(texts["json"], parse_constant=pytest.fail)
    Path("stored/s.jsonl").write_text(
        "".join(json.dumps(values) + "\n" for values in study(train__seq_len=8, **changes))
    )
    assert entry.call("report", "stored").code in (0, 2)


def test_rounds_from_a_nanosecond_to_thirty_years_have_finite_ratios(folder: Path) -> None:
    """What these bounds let through must not overflow an exponential."""
    records = [
        record(name, round_number=i, step_s_median=1e-9 if (i + shift) % 2 else 1e9, run__precision_target=0.5)
        for shift, name in enumerate(("none", "per-block"))
        for i in range(2)
    ]
    rows = json.loads(shown(*records)["json"], parse_constant=pytest.fail)
    assert all(row["slowdown_high"] is not None for row in rows)


def test_markdown_shows_words_as_they_are(folder: Path) -> None:
    words = ["# a", "- b", "+ c", "1. d", "~~~", "http://e.f", "www.g.h", "[i](j)", "<k>", "l|m", "&lt;", "=", "`n`"]
    records = [record("none", study=word, notes=[word], model__family=word) for word in words]
    text = shown(*records)["md"]
    for sign in ("- #", "- -", "- +", "- 1.", "~~~", "://", "www.", "[i]", "<k>", "l|m", "- =", "`n`"):
        assert all(sign not in line for line in text.splitlines() if not line.startswith("| ---")), sign


def test_a_spreadsheet_runs_nothing(folder: Path) -> None:
    words = ["=1+1", "+1", "-1", "@a", "\t=1", "\r=1", "\n=1", " =1", "＝1", "a\n=1"]
    records = [
        record("none", study=word, message=word, model__family=word, record_id=str(i)) for i, word in enumerate(words)
    ]
    for row in csv.DictReader(io.StringIO(shown(*records)["csv"])):
        for key in ("study", "message", "model.family"):
            assert row[key][:1] in ("'", "?", "a")


def test_a_session_name_from_a_file_is_no_path(folder: Path) -> None:
    Path("study.yaml").write_text(GOOD)
    measure = ("run", "study.yaml", "--device", "replay:script.json", *entry.CAPS)
    entry.call(*measure)
    (file,) = entry.records_below(Path("results"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-1]["status"] = "error"
    text = "".join(json.dumps({**line, "session_id": "../../escaped/x"}) + "\n" for line in lines)
    file.write_text(text)
    assert entry.call(*measure, "--resume").code == 0
    assert len(entry.records_below(Path("results"))) == 2
    assert not list(folder.parent.glob("**/x.jsonl")) and not (folder.parent / "escaped").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_and_folders_among_result_files_are_named(folder: Path) -> None:
    shown(record("none"))
    os.mkfifo("stored/pipe.jsonl")
    Path("stored/folder.jsonl").mkdir()
    assert "stored/pipe.jsonl: not a file" in entry.call("report", "stored").out


def test_a_long_file_cut_short_is_read_in_one_pass(folder: Path) -> None:
    """The time once grew with the square of the size."""
    line = json.dumps(record("none"))
    lines = [line.replace("none-0", f"none-{i}") for i in range(3000)]
    Path("cut.jsonl").write_text("\n".join([*lines, line[:-20]]))
    begun = time.process_time()
    records, skipped = store.read(Path("cut.jsonl"))
    assert (len(records), [s.reason for s in skipped]) == (3000, ["cut short (the write was interrupted)"])
    assert time.process_time() - begun < 10


def test_a_line_longer_than_any_record_is_not_read_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_LINE_BYTES", 10_000)
    good = json.dumps(record("none"))
    Path("long.jsonl").write_text("x" * 100_000 + "\n" + good + "\n" + "y" * 10_003)
    records, skipped = store.read(Path("long.jsonl"))
    assert len(records) == 1
    assert [(s.line, s.reason) for s in skipped] == [(1, "longer than any record"), (3, "longer than any record")]


def test_every_number_a_record_may_have_is_read_back(folder: Path) -> None:
    """The bounds that keep foreign numbers out let every number of our own in."""
    values = record("none", run__seed=2**63 - 1, drift_ratio=-0.5, step_s_mad=0.0, parity_noise_ratio=1e-17)
    with store.ResultStore(Path("own"), "own", "s") as results:
        results.append(Record(**values))
    assert store.read(Path("own")) == ([values], [])
    assert config.MAX_LAYERS < store.MAX_NUMBER


def test_a_figure_that_is_no_number_is_unknown(folder: Path) -> None:
    """As where gradients overflow: it once lost the record and ended the session."""
    fields = {"parity_noise_ratio": float("nan"), "peak_allocated_bytes": float("inf"), "notes": [float("-inf")]}
    script = {"device_name": "scripted", "strategies": {"*": {"fields": fields}}}
    Path("script.json").write_text(json.dumps(script))
    Path("study.yaml").write_text(GOOD)
    answer = entry.call("run", "study.yaml", "--device", "replay:script.json", *entry.CAPS, "--format", "json")
    entry.check_manners(answer)
    rows = json.loads(answer.out, parse_constant=pytest.fail)
    assert answer.code == 0 and [row["parity_noise_ratio"] for row in rows] == [None, None]
    read, skipped = store.read(Path("results"))
    assert len(read) == 2 and skipped == []


def test_wide_characters_are_not_cut(folder: Path) -> None:
    records = [record("none", model__family="日本語日本語"), record("per-block", model__family=":smile:")]
    text = reporting.draw(records, width=None)
    assert "日本語日本語" in text and ":smile:" in text
