"""Ranges: both ends included, lists kept in order, nonsense refused in exact words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckbench.errors import ConfigError
from ckbench.ranges import MAX_VALUES, coarse_to_fine, parse_range, thin


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8", [8]),
        ("2,4,8", [2, 4, 8]),
        (" 2 , 4 ", [2, 4]),
        ("8,2", [8, 2]),
        ("2..6", [2, 3, 4, 5, 6]),
        ("6..6", [6]),
        ("2..12:2", [2, 4, 6, 8, 10, 12]),
        ("2..11:3", [2, 5, 8, 11]),
        ("2..12:3", [2, 5, 8, 11]),
        ("2..48x2", [2, 4, 8, 16, 32]),
        ("1..27x3", [1, 3, 9, 27]),
        ("1,4..6,16..64x2", [1, 4, 5, 6, 16, 32, 64]),
    ],
)
def test_both_ends_belong_to_a_range(text: str, values: list[int]) -> None:
    assert parse_range(text) == values


FORMS = "write 2..48, 2..48:2, 2..48x2 or 2,4,8 (both ends included)"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", f"'' is not a range; {FORMS}"),
        ("2-48", f"'2-48' is not a range; {FORMS}"),
        ("2..", f"'2..' is not a range; {FORMS}"),
        ("2...6", f"'2...6' is not a range; {FORMS}"),
        ("2,,4", f"'2,,4' is not a range; {FORMS}"),
        ("2..6:-1", f"'2..6:-1' is not a range; {FORMS}"),
        ("2..6:1.5", f"'2..6:1.5' is not a range; {FORMS}"),
        ("-2..6", f"'-2..6' is not a range; {FORMS}"),
        ("6..2", "'6..2' runs downwards; write the smaller end first"),
        ("2..6:0", "'2..6:0': a step is at least 1"),
        ("2..6x1", "'2..6x1': a factor is at least 2 and starts from at least 1"),
        ("0..6x2", "'0..6x2': a factor is at least 2 and starts from at least 1"),
        ("0..3", "'0..3': sizes are at least 1"),
        ("0", "'0': sizes are at least 1"),
        ("2,2", "'2,2' gives a value twice"),
        ("1..4,3..6", "'1..4,3..6' gives a value twice"),
        ("1..20000", f"'1..20000' gives more than {MAX_VALUES} values"),
        ("1..9000,10001..12000", f"'1..9000,10001..12000' gives more than {MAX_VALUES} values"),
        ("1..999999999999", f"'1..999999999999' gives more than {MAX_VALUES} values"),
    ],
)
def test_refusals(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_range(text)
    assert str(error.value) == told


@given(st.integers(1, 500), st.integers(0, 500), st.integers(1, 60))
def test_steps_stay_inside(low: int, span: int, step: int) -> None:
    values = parse_range(f"{low}..{low + span}:{step}")
    assert values[0] == low
    assert low + span - step < values[-1] <= low + span
    assert all(b - a == step for a, b in zip(values, values[1:], strict=False))


@given(st.lists(st.integers(1, 99), min_size=1, max_size=50, unique=True), st.integers(1, 60))
def test_thin_keeps_both_ends(values: list[int], n_points: int) -> None:
    kept = thin(values, n_points)
    assert len(kept) == min(n_points, len(values))
    assert kept[-1] == values[-1]
    if n_points > 1:
        assert kept[0] == values[0]
    positions = [values.index(value) for value in kept]
    assert positions == sorted(set(positions))


@given(st.integers(0, 300))
def test_coarse_to_fine_is_a_permutation_that_covers_early(n_values: int) -> None:
    order = coarse_to_fine(n_values)
    assert sorted(order) == list(range(n_values))
    for length in range(2, n_values + 1):
        beginning = sorted(order[:length])
        assert beginning[0] == 0 and beginning[-1] == n_values - 1
        gaps = [b - a for a, b in zip(beginning, beginning[1:], strict=False)]
        assert max(gaps) <= 2 * -(-n_values // (length - 1)) + 1
