"""LaTeX tables: they compile, whatever a file says, and nothing in them is more than shown."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ckbench import reporting
from ckbench.reports._tex import SPECIAL, escape
from ckbench.store import Skipped
from tests.sample_records import record, study

GOLDEN = Path(__file__).parents[1] / "golden" / "table.tex"
NASTY = "\\ { } $ & # % _ ^ ~ < > | \" ' ` [x] * -- --- ?` !` ,, << >> '' ``  \\input{/etc/passwd} \\\\[1em] ü é ñ č å ß ø µ × √ … – 日本 \x1b[2J"


def compiled(folder: Path, text: str) -> str:
    """Set a paper around the tables, and give LaTeX's log."""
    paper = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\listoftables\n%s\n\\end{document}\n"
    (folder / "paper.tex").write_text(paper % text, encoding="ascii")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "paper.tex"]
    for _ in range(2):  # the list of tables is read back in the second run
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=120)
    log = (folder / "paper.log").read_text(encoding="latin-1")
    assert done.returncode == 0, log
    return log


needs_latex = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex with booktabs")


def test_golden(request: pytest.FixtureRequest) -> None:
    text = reporting.draw(study(), format_="latex")
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


@needs_latex
def test_it_compiles_and_stays_on_the_page(tmp_path: Path) -> None:
    labels = [*(r["strategy"] for r in study(1)), "selective:every-2nd-matmul", "per-block,early_stop=false"]
    records = [
        record(
            label,
            round_number=i,
            order=n,
            model__attention=("auto", "eager")[n % 2],
            peak_phase=("loss", "backward")[n % 2] if i == 0 else None,
            parity=("exact", "within_noise")[n % 2] if i == 0 else None,
        )
        for n, label in enumerate(labels)
        for i in range(3)
    ]
    records.append(record("full", status="oom", peak_allocated_bytes=None, step_s_median=None))
    log = compiled(tmp_path, reporting.draw(records, format_="latex"))
    assert "Overfull" not in log and "undefined" not in log


@needs_latex
@pytest.mark.parametrize("where", ["strategy", "study", "device_name", "message"])
def test_it_compiles_whatever_a_file_says(tmp_path: Path, where: str) -> None:
    failed = record("full", status="oom", message=NASTY, peak_allocated_bytes=None, step_s_median=None)
    records = [record("none"), failed, record(**{"strategy": "per-block", where: NASTY})]
    compiled(tmp_path, reporting.draw(records, format_="latex"))


def test_it_is_ascii_and_one_line_per_row() -> None:
    records = [record("none", study=NASTY, device_name=NASTY), record(NASTY, study=NASTY, device_name=NASTY)]
    text = reporting.draw(records, format_="latex")
    assert text.isascii()
    body = text[text.index("\\midrule") : text.index("\\bottomrule")].splitlines()[1:-1]
    assert len(body) == 2
    n_columns = len(re.search(r"tabular\}\{@\{\}(\w+)@", text).group(1))  # type: ignore[union-attr]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {n_columns - 1}
    printed = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert "\\input" not in printed and "\\textbackslash{}input" in printed


@pytest.mark.parametrize("char", [chr(code) for code in range(32, 127)])
def test_every_ascii_character_is_itself_or_escaped(char: str) -> None:
    written = escape(f"a{char}b")
    special = SPECIAL.get(char)
    assert written == (f"a{special}b" if special else f"a{char}b")
    assert (special is None) == (char.isalnum() or char in " !'()+,-./:;=?@")


def test_characters_that_join_in_print_are_kept_apart() -> None:
    assert escape("--a---b") == "-{}-a-{}-{}-b"
    assert escape("'' ,, ?`") == "'{}' ,{}, ?\\textasciigrave{}"


def test_what_is_left_out_is_named() -> None:
    text = reporting.draw(study(), format_="latex")
    shown = text[text.index("\\toprule") : text.index("\\midrule")]
    comments = "\n".join(line for line in text.splitlines() if line.startswith("%"))
    for head in ("act. MiB", "tokens/s", "calls"):
        assert head not in shown and head in comments
    assert "In every row: owner backward, parity exact, status ok." in text


def test_a_column_stays_where_rows_differ() -> None:
    records = [record("none"), record("full", status="oom", message="no\nroom", peak_allocated_bytes=None)]
    text = reporting.draw(records, format_="latex")
    assert "& status \\\\" in text and "& oom \\\\" in text
    assert "% did not end ok: full: oom: no room\n" in text


def test_doubts_and_what_was_passed_over_are_comments() -> None:
    records = [record("none"), record("per-block", parity="failed")]
    found = reporting.findings(records, skipped=[Skipped(path=Path("r.jsonl"), line=3, reason="not JSON")])
    text = str(reporting.text_report("latex")(found))
    assert found.whole.doubts
    for doubt in found.whole.doubts:
        assert f"% doubt, to be settled before this is printed: {doubt}" in text
    assert "% not used: r.jsonl:3: not JSON" in text


def test_tables_of_groups_have_labels_of_their_own() -> None:
    records = [record(name, model__n_layers=depth) for depth in (4, 8) for name in ("none", "full")]
    text = reporting.draw(records, format_="latex", group_by="model.n_layers")
    assert re.findall(r"\\label\{(.*)\}", text) == ["tab:ckbench-sample-1", "tab:ckbench-sample-2"]
    whole = reporting.draw(records, format_="latex")
    assert re.findall(r"\\label\{(.*)\}", whole) == ["tab:ckbench-sample"]
    assert whole.count("\\addlinespace") == 1


def test_the_front_is_bold() -> None:
    text = reporting.draw(study(), format_="latex")
    assert "\\textbf{none}" in text and "\\textbf{per-block}" in text and "\\textbf{every-k:2}" not in text
    assert "Bold:" in text and "Bold:" not in reporting.draw([record("none"), record("full")], format_="latex")
