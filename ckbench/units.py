"""Bytes, seconds, counts and foreign words as text fit to print; the only divisor of 2**20 and 2**30."""

import re

KIB_BYTES = 2**10
MIB_BYTES = 2**20
GIB_BYTES = 2**30
UNKNOWN = "n/a"
MAX_LINE_CHARS = 600
MAX_SIZE_BYTES = 2**60
"""An exbibyte: what is larger is a slip, and no array holds it."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SIZE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def clean(text: str) -> str:
    """Replace characters that steer a terminal, hide or reorder text, or break a line.

    >>> clean(f"a{chr(27)}[2Jb"), clean("none")
    ('a?[2Jb', 'none')
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def one_line(text: str) -> str:
    """Make one line for people of any text: nothing that steers a terminal, and the middle left out of a long one."""
    text = clean(" ".join(text.splitlines()))
    half = MAX_LINE_CHARS // 2
    return text if len(text) <= MAX_LINE_CHARS else f"{text[:half]} ... {text[-half:]}"


def parse_size_bytes(text: str) -> int:
    """Read a size that names its unit: GB is 10**9 bytes, GiB is 2**30, B is bytes.

    >>> parse_size_bytes("12GiB"), parse_size_bytes("12 GB"), parse_size_bytes("512B")
    (12884901888, 12000000000, 512)

    A bare number of at least one million is taken as bytes; a smaller one lacks its unit.
    Raises ValueError with a sentence for people.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 16GiB or 800MiB")
    number, unit = match.groups()
    if not unit:
        if "." not in number and 10**6 <= int(number) <= MAX_SIZE_BYTES:
            return int(number)
        raise ValueError(f"{text!r} has no unit; write {number}GiB, {number}GB, {number}MiB or {number}B")
    factor = _SIZE_UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(f"{text!r}: unknown unit {unit!r}; units are B, KB, MB, GB, KiB, MiB, GiB")
    n_bytes = int(float(number) * factor) if "." in number else int(number) * factor
    if n_bytes > MAX_SIZE_BYTES:
        raise ValueError(f"{text[:40]!r} is more than any memory")
    return n_bytes


def format_bytes(n_bytes: int | None) -> str:
    """Show a byte count in MiB below 1 GiB and in GiB from there on.

    >>> format_bytes(1_610_612_736), format_bytes(3 * 2**20), format_bytes(512), format_bytes(None)
    ('1.50 GiB', '3.00 MiB', '512 B', 'n/a')
    """
    if n_bytes is None:
        return UNKNOWN
    size = abs(n_bytes)
    if size >= GIB_BYTES:
        return f"{n_bytes / GIB_BYTES:.2f} GiB"
    if size >= 0.01 * MIB_BYTES:
        return f"{n_bytes / MIB_BYTES:.2f} MiB"
    return f"{n_bytes} B"


def format_mib(n_bytes: int | None) -> str:
    """Show a byte count as a bare number of MiB, for columns that carry the unit in their head.

    >>> format_mib(1_572_864), format_mib(None)
    ('1.5', 'n/a')
    """
    if n_bytes is None:
        return UNKNOWN
    mib = n_bytes / MIB_BYTES
    return f"{mib:.1f}" if abs(mib) >= 1 or n_bytes == 0 else f"{mib:.3f}"


def format_ms(seconds: float | None) -> str:
    """Show seconds as a bare number of milliseconds with three significant digits or more.

    >>> format_ms(0.01234), format_ms(1.5), format_ms(None)
    ('12.3', '1500', 'n/a')
    """
    if seconds is None:
        return UNKNOWN
    ms = seconds * 1e3
    if ms >= 100:
        return f"{ms:.0f}"
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def format_duration(seconds: float | None) -> str:
    """Show a waiting time the way a person says it.

    >>> format_duration(7.4), format_duration(95), format_duration(7300)
    ('7 s', '1 min 35 s', '2 h 2 min')
    """
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def format_percent(ratio: float | None, *, signed: bool = True) -> str:
    """Show a relative change, 0.25 as +25.0 %.

    >>> format_percent(-0.613), format_percent(None)
    ('-61.3 %', 'n/a')
    """
    if ratio is None:
        return UNKNOWN
    return f"{ratio * 100:+.1f} %" if signed else f"{ratio * 100:.1f} %"


def format_count(count: int | float | None) -> str:
    """Show a large count with a suffix of thousands.

    >>> format_count(124_439_808), format_count(950), format_count(None)
    ('124.4 M', '950', 'n/a')
    """
    if count is None:
        return UNKNOWN
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.1f} {suffix}"
    return f"{count:.0f}"


def counted(n: int, noun: str) -> str:
    """Write a number of things.

    >>> counted(1, "round"), counted(3, "round")
    ('1 round', '3 rounds')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
