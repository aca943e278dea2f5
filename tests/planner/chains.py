"""Chains made of numbers alone, for tests that need no simulated stack: drawn at random, or like a GPT-2 XL."""

import random

from ckbench.plan import Region
from ckbench.planner.chain import Chain, Item

MIB = 1 << 20


def made_item(start: int, stop: int, kept: int, forward: int, backward: int, extra_s: float, released: int = 0) -> Item:
    """Give an item by its figures; the plain one is that of no extra time over one block."""
    region = None if extra_s == 0 and stop == start + 1 else Region(start=start, stop=stop)
    return Item(
        start=start,
        stop=stop,
        region=region,
        kept_bytes=kept,
        forward_peak_bytes=forward,
        backward_peak_bytes=backward,
        extra_s=extra_s,
        released_bytes=released,
    )


def random_chain(
    rng: random.Random,
    n_blocks: int,
    n_items: int,
    *,
    spans: bool = False,
    whole: bool = True,
    releases: bool = False,
) -> Chain:
    """Draw any chain at all: kept bytes may be negative, times may tie or be 0, gradients may grow or shrink.

    ``whole``: seconds are whole numbers, so that sums are exact. ``releases``: some items release bytes.
    """
    items = []
    for i in range(n_blocks):
        sizes = [1] * n_items + ([k for k in (2, 3, 4) if i + k <= n_blocks] if spans else [])
        row = []
        for size in sizes:
            seconds = float(rng.choice((0, 1, 1, 2, 5, 9))) if whole else rng.random()
            released = rng.choice((0, 5, 12)) if releases else 0
            kept, forward, backward = rng.randint(-6, 40), rng.randint(0, 60), rng.randint(-5, 90)
            row.append(made_item(i, i + size, kept, forward, backward, seconds, released))
        items.append(tuple(row))
    return Chain(
        n_blocks=n_blocks,
        items=tuple(items),
        start_bytes=rng.randint(0, 50),
        head_peak_bytes=rng.randint(0, 120),
        head_backward_peak_bytes=rng.randint(0, 120),
        later_bytes=tuple(rng.randint(0, 80) for _ in range(n_blocks + 1)),
        fixed_peak_bytes=rng.choice((0, 60, 150)),
        plain_s=10.0 * n_blocks,
    )


def gpt_chain(
    n_blocks: int, n_items: int, *, seed: int | None = None, spans: bool = False, is_autocast: bool = False
) -> Chain:
    """Give a chain of GPT-2 XL's proportions, equal blocks, or each figure up to a quarter off with a ``seed``.

    Per block 12.5 MiB of output, 188 MiB saved, 58.6 MiB of gradients; the options trade saved bytes for time along a
    curve. The planner study's measured figures (batch 4, 1024 tokens, bf16). ``is_autocast``: forward also makes copies
    of the weights, as large as the gradients, which recomputed blocks let go before backward.
    """
    rng = random.Random(seed)

    def off(value: float) -> float:
        return value if seed is None else value * rng.uniform(0.75, 1.25)

    items = []
    for i in range(n_blocks):
        forward_s, saved, out = off(6e-3), off(188) * MIB, 12.5 * MIB
        copies = int(off(58.6) * MIB) if is_autocast else 0
        row = []
        for k in range(n_items):
            share = k / (n_items - 1)
            kept = saved * (1 - share**0.8)
            top = max(kept, 0.6 * saved) + 25 * MIB
            seconds = 0.7 * share**1.6 * forward_s
            kept_bytes, released = int(kept + out) + copies, copies if k else 0
            row.append(made_item(i, i + 1, kept_bytes, int(top) + copies, int(saved + 82 * MIB), seconds, released))
        for size in (2, 3, 4) if spans else ():
            if i + size <= n_blocks:
                top, inside = 0.6 * saved + 25 * MIB, size * saved + 82 * MIB
                seconds, all_copies = (size - 0.3) * forward_s, size * copies
                kept_bytes, highest = int(out) + all_copies, int(top) + all_copies
                row.append(made_item(i, i + size, kept_bytes, highest, int(inside), seconds, all_copies))
        items.append(tuple(row))
    return Chain(
        n_blocks=n_blocks,
        items=tuple(items),
        start_bytes=2000 * MIB,
        head_peak_bytes=1200 * MIB,
        later_bytes=tuple(int((150 + 58.6 * (n_blocks - i)) * MIB) for i in range(n_blocks + 1)),
        fixed_peak_bytes=2500 * MIB,
        head_backward_peak_bytes=1500 * MIB if is_autocast else 0,
        plain_s=n_blocks * 18e-3,
    )
