"""A chain through JSON and back: the same chain."""

import json
import random
from typing import Any

import pytest

from ckbench.plan import Region
from ckbench.planner.chain import Chain, Item
from ckbench.planner.letters import FULL, PLAIN, Letter
from ckbench.planner.wire import pack, unpack

NESTED = Letter(n_blocks=3, region=Region(start=0, stop=3, children=(Region(start=0, stop=1), Region(start=1, stop=3))))
KEEPING = Letter(n_blocks=1, region=Region(start=0, stop=1, save_ops=("aten.mm", "aten.gelu@2")))
REST: dict[str, Any] = {
    "start_bytes": 5,
    "head_peak_bytes": 6,
    "head_backward_peak_bytes": 7,
    "fixed_peak_bytes": 8,
    "plain_s": 1.5,
}


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    n_blocks = draw.randint(3, 12)
    items: list[list[Item]] = [[] for _ in range(n_blocks)]
    packed = []
    for letter in (PLAIN, FULL, KEEPING, NESTED):
        figures = {
            start: (*(draw.randint(0, 3) for _ in range(4)), draw.choice((0.0, 0.1)))
            for start in range(n_blocks - letter.n_blocks + 1)
        }
        packed.append(pack(letter, figures))  # type: ignore[arg-type]
        for start, (kept, forward, backward, released, seconds) in figures.items():
            items[start].append(
                Item(
                    start=start, stop=start + letter.n_blocks, region=letter.at(start), kept_bytes=int(kept),
                    forward_peak_bytes=int(forward), backward_peak_bytes=int(backward), released_bytes=int(released),
                    extra_s=seconds,
                )
            )  # fmt: skip
    later = [draw.randint(0, 9) for _ in range(n_blocks + 1)]
    sent = json.loads(json.dumps({"n_blocks": n_blocks, "letters": packed, "later_bytes": later, **REST}))
    assert unpack(sent) == Chain(
        n_blocks=n_blocks, items=tuple(map(tuple, items)), later_bytes=tuple(later), **REST
    )  # fmt: skip


def test_equal_blocks_are_sent_once() -> None:
    packed = pack(FULL, {start: (1, 2, 3, 4, 0.5) for start in range(1000)} | {0: (9, 2, 3, 4, 0.5)})
    assert len(packed["figures"]) == 2 and len(packed["starts"]) == 1000


def test_a_region_lies_where_its_item_begins() -> None:
    chain = unpack({"n_blocks": 5, "letters": [pack(NESTED, {2: (0, 0, 0, 0, 0.0)})], "later_bytes": [0] * 6, **REST})
    ((item,),) = (items for items in chain.items if items)
    assert item.region == Region(start=2, stop=5, children=(Region(start=2, stop=3), Region(start=3, stop=5)))
