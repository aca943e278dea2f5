"""A stack of made-up blocks run event by event: every tensor is put and dropped by name, and a high-water mark watches.

It is the judge of the planner's tests and shares no formula with it: nothing here adds up items. ``chain_of`` reads a
chain's numbers off runs of single plans, as a probe of a real model would.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckbench.plan import Region
from ckbench.planner.chain import Chain, Item


@dataclass(frozen=True)
class Way:
    """One way to run a block with autograd on: what it saves besides input and output, and its working memory."""

    saved: int
    keeps_input: bool
    forward_work: int
    backward_work: int
    extra_s: float
    keeps_copies: bool = True
    """Whether it holds on to the block's ``copies`` until its backward."""


@dataclass(frozen=True)
class Block:
    """Sizes and times of one block; ``ways[0]`` is the plain one. ``work``: of a forward without autograd.

    ``copies`` live from the block's first forward until the loss is there, or longer where a way keeps them.
    """

    out: int
    gradients: int
    work: int
    forward_s: float
    tail_s: float
    ways: tuple[Way, ...]
    copies: int = 0


@dataclass(frozen=True)
class Stack:
    """Blocks between an embedding (``first``: its output; ``base``: all that always lives) and a head."""

    base: int
    first: int
    head_work: int
    head_gradients: int
    fixed: int
    blocks: tuple[Block, ...]
    head_backward_work: int = 0


@dataclass(frozen=True)
class Span:
    """A checkpointed region of a plan over ``size`` blocks, run again by ``inside``; a plan is a tuple of these and of
    numbers of ways."""

    size: int
    inside: tuple["int | Span", ...]


Plan = tuple[int | Span, ...]
Record = tuple[int | Span, int, str, tuple[str, ...]]


@dataclass
class Trace:
    """What was seen of one entry of the top plan: live bytes and high-water marks."""

    at: int
    before: int = 0
    after: int = 0
    top_forward: int = 0
    at_backward: int = 0
    top_backward: int = 0


@dataclass
class Run:
    """One simulated step."""

    stack: Stack
    live: dict[str, int] = field(default_factory=dict)
    total: int = 0
    mark: int = 0
    peak: int = 0
    seconds: float = 0.0
    passing: list[str] = field(default_factory=list)
    """Copies that go once the loss is there."""
    names: Iterator[int] = field(default_factory=itertools.count)

    def put(self, what: str, size: int) -> str:
        """Make a tensor live."""
        name = f"{what} {next(self.names)}"
        self.live[name] = size
        self.total += size
        self.mark, self.peak = max(self.mark, self.total), max(self.peak, self.total)
        return name

    def drop(self, name: str) -> None:
        """Free a tensor; freeing it twice is an error."""
        self.total -= self.live.pop(name)

    def touch(self, size: int) -> None:
        """Have working memory live for a moment."""
        self.drop(self.put("work", size))

    def forward(self, at: int, plan: Plan, given: str, *, is_replay: bool) -> list["Record"]:
        """Run a plan's forward with autograd; returns entries with first block, input tensor and saved tensors.

        In a replay the region around it holds ``given``, and the last entry stops early: a block before its tail and
        its output, a region before it starts.
        """
        records = []
        for k, entry in enumerate(plan):
            stops_early = is_replay and k + 1 == len(plan)
            if isinstance(entry, Span):
                records.append((entry, at, given, ()))
                if not stops_early:
                    given = self.forward_without_graph(at, entry.size, given, makes_copies=not is_replay)
                    self.seconds += is_replay * sum(b.forward_s for b in self.stack.blocks[at : at + entry.size])
                at += entry.size
                continue
            block = self.stack.blocks[at]
            way = block.ways[entry]
            self.touch(way.forward_work)
            saved = [self.put("saved", way.saved)]
            self.seconds += is_replay * block.forward_s
            if way.keeps_copies:
                saved.append(self.put("copies", block.copies))
            elif not is_replay:
                self.passing.append(self.put("copies", block.copies))
            records.append((entry, at, given, tuple(saved)))
            out = given
            if stops_early:
                self.seconds -= block.tail_s
            else:
                out = self.put("out", block.out)
            if not way.keeps_input and not (is_replay and k == 0):
                self.drop(given)
            given = out
            at += 1
        self.last = given
        return records

    def forward_without_graph(self, at: int, size: int, given: str, *, makes_copies: bool) -> str:
        """Run blocks that keep nothing; the input of the first stays."""
        now = given
        for i in range(at, at + size):
            self.touch(self.stack.blocks[i].work)
            if makes_copies:
                self.passing.append(self.put("copies", self.stack.blocks[i].copies))
            out = self.put("out", self.stack.blocks[i].out)
            if now != given:
                self.drop(now)
            now = out
        return now

    def backward(self, record: "Record", gradient: str, *, is_held: bool) -> str:
        """Run one entry's backward; ``is_held``: a region around it holds its input. Returns its input's gradient."""
        entry, at, given, saved = record
        if isinstance(entry, Span):
            records = self.forward(at, entry.inside, given, is_replay=True)
            for k in reversed(range(len(records))):
                gradient = self.backward(records[k], gradient, is_held=k == 0)
            if not is_held:
                self.drop(given)
            return gradient
        block = self.stack.blocks[at]
        way = block.ways[entry]
        self.touch(way.backward_work)
        new = self.put("gradient", self.stack.blocks[at - 1].out if at else self.stack.first)
        self.put("parameter gradients", block.gradients)
        for name in (*saved, gradient):
            self.drop(name)
        if not is_held and given in self.live:
            self.drop(given)
        self.seconds += way.extra_s
        return new


