"""What to use within a budget, in one sentence: the fastest measured strategy that fits, for every budget there is.

In a sentence names of strategies stand between backticks, so that a format can set them apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckbench.cards import CARDS_MIB, usable_bytes
from ckbench.compare import Row
from ckbench.reports._pareto import is_faster, is_measured
from ckbench.reports.base import Budget
from ckbench.units import MIB_BYTES, clean, format_bytes, format_ms, format_percent

LEAST_SAVING = 0.05
"""A strategy that is not measurably slower is worth a word where it needs at least this share less."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One sentence about one budget, or about several with the same answer."""

    budget: str
    sentence: str
    is_asked: bool = False
    """Whether the reader named this budget."""


def verdicts(members: Sequence[Row], asked: Sequence[Budget] = ()) -> list[Verdict]:
    """Answer for one group of comparable rows: without a limit, in each asked budget, on cards, in tighter budgets."""
    measured = [row for row in members if is_measured(row)]
    if not measured:
        return [Verdict(budget="any budget", sentence="no strategy ended ok with a peak and a step time.")]
    answers = [_in_budget(measured, budget) for budget in asked]
    return [_without_limit(measured), *answers, *_on_cards(measured), *_tighter(measured)]


def needed_bytes(row: Row) -> int:
    """Give what a device must have for a measured row: what its allocator held, or the higher peak."""
    held = [row.values[key] for key in ("peak_reserved_bytes", "peak_allocated_bytes", "first_step_peak_bytes")]
    most: int = max(n_bytes for n_bytes in held if n_bytes is not None)
    return most


def choose(measured: Sequence[Row], limit_bytes: int | None) -> Row | None:
    """Give the fastest row that fits, of equally fast ones that which needs least; None where nothing fits."""
    fitting = [row for row in measured if limit_bytes is None or needed_bytes(row) <= limit_bytes]
    return min(fitting, key=lambda row: (row.values["step_s_median"], needed_bytes(row)), default=None)


def _without_limit(measured: Sequence[Row]) -> Verdict:
    best = choose(measured, None)
    assert best is not None
    return Verdict(
        budget="no limit",
        sentence=f"{_name(best)} is fastest: {_figures(best)}{_as_good(best, measured, None)}.",
    )


def _in_budget(measured: Sequence[Row], budget: Budget) -> Verdict:
    best = choose(measured, budget.usable_bytes)
    usable = f" ({format_bytes(budget.usable_bytes)} usable)" if budget.name in CARDS_MIB else ""
    label = clean(budget.name) + usable
    if best is None:
        return Verdict(budget=label, sentence=_nothing(measured), is_asked=True)
    rest = _as_good(best, measured, budget.usable_bytes)
    sentence = f"use {_name(best)}: {_figures(best)}; {_why(best, measured)}{rest}."
    return Verdict(budget=label, sentence=sentence, is_asked=True)


def _on_cards(measured: Sequence[Row]) -> Iterator[Verdict]:
    """Answer for common cards, neighbours with one answer together."""
    by_size = sorted(CARDS_MIB, key=CARDS_MIB.__getitem__)
    runs: list[tuple[Row | None, list[str]]] = []
    for card in by_size:
        best = choose(measured, usable_bytes(CARDS_MIB[card] * MIB_BYTES))
        if runs and runs[-1][0] is best:
            runs[-1][1].append(card)
        else:
            runs.append((best, [card]))
    for best, cards in runs:
        names = cards[0] if len(cards) == 1 else f"{cards[0]} to {cards[-1]}"
        if best is None:
            yield Verdict(budget=names, sentence=_nothing(measured))
            continue
        yield Verdict(budget=names, sentence=f"use {_name(best)}: {_figures(best)}; {_why(best, measured)}.")


def _tighter(measured: Sequence[Row]) -> Iterator[Verdict]:
    """Name every budget below the smallest card from which on the answer is another one, the largest first."""
    smallest_card = usable_bytes(min(CARDS_MIB.values()) * MIB_BYTES)
    steps: list[Row] = []
    for row in sorted(measured, key=lambda row: (needed_bytes(row), row.values["step_s_median"])):
        if not steps or row.values["step_s_median"] < steps[-1].values["step_s_median"]:
            steps.append(row)
    for row in reversed(steps):
        if row is choose(measured, None):  # said without a limit
            continue
        if needed_bytes(row) < smallest_card:
            sentence = f"{_name(row)} is the fastest that fits: {_figures(row)}."
            yield Verdict(budget=f"from {format_bytes(needed_bytes(row))} on", sentence=sentence)
    yield Verdict(budget=f"below {format_bytes(needed_bytes(steps[0]))}", sentence="nothing that was measured fits.")


def _name(row: Row) -> str:
    return f"`{clean(row.label).replace('`', '?')}`"


def _figures(row: Row) -> str:
    """Write what a row needs and takes, and both against its baseline."""
    values = row.values
    text = f"{format_bytes(needed_bytes(row))}, {format_ms(values['step_s_median'])} ms per step"
    ratio, low, high = values["slowdown_ratio"], values["slowdown_low"], values["slowdown_high"]
    if ratio is None or values["baseline"] == values["strategy"]:
        return text
    interval = " [no interval]" if low is None or high is None else f" [{low:.2f}..{high:.2f}]"
    change = values.get("peak_change_ratio")
    peak = "" if change is None else f"{format_percent(change)} peak and "
    return f"{text} ({peak}{ratio:.2f}{interval} times the step time of {clean(str(values['baseline']))})"


def _why(best: Row, measured: Sequence[Row]) -> str:
    faster = [row for row in measured if row.values["step_s_median"] < best.values["step_s_median"]]
    if not faster:
        return "nothing measured is faster"
    least = min(map(needed_bytes, faster))
    return f"what is faster needs {format_bytes(least)} or more"


def _as_good(best: Row, measured: Sequence[Row], limit_bytes: int | None) -> str:
    """Name the row that needs clearly less and of which the intervals do not say that it is slower."""
    limit = (1 - LEAST_SAVING) * needed_bytes(best)
    rivals = [row for row in measured if needed_bytes(row) <= limit and not is_faster(best, row)]
    rival = min(rivals, key=needed_bytes, default=None)
    if rival is None:
        return ""
    less = format_percent(1 - needed_bytes(rival) / needed_bytes(best), signed=False)
    return f"; {_name(rival)} needs {less} less and its intervals do not say that it is slower"


def _nothing(measured: Sequence[Row]) -> str:
    least = min(measured, key=needed_bytes)
    return f"nothing measured fits; {_name(least)} needs least, {format_bytes(needed_bytes(least))}."
