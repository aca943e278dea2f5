"""Hypothesis strategies for what a careless or hostile user may hand in: study trees, words, ranges, arguments."""

import json
from typing import Any

import typer
from hypothesis import strategies as st

from ckbench import cli, registry
from ckbench.config import ModelConfig, RunSettings, TrainConfig
from ckbench.specs import OPTIONS
from ckbench.study import TOP_KEYS

KEYS = {
    "model": tuple(ModelConfig.model_fields),
    "train": tuple(TrainConfig.model_fields),
    "run": tuple(RunSettings.model_fields),
}
GOOD = {
    "model": {"n_layers": "4", "d_model": "32", "n_heads": "4", "vocab_size": "64"},
    "train": {"batch_size": "2", "seq_len": "16"},
    "run": {"rounds": "2"},
}
DOTTED = tuple(f"{section}.{name}" for section, names in KEYS.items() for name in names)

FEW = st.sampled_from((0, 0, 0, 1, 1, 2))
"""How many hostile things a part of a study gets; mostly none, so that others are reached behind them."""

text = st.text(st.characters(codec="utf-8"), max_size=12)
any_text = st.text(st.characters(), max_size=12)  # lone surrogates among them, as undecodable bytes become in argv
numbers = st.one_of(
    st.integers(-3, 12),
    st.integers(-(10**30), 10**30),
    st.sampled_from([2**31, 2**63, 2**64, 10**12, 10**12 + 1, 10**400, -(10**400)]),
    st.floats(),
).map(str)
words = st.sampled_from(
    (
        "", "~", "null", "true", "no", "off", ".nan", ".inf", "-.inf", "nan", "inf", "1e999", "1e-999", "-0.0",
        "9" * 5000, "010", "0x1F", "1_000", "1:30", "2026-11-29", "=", "<<", "*a", "&a 1", "&a [*a]",
        "!!python/object/apply:os.system [x]", "!!python/tuple [1]", "!!binary aGk=", "!!set {a}", "!!omap []", "! 3",
        "!!float nan", "!!int 0b1", '"\\ud800"', '"\\UFFFFFFFF"', '"\\e[31m"', '"\\x9b2J"', '"\\u202e"', "[]", "{}",
        "[[[]]]", "{a: {b: 1}}", "[1, x, null, {}]", "[" * 45 + "]" * 45, "'" + "x" * 3000 + "'", "日本", "|", ">", "'",
        '"', "2..48", "2..48x2", "8..2", "1..99999999", "replay:x", "cuda:9999", "\tx", "- 1",
    )
)  # fmt: skip
quoted = text.map(lambda value: json.dumps(value))
scalars = st.one_of(words, words, numbers, quoted, text)

names = (*registry.names("strategies"), "per_block", "None", "sqrt:2", "nope", "")
spec_texts = st.one_of(
    st.builds(
        lambda name, argument, options, repeat: name + argument + "".join(f",{o}" for o in options) + repeat,
        st.sampled_from(names),
        st.sampled_from(("", ":2", ":", ":0", ":-1", ":x", ":2:3", ":999999999999", ":" + "9" * 60, ": 2", ":٣", ":1e3")),
        st.lists(st.sampled_from((*OPTIONS, "use_reentrant", "early_stop=false", "skip_last=maybe", "=", "name", "k")), max_size=3),
        st.sampled_from(("", "", "#2", "#", "#0", "#x", "#2#3", "#" + "9" * 30)),
    ),
    any_text,
    scalars.map(lambda value: "{name: " + value + ", k: " + value + "}"),
)  # fmt: skip
range_texts = st.one_of(
    st.builds("{}..{}{}".format, st.integers(-1, 40), st.integers(-1, 60), st.sampled_from(("", ":2", "x2", ":0", "x1", "x", ":", "..3"))),
    st.lists(st.integers(-1, 30), max_size=4).map(lambda values: ",".join(map(str, values))),
    st.sampled_from(("1..999999999999", "1..999999999999x2", "1..99999", "0..0", "9" * 13, "1..2,1..2", ",", "2..4,", "٢..٤", "1e3", "")),
    any_text,
)  # fmt: skip