def simulate(stack: Stack, plan: Plan) -> tuple[int, float, list[Trace], Trace]:
    """Run one step; returns peak, extra seconds, and what was seen of each entry and of the head."""
    run = Run(stack)
    run.put("base", stack.base)
    run.touch(stack.fixed - stack.base)
    given, at = run.put("embedded", stack.first), 0
    traces: list[Trace] = []
    records = []
    for entry in plan:
        trace = Trace(at, before=run.total)
        run.mark = run.total
        records += run.forward(at, (entry,), given, is_replay=False)
        given = run.last
        trace.after, trace.top_forward = run.total, run.mark
        traces.append(trace)
        at += entry.size if isinstance(entry, Span) else 1
    assert at == len(stack.blocks), "a plan covers the stack"
    head = Trace(at, before=run.total)
    run.mark = run.total
    run.touch(stack.head_work)
    head.top_forward = run.mark
    for name in run.passing:
        run.drop(name)
    head.at_backward = run.mark = run.total
    run.touch(stack.head_backward_work)
    gradient = run.put("gradient", stack.blocks[-1].out)
    run.put("head gradients", stack.head_gradients)
    head.top_backward = run.mark
    run.drop(given)
    for record, trace in zip(reversed(records), reversed(traces), strict=True):
        trace.at_backward = run.mark = run.total
        gradient = run.backward(record, gradient, is_held=False)
        trace.top_backward = run.mark
    run.drop(gradient)
    return run.peak, run.seconds, traces, head


def chain_of(stack: Stack, spans: dict[int, list[Span]] | None = None) -> tuple[Chain, dict[int, "int | Span"]]:
    """Read a chain off single runs, each with one entry that is not plain; also the entry behind each item, by id.

    The plain way is to keep its copies, so that all that is released is the entry's.

    ``spans``: by first block, the regions that may start there.
    """
    n = len(stack.blocks)
    _, _, plain, head = simulate(stack, (0,) * n)
    later = [0] * (n + 1)
    for trace in plain:
        later[trace.at + 1] = trace.at_backward - trace.after
    entries: dict[int, int | Span] = {}
    items: list[tuple[Item, ...]] = []
    for i, block in enumerate(stack.blocks):
        row = []
        for entry in [*range(len(block.ways)), *(spans or {}).get(i, [])]:
            size = entry.size if isinstance(entry, Span) else 1
            _, seconds, traces, end = simulate(stack, (0,) * i + (entry,) + (0,) * (n - i - size))
            seen = traces[i]
            released = (end.before - end.at_backward) - (head.before - head.at_backward)
            item = Item(
                start=i,
                stop=i + size,
                region=Region(start=i, stop=i + size) if entry else None,
                kept_bytes=seen.after - seen.before,
                forward_peak_bytes=seen.top_forward - seen.before,
                backward_peak_bytes=seen.top_backward - seen.before - later[i + size],
                extra_s=seconds,
                released_bytes=released,
            )
            entries[id(item)] = entry
            row.append(item)
        items.append(tuple(row))
    chain = Chain(
        n_blocks=n,
        items=tuple(items),
        start_bytes=plain[0].before,
        head_peak_bytes=head.top_forward - head.before,
        head_backward_peak_bytes=head.top_backward - head.at_backward,
        later_bytes=tuple(later),
        fixed_peak_bytes=stack.fixed,
        plain_s=3 * sum(block.forward_s for block in stack.blocks),
    )
    return chain, entries


def plans(chain: Chain, at: int = 0) -> Iterator[tuple[Item, ...]]:
    """Give every plan of a chain."""
    if at == chain.n_blocks:
        yield ()
        return
    for item in chain.items[at]:
        for rest in plans(chain, item.stop):
            yield (item, *rest)


def pareto(judged: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keep what nothing beats in both."""
    kept: list[tuple[int, float]] = []
    for peak, seconds in sorted(judged):
        if not kept or seconds < kept[-1][1]:
            kept.append((peak, seconds))
    return kept


def random_block(rng: random.Random, n_ways: int, *, ties: bool, has_copies: bool = False) -> Block:
    """Draw a block: ways save less and take longer one after the other, or anything at all where ``ties``."""
    out, forward_s = rng.randint(1, 30), float(rng.randint(2, 9))
    full = rng.randint(2, 60)
    ways = []
    for k in range(n_ways):
        saved = rng.randint(0, full) if ties else full * (n_ways - 1 - k) // max(1, n_ways - 1)
        extra = 0.0 if k == 0 else float(rng.choice((0, 0, 1, 2)) if ties else rng.randint(1, int(forward_s)))
        keeps = k == 0 or rng.random() < 0.4
        ways.append(Way(saved, rng.random() < 0.6, rng.randint(0, 2 * full), rng.randint(0, 2 * full), extra, keeps))
    tail = float(rng.randint(0, 1))
    copies = rng.choice((0, rng.randint(1, 40))) if has_copies else 0
    return Block(out, rng.randint(0, 25), rng.randint(0, full), forward_s, tail, tuple(ways), copies)


def random_stack(rng: random.Random, n_blocks: int, n_ways: int, *, has_copies: bool = False) -> Stack:
    """Draw a stack: equal blocks, unequal blocks, or blocks with ties, a third each."""
    kind = rng.randrange(3)
    one = random_block(rng, n_ways, ties=False, has_copies=has_copies)
    blocks = tuple(
        one if kind == 0 else random_block(rng, n_ways, ties=kind == 2, has_copies=has_copies) for _ in range(n_blocks)
    )
    base = rng.randint(0, 40)
    fixed = base + rng.choice((0, 50, 200))
    work, gradients, backward_work = rng.randint(0, 90), rng.randint(0, 20), rng.randint(0, 90)
    return Stack(base, rng.randint(1, 30), work, gradients, fixed, blocks, backward_work)
