"""Draw a Plan: one cell per block, and rows for what is kept, what runs again, what waits on the host, and nesting.

``python -m ckbench.diagrams nested:4 --layers 8 > plan.svg`` draws any strategy; :func:`draw` draws any plan.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from ckbench import specs
from ckbench.errors import CkbenchError
from ckbench.plan import Plan, Region, StackShape

EVERYTHING, INPUT, OUTPUT, SHARE, NOTHING = "everything", "input", "output", "share", "nothing"
PART_WORDS = {"ffn": "FFN", "attention": "attn", "core": "core"}
PART_SPANS = {"attention": (0.08, 0.5), "core": (0.2, 0.38), "ffn": (0.5, 1.0)}
"""Where a part lies in a cell, from its left edge to its right one: a block runs attention first, then the FFN."""

LABEL, CELL, MIN_CELL, MAX_STACK, ROW, LANE, GAP, EDGE = 84, 36, 6, 760, 24, 10, 6, 8
TEXT_CELL = 16
"""Cells narrower than this have no room for a number."""

RESULTS_AT = (0.2, 0.5, 0.8)
"""Where kept results are drawn in what is otherwise dropped."""

STYLE = """
svg { --card: #ffffff; --text: #1f2430; --line: #b9c0cc; --kept: #0072b2; --again: #e69f00; --host: #009e73;
  --region: #6b7686; --on: #1f2430; }
@media (prefers-color-scheme: dark) { svg { --card: #1c1f26; --text: #e8eaf0; --line: #4d5563; --kept: #56b4e9;
  --again: #e69f00; --host: #2fc49b; --region: #98a3b5; } }
text { font: 11px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--text); }
.card { fill: var(--card); } .empty { fill: none; stroke: var(--line); } .kept { fill: var(--kept); }
.again { fill: var(--again); } .host { fill: var(--host); } .region { fill: var(--region); }
.on { fill: var(--on); font-weight: 600; } .middle { text-anchor: middle; } .small { font-size: 10px; }
""".strip()


@dataclass(frozen=True, kw_only=True)
class BlockPicture:
    """What a plan does with one block.

    ``kept``: what is held for backward of the block itself: everything; the input of the region that begins here; the
    stack's output; a share that the compiler chooses; nothing. ``has_results``: and results of chosen operations.
    ``parts_again``: parts that are dropped and run again by themselves, while the rest of the block is kept.
    ``runs_again``: starts of the block's forward in backward, as the plan predicts; None where the compiler decides.
    ``depth``: how many regions lie around the block.
    """

    kept: str
    runs_again: int | None
    has_results: bool = False
    parts_again: tuple[str, ...] = ()
    is_on_host: bool = False
    depth: int = 0


def pictures(plan: Plan) -> tuple[BlockPicture, ...]:
    """Say of every block what a plan keeps of it, how often it runs again, and how deep it is nested."""
    has_budget = plan.compile_budget is not None
    on_host = {i for start, stop in plan.host_spans for i in range(start, stop)}
    kept = [SHARE if has_budget else INPUT if plan.native else EVERYTHING] * plan.n_layers
    results = [False] * plan.n_layers
    parts: list[list[str]] = [[] for _ in kept]
    depth = [int(plan.native)] * plan.n_layers
    for region in plan.regions:
        if region.save_ops:
            results[region.start : region.stop] = [True] * region.n_blocks
        if region.part != "block":
            parts[region.start].append(region.part)
            depth[region.start] = 1
            continue
        kept[region.start : region.stop] = [NOTHING] * region.n_blocks
        if region.mode == "invert":
            kept[region.stop - 1] = OUTPUT
        else:
            kept[region.start] = INPUT
        for inner in region.walk():
            for block in range(inner.start, inner.stop):
                depth[block] += 1
    return tuple(
        BlockPicture(
            kept=kept[i],
            runs_again=None if has_budget else calls,
            has_results=results[i],
            parts_again=tuple(parts[i]),
            is_on_host=i in on_host and (kept[i] != NOTHING or results[i]),
            depth=depth[i],
        )
        for i, calls in enumerate(plan.block_calls_backward())
    )


def describe(plan: Plan) -> str:
    """Tell in words what a diagram shows, for those who cannot see it."""
    blocks = pictures(plan)
    place = "" if plan.offload_spans else " on the host" if plan.offload else " on the device"
    told = [f"{plan.n_layers} blocks", f"kept{place}: {_runs([_kept_words(block) for block in blocks])}"]
    if plan.offload_spans:
        told.append(f"it lies: {_runs(['on the host' if block.is_on_host else 'on the device' for block in blocks])}")
    parts = [" and ".join(PART_WORDS[part] for part in block.parts_again) for block in blocks]
    if any(parts):
        told.append(f"parts run again: {_runs([part or 'none' for part in parts])}")
    if plan.compile_budget is None:
        told.append(f"block forwards in backward: {_runs([str(block.runs_again) for block in blocks])}")
    else:
        told.append(f"the compiler decides what runs again, for {plan.compile_budget:g} of the activations")
    told.append(f"nested depth: {_runs([str(block.depth) for block in blocks])}")
    return "; ".join(told)


def _kept_words(block: BlockPicture) -> str:
    words = {SHARE: "what the compiler keeps"}.get(block.kept, block.kept)
    if block.kept == EVERYTHING and block.parts_again:
        words = "all but the " + " and ".join(PART_WORDS[part] for part in block.parts_again)
    if not block.has_results:
        return words
    return "some results" if block.kept == NOTHING else f"{words} and some results"


def _runs(items: Sequence[str]) -> str:
    """Join equal neighbours: ``1, 0 (3 times)``."""
    runs: list[list[str]] = []
    for item in items:
        if runs and runs[-1][0] == item:
            runs[-1].append(item)
        else:
            runs.append([item])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} ({len(run)} times)" for run in runs)


def draw(plan: Plan, *, title: str = "plan") -> str:
    """Draw a plan as an SVG picture that stands by itself, light or dark as the reader's system is."""
    drawing = _Drawing(plan)
    body = "\n".join(drawing.body())
    width, height = drawing.width, drawing.height
    shown = round(width * 1.5)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{shown}" '
        f'height="{round(height * 1.5)}">\n<title>{escape(title)}</title>\n<desc>{escape(describe(plan))}</desc>\n'
        f'<style>{STYLE}</style>\n<rect class="card" width="{width}" height="{height}" rx="6"/>\n{body}\n</svg>\n'
    )


@dataclass
class _Drawing:
    """Where everything lies in one picture, in its own units."""

    plan: Plan
    blocks: tuple[BlockPicture, ...] = ()
    bars: tuple[tuple[int, float, float], ...] = ()
    cell: int = CELL
    width: int = 0
    height: int = 0
    legend: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = pictures(self.plan)
        self.bars = tuple(_bars(self.plan))
        self.cell = max(MIN_CELL, min(CELL, MAX_STACK // self.plan.n_layers))
        self.legend = list(_legend(self.plan, self.blocks))
        self.width = max(LABEL + self.cell * self.plan.n_layers + EDGE, 372)
        self.height = self._lanes_y() + self.n_lanes * LANE + GAP + 15 * len(self.legend) + EDGE

    @property
    def n_lanes(self) -> int:
        return max((depth for depth, _, _ in self.bars), default=1)

    def _row_y(self, row: int) -> int:
        return EDGE + 16 + row * (ROW + GAP)

    def _lanes_y(self) -> int:
        return self._row_y(3)

    def _x(self, block: float) -> float:
        return round(LABEL + block * self.cell, 2)

    def body(self) -> Iterator[str]:
        yield _text(EDGE, EDGE + 11, "block")
        every = 1 if self.cell >= TEXT_CELL else 10
        for i in range(0, self.plan.n_layers, every):
            yield _text(self._x(i + 0.5), EDGE + 11, str(i), "middle small")
        for row, label in enumerate(("kept", "run again", "on the host")):
            y = self._row_y(row)
            yield _text(EDGE, y + 16, label)
            for i in range(self.plan.n_layers):
                yield _rect(self._x(i) + 1, y, self.cell - 2, ROW, "empty")
        for i, block in enumerate(self.blocks):
            yield from self._kept(i, block, row=2 if block.is_on_host else 0)
            yield from self._again(i, block)
        yield _text(EDGE, self._lanes_y() + 9, "nested depth")
        for depth, start, stop in self.bars:
            y = self._lanes_y() + (depth - 1) * LANE
            yield _rect(self._x(start) + 2, y, (stop - start) * self.cell - 4, LANE - 3, "region")
        if not self.bars:
            yield _text(self._x(0) + 2, self._lanes_y() + 9, "0: no region", "small")
        for line, (look, words) in enumerate(self.legend):
            y = self._lanes_y() + self.n_lanes * LANE + GAP + 15 * line
            yield _rect(EDGE, y + 2, 10, 10, look)
            yield _text(EDGE + 16, y + 11, words, "small")

    def _kept(self, i: int, block: BlockPicture, row: int) -> Iterator[str]:
        look, y, inner = ("host" if row else "kept"), self._row_y(row), self.cell - 2
        for left, right in _kept_spans(block, self.plan.compile_budget):
            yield _rect(self._x(i) + 1 + left * inner, y, max(1.5, (right - left) * inner), ROW, look)

    def _again(self, i: int, block: BlockPicture) -> Iterator[str]:
        y, inner, middle = self._row_y(1), self.cell - 2, self._x(i + 0.5)
        for part in block.parts_again:
            left, right = PART_SPANS[part]
            yield _rect(self._x(i) + 1 + left * inner, y, (right - left) * inner, ROW, "again")
        if block.runs_again:
            yield _rect(self._x(i) + 1, y, inner, ROW, "again")
        if self.cell < TEXT_CELL or block.parts_again:
            return
        number = "?" if block.runs_again is None else str(block.runs_again)
        yield _text(middle, y + 16, number, "middle on" if block.runs_again else "middle")


def _kept_spans(block: BlockPicture, budget: float | None) -> list[tuple[float, float]]:
    """Give the filled shares of a cell, each from its left to its right edge."""
    gaps = sorted(PART_SPANS[part] for part in block.parts_again)
    if block.kept == EVERYTHING:
        spans, at = [], 0.0
        for left, right in gaps:
            if left > at:
                spans.append((at, left))
            at = max(at, right)
        spans += [(at, 1.0)] if at < 1 else []
    else:
        known = {INPUT: [(0.0, 0.16)], OUTPUT: [(0.84, 1.0)], SHARE: [(0.0, budget or 0.0)]}
        spans, gaps = known.get(block.kept, []), [(0.16, 1.0)]
    if block.has_results:
        spans = spans + [
            (left + (right - left) * at, left + (right - left) * (at + 0.1))
            for left, right in gaps
            for at in RESULTS_AT
        ]
    return spans


def _bars(plan: Plan) -> Iterator[tuple[int, float, float]]:
    """Give every region as its depth, from 1, and the blocks from and to which it reaches."""
    if plan.native:
        yield from ((1, float(i), i + 1.0) for i in range(plan.n_layers))

    def below(region: Region, depth: int) -> Iterator[tuple[int, float, float]]:
        left, right = PART_SPANS.get(region.part, (0.0, float(region.n_blocks)))
        yield depth, region.start + left, region.start + right
        for child in region.children:
            yield from below(child, depth + 1)

    for region in plan.regions:
        yield from below(region, 1)


def _legend(plan: Plan, blocks: Sequence[BlockPicture]) -> Iterator[tuple[str, str]]:
    """Explain the colours and shapes that a picture has, and no others."""
    looks = [("host" if on_host else "kept", on_host) for on_host in (False, True)]
    present = {(block.is_on_host, block.kept) for block in blocks}
    words = {
        EVERYTHING: "whole cell: all that autograd keeps of a block",
        INPUT: "bar at the left: the input of a region",
        OUTPUT: "bar at the right: the stack's output, from which inputs are rebuilt",
        SHARE: "a share of what keeping everything would hold; the compiler chooses",
    }
    has_parts = any(block.parts_again for block in blocks)
    if has_parts:
        words[EVERYTHING] = "what autograd keeps of a block, but for the gap"
    for look, on_host in looks:
        where = " (on the host)" if on_host and plan.offload_spans else ""
        yield from ((look, f"{words[kind]}{where}") for kind in words if (on_host, kind) in present)
        if any(block.has_results and block.is_on_host == on_host for block in blocks):
            yield look, f"thin bars: results of chosen operations{where}"
    if has_parts:
        yield "again", "that part runs forward once more in backward"
    elif any(block.runs_again for block in blocks):
        yield "again", "times that the block's forward starts in backward"
    if plan.regions or plan.native:
        yield "region", "a region: one checkpoint call"


def _rect(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def _text(x: float, y: float, words: str, look: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" class={chr(34)}{look}{chr(34)}" if look else ""}>{escape(words)}</text>'


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the diagram of a strategy for a stack; give the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ckbench.diagrams", description="Draw what a strategy does, as SVG."
    )
    parser.add_argument("strategy", help="As in a study: per-block, nested:4, per-block+offload, ...")
    parser.add_argument("--layers", type=int, default=8, help="Blocks of the stack (8).")
    given = parser.parse_args(arguments)
    try:
        if given.layers < 1:
            raise CkbenchError(f"--layers is at least 1, got {given.layers}")
        plan = specs.resolve(specs.parse(given.strategy), shape(given.layers))
    except CkbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sys.stdout.write(draw(plan, title=f"{given.strategy} over {given.layers} blocks"))
    return 0


def shape(n_layers: int) -> StackShape:
    """Give a stack that every strategy can be drawn for; its middle third keeps more than the rest (``largest-n``)."""
    third = n_layers / 3
    sizes = tuple(2 if third <= i < 2 * third else 1 for i in range(n_layers))
    return StackShape(n_layers=n_layers, block_saved_bytes=sizes, is_invertible=True, has_native=True)


if __name__ == "__main__":
    sys.exit(main())
