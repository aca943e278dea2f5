"""What ways to run blocks come to adds up: the chain's peak of any mixture is that of its replay."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from ckbench.config import RunConfig
from ckbench.errors import CkbenchError
from ckbench.estimate.profile import Profiler
from ckbench.estimate.replay import replay
from ckbench.plan import Region
from ckbench.planner.chain import Chain, Item
from ckbench.planner.letters import FULL, FULL_OFFLOADED, PLAIN, Letter
from ckbench.planner.wire import pack, unpack
from ckbench.planning import plan_of
from tests.contract.everything import FAMILY_SETTINGS

MakeRun = Callable[..., RunConfig]

MATMULS = Letter(n_blocks=1, region=Region(start=0, stop=1, save_ops=("aten.mm", "aten.addmm")))


def segment(k: int) -> Letter:
    return Letter(n_blocks=k, region=Region(start=0, stop=k))


def nested(k: int) -> Letter:
    inner = tuple(Region(start=i, stop=i + 1) for i in range(k))
    return Letter(n_blocks=k, region=Region(start=0, stop=k, children=inner))


def offloaded(k: int) -> Letter:
    return Letter(n_blocks=k, region=None, offload=True)


SHORT_LETTERS = (PLAIN, FULL, MATMULS, segment(2))
HOST_LETTERS = (PLAIN, FULL, segment(2), offloaded(1), offloaded(2), FULL_OFFLOADED)
LETTERS = (*SHORT_LETTERS, segment(3), segment(4), nested(2), nested(3))


@dataclass(frozen=True)
class Case:
    """A trial, whose bytes it is, and the letters that mix in it."""

    kind: str
    n_layers: int
    model: str
    """Name of one of MODELS."""
    step: str = ""
    """Settings of the step, as key=value words."""
    letters: tuple[Letter, ...] = SHORT_LETTERS

    def __repr__(self) -> str:
        return f"{self.kind} {self.n_layers} x {self.model} {self.step}".strip()


MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.1},
    "llama": {"family": "llama", "n_kv_heads": 2},
    "vit": {"family": "vit", "dropout": 0.1},
    "reversible": {"residual": "reversible", "dropout": 0.1},
    "wide": {"d_model": 64},  # what is smaller than a KiB never leaves
    "wide unequal": {"d_model": 64, "d_ff": (64, 256, 128, 256, 64)},
    "tied": {"tie_embeddings": True},
    "hf-llama": {
        "family": "hf",
        "arch": "llama",
        "n_layers": 5,
        "config": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64},
    },
    "unequal": {"d_ff": (16, 64, 48, 64, 16)},
    "custom": {**FAMILY_SETTINGS["custom"], "args": {"depth": 4}, "n_layers": 4},
    "hf-gpt2": {**FAMILY_SETTINGS["hf-gpt2"], "n_layers": 4},
}
STEPS: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"precision": "bf16"},
    "bf16-pure": {"precision": "bf16-pure"},
    "two": {"grad_accumulation": 2},
    "two bf16": {"grad_accumulation": 2, "precision": "bf16"},
    "gradients stay": {"set_to_none": False},
    "in backward": {"optimizer_in_backward": True},
    "sgd": {"optimizer": "sgd"},
    "adamw in backward": {"optimizer": "adamw", "optimizer_in_backward": True},
    "adafactor bf16": {"optimizer": "adafactor", "precision": "bf16"},
    "chunked": {"loss": "chunked_cross_entropy", "loss_chunks": 3},
}


def config_of(tiny_run: MakeRun, case: Case) -> RunConfig:
    model = MODELS[case.model]
    if model.get("family") not in ("custom", "hf"):
        model = {"d_model": 16, "n_layers": case.n_layers, **model}
    return tiny_run("none", model=model, train=STEPS[case.step])


@cache
def profiled(tiny_run: MakeRun, case: Case) -> tuple[RunConfig, Chain, tuple[str, ...]]:
    """Give the trial, its chain, and the letters that were left out; seconds are made up."""
    config = config_of(tiny_run, case)
    profiler = Profiler(config, case.kind, 1000, case.n_layers)
    packed, left_out = [], []
    for letter in case.letters:
        if letter.n_blocks > 1 and not profiler.may_span:
            continue
        try:
            tiles = profiler.tiles(letter)
        except CkbenchError as error:
            left_out.append(f"{letter.name}: {error}")
            continue
        figures = {
            start: (t.kept_bytes, t.forward_peak_bytes, t.backward_peak_bytes, t.released_bytes, 1.0 * letter.n_blocks)
            for start, t in tiles.items()
        }
        packed.append(pack(letter, figures))
    rest = profiler.rest
    data = {
        "n_blocks": case.n_layers,
        "letters": packed,
        "start_bytes": rest.start_bytes,
        "head_peak_bytes": rest.head_peak_bytes + profiler.shared_bytes,
        "head_backward_peak_bytes": rest.head_backward_peak_bytes + profiler.shared_bytes,
        "later_bytes": [n_bytes + profiler.shared_bytes for n_bytes in rest.later_bytes],
        "fixed_peak_bytes": rest.fixed_peak_bytes,
        "plain_s": 100.0,
    }
    return config, unpack(data), tuple(left_out)


def drawn(chain: Chain, draw: random.Random) -> list[Item]:
    """Draw a plan block by block."""
    items: list[Item] = []
    at = 0
    while at < chain.n_blocks:
        items.append(draw.choice(chain.items[at]))
        at = items[-1].stop
    return items


def replayed_peak(config: RunConfig, kind: str, chain: Chain, items: list[Item]) -> int:
    found = replay(config, kind, 1000, plan=plan_of(chain, items))
    return int(max(found.first["peak_allocated_bytes"], found.steady["peak_allocated_bytes"]))


def check(tiny_run: MakeRun, case: Case, seed: int) -> None:
    config, chain, _ = profiled(tiny_run, case)
    items = drawn(chain, random.Random(f"{case!r} {seed}"))
    told = [(item.start, item.stop, item.region) for item in items]
    assert chain.peak_bytes(items) == replayed_peak(config, case.kind, chain, items), told


HF = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra hf is not installed")
FEW = [
    Case("cuda", 6, "gpt", "bf16", (*SHORT_LETTERS, nested(2))),
    Case("cpu", 5, "gpt", "bf16"),
    Case("cuda", 5, "unequal", "bf16"),
    Case("cpu", 4, "custom"),
    pytest.param(Case("cuda", 4, "hf-gpt2", ""), marks=HF),
    Case("cuda", 5, "llama", "two"),
    Case("cuda", 8, "wide", "bf16", HOST_LETTERS),
    Case("cuda", 6, "gpt", "adamw in backward"),
    Case("cpu", 5, "unequal", "adamw in backward"),
    Case("cuda", 7, "tied", "adafactor bf16"),
]
MANY = [
    *(Case(kind, 13, model, step, LETTERS) for kind in ("cuda", "cpu") for model in ("gpt", "llama", "vit", "reversible") for step in STEPS),
    *(Case("cuda", 13, "wide", step, (*HOST_LETTERS, offloaded(4))) for step in STEPS),
    *(Case("cuda", 5, "wide unequal", step, HOST_LETTERS) for step in STEPS),
    *(Case(kind, 5, "unequal", step, LETTERS) for kind in ("cuda", "cpu") for step in ("", "bf16", "two bf16")),
    *(Case(kind, 4, "custom", step, LETTERS) for kind in ("cuda", "cpu") for step in ("", "bf16")),
    *(pytest.param(Case(kind, 4, "hf-gpt2", step, LETTERS), marks=HF) for kind in ("cuda", "cpu") for step in ("", "bf16")),
]  # fmt: skip


@pytest.mark.parametrize("case", FEW, ids=repr)
def test_mixtures_add_up(tiny_run: MakeRun, case: Case) -> None:
    _, chain, left_out = profiled(tiny_run, case)
    assert not left_out
    assert all(any(item.region is None for item in items) for items in chain.items)
    for seed in range(2):
        check(tiny_run, case, seed)


@pytest.mark.prove
@pytest.mark.parametrize("case", MANY if os.environ.get("CKBENCH_WIDE") else MANY[::25], ids=repr)
def test_many_mixtures_add_up(tiny_run: MakeRun, case: Case) -> None:
    for seed in range(3):
        check(tiny_run, case, seed)


@HF
def test_what_regions_hold_in_common_is_counted_for_every_plan(tiny_run: MakeRun) -> None:
    """Positions are an argument of every block: regions hold them until backward ends, kept blocks do not."""
    case = Case("cuda", 5, "hf-llama")
    config, chain, left_out = profiled(tiny_run, case)
    assert not left_out
    positions_bytes = 8 * (config.train.seq_len or 0)
    over = set()
    for seed in range(6):
        items = drawn(chain, random.Random(seed))
        over.add(chain.peak_bytes(items) - replayed_peak(config, "cuda", chain, items))
    assert over <= {0, positions_bytes}, "never too low"


def test_what_waits_on_the_host_is_not_kept_on_the_device(tiny_run: MakeRun) -> None:
    _, chain, _ = profiled(tiny_run, Case("cuda", 8, "wide", "bf16", HOST_LETTERS))
    held = {
        (item.region is None, item.stop - item.start, item.offload): item.kept_bytes - item.released_bytes
        for item in chain.items[2]
    }
    small = 3 * 1024  # what is below a KiB stays
    assert 0 <= held[True, 1, True] <= small < held[True, 1, False] / 10
    assert 0 <= held[True, 2, True] <= 2 * small
    assert 0 <= held[False, 1, True] <= small < held[False, 1, False]


def test_autocast_s_copies_are_released_where_blocks_are_kept(tiny_run: MakeRun) -> None:
    """On CUDA a block's forward leaves short copies of its biases, which nothing keeps once forward has ended."""
    case = FEW[0]
    assert isinstance(case, Case)
    _, chain, _ = profiled(tiny_run, case)
    plain = next(item for item in chain.items[2] if item.region is None)
    full = next(item for item in chain.items[2] if item.region == Region(start=2, stop=3))
    assert 0 < plain.released_bytes < full.released_bytes, "a kept block keeps the copies of its matrices"
    assert plain.kept_bytes - plain.released_bytes > full.kept_bytes - full.released_bytes


def test_a_short_profile_is_that_of_the_whole_stack(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal blocks told as unequal ones are replayed whole, and come to the same figures at every place."""
    from ckbench.estimate import profile

    config = config_of(tiny_run, Case("cuda", 6, "gpt", "bf16"))
    short = Profiler(config, "cuda", 1000, 6)
    monkeypatch.setattr(profile, "is_equal_stack", lambda _config: False)
    whole = Profiler(config, "cuda", 1000, 6)
    assert short.is_short and not whole.is_short
    assert replace(short.rest, later_bytes=()) == replace(whole.rest, later_bytes=())
    assert short.rest.later_bytes[1:] == whole.rest.later_bytes[1:], "at 0 no item ends"
    for letter in (FULL, segment(2)):
        one, other = short.tiles(letter), whole.tiles(letter)
        assert one.keys() == other.keys() == set(range(6 - letter.n_blocks + 1))
        assert one == other
