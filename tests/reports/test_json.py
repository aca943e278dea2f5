"""JSON: strict, raw units, null for unknown, the promised keys."""

import json

import pytest

from ckbench import reporting
from tests.sample_records import record, study


def rows(records: list[dict[str, object]]) -> list[dict[str, object]]:
    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    parsed = json.loads(reporting.draw(records, format_="json"), parse_constant=refuse)
    assert isinstance(parsed, list)
    return parsed


def test_rows_carry_raw_units() -> None:
    first = rows(study())[0]
    assert first["peak_allocated_bytes"] == 80 * 2**20
    assert first["step_s_median"] == pytest.approx(0.1 * (1.0 * 1.01 * 1.02) ** (1 / 3))
    assert first["model"] == study()[0]["model"]


def test_unknown_is_null() -> None:
    first = rows([record("none", status="oom", step_s_median=None, samples=None, step_samples_s=[])])[0]
    assert first["nvml_process_bytes"] is None
    assert first["step_s_median"] is None and first["step_s_low"] is None


def test_group_by_keeps_one_list() -> None:
    records = [record("none", model__n_layers=n) for n in (8, 2)]
    parsed = json.loads(reporting.draw(records, format_="json", group_by="n_layers"))
    assert [row["model"]["n_layers"] for row in parsed] == [2, 8]
