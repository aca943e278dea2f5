"""Break text the way files get broken: flipped, cut, doubled and spliced bytes, and hostile words put in."""

import random
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANNED = "budget.yaml"
"""A study whose plans take minutes to find for the sizes that a mutant may ask for."""
STUDIES = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.name != PLANNED)

HOSTILE = (
    b"&a [*a, *a]", b"*a", b"<<: *a", b"<<: {n_layers: 3}", b"!!python/object/apply:os.system ['touch hacked']",
    b"!!python/name:os.system", b"!!binary aGk=", b"!!set {a}", b"!!timestamp 2026-01-01", b"! x", b"!<tag:x> y",
    b"!!int x", b"!!float .nan", b"!!float inf", b"!!bool maybe", b"!!null 3", b"%YAML 9.9\n---", b"---\n", b"...\n",
    b"\t", b"\r\n", b"\r", b"\xef\xbb\xbf", b"\x00", b"\x1b[31m", b"\x7f", b"\xc2\x85", b"\xe2\x80\xa8",
    b"\xe2\x80\xae", b"\xff\xfe", b"\xc3\x28", "日本".encode(), "𝟙𝟚".encode(), b'"\\ud800"', b'"\\uDFFF"',
    b'"\\UFFFFFFFF"', b'"\\x1b[2J"', b'"\\0"', b"9" * 400, b"9" * 5000, b"-1", b"0", b"1e999", b"-1e999", b"1e-999",
    b".inf", b".nan", b"NaN", b"null", b"~", b"[]", b"{}", b"[[[[1]]]]", b"{a: {b: {c: {d: 1}}}}", b"[" * 60,
    b"{" * 60, b"[" * 3000, b"{a: " * 2000, b"- " * 300, b"? ", b"| \n", b">-\n", b"'", b'"', b"#", b": ", b":", b",",
    b"yes", b"off", b"true", b"010", b"0x1F", b"1_000", b"1:30", b"2..48", b"48..2", b"1..100000000", b"1..9999x2",
    b"2..", b"x" * 3000, b"=1+1", b"<script>", b"|", b"%s%n{0}", b"n_layers: 1000000000000", b"run: {}",
    b"vary: {model.n_layers: 1..400, train.seq_len: 1..400}", b"on_cpu: {on_cpu: {}}",
    b"strategies: [every-k:999999999999]", b"strategies: {name: none, name: none}", b"strategies: ~", b"name: ''",
)  # fmt: skip
"""Words that readers of YAML and of numbers are known to stumble over."""


def mutant(seed: object, sources: list[bytes]) -> bytes:
    """Give one broken text; the same seed gives the same one."""
    draw = random.Random(f"mutant {seed}")
    data = bytearray(draw.choice(sources))
    for _ in range(draw.choice((1, 1, 2, 3, 5, 8))):
        data = bytearray(draw.choice(OPERATIONS)(data, draw, sources))
    return bytes(data)


def _span(data: bytearray, draw: random.Random, longest: int = 200) -> tuple[int, int]:
    start = draw.randrange(len(data) + 1)
    return start, min(len(data), start + draw.randrange(1, longest))


def _flip(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return data


def _any_byte(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    at, _ = _span(data, draw)
    return data[:at] + bytes([draw.randrange(256)]) + data[at:]


def _delete(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    start, stop = _span(data, draw, draw.choice((2, 20, 400)))
    return data[:start] + data[stop:]


def _double(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    start, stop = _span(data, draw)
    return data[:stop] + data[start:stop] + data[stop:]


def _cut(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _splice(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    other = bytearray(draw.choice(sources))
    return data[: _span(data, draw)[0]] + other[_span(other, draw)[0] :]


def _hostile(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    at, _ = _span(data, draw)
    return data[:at] + draw.choice(HOSTILE) + data[at:]


def _hostile_value(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    """Put a hostile word where a value stood, so that the rest of the file stays well-formed."""
    lines = data.split(b"\n")
    places = [i for i, line in enumerate(lines) if b":" in line and not line.lstrip().startswith(b"#")]
    if places:
        at = draw.choice(places)
        lines[at] = lines[at].partition(b":")[0] + b": " + draw.choice(HOSTILE)
    return b"\n".join(lines)


def _swap_lines(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    lines = data.split(b"\n")
    a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return b"\n".join(lines)


def _double_line(data: bytearray, draw: random.Random, sources: list[bytes]) -> bytes:
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    return b"\n".join([*lines[: at + 1], lines[at], *lines[at + 1 :]])


OPERATIONS = (
    _flip, _any_byte, _delete, _double, _cut, _splice, _hostile, _hostile_value, _hostile_value, _swap_lines,
    _double_line,
)  # fmt: skip
