"""The worked example of a user's own model, run whole from its own folder, and what a study of such a model may ask."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckbench
from ckbench import study
from ckbench.errors import ConfigError

ROOT = Path(ckbench.__file__).parents[1]
Write = Callable[[str | bytes], Path]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example's folder."""
    source = Path(__file__).parents[2] / "examples" / "custom_model"
    return Path(
        shutil.copytree(source, tmp_path / "custom_model", ignore=shutil.ignore_patterns("results", "__pycache__"))
    )


QUICK = ("--quick", "--device", "cpu", "--set", "run.threads=1", "--set", "train.batch_size=2")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        # -P: as the installed command, which does not have the current directory on its path either
        [sys.executable, "-P", "-m", "ckbench", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in (folder / "results").glob("*.jsonl") for line in file.read_text().splitlines()]


def test_the_example_runs_from_its_folder(example: Path) -> None:
    done = run(example, "run", "study.yaml", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {record["strategy"]: record for record in records(example)}
    assert list(rows) == ["none", "per-block", "sqrt", "ffn-only", "attn-only"]
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert [row["parity"] for row in rows.values()] == ["exact"] * 5
    assert [row["block_calls_backward"] for row in rows.values()] == [0, 4, 4, 0, 0]
    assert rows["per-block"]["saved_bytes"] < rows["none"]["saved_bytes"]
    assert rows["none"]["model"]["n_layers"] is None
    assert "family custom, build model:build" in done.stdout.replace("\n ", " ")
    assert "args vocab=256 depth=4 width=64" in done.stdout.replace("\n ", " ")
    again = run(example, "report", "results")
    assert again.returncode == 0 and "attn-only" in again.stdout
    assert "__pycache__" not in {path.name for path in (ROOT / "examples" / "custom_model").iterdir()}


def test_a_sweep_over_its_own_arguments(example: Path) -> None:
    text = (example / "study.yaml").read_text() + "name: grown\nvary: {model.args.depth: [1, 2]}\n"
    (example / "grown.yaml").write_text(text)
    (example / "script.json").write_text('{"device_name": "scripted", "strategies": {"*": {"step_s": 0.01}}}')
    scripted = ("--set", "run.rounds=1", "--device", "replay:script.json")
    dry = run(example, "sweep", "grown.yaml", "--batch", "2", "--dry-run", *scripted)
    assert dry.returncode == 0, dry.stderr
    assert "2 points, 10 trials" in dry.stdout and "model.args.depth 1" in dry.stdout
    done = run(example, "run", "grown.yaml", *QUICK, "-s", "none", "-s", "per-block")
    assert done.returncode == 0, done.stdout + done.stderr
    calls = {(r["model"]["args"]["depth"], r["strategy"]): r["block_calls_backward"] for r in records(example)}
    assert calls == {(1, "none"): 0, (1, "per-block"): 1, (2, "none"): 0, (2, "per-block"): 2}
    grouped = run(example, "report", "results", "--group-by", "args.depth")
    assert grouped.returncode == 0 and grouped.stdout.count("study grown") == 2
    assert "args.depth" in done.stdout and "args vocab=256 width=64" in done.stdout.replace("\n ", " ")


def test_what_is_wrong_is_a_row(example: Path) -> None:
    text = (example / "study.yaml").read_text() + "vary: {model.build: ['modell:build', 'model:build']}\n"
    (example / "wrong.yaml").write_text(text)
    done = run(example, "run", "wrong.yaml", *QUICK, "-s", "none", "--set", "model.n_layers=3")
    assert done.returncode == 1
    told = " ".join(done.stdout.split())
    assert "ConfigError: model.build: no module 'modell' in the current directory or installed" in told
    assert "ConfigError: n_layers is 3, but the model has 4 blocks (layers)" in told
    assert "Traceback" not in done.stdout + done.stderr


CUSTOM = """\
model:
  family: custom
  build: model:build
  args: {depth: 2}
  vocab_size: 8
train: {batch_size: 2, seq_len: 8}
"""
HF = """\
model:
  family: hf
  arch: gpt2
  config: {n_embd: 16}
train: {batch_size: 2, seq_len: 8}
"""


def models(loaded: study.Study) -> list[Any]:
    return [point.model for point in loaded.points("cpu")]


def test_arguments_can_be_set_and_varied(write_study: Write) -> None:
    (model,) = models(study.load(write_study(CUSTOM), sets=("model.args.depth=4", "model.args.wide=true")))
    assert model.args == {"depth": 4, "wide": True}
    varied = models(study.load(write_study(CUSTOM + "vary: {model.args.depth: [2, 4]}\n")))
    assert [model.args["depth"] for model in varied] == [2, 4]
    (model,) = models(study.load(write_study(HF), sets=("model.config.n_head=2",)))
    assert model.config == {"n_embd": 16, "n_head": 2}
    assert [m.n_layers for m in models(study.load(write_study(HF), swept={"model.n_layers": [2, 3]}))] == [2, 3]


def test_plans_wait_for_the_model_where_its_depth_is_unknown(write_study: Write) -> None:
    (point,) = study.load(write_study(CUSTOM + "strategies: [none, 'every-k:2', full]\n")).points("cpu")
    assert [(plan, alias) for _, plan, alias in point.plans()] == [(None, None)] * 3
    (point,) = study.load(write_study(CUSTOM), sets=("model.n_layers=1",)).points("cpu")
    assert all(plan is not None for _, plan, _ in point.plans())


@pytest.mark.parametrize(
    ("text", "sets", "fault"),
    [
        (HF.replace("arch: gpt2", "n_layers: 2"), (), "study.yaml:1: family hf needs arch (a model type) or path"),
        (HF, ("model.d_model=3",), "unknown key 'd_model' in model"),
        (HF.replace("arch: gpt2", "arch: vit"), (), "this model makes sequences of 197 itself; leave seq_len out"),
        (CUSTOM, ("model.args=3",), "model.args must be a mapping, got 3"),
        (CUSTOM, ("model.build=model.build",), "model.build"),
        (CUSTOM, ("train.loss=mse",), "loss mse needs head: none"),
        (CUSTOM.replace("  vocab_size: 8\n", ""), (), "family custom needs vocab_size, or batch"),
        (CUSTOM + "strategies: [hf-native]\n", ("model.n_layers=2",), "this model has none; write per-block"),
    ],
)
def test_faults_that_need_no_model(write_study: Write, text: str, sets: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError) as told:
        study.load(write_study(text), sets=sets)
    assert fault in str(told.value)


def test_a_vit_s_sequence_length_may_be_left_out(write_study: Write) -> None:
    text = HF.replace("arch: gpt2", "arch: vit").replace(", seq_len: 8", "")
    text = text.replace("{n_embd: 16}", "{image_size: 32, patch_size: 8}")
    (point,) = study.load(write_study(text)).points("cpu")
    assert point.train.seq_len == 17
