"""Measure, without the device, what each way of running a span of blocks keeps and how high it rises.

Every way (a letter, see planner/letters.py) is tiled over the stack and replayed once. Stacks of equal blocks are
replayed short: what the first, one in the middle and the last tile come to holds for any depth. Other stacks are
replayed whole, once per place where the tiling may begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckbench.config import RunConfig
from ckbench.engine.optimizers import AfterBackward
from ckbench.engine.trial import Trial
from ckbench.estimate.chain import StepSpans, figures, is_equal_stack, step_spans, with_layers
from ckbench.estimate.repeats import KEPT, NotAChain, Short, lengthen, shorten
from ckbench.estimate.replay import Replayed, replay
from ckbench.estimate.spans import CALL, GRADIENT, spans, watch_blocks
from ckbench.plan import Plan
from ckbench.planner.letters import PLAIN, Letter

N_TILES = 4
"""Tiles of one block in a short replay: the first, two in the middle that must be equal, the last. Wider tiles have one
in the middle: what they come to is made of blocks that are known to be equal."""


SHARED_BYTES, SHARED_RATIO = 64 * 2**10, 1e-4
"""How much regions may hold in common, in bytes or of what is there before the first block. It is counted for every
plan, so that more would make every prediction too high."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one item comes to at one place of a stack, bytes; the names are those of planner.chain.Item."""

    kept_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    released_bytes: int


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What no plan changes, bytes; the names are those of planner.chain.Chain."""

    start_bytes: int
    head_peak_bytes: int
    head_backward_peak_bytes: int
    later_bytes: tuple[int, ...]
    fixed_peak_bytes: int


class Profiler:
    """Replays tilings of one trial; ``rest`` comes from the plain one."""

    def __init__(self, config: RunConfig, kind: str, workspace_bytes: int, n_layers: int) -> None:
        self.config = config
        self.kind = kind
        self.workspace_bytes = workspace_bytes
        self.n_layers = n_layers
        self.is_short = is_equal_stack(config) and n_layers > N_TILES
        # Without state of the optimizer a step differs by what is there before it, which no tile's figures hold.
        self.n_steps = 1 if config.train.set_to_none and not config.train.optimizer_in_backward else 2
        self.shared_bytes = 0
        """What regions hold until backward ends and kept blocks do not: arguments of every block, such as positions."""
        plain, self.rest = self._plain_and_rest()
        self.may_span = not plain.trial.model.apart
        """Whether a region may cover several blocks of this model."""
        self._plain = None if self.is_short else plain

    def tiles(self, letter: Letter) -> dict[int, Tile]:
        """Give the letter's figures by the block where it begins.

        Raises NotAChain where they would not add up: tiles in the middle that differ, or a rest that depends on them.
        """
        k = letter.n_blocks
        n_tiles = N_TILES if k == 1 else N_TILES - 1
        if self.is_short and self.n_layers >= n_tiles * k:
            short = self._replayed(letter, 0, n_tiles * k, self.n_steps)
            found = self._cut(short, self._tiling(letter, 0, n_tiles * k))
            first, *middles, last = (found[i * k] for i in range(n_tiles))
            middle = middles[0]
            if len(set(middles)) > 1:
                raise NotAChain("two equal blocks in a row differ")
            by_start = {start: middle for start in range(self.n_layers - k + 1)}
            return {**by_start, 0: first, self.n_layers - k: last}
        result: dict[int, Tile] = {}
        for offset in range(min(k, self.n_layers - k + 1)):
            known, self._plain = (self._plain, None) if letter is PLAIN else (None, self._plain)
            replayed = known or self._replayed(letter, offset, self.n_layers, self.n_steps)
            tiling = self._tiling(letter, offset, self.n_layers)
            cut = self._cut(replayed, tiling)
            result.update({start: cut[start] for start, stop in tiling if start % k == offset and stop - start == k})
        return result

    def _tiling(self, letter: Letter, offset: int, n_layers: int) -> list[tuple[int, int]]:
        """Give the spans of a tiling: plain blocks up to the offset, tiles, plain blocks for what is left."""
        k = letter.n_blocks
        n_tiles = (n_layers - offset) // k
        stop = offset + n_tiles * k
        return [
            *((i, i + 1) for i in range(offset)),
            *((offset + i * k, offset + (i + 1) * k) for i in range(n_tiles)),
            *((i, i + 1) for i in range(stop, n_layers)),
        ]

    def _replayed(self, letter: Letter, offset: int, n_layers: int, n_steps: int = 2) -> Replayed:
        k = letter.n_blocks
        starts = range(offset, n_layers - k + 1, k)
        regions = tuple(region for start in starts if (region := letter.at(start)) is not None)
        return replay(
            with_layers(self.config, n_layers) if self.is_short else self.config,
            self.kind,
            self.workspace_bytes,
            plan=Plan(
                n_layers=n_layers,
                regions=regions,
                offload_spans=tuple((start, start + k) for start in starts) if letter.offload else (),
            ),
            watch=watch_blocks,
            n_steps=n_steps,
            prepare=_leave_out_update if n_steps == 1 else None,
        )

    def _plain_and_rest(self) -> tuple[Replayed, Rest]:
        """Replay a stack that keeps everything, with more blocks where few do not stand for many."""
        if not self.is_short:
            plain = self._replayed(PLAIN, 0, self.n_layers)
            first, steady = step_spans(spans(plain))
            rest = _rest_of(steady, self.n_layers)
            return plain, replace(rest, fixed_peak_bytes=max(rest.fixed_peak_bytes, _optimizer_peak(first)))
        for n_kept in KEPT:
            short = shorten(Plan(n_layers=self.n_layers), n_kept)
            plain = self._replayed(PLAIN, 0, short.plan.n_layers)
            try:
                return plain, self._rest(plain, short)
            except NotAChain:
                if n_kept == KEPT[-1]:
                    raise
        raise AssertionError("KEPT is not empty")

    def _rest(self, replayed: Replayed, short: Short) -> Rest:
        """Take the rest from a short stack, put together in its real depth. Raises NotAChain."""
        small = _rest_of(step_spans(spans(replayed))[1], short.plan.n_layers)
        first, steady = step_spans(lengthen(spans(replayed), short.runs))
        if sum(span.added_bytes for span in steady.spans):
            raise NotAChain("what many equal blocks hold is let go at once")
        steps = {a - b for a, b in zip(small.later_bytes[1:], small.later_bytes[2:], strict=False)}
        if len(steps) != 1:
            raise NotAChain("equal blocks add different bytes of gradients")
        (growth,) = steps
        last = small.later_bytes[-1]
        later = [last + (self.n_layers - i) * growth for i in range(self.n_layers + 1)]
        return Rest(
            start_bytes=_live_at(steady, f"{CALL} 0"),
            head_peak_bytes=small.head_peak_bytes,
            head_backward_peak_bytes=small.head_backward_peak_bytes,
            later_bytes=tuple(later),
            fixed_peak_bytes=max(_fixed_peak(steady), _optimizer_peak(first)),
        )

    def _cut(self, replayed: Replayed, tiling: Sequence[tuple[int, int]]) -> dict[int, Tile]:
        steady = step_spans(spans(replayed))[-1]
        n_layers = tiling[-1][1]
        tiles = _tiles_of(steady, tiling)
        released = 0
        over: set[int] = set()
        limit = max(SHARED_BYTES, SHARED_RATIO * self.rest.start_bytes)
        for start, stop in tiling:
            released += tiles[start].released_bytes
            expected = self.rest.later_bytes[self.n_layers - n_layers + stop] - released
            got = _live_at(steady, f"{GRADIENT} {stop - 1}") - _after_forward(steady, stop, n_layers)
            over.add(got - expected)
            if not 0 <= got - expected <= limit:
                raise NotAChain(f"gradients above block {stop} hold {got} bytes, {expected} under none")
        head = _head_peaks(steady, n_layers, released)
        for got, expected in zip(head, (self.rest.head_peak_bytes, self.rest.head_backward_peak_bytes), strict=True):
            over.add(got - expected)
            if not 0 <= got - expected <= limit:
                raise NotAChain(f"head and loss peak {got} bytes above the blocks, {expected} under none")
        self.shared_bytes = max(self.shared_bytes, *over)
        return tiles


def _leave_out_update(trial: Trial) -> None:
    """Have the step end before its update, which is most of its operations and of no block, where it comes last."""
    if isinstance(trial.optimizer, AfterBackward):
        trial.optimizer.step = lambda scaler: True  # type: ignore[method-assign]


def _last_index(step: StepSpans, mark: str) -> int:
    for i in range(len(step.spans) - 1, -1, -1):
        if step.spans[i].mark == mark and (i == 0 or step.spans[i - 1].mark != mark):
            return i
    raise NotAChain(f"the replayed step has no {mark}")


def _forward_end(step: StepSpans, stop: int, n_layers: int) -> int:
    """Give the index of the span after a forward: the next block's call, or what first takes memory in the head."""
    if stop < n_layers:
        return _last_index(step, f"{CALL} {stop}")
    i = _last_index(step, "head")
    while step.spans[i].rise_bytes == 0 and step.spans[i].added_bytes <= 0:
        i += 1  # what the last block's caller lets go of on return
    return i


