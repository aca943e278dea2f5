"""ckbench from Python: records from any kind of config, a frame with the documented columns, nothing printed."""

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import ckbench
from ckbench import frames, records, study
from ckbench.config import StrategySpec
from ckbench.errors import CkbenchError, ConfigError, DeviceUnavailable, StoreError
from ckbench.records import FIELDS, Record
from ckbench.study import SECTION_CLASSES
from tests.sample_records import MIB, record
from tests.sample_records import study as sample_study

ROOT = Path(ckbench.__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- columns: begin -->", "<!-- columns: end -->"
STUDY: dict[str, Any] = {
    "name": "tiny",
    "model": {"n_layers": 4, "d_model": 32, "n_heads": 4, "vocab_size": 64},
    "train": {"batch_size": 2, "seq_len": 16},
    "strategies": ["none", "per-block"],
    "run": {"rounds": 2, "max_steps": 10},
}
Device = Callable[..., str]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Go to an empty folder, and give a device there whose answers are scripted."""
    monkeypatch.chdir(tmp_path)

    def make(**top: Any) -> str:
        answers = {"*": {"step_s": 0.01, "fields": {"peak_allocated_bytes": MIB}}, **top.pop("strategies", {})}
        Path("script.json").write_text(json.dumps({"device_name": "scripted", "strategies": answers, **top}))
        return "replay:script.json"

    return make


def in_fresh_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; runpy.run_path('script.py')",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import ckbench\nprint([m for m in ('torch', 'pandas', 'pydantic', 'typer', 'yaml') if m in sys.modules])\n"
    done = in_fresh_python("import sys\n" + code, tmp_path)
    assert done.stdout == "[]\n", done.stderr


def test_public_names_are_where_they_are_promised() -> None:
    assert set(ckbench.__all__) >= {"__version__", "run", "load", "frame"}
    for name in ckbench.__all__:
        assert getattr(ckbench, name) is not None and name in dir(ckbench)
    stub = (ROOT / "ckbench" / "__init__.pyi").read_text(encoding="utf-8")
    told = set(re.findall(r"^from [\w.]+ import \w+ as (\w+)$", stub, flags=re.MULTILINE)) | {"__version__"}
    assert told == set(ckbench.__all__), "__init__.pyi and __init__.py name the same"
    with pytest.raises(AttributeError, match="nonsense"):
        ckbench.nonsense  # type: ignore[attr-defined]  # noqa: B018


def outcome(found: list[Record]) -> list[tuple[str, int, str, float | None, int | None]]:
    return [(r.strategy, r.round, r.status, r.step_s_median, r.peak_allocated_bytes) for r in found]


def test_a_path_a_mapping_and_a_study_give_the_same(
    device: Device, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = device()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("temporary").resolve()))
    Path("temporary").mkdir()
    Path("study.yaml").write_text(json.dumps(STUDY))
    before = json.dumps(STUDY)
    configs: list[Any] = [STUDY, "study.yaml", Path("study.yaml"), study.load(Path("study.yaml"))]
    found = [ckbench.run(config, device=name) for config in configs]
    assert all(isinstance(each, Record) for each in found[0])
    assert outcome(found[0]) == [
        ("none", 0, "ok", 0.01, MIB),
        ("per-block", 0, "ok", 0.01, MIB),
        ("per-block", 1, "ok", 0.01, MIB),
        ("none", 1, "ok", 0.01, MIB),
    ]
    assert all(outcome(each) == outcome(found[0]) for each in found)
    assert {each[0].study for each in found} == {"tiny"}
    assert capfd.readouterr() == ("", "")
    assert json.dumps(STUDY) == before, "what is given is left as it was"
    assert sorted(path.name for path in Path().rglob("*")) == ["script.json", "study.yaml", "temporary"]


@pytest.mark.parametrize("kind", ["mapping", "study"])
def test_strategies_and_overrides_replace_those_of_the_study(device: Device, kind: str) -> None:
    Path("study.yaml").write_text(json.dumps(STUDY))
    config: Any = STUDY if kind == "mapping" else study.load(Path("study.yaml"), sets=("train.seq_len=8",))
    found = ckbench.run(
        config,
        strategies=["every-k:2", {"name": "per-block", "skip_last": True}],
        device=device(),
        overrides={"run.rounds": 1, "model.n_layers": 6},
    )
    assert [(r.strategy, r.model["n_layers"]) for r in found] == [("every-k:2", 6), ("per-block,skip_last", 6)]
    assert found[0].train["seq_len"] == (16 if kind == "mapping" else 8)
    assert len(ckbench.run(config, strategies="sqrt", device=device(), overrides={"run.rounds": 1})) == 1


def test_a_mapping_may_hold_what_python_has(device: Device) -> None:
    import numpy as np

    config = {
        **STUDY,
        "model": {**STUDY["model"], "d_ff": (64, 64, 32, 32), "dropout": np.float64(0.1)},
        "train": {"batch_size": np.int64(4), "seq_len": 16},
        "vary": {"train.seq_len": range(8, 17, 8)},
    }
    found = ckbench.run(config, device=device(), overrides={"run.rounds": np.int32(1)})
    assert {(r.train["batch_size"], r.train["seq_len"], r.model["dropout"]) for r in found} == {
        (4, 8, 0.1),
        (4, 16, 0.1),
    }
    assert found[0].model["d_ff"] == [64, 64, 32, 32]


def test_out_keeps_what_is_given_back(device: Device) -> None:
    found = ckbench.run(STUDY, device=device(), out="kept")
    frame = ckbench.load("kept")
    assert list(frame["record_id"]) == [r.record_id for r in found]
    pd.testing.assert_frame_equal(frame, ckbench.frame(found))
    again = ckbench.run(STUDY, device=device(), out=Path("kept"), resume=True)
    assert [r.record_id for r in again] == [r.record_id for r in found]
    assert len(list(Path("kept").glob("*.jsonl"))) == 1, "nothing was left to measure"


def test_what_happens_is_told_to_who_asks(device: Device, capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    ckbench.run(STUDY, device=device(), tell=lines.append)
    assert len(lines) == 5 and lines[0].startswith("4 trials to run") and "per-block, round 1 of 2: ok" in lines[2]
    assert capfd.readouterr() == ("", "")


def test_a_failed_trial_is_a_record(device: Device) -> None:
    oom = {"fail": {"raise": "CUDA out of memory.", "type": "OutOfMemoryError"}}
    found = ckbench.run(STUDY, device=device(strategies={"per-block": oom}))
    assert [(r.strategy, r.status) for r in found] == [("none", "ok"), ("per-block", "oom"), ("none", "ok")]


@pytest.mark.parametrize(
    ("how", "kind", "fault"),
    [
        ({"config": "missing.yaml"}, ConfigError, r"^missing.yaml: no such file$"),
        ({"config": {**STUDY, "modell": {}}}, ConfigError, r"^config: unknown key 'modell'; did you mean 'model'\?$"),
        ({"config": {**STUDY, "model": {**STUDY["model"], "n_heads": 5}}}, ConfigError, "^config: d_model 32 is not a multiple"),
        ({"config": {**STUDY, "model": {"n_layers": object()}}}, ConfigError, r"^config.model.n_layers: <object .* is nothing that a study holds"),
        ({"config": {**STUDY, "model": {"n_layers": float("nan")}}}, ConfigError, "config.model.n_layers: nan is nothing"),
        ({"config": {**STUDY, 3: 4}}, ConfigError, "^config: the key 3 is no word; write '3'$"),
        ({"config": 3}, ConfigError, "^config is a path, a mapping or a Study, got int$"),
        ({"config": None}, ConfigError, "got NoneType$"),
        ({"config": {"model": STUDY["model"]}}, ConfigError, "config: section 'train' is missing"),
        ({"strategies": "per-blck"}, ConfigError, r"^strategies: unknown strategy 'per-blck'; did you mean 'per-block'\?$"),
        ({"strategies": []}, ConfigError, "strategies is empty"),
        ({"overrides": {"train.batch_sizes": 3}}, ConfigError, r"^overrides 'train.batch_sizes=3': unknown key 'batch_sizes' in train; did you mean 'batch_size'"),
        ({"overrides": {"train.batch_size": "x"}}, ConfigError, "^overrides train.batch_size: train.batch_size must be a whole number, got \"x\"$"),
        ({"device": "tpu"}, ConfigError, "run.device must be auto, cpu"),
        ({"device": "replay:none.json"}, DeviceUnavailable, "none.json: not a replay script"),
        ({"out": "script.json"}, StoreError, "script.json: is a file, not a results folder"),
        ({"resume": True}, ConfigError, "give out$"),
        ({"out": "kept", "retry_oom": True}, ConfigError, "retry_oom needs resume=True"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_run_is_an_exception(
    device: Device, capfd: pytest.CaptureFixture[str], how: dict[str, Any], kind: type[CkbenchError], fault: str
) -> None:
    with pytest.raises(kind, match=fault) as told:
        ckbench.run(**{"config": STUDY, "device": device(), **how})
    assert len(str(told.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")
    assert not list(Path().rglob("*.jsonl"))


def test_ctrl_c_is_an_exception_and_finished_trials_are_kept(device: Device) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("per-block, round 1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckbench.run(STUDY, device=device(), out="kept", tell=interrupt)
    assert list(ckbench.load("kept")["strategy"]) == ["none", "per-block"]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_script_needs_no_main_guard(device: Device, tmp_path: Path, start_method: str) -> None:
    """Trials in processes of their own do not run the script again."""
    name = device(isolated=True)
    config = {**STUDY, "run": {"rounds": 1, "max_steps": 10, "start_method": start_method}}
    Path("plain.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nprint('top')\nimport ckbench\n"
        f"found = ckbench.run({config!r}, device={name!r}, estimates=False)\n"
        "print([(r.strategy, r.status, r.message) for r in found])\n"
        "print(__file__ is not None, __spec__)\n"
    )
    done = subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["top", "[('none', 'ok', None), ('per-block', 'ok', None)]", "True None"]


def test_every_field_is_a_column_of_its_dtype() -> None:
    frame = ckbench.frame(sample_study())
    assert frame.shape[0] == 9 and len(frame.columns) == len(set(frame.columns))
    flat = [name for name in FIELDS if name not in frames.NESTED]
    assert [name for name in frame.columns if "." not in name] == flat
    for name in frame.columns:
        if name in frames.DECLARED:
            assert str(frame[name].dtype) == frames.DECLARED[name], name
    assert frames.NESTED == ("strategy_spec", "plan", "model", "train", "run", "environment")
    assert frame["model.n_layers"].tolist() == [4] * 9 and str(frame["environment.load_1min"].dtype) == "Float64"
    assert "environment.allocator" not in frame.columns, "an empty mapping has no keys"


def test_unknown_is_na() -> None:
    frame = ckbench.frame([record("none"), record("per-block", round_number=1)])
    assert frame["peak_allocated_bytes"].isna().tolist() == [False, True]
    assert frame["message"].isna().all() and frame["message"].dtype == "string"
    assert frame["peak_reserved_bytes"].isna().all() and frame["peak_reserved_bytes"].dtype == "Int64"
    assert frame["peak_allocated_bytes"].sum() == 80 * MIB
    other = ckbench.frame([record("none"), record("none", model__image_size=8)])
    assert other["model.image_size"].isna().tolist() == [True, False] and other["model.image_size"].dtype == "Int64"


def test_records_of_any_kind_and_none_at_all() -> None:
    plain = sample_study()
    pd.testing.assert_frame_equal(ckbench.frame(plain), ckbench.frame(Record(**each) for each in plain))
    empty = ckbench.frame([])
    assert len(empty) == 0 and list(empty.columns) == [name for name in FIELDS if name not in frames.NESTED]
    assert empty["step_s_median"].dtype == "Float64" and ckbench.frame([], pooled=True).shape[0] == 0


def test_big_numbers_stay_exact() -> None:
    frame = ckbench.frame([record("none", peak_allocated_bytes=2**62 + 1), record("none", peak_allocated_bytes=None)])
    assert frame["peak_allocated_bytes"][0] == 2**62 + 1


def test_nested_keys_have_dots() -> None:
    args = {"depth": 3, "inner": {"wide": True}, "a.b": 1, "list": [1, 2]}
    frame = ckbench.frame(
        [record("none", model={"family": "custom", "args": args}, plan={"n_layers": 4, "regions": [{}]})]
    )
    assert frame["model.args.depth"][0] == 3 and frame["model.args.inner.wide"][0] and frame['model.args."a.b"'][0] == 1
    assert frame["model.args.list"][0] == [1, 2] and frame["plan.regions"][0] == [{}]
    assert frame["plan.n_layers"].dtype == "Int64" and "plan.early_stop" not in frame.columns


def test_a_foreign_type_is_shown_as_it_is() -> None:
    frame = ckbench.frame([record("none", model__n_layers="four"), record("none", model__n_layers=4)])
    assert frame["model.n_layers"].dtype == object and frame["model.n_layers"].tolist() == ["four", 4]
    text = ckbench.frame([record("none", model__n_layers="four")])
    assert text["model.n_layers"].dtype == "string"
    whole = ckbench.frame([record("none", train__lr=1)])
    assert whole["train.lr"].dtype == "Float64", "a whole number is a number"


def test_times_are_times() -> None:
    frame = ckbench.frame([record("none"), record("none", started_at="yesterday")])
    assert frame["started_at"][0] == pd.Timestamp("2026-11-29T10:00:00Z")
    assert frame["started_at"].isna().tolist() == [False, True]


def test_pooled_rows_are_those_of_the_report() -> None:
    rows = ckbench.frame(sample_study(), pooled=True)
    assert rows["strategy"].tolist() == ["none", "per-block", "every-k:2"]
    assert rows["slowdown_ratio"].tolist() == pytest.approx([1, 1.25, 1.3]) and rows["rounds"].tolist() == [3] * 3
    assert {name: str(rows[name].dtype) for name in frames.POOLED} == frames.POOLED
    assert rows["peak_change_ratio"][1] == pytest.approx(50 / 80 - 1)
    other = ckbench.frame(sample_study(), pooled=True, baseline="per-block")
    assert other["baseline"].tolist() == ["per-block"] * 3 and other["slowdown_ratio"][0] == pytest.approx(1 / 1.25)
    with pytest.raises(ConfigError, match="did you mean 'per-block'"):
        ckbench.frame(sample_study(), pooled=True, baseline="per-blck")
    with pytest.raises(ConfigError, match="pooled=True"):
        ckbench.frame(sample_study(), baseline="per-block")


def test_lines_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record("none")) + "\nnot a record\n{}\n")
    with pytest.warns(UserWarning, match="a.jsonl:2: not JSON and 1 more"):
        frame = ckbench.load(file)
    assert len(frame) == 1 and len(frame.attrs["not_used"]) == 2
    file.write_text(json.dumps(record("none")) + "\n")
    assert ckbench.load(str(tmp_path)).attrs == {"not_used": []}
    with pytest.raises(StoreError, match="no such results folder"):
        ckbench.load(tmp_path / "nowhere")
    file.write_text("not a record\n")
    with pytest.raises(StoreError, match="passed over: .*a.jsonl:1: not JSON"):
        ckbench.load(tmp_path)


def meanings() -> dict[str, str]:
    """Read what the source says under each field of a record."""
    tree = ast.parse(Path(records.__file__).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Record").body
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            told = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[node.target.id] = " ".join(str(told).split())
    return found


def column_table() -> str:
    """Make the table of columns from what is declared, with the meanings that stand in the source."""
    fields = meanings()
    classes = {**SECTION_CLASSES, "strategy_spec": (StrategySpec,)}
    lines = ["| column | dtype | meaning |", "| --- | --- | --- |"]
    for column, dtype in frames.DECLARED.items():
        section, _, key = column.partition(".")
        infos = [cls.model_fields[key] for cls in classes.get(section, ()) if key in cls.model_fields]
        told = next((" ".join(info.description.split()) for info in infos if info.description), "")
        if section == "plan":
            told = f"`{key}` of the class Plan in `ckbench/plan.py`"
        lines.append(f"| `{column}` | {dtype} | {told if key else fields[column]} |")
    return "\n".join(lines)


def test_every_column_is_documented(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    wanted = f"{BEGIN}\n{column_table()}\n{END}"
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page.partition(BEGIN)[0] + wanted + page.partition(END)[2], encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
    assert wanted in page, "run pytest with --update-golden and read the diff"
    for name, dtype in frames.POOLED.items():
        assert f"| `{name}` | {dtype} | " in page


def test_the_page_s_code_runs(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    """Over scripted answers, so that it takes no time; the notebook does the same for real."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert 'device="cpu"' in code
    exec(code.replace('device="cpu"', f"device={device()!r}"), {})
    told = capsys.readouterr().out
    assert told.startswith(f"none ok {MIB}\n") and "slowdown_low" in told
    assert records.SCHEMA == 1
