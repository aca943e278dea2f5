"""What a study expands to: vary, on_cpu, --set, sweeps; and refusals in exact words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckbench import specs, study
from ckbench.errors import ConfigError

Write = Callable[[str | bytes], Path]

BASE = """\
name: tiny
model:
  n_layers: 4
  d_model: 32
  n_heads: 4
  vocab_size: 64
train:
  batch_size: 2
  seq_len: 16
"""
SET_FORM = "write section.key=value, for example train.batch_size=4"


def told(write: Write, text: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        study.load(write(text), **options)
    return list(error.value.faults)


def varied(points: list[study.Point]) -> list[tuple[Any, ...]]:
    return [tuple(value for _, value in point.varied) for point in points]


def test_vary_goes_coarse_to_fine(write_study: Write) -> None:
    found = study.load(write_study(BASE + "vary:\n  model.n_layers: 2..6\n"))
    points = found.points("cuda")
    assert varied(points) == [(2,), (6,), (4,), (3,), (5,)]
    assert [point.model.n_layers for point in points] == [2, 6, 4, 3, 5]
    assert points[0].varied == (("model.n_layers", 2),)


def test_vary_forms(write_study: Write) -> None:
    def values(text: str) -> list[Any]:
        return sorted(value for (value,) in varied(study.load(write_study(f"{BASE}vary:\n  {text}\n")).points("cpu")))

    assert values("model.n_layers: 2..48x2") == [2, 4, 8, 16, 32]
    assert values("model.n_layers: 2..12:5") == [2, 7, 12]
    assert values("model.n_layers: [2, 12]") == [2, 12]
    assert values("model.n_layers: 7") == [7]
    assert values("train.precision: [fp32, bf16]") == ["bf16", "fp32"]
    assert values("train.precision: bf16") == ["bf16"]
    assert values("model.dropout: [0, 0.1]") == [0, 0.1]
    assert values("model.tie_embeddings: [true, false]") == [False, True]


def test_two_axes_make_a_grid(write_study: Write) -> None:
    found = study.load(write_study(BASE + "vary:\n  model.n_layers: 1..3\n  train.batch_size: [1, 2]\n"))
    points = found.points("cuda")
    assert sorted(varied(points)) == [(n, b) for n in (1, 2, 3) for b in (1, 2)]
    assert set(varied(points)[:4]) == {(1, 1), (1, 2), (3, 1), (3, 2)}, "the corners come first"
    assert all((p.model.n_layers, p.train.batch_size) == v for p, v in zip(points, varied(points), strict=True))


def test_a_key_that_varies_may_be_missing_from_its_section(write_study: Write) -> None:
    text = BASE.replace("  n_layers: 4\n", "") + "vary: {model.n_layers: [2, 3]}\n"
    assert varied(study.load(write_study(text)).points("cuda")) == [(2,), (3,)]


def test_strategies_that_fit_no_point_are_found_at_once(write_study: Write) -> None:
    text = BASE + "strategies: ['nested:2,reentrant']\nvary: {model.n_layers: [1, 4]}\n"
    assert told(write_study, text)[0].startswith("study.yaml:10: strategy nested:2,reentrant: reentrant")


@pytest.mark.parametrize(
    ("vary", "fault"),
    [
        ("[model]", "study.yaml:10: vary must be a mapping of keys"),
        ("~", "study.yaml:10: vary must be a mapping of keys"),
        ("{model.layers: 2..4}", "study.yaml:10: unknown key 'layers' in model; did you mean 'n_layers'?"),
        ("{n_layers: 2..4}", "study.yaml:10: unknown key 'n_layers'; did you mean 'model.n_layers'?"),
        ("{seq: 2..4}", "study.yaml:10: unknown key 'seq'; did you mean 'train.seq_len'?"),
        (
            "{foo.bar: 2..4}",
            "study.yaml:10: unknown key 'foo.bar'; write section.key with one of the sections model, train, run",
        ),
        (
            "{run.seed: 1..3}",
            "study.yaml:10: run.seed cannot vary: it says how to measure; vary keys of model and train",
        ),
        (
            "{model.n_layers: 4..2}",
            "study.yaml:10: vary model.n_layers: '4..2' runs downwards; write the smaller end first",
        ),
        (
            "{model.n_layers: []}",
            "study.yaml:10: vary model.n_layers: write a range like 2..48:2 or a list like [2, 4, 8]",
        ),
        (
            "{model.n_layers: true}",
            "study.yaml:10: vary model.n_layers: write a range like 2..48:2 or a list like [2, 4, 8]",
        ),
        ("\n  model.n_layers: [2, x]", 'study.yaml:11: model.n_layers must be a whole number, got "x"'),
        ("\n  model.n_layers: [2, 2.5]", "study.yaml:11: model.n_layers must be a whole number, got 2.5"),
        ("{model.d_model: [32, 30]}", "study.yaml:2: d_model 30 is not a multiple of n_heads 4"),
        (
            "{model.n_layers: 1..9999, train.batch_size: [1, 2, 3]}",
            "study.yaml: the grid has 29997 points, more than 20000",
        ),
    ],
)
def test_vary_refusals(write_study: Write, vary: str, fault: str) -> None:
    assert told(write_study, f"{BASE}vary: {vary}\n") == [fault]


CPU = """\
on_cpu:
  model:
    n_layers: 2
    dropout: 0.1
  train: {lr: 1e-3}
  strategies: [none, sqrt]
  vary: {train.batch_size: [1, 2]}
