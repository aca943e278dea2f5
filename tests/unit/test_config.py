"""A study as a person types it: every refusal in its exact words, and what each accepted form comes to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckbench import registry, study
from ckbench.errors import ConfigError
from ckbench.plan import Plan

Write = Callable[[str | bytes], Path]

BASE = """\
model:
  n_layers: 4
  d_model: 32
  n_heads: 4
  vocab_size: 64
train:
  batch_size: 2
  seq_len: 16
"""
STRATEGIES = ", ".join(registry.names("strategies"))
TOP = "name, description, model, train, run, strategies, vary, on_cpu"


def loaded(write: Write, text: str, **options: Any) -> study.Study:
    return study.load(write(text), **options)


def told(write: Write, text: str | bytes, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        study.load(write(text), **options)
    assert str(error.value) == "\n".join(error.value.faults)
    return list(error.value.faults)


def point(found: study.Study, kind: str = "cuda") -> study.Point:
    (only,) = found.points(kind)
    return only


MODEL_FAULTS = {
    # what replaces a line of BASE: (line, its replacement) -> the faults
    ("n_layers: 4", "layers: 4"): [
        "study.yaml:1: key 'n_layers' is missing in model",
        "study.yaml:2: unknown key 'layers' in model; did you mean 'n_layers'?",
    ],
    ("n_layers: 4", "n_layer: 4\n  dropot: 3\n  zzz: 1"): [
        "study.yaml:1: key 'n_layers' is missing in model",
        "study.yaml:2: unknown key 'n_layer' in model; did you mean 'n_layers'?",
        "study.yaml:3: unknown key 'dropot' in model; did you mean 'dropout'?",
        "study.yaml:4: unknown key 'zzz' in model; have: family, n_layers, d_model, n_heads, n_kv_heads, d_ff, "
        "vocab_size, head, dropout, tie_embeddings, attention, norm_position, activation, freeze_embedding, residual",
    ],
    ("n_layers: 4", "n_layers: 4\n  batch_size: 3"): [
        "study.yaml:3: misplaced key 'batch_size' in model; did you mean 'train.batch_size'?"
    ],
    ("n_layers: 4", "n_layers: 4\n  seed: 3"): [
        "study.yaml:3: misplaced key 'seed' in model; did you mean 'run.seed'?"
    ],
    ("n_layers: 4", "n_layers: 4\n  context_length: 3"): [
        "study.yaml:3: unknown key 'context_length' in model; did you mean 'train.seq_len'?"
    ],
    ("n_layers: 4", "n_layers: 4\n  n_layers: 5"): ["study.yaml:3: key 'n_layers' is given twice, first in line 2"],
    ("n_layers: 4", "n_layers: '4'"): ['study.yaml:2: model.n_layers must be a whole number, got "4"'],
    ("n_layers: 4", "n_layers: four"): ['study.yaml:2: model.n_layers must be a whole number, got "four"'],
    ("n_layers: 4", "n_layers: 010"): ['study.yaml:2: model.n_layers must be a whole number, got "010"'],
    ("n_layers: 4", "n_layers: 4.5"): ["study.yaml:2: model.n_layers must be a whole number, got 4.5"],
    ("n_layers: 4", "n_layers: 4.0"): ["study.yaml:2: model.n_layers must be a whole number, got 4.0"],
    ("n_layers: 4", "n_layers: 1e3"): ["study.yaml:2: model.n_layers must be a whole number, got 1000.0"],
    ("n_layers: 4", "n_layers: true"): ["study.yaml:2: model.n_layers must be a whole number, got true"],
    ("n_layers: 4", "n_layers: yes"): ["study.yaml:2: model.n_layers must be a whole number, got true"],
    ("n_layers: 4", "n_layers: [2, 4]"): ["study.yaml:2: model.n_layers must be a whole number, got [2, 4]"],
    ("n_layers: 4", "n_layers: ~"): ["study.yaml:2: model.n_layers is null; give a value or leave the key out"],
    ("n_layers: 4", "n_layers:"): ["study.yaml:2: model.n_layers is null; give a value or leave the key out"],
    ("n_layers: 4", "n_layers: 0"): ["study.yaml:2: model.n_layers must be at least 1, got 0"],
    ("n_layers: 4", "n_layers: -3"): ["study.yaml:2: model.n_layers must be at least 1, got -3"],
    ("n_layers: 4", "n_layers: 99999999999999"): [
        "study.yaml:2: model.n_layers must be at most 10000, got 99999999999999"
    ],
    ("d_model: 32", "d_model: 30"): ["study.yaml:1: d_model 30 is not a multiple of n_heads 4"],
    ("n_heads: 4", "n_heads: 4\n  n_kv_heads: 3"): ["study.yaml:1: n_heads 4 is not a multiple of n_kv_heads 3"],
    ("n_heads: 4", "n_heads: 32\n  family: llama"): [
        "study.yaml:1: rotary positions need an even d_model / n_heads, got 1"
    ],
    ("n_heads: 4", "n_heads: 4\n  d_ff: [64, 128]"): ["study.yaml:1: d_ff lists 2 widths for n_layers 4"],
    ("n_heads: 4", "n_heads: 4\n  d_ff: []"): ["study.yaml:1: d_ff lists 0 widths for n_layers 4"],
    ("n_heads: 4", "n_heads: 4\n  d_ff: [64, 64, 64, x]"): [
        'study.yaml:5: model.d_ff must be a whole number of at least 1 or a list of them, got [64, 64, 64, "x"]'
    ],
    ("n_heads: 4", "n_heads: 4\n  d_ff: true"): [
        "study.yaml:5: model.d_ff must be a whole number of at least 1 or a list of them, got true"
    ],
    ("n_heads: 4", "n_heads: 4\n  d_ff: 0"): [
        "study.yaml:5: model.d_ff must be a whole number of at least 1 or a list of them, got 0"
    ],
    ("vocab_size: 64", "dropout: 0.1"): ["study.yaml:1: head lm needs vocab_size (or write head: none)"],
    ("vocab_size: 64", "head: none"): ["study.yaml:6: loss cross_entropy needs head: lm"],
    ("vocab_size: 64", "head: ~"): ["study.yaml:5: model.head is null; give a value or leave the key out"],
    ("vocab_size: 64", "head: off"): ["study.yaml:5: model.head must be 'lm' or 'none', got false"],
    ("vocab_size: 64", "vocab_size: 64\n  dropout: 1.0"): ["study.yaml:6: model.dropout must be below 1, got 1.0"],
    ("vocab_size: 64", "vocab_size: 64\n  dropout: -0.1"): ["study.yaml:6: model.dropout must be at least 0, got -0.1"],
    ("vocab_size: 64", "vocab_size: 64\n  dropout: 1e999"): [
        "study.yaml:6: model.dropout must be a finite number, got Infinity"
    ],
    ("vocab_size: 64", "vocab_size: 64\n  dropout: .nan"): ['study.yaml:6: model.dropout must be a number, got ".nan"'],
    ("vocab_size: 64", "vocab_size: 64\n  dropout: true"): ["study.yaml:6: model.dropout must be a number, got true"],
    ("vocab_size: 64", "vocab_size: 64\n  activation: tanh"): [
        "study.yaml:6: model.activation must be 'gelu', 'relu' or 'swiglu', got \"tanh\""
    ],
    ("vocab_size: 64", "vocab_size: 64\n  tie_embeddings: 1"): [
        "study.yaml:6: model.tie_embeddings must be true or false, got 1"
    ],
    ("vocab_size: 64", "vocab_size: 64\n  family: lama"): [
        "study.yaml:6: unknown model family 'lama'; did you mean 'llama'?"
    ],
    ("vocab_size: 64", "vocab_size: 64\n  family: Llama"): [
        "study.yaml:6: unknown model family 'Llama'; did you mean 'llama'?"
    ],
    ("vocab_size: 64", "vocab_size: 64\n  family: 3"): ["study.yaml:6: model.family must be text, got 3"],
    ("vocab_size: 64", "vocab_size: 64\n  tie_embeddings: true\n  freeze_embedding: true"): [
        "study.yaml:1: freeze_embedding with tie_embeddings would freeze the head too"
    ],
    ("vocab_size: 64", "head: none\n  tie_embeddings: true"): ["study.yaml:1: tie_embeddings needs head lm"],
    ("vocab_size: 64", "head: none\n  freeze_embedding: true"): [
        "study.yaml:1: freeze_embedding needs vocab_size: without it there is no embedding"
    ],
    ("batch_size: 2", "batch_siz: 2"): [
        "study.yaml:6: key 'batch_size' is missing in train",
        "study.yaml:7: unknown key 'batch_siz' in train; did you mean 'batch_size'?",
    ],
    ("seq_len: 16", "seq_len: 16\n  precision: bf17"): [
        "study.yaml:9: train.precision must be 'fp32', 'tf32', 'bf16', 'fp16', 'bf16-pure' or 'fp16-pure', got \"bf17\""
    ],
    ("seq_len: 16", "seq_len: 16\n  offload_cap_bytes: lots"): [
        "study.yaml:9: train.offload_cap_bytes: 'lots' is not a size; write for example 16GiB or 800MiB"
    ],
    ("seq_len: 16", "seq_len: 16\n  lr: 0"): ["study.yaml:9: train.lr must be above 0, got 0"],
    ("seq_len: 16", "seq_len: 16\n  lr: fast"): ['study.yaml:9: train.lr must be a number, got "fast"'],
    ("seq_len: 16", "seq_len: 16\n  loss: mse"): ["study.yaml:9: loss mse needs head: none"],
    ("n_layers: 4", "\tn_layers: 4"): ["study.yaml:2:1: tab not allowed for indentation; use spaces"],
}


@pytest.mark.parametrize(("change", "faults"), MODEL_FAULTS.items(), ids=lambda x: x[1] if isinstance(x, tuple) else "")
def test_faults_of_the_sections(write_study: Write, change: tuple[str, str], faults: list[str]) -> None:
    line, replacement = change
    if replacement.startswith("\t"):
        line = "  " + line
    text = BASE.replace(line, replacement)
    assert text != BASE
    assert told(write_study, text) == faults


def test_faults_of_several_sections_come_together(write_study: Write) -> None:
    text = BASE.replace("n_layers: 4", "n_layers: 4.5").replace("seq_len: 16", "seq_len: ~") + "run:\n  rounds: 0\n"
    assert told(write_study, text) == [
        "study.yaml:2: model.n_layers must be a whole number, got 4.5",
        "study.yaml:8: train.seq_len is null; give a value or leave the key out",
        "study.yaml:10: run.rounds must be at least 1, got 0",
    ]


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("run:", ["study.yaml:9: run must be a mapping of keys"]),
        ("runs: {}", ["study.yaml:9: unknown key 'runs'; did you mean 'run'?"]),
        ("strategy: none", ["study.yaml:9: unknown key 'strategy'; did you mean 'strategies'?"]),
        ("n_layers: 3", ["study.yaml:9: misplaced key 'n_layers'; did you mean 'model.n_layers'?"]),
        ("hidden_size: 3", ["study.yaml:9: unknown key 'hidden_size'; did you mean 'model.d_model'?"]),
        ("zzz: 3", [f"study.yaml:9: unknown key 'zzz'; have: {TOP}"]),
        ("name: 3", ["study.yaml:9: name must be text, got 3"]),
        ("name: ''\ndescription: [a]", ['study.yaml:10: description must be text, got ["a"]']),
        ("name: ' '", ["study.yaml:9: name must be one line of 1 to 200 characters"]),
        ('name: "a\\nb"', ["study.yaml:9: name must be one line of 1 to 200 characters"]),
        ("run: {device: tpu}", ['study.yaml:9: run.device must be auto, cpu, cuda, cuda:N or replay:FILE, got "tpu"']),
        ("run: {threads: 0}", ["study.yaml:9: run.threads must be at least 1, got 0"]),
        ("run: {parity: 1}", ["study.yaml:9: run.parity must be true or false, got 1"]),
        ("strategies: []", ["study.yaml:9: strategies must be a list of at least one strategy"]),
        ("strategies: ~", ["study.yaml:9: strategy is null (~, null or empty); write the word none"]),
        ("strategies: null", ["study.yaml:9: strategy is null (~, null or empty); write the word none"]),
        ("strategies:", ["study.yaml:9: strategy is null (~, null or empty); write the word none"]),
        ("strategies:\n  - none\n  -", ["study.yaml:11: strategy is null (~, null or empty); write the word none"]),
        (
            "strategies: off",
            ["study.yaml:9: strategy got the boolean false; write none to keep everything (quote the word)"],
        ),
        (
            "strategies: [none, no]",
            ["study.yaml:9: strategy got the boolean false; write none to keep everything (quote the word)"],
        ),
        (
            "strategies:\n  - perblock\n  - every-k\n  - none",
            [
                "study.yaml:10: unknown strategy 'perblock'; did you mean 'per-block'?",
                "study.yaml:11: strategy every-k needs k; write every-k:K",
            ],
        ),
        ("strategies: [zzz]", [f"study.yaml:9: unknown strategy 'zzz'; have: {STRATEGIES}"]),
        (
            "strategies: ['nested:2,reentrant']",
            [
                "study.yaml:9: strategy nested:2,reentrant: reentrant checkpoints cannot be nested; "
                "drop reentrant or choose a flat strategy"
            ],
        ),
    ],
)
def test_faults_of_the_top_level(write_study: Write, line: str, faults: list[str]) -> None:
    assert told(write_study, BASE + line + "\n") == faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["study.yaml: the file is empty; `ckbench init` writes examples"]),
        ("# nothing yet\n", ["study.yaml: the file is empty; `ckbench init` writes examples"]),
        ("- a\n", [f"study.yaml:1: a study is a mapping with the keys {TOP}"]),
        ("just words\n", [f"study.yaml:1: a study is a mapping with the keys {TOP}"]),
        ("name: x\n", ["study.yaml: section 'model' is missing", "study.yaml: section 'train' is missing"]),
        (
            "model: 3\ntrain: [1]\n",
            ["study.yaml:1: model must be a mapping of keys", "study.yaml:2: train must be a mapping of keys"],
        ),
        (
            "model: {}\ntrain: {}\n",
            [
                "study.yaml:1: key 'n_layers' is missing in model",
                "study.yaml:1: key 'd_model' is missing in model",
                "study.yaml:1: key 'n_heads' is missing in model",
                "study.yaml:2: key 'batch_size' is missing in train",
                "study.yaml:2: key 'seq_len' is missing in train",
            ],
        ),
        (b"name: caf\xe9\n", ["study.yaml: not UTF-8 text"]),
    ],
)
def test_sections_missing_or_no_study_at_all(write_study: Write, text: str | bytes, faults: list[str]) -> None:
    assert told(write_study, text) == faults


@pytest.mark.parametrize("word", ["none", "None", "NONE", "'none'", "[none]", "{name: none}"])
def test_the_word_none_is_a_strategy(write_study: Write, word: str) -> None:
    found = point(loaded(write_study, BASE + f"strategies: {word}\n"))
    assert [spec.label for spec in found.strategies] == ["none"]


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("1e4", 1e4), (".5", 0.5), ("2", 2.0), ("1.5E-3", 1.5e-3)])
def test_numbers_people_write(write_study: Write, text: str, value: float) -> None:
    assert point(loaded(write_study, BASE + f"  lr: {text}\n")).train.lr == value


def test_a_whole_number_of_zero_dropout_is_a_number(write_study: Write) -> None:
    assert point(loaded(write_study, BASE.replace("n_heads: 4", "n_heads: 4\n  dropout: 0"))).model.dropout == 0.0


def test_merge_keys_work(write_study: Write) -> None:
    text = BASE.replace("model:\n", "model: &m\n") + "on_cpu:\n  model: {<<: *m, n_layers: 2}\n"
    found = loaded(write_study, text)
    assert (point(found, "cuda").model.n_layers, point(found, "cpu").model.n_layers) == (4, 2)
    assert point(found, "cpu").model.d_model == 32


def test_aliases_of_one_plan_name_the_row_that_is_measured(write_study: Write) -> None:
    text = (
        BASE.replace("n_layers: 4", "n_layers: 2") + "strategies: [none, sqrt, 'every-k:4', full, sqrt, 'every-k:4']\n"
    )
    rows = point(loaded(write_study, text)).plans()
    assert all(isinstance(plan, Plan) for _, plan, _ in rows)
    aliases = [alias.label if alias else None for _, _, alias in rows]
    assert aliases == [None, None, "sqrt", "sqrt", None, None], "a strategy listed again is measured again"
    assert [spec.label for spec, _, _ in rows][4:] == ["sqrt#2", "every-k:4#2"]


def test_defaults(write_study: Write) -> None:
    found = loaded(write_study, BASE)
    assert found.name == "study" and found.description == ""
    assert [spec.label for spec in point(found).strategies] == ["none", "per-block"]
    assert point(found).train.tokens_per_step() == 32
    assert found.device() == "auto"
