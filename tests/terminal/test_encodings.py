"""Terminals without UTF-8: every command works, and what cannot be shown becomes a question mark, never an error."""

from pathlib import Path

import pytest

from ckbench.registry import load, names
from ckbench.reports.base import FileReport
from tests.prove import tool

ASCII = (
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii:strict"},
    {"PYTHONIOENCODING": "cp1252"},
)


@pytest.mark.parametrize(
    "variables", tool.some(1, *ASCII), ids=lambda v: ",".join(f"{name}={value}" for name, value in v.items())
)
def test_measuring_and_reporting(study: Path, variables: dict[str, str]) -> None:
    text = (study / "study.yaml").read_text()
    (study / "stüdy.yaml").write_text(text + 'description: "naïve"\nname: "naïve 日本 ─ ·"\n', encoding="utf-8")
    process = tool.start(study, "run", "stüdy.yaml", "--rounds", "1", env=tool.environment(**variables), text=None)
    out, err = (
        stream.decode("ascii" if "1252" not in str(variables) else "cp1252")
        for stream in process.communicate(timeout=120)
    )
    assert process.returncode == 0, err
    assert "study na" in out and "none" in out and "\\u" not in out
    assert "Error" not in err


@pytest.mark.parametrize(
    "arguments", tool.some(1, ("run", "--help"), ("--help",), ("list",), ("schema",)), ids=" ".join
)
def test_reading_along(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, out, err = tool.finish(tmp_path, *arguments, env=tool.environment(**ASCII[0]))
    assert (code, err) == (0, "") and out.isascii()


@pytest.mark.parametrize("format_", tool.some(1, *names("reports")))
def test_every_format_in_ascii(measured: Path, tmp_path: Path, format_: str) -> None:
    arguments = ["report", "results", "--format", format_]
    if isinstance(load("reports", format_), FileReport):
        arguments += ["--out", str(tmp_path / "figures")]
    code, out, err = tool.finish(measured, *arguments, env=tool.environment(**ASCII[2]))
    assert code == 0 and out.isascii() and err.isascii() and (err == "" or "--out" in arguments)


def test_errors_in_ascii(tmp_path: Path) -> None:
    (tmp_path / "ü.yaml").write_text("日本: 1\n", encoding="utf-8")
    code, out, err = tool.finish(tmp_path, "run", "ü.yaml", env=tool.environment(**ASCII[1]))
    assert (code, out) == (2, "") and err.isascii() and err.startswith("\\xfc.yaml")
