"""Standard output holds the table and nothing else, standard error one line a trial; files get no control codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckbench.registry import load, names
from ckbench.reports.base import FileReport
from tests.prove import entry, tool

RUN = ("sweep", "study.yaml", "--layers", "2..3", "--rounds", "1")

FORCING = (
    {
        "FORCE_COLOR": "1",
        "CLICOLOR_FORCE": "1",
        "TTY_COMPATIBLE": "1",
        "TTY_INTERACTIVE": "1",
        "COLORTERM": "truecolor",
    },
    {"NO_COLOR": "1"},
    {"TERM": "dumb"},
    {"COLUMNS": "20"},
    {"CI": "true", "GITHUB_ACTIONS": "true"},
)


@pytest.mark.parametrize("variables", tool.some(1, *FORCING), ids=lambda v: "+".join(v))
def test_output_to_files_is_plain_and_whole(study: Path, variables: dict[str, str]) -> None:
    """Whatever the environment says of colours and widths: these are files."""
    with (study / "out").open("w") as out, (study / "err").open("w") as err:
        code, _, _ = tool.finish(study, *RUN, stdout=out, stderr=err, env=tool.environment(**variables))
    assert code == 0
    table, told = (study / "out").read_text(), (study / "err").read_text()
    assert entry.steering(table + told) == set()
    lines = told.splitlines()
    n_trials = int(lines[0].split()[0])
    assert len(lines) == 1 + n_trials + 1
    assert all(
        re.match(rf"\[{i}/{n_trials}\] .+; (\d+ (s|min|h)\b.*|n/a) left$", line)
        for i, line in enumerate(lines[1:-1], 1)
    )
    assert lines[-1].startswith("records: results/study_")
    assert table == entry.call("report", str(study / "results")).out
    head = next(line for line in table.splitlines() if line.lstrip().startswith("n_layers"))
    shown = ("peak MiB", "owner", "change", "saved MiB", "step ms", "slower", "tokens/s", "parity", "status")
    assert all(word in head for word in shown)


@pytest.mark.parametrize("format_", [n for n in names("reports") if not isinstance(load("reports", n), FileReport)])
def test_every_format_is_plain_in_a_pipe(measured: Path, format_: str) -> None:
    out = entry.call("report", str(measured / "results"), "--format", format_).out
    assert entry.steering(out) == set() and out.endswith("\n") and "..." not in out


def test_numbers_are_sorted_as_numbers(measured: Path) -> None:
    rows = json.loads(entry.call("report", str(measured / "results"), "--format", "json").out)
    depths = [row["model"]["n_layers"] for row in rows]
    assert depths == sorted(depths) and set(depths) == {2, 7, 12}
    for format_ in ("console", "md", "csv"):
        text = entry.call("report", str(measured / "results"), "--format", format_).out
        found = [int(n) for n in re.findall(r"^\W*(2|7|12)\b", text, re.M)] if format_ != "csv" else depths
        assert found == depths


@pytest.mark.parametrize("format_", tool.some(1, "json", "console"))
def test_a_reader_that_leaves_early_is_no_fault(measured: Path, tmp_path: Path, format_: str) -> None:
    big = tmp_path / "big.jsonl"
    lines = b"".join(line for lines in tool.complete_lines(measured).values() for line in lines)
    big.write_bytes(
        b"".join(
            lines.replace(b'"seed":0', b'"seed":%d' % i).replace(b'"record_id":"', b'"record_id":"%d-' % i)
            for i in range(20)
        )
    )
    script = f"{sys.executable} -m ckbench report {big} --format {format_} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], env=tool.environment(), capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.splitlines()[1:] == ["0"]


def test_a_reader_of_progress_that_leaves_early_stops_nothing(study: Path) -> None:
    command = f"{sys.executable} -m ckbench {' '.join(RUN)} --device replay:script.json 2>&1 >table | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=study, env=tool.environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert "slower" in (study / "table").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", tool.some(2, ("list",), ("--help",), ("schema",), ("--version",)), ids=" ".join)
def test_an_output_that_is_full_is_told_in_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        code, _, err = tool.finish(tmp_path, *arguments, stdout=full)
    assert code == 2 and "No space left on device" in err and err.count("\n") == 1


@pytest.mark.parametrize("closed", tool.some(1, "1>&- 2>&-", "1>&-", "2>&-", "0<&-"))
def test_closed_outputs_do_no_harm(study: Path, closed: str) -> None:
    command = f"{sys.executable} -m ckbench {' '.join(RUN)} --device replay:script.json {closed}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=study, env=tool.environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    (lines,) = tool.complete_lines(study).values()
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_file_names_are_safe_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tool.write_study(tmp_path)
    for name in ("a:b|c*?", "CON", "nul.txt", "日本", "a" * 150, "...", "x ", 'q"<>'):
        (tmp_path / "study.yaml").write_text(tool.STUDY + f"name: {json.dumps(name)}\n")
        assert entry.call("run", "study.yaml", "--device", "replay:script.json", *entry.CAPS).code in (0, 130)
    for path in entry.records_below(tmp_path):
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,110}\.jsonl", path.name), path
        stem = path.name.partition(".")[0].upper()
        assert stem not in ("CON", "PRN", "AUX", "NUL") and not re.fullmatch(r"(COM|LPT)\d", stem)