"""


def test_on_cpu_applies_on_cpu_only(write_study: Write) -> None:
    found = study.load(write_study(BASE + CPU))
    (gpu,) = found.points("cuda")
    assert (gpu.model.n_layers, gpu.model.dropout, gpu.train.lr) == (4, 0.0, 1e-4)
    cpu = found.points("cpu")
    assert [point.train.batch_size for point in cpu] == [1, 2]
    assert (cpu[0].model.n_layers, cpu[0].model.dropout, cpu[0].train.lr) == (2, 0.1, 1e-3)
    assert cpu[0].model.d_model == gpu.model.d_model == 32, "what on_cpu does not name stays"
    assert [spec.label for spec in cpu[0].strategies] == ["none", "sqrt"]
    assert [spec.label for spec in gpu.strategies] == ["none", "per-block"]


def test_on_cpu_says_what_it_changes(write_study: Write) -> None:
    assert study.load(write_study(BASE + CPU)).cpu_notes() == [
        "model.n_layers 4 -> 2",
        "model.dropout unset -> 0.1",
        "train.lr unset -> 0.001",
        'strategies unset -> ["none", "sqrt"]',
        "vary.train.batch_size unset -> [1, 2]",
    ]
    assert study.load(write_study(BASE)).cpu_notes() == []


@pytest.mark.parametrize(
    ("on_cpu", "faults"),
    [
        ("~", ["study.yaml:10: on_cpu must be a mapping of keys"]),
        ("{model: 3}", ["study.yaml:10: on_cpu.model must be a mapping of keys"]),
        ("{foo: 3}", ["study.yaml:10: unknown key 'foo' in on_cpu; have: model, train, run, strategies, vary"]),
        ("{n_layers: 3}", ["study.yaml:10: misplaced key 'n_layers' in on_cpu; did you mean 'model.n_layers'?"]),
        ("\n  model:\n    layers: 2", ["study.yaml:12: unknown key 'layers' in model; did you mean 'n_layers'?"]),
        ("\n  model:\n    n_layers: x", ['study.yaml:12: model.n_layers must be a whole number, got "x"']),
        ("\n  train:\n    lr: ~", ["study.yaml:12: train.lr is null; give a value or leave the key out"]),
        (
            "\n  strategies:\n    - none\n    - perblock",
            ["study.yaml:13: unknown strategy 'perblock'; did you mean 'per-block'?"],
        ),
        (
            "\n  vary:\n    model.n_layers: 3..1",
            ["study.yaml:12: vary model.n_layers: '3..1' runs downwards; write the smaller end first"],
        ),
    ],
)
def test_on_cpu_refusals_hold_on_every_machine(write_study: Write, on_cpu: str, faults: list[str]) -> None:
    assert told(write_study, f"{BASE}on_cpu: {on_cpu}\n") == faults


def test_set_wins_over_the_file_and_over_on_cpu(write_study: Write) -> None:
    found = study.load(write_study(BASE + CPU), sets=("model.n_layers=6", "train.lr=1e-2", "run.rounds=2"))
    assert [point.model.n_layers for kind in ("cuda", "cpu") for point in found.points(kind)] == [6, 6, 6]
    assert {point.train.lr for point in found.points("cpu")} == {0.01}
    assert found.points("cuda")[0].run.rounds == 2


def test_set_reads_values_as_the_file_does(write_study: Write) -> None:
    def point(*sets: str) -> study.Point:
        return study.load(write_study(BASE), sets=sets).points("cuda")[0]

    assert point("model.d_ff=[64, 32, 64, 32]").model.d_ff == (64, 32, 64, 32)
    assert point("run.parity=no").run.parity is False
    assert point(" train.precision = bf16 ").train.precision == "bf16"
    assert point("model.n_kv_heads=~").model.n_kv_heads is None
    assert point("run.device=replay:a=b.json").run.device == "replay:a=b.json"
    assert point("model.n_layers=2", "model.n_layers=3").model.n_layers == 3
    assert study.load(write_study(BASE), sets=("run.device=cpu",)).device() == "cpu"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model.n_layers", f"--set 'model.n_layers': {SET_FORM}"),
        ("n_layers=3", f"--set 'n_layers=3': {SET_FORM}"),
        ("strategies=none", f"--set 'strategies=none': {SET_FORM}"),
        ("model.layers=3", "--set 'model.layers=3': unknown key 'layers' in model; did you mean 'n_layers'?"),
        (
            "train.n_layers=3",
            "--set 'train.n_layers=3': misplaced key 'n_layers' in train; did you mean 'model.n_layers'?",
        ),
        (
            "foo.bar=1",
            "--set 'foo.bar=1': unknown key 'foo.bar'; write section.key with one of the sections model, train, run",
        ),
        ("model.n_layers=x", '--set model.n_layers: model.n_layers must be a whole number, got "x"'),
        ("model.n_layers=4.5", "--set model.n_layers: model.n_layers must be a whole number, got 4.5"),
        ("model.n_layers=true", "--set model.n_layers: model.n_layers must be a whole number, got true"),
        ("model.n_layers=", "--set model.n_layers: model.n_layers is null; give a value or leave the key out"),
        ("run.device=tpu", '--set run.device: run.device must be auto, cpu, cuda, cuda:N or replay:FILE, got "tpu"'),
        ("model.d_model=30", "study.yaml:2: d_model 30 is not a multiple of n_heads 4"),
        ("model.n_layers=[1", "command line:1: expected ',' or ']', but got '<stream end>'"),
        ("train.seq_len=!!python/object:os.system 3", "command line:1: tag 'python/object:os.system' is not allowed"),
    ],
)
def test_set_refusals(write_study: Write, text: str, fault: str) -> None:
    assert told(write_study, BASE, sets=(text,)) == [fault]


def test_strategies_given_replace_those_of_the_file(write_study: Write) -> None:
    found = study.load(write_study(BASE + "strategies: [sqrt]\n"), strategies=("none", "every-k:2"))
    assert [spec.label for spec in found.points("cpu")[0].strategies] == ["none", "every-k:2"]
    assert told(write_study, BASE, strategies=("perblock",)) == [
        "--strategy: unknown strategy 'perblock'; did you mean 'per-block'?"
    ]


def test_a_sweep_adds_to_vary_and_replaces_its_own_key(write_study: Write) -> None:
    path = write_study(BASE + "vary: {train.batch_size: [1, 2]}\n")
    found = study.load(path, swept={"model.n_layers": [2, 3], "train.batch_size": [4]})
    assert sorted(varied(found.points("cuda"))) == [(4, 2), (4, 3)]


def test_a_trial_knows_its_configuration_whatever_its_round(write_study: Write) -> None:
    (point,) = study.load(write_study(BASE)).points("cuda")
    first, other = point.config(specs.parse("per-block")), point.config(specs.parse("sqrt"))
    assert first.configuration_id() == point.config(specs.parse("per_block")).configuration_id()
    assert first.configuration_id() != other.configuration_id()
    calmer = first.model_copy(update={"run": first.run.model_copy(update={"rounds": 9, "max_seconds": 1.0})})
    assert calmer.configuration_id() == first.configuration_id(), "how often does not change what"
    reseeded = first.model_copy(update={"run": first.run.model_copy(update={"seed": 9})})
    assert reseeded.configuration_id() != first.configuration_id()
    assert len(first.configuration_id()) == 16


def test_the_name_is_the_file_stem_unless_given(write_study: Write) -> None:
    assert study.load(write_study(BASE)).name == "tiny"
    assert study.load(write_study(BASE.replace("name: tiny\n", ""))).name == "study"
