"""Sizes, durations and counts as text, and sizes from text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckbench import units


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("16GiB", 16 * 2**30),
        ("16 GiB", 16 * 2**30),
        (" 16gib ", 16 * 2**30),
        ("16GB", 16 * 10**9),
        ("800MiB", 800 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("512B", 512),
        ("512 b", 512),
        ("64KiB", 65536),
        ("2TB", 2 * 10**12),
        ("17179869184", 2**34),
        ("1000000", 10**6),
        ("0B", 0),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert units.parse_size_bytes(text) == n_bytes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("16", "'16' has no unit; write 16GiB, 16GB, 16MiB or 16B"),
        ("999999", "'999999' has no unit; write 999999GiB, 999999GB, 999999MiB or 999999B"),
        ("1.5", "'1.5' has no unit; write 1.5GiB, 1.5GB, 1.5MiB or 1.5B"),
        ("16G", "'16G': unknown unit 'G'; units are B, KB, MB, GB, KiB, MiB, GiB"),
        ("16Gib/s", "'16Gib/s' is not a size; write for example 16GiB or 800MiB"),
        ("", "'' is not a size; write for example 16GiB or 800MiB"),
        ("-1GiB", "'-1GiB' is not a size; write for example 16GiB or 800MiB"),
        ("big", "'big' is not a size; write for example 16GiB or 800MiB"),
        ("1e3GiB", "'1e3GiB' is not a size; write for example 16GiB or 800MiB"),
    ],
)
def test_sizes_that_are_none(text: str, told: str) -> None:
    with pytest.raises(ValueError) as error:
        units.parse_size_bytes(text)
    assert str(error.value) == told


@given(st.integers(0, 2**60))
def test_bytes_come_back_whole(n_bytes: int) -> None:
    assert units.parse_size_bytes(f"{n_bytes}B") == n_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (512, "512 B"),
        (10_485, "10485 B"),
        (10_486, "0.01 MiB"),
        (2**20, "1.00 MiB"),
        (2**30 - 1, "1024.00 MiB"),
        (2**30, "1.00 GiB"),
        (-(2**30), "-1.00 GiB"),
        (80 * 2**30, "80.00 GiB"),
    ],
)
def test_bytes(n_bytes: int | None, text: str) -> None:
    assert units.format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(None, "n/a"), (0, "0.0"), (2**20, "1.0"), (2**19, "0.500"), (1024, "0.001"), (2**30, "1024.0")],
)
def test_mib_column(n_bytes: int | None, text: str) -> None:
    assert units.format_mib(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "n/a"), (0.0, "0.00"), (0.001234, "1.23"), (0.01234, "12.3"), (0.1234, "123"), (12.0, "12000")],
)
def test_ms_column(seconds: float | None, text: str) -> None:
    assert units.format_ms(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (3600, "1 h 0 min"),
        (7200 + 60 + 29, "2 h 1 min"),
        (7300, "2 h 2 min"),
        (2 * 3600 - 10, "2 h 0 min"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("ratio", "signed", "text"),
    [
        (None, True, "n/a"),
        (0.25, True, "+25.0 %"),
        (-0.613, True, "-61.3 %"),
        (0.0, True, "+0.0 %"),
        (0.25, False, "25.0 %"),
    ],
)
def test_percent(ratio: float | None, signed: bool, text: str) -> None:
    assert units.format_percent(ratio, signed=signed) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "n/a"),
        (0, "0"),
        (999, "999"),
        (1000, "1.0 k"),
        (124_439_808, "124.4 M"),
        (3.5e9, "3.5 G"),
        (2e12, "2.0 T"),
        (-5000, "-5.0 k"),
    ],
)
def test_counts(count: float | None, text: str) -> None:
    assert units.format_count(count) == text


@pytest.mark.parametrize("text", ["99999999999999999999999999GiB", f"{2**60 + 1}B", "2000000.5TiB"])
def test_what_is_more_than_any_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="more than any memory"):
        units.parse_size_bytes(text)