@st.composite
def studies(draw: st.DrawFn) -> bytes:
    """Write a study of real keys in which some values, keys or lines are hostile."""
    lines: list[str] = []
    for key in draw(st.permutations(("model", "train", "run"))):
        lines += _section(draw, key, dict(GOOD[key]), "")
    for key in draw(
        st.lists(st.sampled_from((*TOP_KEYS, "vary", "on_cpu", "strategies", "nonsense")), max_size=draw(FEW))
    ):
        lines += _top(draw, key)
    for _ in range(draw(FEW) // 2):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.one_of(scalars, text)))
    return _dressed(draw, lines)


def _section(draw: st.DrawFn, key: str, values: dict[str, str], indent: str) -> list[str]:
    for name in draw(st.lists(st.sampled_from((*KEYS[key], "nonsense", "<<", "? x", "1", "~")), max_size=draw(FEW))):
        values[name] = draw(scalars)
    lines = [f"{indent}  {name}: {value}" for name, value in values.items()]
    if lines and draw(st.integers(0, 9)) == 0:
        lines.append(draw(st.sampled_from(lines)))  # a key given twice
    return [f"{indent}{key}:", *lines]


def _top(draw: st.DrawFn, key: str) -> list[str]:
    if key == "vary":
        axes = st.dictionaries(
            st.sampled_from((*DOTTED, "n_layers", "model.x", "")), st.one_of(range_texts, scalars), max_size=3
        )
        return ["vary:", *(f"  {name}: {value}" for name, value in draw(axes).items())]
    if key == "strategies":
        return ["strategies:", *(f"  - {spec}" for spec in draw(st.lists(st.one_of(spec_texts, scalars), max_size=3)))]
    if key == "on_cpu":
        return ["on_cpu:", *_section(draw, draw(st.sampled_from(tuple(KEYS))), {}, "  ")]
    return [f"{key}: {draw(scalars)}"]


def _dressed(draw: st.DrawFn, lines: list[str]) -> bytes:
    """Join lines the way editors of all ages would."""
    start = draw(st.sampled_from(("", "", "", "", "\ufeff", "---\n", "%YAML 1.1\n---\n", "%TAG ! !x\n---\n")))
    end = draw(st.sampled_from(("\n", "\n", "\n", "\r\n", "\r", "\n\n", "\u2028", "\n---\n", "\n...\n")))
    encoding = draw(st.sampled_from(("utf-8", "utf-8", "utf-8", "utf-8", "utf-16", "latin-1")))
    return (start + end.join(lines) + "\n").encode(encoding, "replace")


sets = st.one_of(
    st.builds("{}={}".format, st.sampled_from((*DOTTED, "model", "model.", ".n_layers", "x.y", "run.device")), st.one_of(scalars, any_text)),
    any_text,
)  # fmt: skip


def options(command: str) -> dict[str, Any]:
    """Give the option names of a command, from the command line's own description; values by option, None for a flag."""
    described: Any = typer.main.get_command(cli.app)
    known = {
        spelling: None if option.is_flag else st.one_of(_good(spelling), _values(spelling))
        for option in described.commands[command].params
        for spelling in option.opts
        if spelling.startswith("-")
    }
    return {**known, "--help": None}


def _good(option: str) -> Any:
    """Choose among values that work."""
    good = {
        "--strategy": ("none", "per-block", "every-k:2"), "-s": ("sqrt", "{name: nested, k: 2}"),
        "--set": ("train.batch_size=1",), "--device": ("cpu",), "--rounds": ("1", "2"), "--max-rounds": ("3",),
        "--points": ("2",), "--format": ("md", "csv", "json"), "--group-by": ("n_layers", "strategy"),
        "--baseline": ("none", "per-block"), "--out": ("results",), "--seq-len": ("8,16",), "--width": ("32..64x2",),
        "--heads": ("2,4",),
    }  # fmt: skip
    return st.sampled_from(good.get(option, ("1..3", "2,4")))


def _values(option: str) -> Any:
    """Choose what may follow an option."""
    counts = st.one_of(numbers, any_text)
    special = {
        "--strategy": spec_texts, "-s": spec_texts, "--set": sets, "--rounds": counts, "--max-rounds": counts,
        "--points": counts,
        "--format": st.one_of(st.sampled_from(("console", "md", "csv", "json", "JSON", "pdf", "base", "_x")), any_text),
        "--group-by": st.one_of(st.sampled_from((*DOTTED, "n_layers", "strategy", "study", "device_name")), any_text),
        "--baseline": st.one_of(spec_texts, any_text),
        "--out": st.sampled_from(("results", "file", "file/deeper", "o" * 300, "a\nb", "\x1b[31m", "ünï", "", "\udcff", "study.yaml")),
    }  # fmt: skip
    if option in ("--layers", "--width", "--batch", "--seq-len", "--heads"):
        return range_texts
    return special.get(option, any_text)


@st.composite
def arguments(draw: st.DrawFn, command: str, *places: Any) -> list[str]:
    """Write a command line: the command's positional arguments among options of its own and of others."""
    known = options(command)
    given: list[str] = []
    for option in draw(st.lists(st.sampled_from((*known, *known, *known, "--nope", "-x", "--form")), max_size=4)):
        value = known.get(option)
        given.append(option)
        if value is not None and draw(st.integers(0, 19)):
            given.append(draw(value))
    for place in places:
        given.insert(draw(st.sampled_from((0, len(given)))), draw(place))
    return [command, *(argument.replace("\0", "") for argument in given)]
