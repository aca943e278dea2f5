"""Estimates are written beside the records, replace their own study's alone, and are read back as evidence."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckbench import estimating, largest
from ckbench.claims import evidence, making
from ckbench.config import RunConfig
from ckbench.errors import StoreError
from ckbench.estimates import Estimate
from ckbench.estimating import Estimated


class Probe:
    """Answers for a device without starting a process."""

    def probe(self, device: str) -> dict[str, Any]:
        """Give the facts that a file of estimates keeps."""
        return {"facts": {"ckbench": "0", "code": "abc", "torch": "2"}, "asked": device}


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate by counting layers, and find a largest size by the batch."""

    def estimate_study(study: Any, kind: str, launcher: Any, card: None, tell: Any) -> list[Estimated]:
        assert kind == "cuda"
        configs: list[RunConfig] = [p.config(s) for p in study.points(kind) for s in p.strategies]
        return [
            Estimated(
                config=config,
                varied=(),
                estimate=Estimate(strategy=config.strategy.label, saved_bytes=1000 * (config.model.n_layers or 0)),
            )
            for config in configs
        ]

    def estimate_largest(study: Any, axis: str, kind: str, **how: Any) -> list[largest.Answer]:
        (point,) = study.points(kind)
        found = largest.Found(size=point.train.batch_size, size_bytes=1, next_size=None, next_bytes=None, n_trials=1)
        return [largest.Answer(strategy=spec.label, found=found, record=None) for spec in point.strategies]

    monkeypatch.setattr(estimating, "estimate_study", estimate_study)
    monkeypatch.setattr(largest, "estimate_largest", estimate_largest)


def make(out: Path, *names: str) -> Path | None:
    return making.estimate(names, out=out, launcher=Probe(), tell=lambda line: None)  # type: ignore[arg-type]


def test_estimates_are_read_back_by_study_strategy_and_keys(tmp_path: Path) -> None:
    make(tmp_path, "gpt3_layer", "larger_models")
    ((found,), _) = evidence.read(tmp_path)
    where = {"attention": "flash", "batch_size": 32}
    assert found.estimate("gpt3_layer", "per-block", "saved_bytes", n_layers=2, **where) == 2000
    assert found.estimate("larger_models", "none", "largest", batch_size=64) == 64
    assert found.estimated_settings("larger_models", "batch_size") == list(making.BATCHES)


def test_each_row_names_the_command_that_makes_it(tmp_path: Path) -> None:
    path = make(tmp_path, "gpt22b_layer", "larger_models")
    assert path is not None
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    commands = {row["command"] for row in rows}
    assert "ckbench estimate configs/articles/gpt22b_layer.yaml" in commands
    assert any(command.endswith("--set train.batch_size=64") for command in commands)


def test_estimates_of_other_studies_stay(tmp_path: Path) -> None:
    make(tmp_path, "gpt3_layer")
    make(tmp_path, "gpt22b_layer")
    path = make(tmp_path, "gpt22b_layer")
    assert path is not None
    studies = [row["study"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    assert studies.count("gpt22b_layer") == 12 and studies.count("gpt3_layer") == 24


def test_a_study_that_is_run_is_not_estimated(tmp_path: Path) -> None:
    assert make(tmp_path, "memory_laws") is None
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / evidence.ESTIMATES_NAME
    path.write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match="remove it"):
        make(tmp_path, "gpt22b_layer")
    assert path.read_text(encoding="utf-8") == "{"
