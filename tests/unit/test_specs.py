"""Strategy specs: the text and mapping forms, labels that can be typed again, refusals in exact words."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckbench import registry, specs
from ckbench.config import StrategySpec
from ckbench.errors import CkbenchError, ConfigError, PlanError
from ckbench.plan import StackShape

NAMES = registry.names("strategies")
ALL = ", ".join(NAMES)


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ("none", "none"),
        ("None", "none"),
        ("per_block", "per-block"),
        (" Per-Block ", "per-block"),
        ("every-k:4", "every-k:4"),
        ("every_k:004", "every-k:4"),
        ("every-k:4,skip_last,early_stop=false", "every-k:4,early_stop=false,skip_last"),
        ("per-block , skip_last = yes", "per-block,skip_last"),
        ("per-block,skip_last=off,early_stop=on", "per-block"),
        ({"name": "every-k", "k": 4}, "every-k:4"),
        ({"name": "every_k", "k": 4, "skip_last": True}, "every-k:4,skip_last"),
        ({"k": 4, "name": "every-k"}, "every-k:4"),
        ("none#1", "none"),
        ("none#2", "none#2"),
        ("every-k:4,skip_last#12", "every-k:4,skip_last#12"),
        ({"name": "per-block", "early_stop": True}, "per-block"),
        ({"name": "per-block", "early_stop": False, "reentrant": True}, "per-block,early_stop=false,reentrant"),
    ],
)
def test_forms(written: Any, label: str) -> None:
    assert specs.parse(written).label == label


def test_text_and_mapping_are_the_same_spec() -> None:
    text = specs.parse("nested:3,skip_last,preserve_rng=false")
    mapping = specs.parse({"name": "nested", "k": 3, "preserve_rng": False, "skip_last": True})
    assert (
        text
        == mapping
        == StrategySpec(name="nested", params={"k": 3}, options={"skip_last": True, "preserve_rng": False})
    )


def test_a_strategy_listed_again_is_numbered() -> None:
    listed = [specs.parse(text) for text in ("none", "sqrt", "none", "none#2", "sqrt#5", "none", "sqrt,skip_last")]
    numbered = specs.number_repeats(listed)
    assert [spec.label for spec in numbered] == [
        "none",
        "sqrt",
        "none#2",
        "none#3",
        "sqrt#5",
        "none#4",
        "sqrt,skip_last",
    ]
    assert {spec.plain_label for spec in numbered} == {"none", "sqrt", "sqrt,skip_last"}


@st.composite
def any_spec(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(NAMES))
    drawn: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(1, specs.MAX_PARAMETER),
        float: st.floats(0.0, 1e9),
        str: st.sampled_from(
            ["matmul", "attention", "matmul+attention", "aten.mm", "aten.mm+aten.addmm.default", "x-y"]
        ),
    }
    params = {field.name: draw(drawn[field.type]) for field in fields(registry.load("strategies", name))}
    takes_options = name != "none" and getattr(registry.load("strategies", name), "takes_options", True)
    options = {} if not takes_options else draw(st.dictionaries(st.sampled_from(specs.OPTIONS), st.booleans()))
    return {"name": name, **params, **options}


REPEATS = st.integers(1, 99)


@given(any_spec(), REPEATS)
def test_labels_can_be_typed_again(items: dict[str, Any], repeat: int) -> None:
    spec = specs.parse(items).model_copy(update={"repeat": repeat})
    again = specs.parse(spec.label)
    assert again == spec
    assert again.label == spec.label


OF_THE_STRATEGY = (
    "cannot be cut into",
    "needs model.residual: reversible",
    "this model has none; write per-block",
    "which blocks keep most is known once",
    "a share of the activations, from 0 to 1",
    "unknown policy",
    "unknown card",
    "cannot read the plan",
)
"""What strategies say of stacks or arguments that they cannot work with."""


@given(any_spec(), st.integers(1, 9))
def test_every_spec_resolves_or_says_why(items: dict[str, Any], n_layers: int) -> None:
    spec = specs.parse(items)
    try:
        plan = specs.resolve(spec, StackShape(n_layers=n_layers))
    except CkbenchError as error:
        told = str(error)
        names_an_option = any(key in told for key in spec.options)
        assert names_an_option or any(told.count(reason) for reason in OF_THE_STRATEGY), told
        return
    assert plan.n_layers == n_layers
    if plan.regions:
        assert plan.early_stop == spec.options.get("early_stop", True)
        assert plan.preserve_rng == spec.options.get("preserve_rng", True)
        assert plan.reentrant == spec.options.get("reentrant", False)


@given(st.one_of(st.text(max_size=40), st.text(alphabet="every-k:4,=skip_last truefalse", max_size=40)))
def test_any_text_parses_or_is_refused_politely(text: str) -> None:
    try:
        specs.parse(text)
    except ConfigError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (None, "strategy is null (~, null or empty); write the word none"),
        (False, "strategy got the boolean false; write none to keep everything (quote the word)"),
        (True, "strategy got the boolean true; write none to keep everything (quote the word)"),
        (4, "a strategy is a name or a mapping with a name, got 4"),
        (["none"], "a strategy is a name or a mapping with a name, got ['none']"),
        ("", "strategy is empty; write the word none"),
        (":4", "strategy is empty; write the word none"),
        ("perblock", "unknown strategy 'perblock'; did you mean 'per-block'?"),
        ("zzz", f"unknown strategy 'zzz'; have: {ALL}"),
        ("every-k", "strategy every-k needs k; write every-k:K"),
        ("segments", "strategy segments needs n; write segments:N"),
        ("every-k:", "strategy 'every-k:' ends in a colon; write every-k:ARG or every-k"),
        ("every-k:0", "strategy every-k: k must be a whole number of at least 1, got 0"),
        ("every-k:x", "strategy 'every-k:x': k must be a whole number of at least 1, got 'x'"),
        ("every-k:-2", "strategy 'every-k:-2': k must be a whole number of at least 1, got '-2'"),
        ("every-k:2.5", "strategy 'every-k:2.5': k must be a whole number of at least 1, got '2.5'"),
        ("every-k:2:3", "strategy 'every-k:2:3': k must be a whole number of at least 1, got '2:3'"),
        ("every-k:1000000001", "strategy every-k: k must be at most 1000000000, got 1000000001"),
        ("none#", "strategy 'none#': after # comes the number of the repeat, as in none#2"),
        ("none#0", "strategy 'none#0': after # comes the number of the repeat, as in none#2"),
        ("none#x", "strategy 'none#x': after # comes the number of the repeat, as in none#2"),
        ("none#2#3", "strategy 'none#2#3': after # comes the number of the repeat, as in none#2"),
        ("none:3", "strategy none takes no argument, got '3'"),
        ("full:1", "strategy full takes no argument, got '1'"),
        ("none,skip_last", "strategy none recomputes nothing, so skip_last has no effect"),
        ("every-k:4,k=true", "strategy 'every-k:4,k=true' gives 'k' twice"),
        ("per-block,skip_last,skip_last", "strategy 'per-block,skip_last,skip_last' gives 'skip_last' twice"),
        (
            "per-block,early_stop=maybe",
            "strategy 'per-block,early_stop=maybe': early_stop must be true or false, got 'maybe'",
        ),
        ("per-block,skiplast", "strategy per-block: unknown key 'skiplast'; did you mean 'skip_last'?"),
        ("per-block,use_reentrant", "strategy per-block: unknown key 'use_reentrant'; did you mean 'reentrant'?"),
        ({}, "a strategy mapping needs a name, for example {name: per-block, skip_last: true}"),
        ({"every-k": 4}, "a strategy mapping needs a name, for example {name: per-block, skip_last: true}"),
        ({"name": False}, "a strategy mapping needs a name, for example {name: per-block, skip_last: true}"),
        ({"name": 5}, "a strategy name is a word, got 5"),
        (
            {"name": "every-k:4"},
            "in a mapping, name is the bare name; give parameters and options as keys, not 'every-k:4'",
        ),
        ({"name": "every-k", "k": True}, "strategy every-k: k must be a whole number of at least 1, got True"),
        ({"name": "every-k", "k": "4"}, "strategy every-k: k must be a whole number of at least 1, got '4'"),
        ({"name": "every-k", "k": 4.0}, "strategy every-k: k must be a whole number of at least 1, got 4.0"),
        ({"name": "every-k", "n": 4}, f"strategy every-k: unknown key 'n'; have: k, {', '.join(specs.OPTIONS)}"),
        ({"name": "per-block", "skip_last": 1}, "strategy per-block: skip_last must be true or false, got 1"),
        (
            {"name": "per-block", "preserve_rng_state": False},
            "strategy per-block: unknown key 'preserve_rng_state'; did you mean 'preserve_rng'?",
        ),
    ],
)
def test_refusals(written: Any, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        specs.parse(written)
    assert str(error.value) == told


def test_skip_last_that_leaves_nothing_is_none() -> None:
    stack = StackShape(n_layers=3)
    assert specs.resolve(specs.parse("full,skip_last,early_stop=false"), stack) == specs.resolve(
        specs.parse("none"), stack
    )


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("per-block,reentrant,early_stop=false", "reentrant checkpoints never stop early, so early_stop has nothing"),
        ("offload,skip_last", "offload has no region of ours, so skip_last has nothing to act on"),
        ("offload,offload", "offload offloads already"),
    ],
)
def test_an_option_without_effect_is_refused(spec: str, told: str) -> None:
    with pytest.raises(PlanError) as caught:
        specs.resolve(specs.parse(spec), StackShape(n_layers=4))
    assert str(caught.value).startswith(told)