def _live_before(step: StepSpans, index: int) -> int:
    return step.start_bytes + sum(span.added_bytes for span in step.spans[:index])


def _live_at(step: StepSpans, mark: str) -> int:
    return _live_before(step, _last_index(step, mark))


def _after_forward(step: StepSpans, stop: int, n_layers: int) -> int:
    return _live_before(step, _forward_end(step, stop, n_layers))


def _peak(step: StepSpans, begin: int, end: int) -> int:
    """Give the highest live bytes over the spans from ``begin`` to ``end - 1``."""
    live = peak = _live_before(step, begin)
    for span in step.spans[begin:end]:
        peak = max(peak, live + span.rise_bytes)
        live += span.added_bytes
    return peak


def _tiles_of(step: StepSpans, tiling: Sequence[tuple[int, int]]) -> dict[int, Tile]:
    n_layers = tiling[-1][1]
    tiles = {}
    for start, stop in tiling:
        begin, end = _last_index(step, f"{CALL} {start}"), _forward_end(step, stop, n_layers)
        before, after = _live_before(step, begin), _live_before(step, end)
        back = _last_index(step, f"{GRADIENT} {stop - 1}")
        done = _last_index(step, f"{GRADIENT} {start - 1}" if start else "optimizer")
        released = _released(step, start, stop)
        tiles[start] = Tile(
            kept_bytes=after - before,
            forward_peak_bytes=_peak(step, begin, end) - before,
            backward_peak_bytes=_peak(step, back, done) - _live_before(step, back) + after - before - released,
            released_bytes=released,
        )
    return tiles


