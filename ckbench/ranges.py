"""Ranges on the command line and in ``vary:``; both ends belong to a range."""

import re

from ckbench.errors import ConfigError

MAX_VALUES = 10_000
_RANGE = re.compile(r"(\d{1,12})\.\.(\d{1,12})(?:(:|x)(\d{1,12}))?")


def parse_range(text: str) -> list[int]:
    """Read ``8``, ``2,4,8``, ``2..6``, ``2..48:2`` (every second) or ``2..48x2`` (doubling).

    >>> parse_range("2..6"), parse_range("2..10:4"), parse_range("2..48x2"), parse_range("6..6")
    ([2, 3, 4, 5, 6], [2, 6, 10], [2, 4, 8, 16, 32], [6])

    The upper end is part of the range where the step lands on it. Raises ConfigError.
    """
    values: list[int] = []
    for piece in text.split(","):
        piece = piece.strip()
        if re.fullmatch(r"\d{1,12}", piece):
            values.append(int(piece))
            continue
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ConfigError(f"{text!r} is not a range; write 2..48, 2..48:2, 2..48x2 or 2,4,8 (both ends included)")
        values.extend(_expand(text, *match.groups()))
        if len(values) > MAX_VALUES:
            raise ConfigError(f"{text!r} gives more than {MAX_VALUES} values")
    if min(values) < 1:
        raise ConfigError(f"{text!r}: sizes are at least 1")
    if len(set(values)) != len(values):
        raise ConfigError(f"{text!r} gives a value twice")
    return values


def _expand(text: str, first: str, last: str, kind: str | None, step_text: str | None) -> list[int]:
    low, high, step = int(first), int(last), int(step_text or 1)
    if high < low:
        raise ConfigError(f"{text!r} runs downwards; write the smaller end first")
    if kind == "x":
        if step < 2 or low < 1:
            raise ConfigError(f"{text!r}: a factor is at least 2 and starts from at least 1")
        values = []
        while low <= high:
            values.append(low)
            low *= step
        return values
    if step < 1:
        raise ConfigError(f"{text!r}: a step is at least 1")
    if (high - low) // step >= MAX_VALUES:
        raise ConfigError(f"{text!r} gives more than {MAX_VALUES} values")
    return list(range(low, high + 1, step))


def thin(values: list[int], n_points: int) -> list[int]:
    """Keep ``n_points`` of the values, evenly by position, both ends among them.

    >>> thin([2, 3, 4, 5, 6, 7, 8], 3)
    [2, 5, 8]
    """
    if n_points >= len(values):
        return values
    if n_points == 1:
        return [values[-1]]
    last = len(values) - 1
    return [values[round(i * last / (n_points - 1))] for i in range(n_points)]


def coarse_to_fine(n_values: int) -> list[int]:
    """Order positions so that any beginning of the list already covers the whole range.

    >>> coarse_to_fine(5)
    [0, 4, 2, 1, 3]
    """
    order = [0, n_values - 1] if n_values > 1 else list(range(n_values))
    gaps = [(0, n_values - 1)]
    while gaps:
        next_gaps = []
        for low, high in gaps:
            if high - low < 2:
                continue
            middle = (low + high) // 2
            order.append(middle)
            next_gaps += [(low, middle), (middle, high)]
        gaps = next_gaps
    return order
