"""The comparison with published numbers: every row is a trial or has a reason, and errors are what they say."""

import csv
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scripts of benchmarks/ be imported for one test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(BENCHMARKS)
    for name in ("published", "_published_rows", "_published_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def rows() -> list[dict[str, str]]:
    """Read all published rows."""
    found = []
    for path in sorted((BENCHMARKS / "data").glob("published_*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            found += list(csv.DictReader(file))
    return found


@pytest.mark.usefixtures("on_path")
def test_every_row_is_expressed_or_has_a_reason() -> None:
    from _published_rows import case_of

    answers = {row["id"]: case_of(row) for row in rows()}
    assert len(answers) == len(rows()) == 89 + 31
    reasons = {answer for answer in answers.values() if isinstance(answer, str)}
    assert not any("no reason is known" in reason for reason in reasons)
    expressed = {row_id.partition("-")[0] for row_id, answer in answers.items() if not isinstance(answer, str)}
    assert expressed == {"S01", "S02", "S03", "S04a", "S15", "R01", "R07", "N1", "N2", "N3"}
    assert sum(not isinstance(answer, str) for answer in answers.values()) == 78


@pytest.mark.usefixtures("on_path")
def test_errors_are_in_the_rows_own_units() -> None:
    from published import _result

    row = dict.fromkeys(("id", "model", "batch", "seq", "attention", "strategy"), "") | {"grade": "A"}
    assert _result(row | {"value": "2", "unit": "MiB"}, 3 * 2**20, "")["error"] == pytest.approx(0.5)
    assert _result(row | {"value": "2000", "unit": "MB (1e6 B)"}, 1.9e9, "")["error"] == pytest.approx(-0.05)
    assert _result(row | {"value": "-50", "unit": "%"}, -0.6, "")["error"] == pytest.approx(40 / 50 - 1)


@pytest.mark.usefixtures("on_path")
def test_a_softmax_of_an_older_pytorch_keeps_its_input() -> None:
    import _published_models as published
    import torch

    from ckbench.estimate.substitutes import CudaOperations
    from ckbench.estimate.tracker import StorageTracker

    def kept(version: str) -> int:
        tracker = StorageTracker("meta")
        with CudaOperations(None, raises_rms_norm=False), published.torch_of(version), tracker:
            leaf = torch.empty(64, 256, device="meta", requires_grad=True)
            result = torch.softmax(leaf + 1, -1)
            live = tracker.live_bytes
            result.sum().backward()
            assert leaf.grad is not None and leaf.grad.shape == leaf.shape
        return live

    leaf_bytes = 4 * 64 * 256
    assert kept("") == 2 * leaf_bytes, "the leaf and the result"
    assert kept("1.10") == 3 * leaf_bytes
    assert kept("") == 2 * leaf_bytes, "nothing is left behind"


@pytest.mark.usefixtures("on_path")
def test_a_row_is_estimated() -> None:
    """The vision transformer needs no library; a few layers of it here."""
    from _published_rows import Case, case_of
    from published import estimated

    row = next(row for row in rows() if row["id"] == "S02-2")
    case = case_of(row | {"layers": "2", "d_model": "64", "heads": "4", "d_ff": "128"})
    assert isinstance(case, Case)
    n_parameters = 3 * 16 * 16 * 64 + 64 + 64 + 197 * 64 + 2 * (4 * 64 + 4 * 64 * 64 + 4 * 64 + 2 * 64 * 128 + 192)
    n_parameters += 2 * 64 + 64 * 1000 + 1000
    assert estimated(case) > 4 * 3 * n_parameters + case.workspace_bytes