def _released(step: StepSpans, start: int, stop: int) -> int:
    """Give what blocks held through the forward of head and loss, and no longer when backward begins."""
    return -sum(
        span.added_bytes
        for span in step.spans[_forward_ended(step) : _last_index(step, "turn")]
        if span.block is not None and start <= span.block < stop
    )


def _forward_ended(step: StepSpans) -> int:
    """Give the index of the first of the spans before the turn in which storages are only let go."""
    i = _last_index(step, "turn")
    while step.spans[i - 1].mark == "head" and step.spans[i - 1].rise_bytes == 0:
        i -= 1
    return i


def _back_begins(step: StepSpans) -> int:
    last = max(int(span.mark.split()[1]) for span in step.spans if span.mark.startswith(GRADIENT))
    return _last_index(step, f"{GRADIENT} {last}")


def _head_peaks(step: StepSpans, n_layers: int, released: int) -> tuple[int, int]:
    """Give the peaks of head and loss, forward and backward, as Chain has them."""
    end, turn = _forward_end(step, n_layers, n_layers), _last_index(step, "turn")
    top = _live_before(step, end)
    return _peak(step, end, turn) - top, _peak(step, turn, _back_begins(step)) - top + released


def _rest_of(step: StepSpans, n_layers: int) -> Rest:
    """Take apart a step that keeps everything."""
    released = sum(_released(step, block, block + 1) for block in range(n_layers))
    head, head_backward = _head_peaks(step, n_layers, released)
    later = [0] * (n_layers + 1)
    for i in range(1, n_layers + 1):
        later[i] = _live_at(step, f"{GRADIENT} {i - 1}") - _after_forward(step, i, n_layers) + _released(step, 0, i)
    return Rest(
        start_bytes=_live_at(step, f"{CALL} 0"),
        head_peak_bytes=head,
        head_backward_peak_bytes=head_backward,
        later_bytes=tuple(later),
        fixed_peak_bytes=_fixed_peak(step),
    )


def _fixed_peak(step: StepSpans) -> int:
    begin = next(i for i, span in enumerate(step.spans) if span.mark == f"{CALL} 0")
    return max(_peak(step, 0, begin), _optimizer_peak(step))


def _optimizer_peak(step: StepSpans) -> int:
    return figures(step).peaks.get("optimizer", 0)
