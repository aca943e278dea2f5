"""Strict YAML: what is a number and what is text, where every key stands, and hostile files refused in one line."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckbench.errors import ConfigError
from ckbench.marked_yaml import MAX_FILE_BYTES, Marked, read_file, read_text, read_value


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as told:
        read_text(text, source="s.yaml")
    assert len(told.value.faults) == 1 and "\n" not in told.value.faults[0]
    return str(told.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("1_000", 1000),
        ("1e-4", 1e-4),
        ("1E4", 1e4),
        ("2.5e+3", 2500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("010", "010"),
        ("0x10", "0x10"),
        ("0o17", "0o17"),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("2..48:2", "2..48:2"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("true", True),
        ("Yes", True),
        ("OFF", False),
        ("no", False),
        ("'no'", "no"),
        ("none", "none"),
        ("None", "None"),
        ("~", None),
        ("null", None),
        ("Null", None),
        ("", None),
        ("'null'", "null"),
        ("every-k:4", "every-k:4"),
        ("[1, a]", [1, "a"]),
        ("{a: 1}", {"a": 1}),
        ("!!str 5", "5"),
        ("!!int '5'", 5),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    got = read_value(text)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("key", ["1", "1.5", "yes", "on", "a b"])
def test_keys_are_always_text(key: str) -> None:
    assert read_value(f"{key}: x") == {key: "x"}


def test_every_key_and_item_has_its_line() -> None:
    marked = read_text("a: 1\n\nb:\n  c: 2\n  d: [x,\n    y]\ne:\n  - {f: 1}\n", source="s.yaml")
    wanted = {("a",): 1, ("b",): 3, ("b", "c"): 4, ("b", "d"): 5, ("b", "d", 1): 6, ("e", 0): 8, ("e", 0, "f"): 8}
    assert {path: marked.lines[path] for path in wanted} == wanted


def test_where_falls_back_to_the_nearest_parent() -> None:
    marked = read_text("a:\n  b: 1\n", source="s.yaml")
    assert marked.where(("a", "b")) == "s.yaml:2"
    assert marked.where(("a", "missing", "deeper")) == "s.yaml:1"
    assert marked.where(("zzz",)) == "s.yaml:1"
    assert Marked(source="s.yaml", data=None).where(("a",)) == "s.yaml"


def test_merge_keys() -> None:
    text = "base: &base\n  a: 1\n  b: 2\nuse:\n  b: 3\n  <<: *base\n"
    marked = read_text(text, source="s.yaml")
    assert marked.data["use"] == {"a": 1, "b": 3}
    assert marked.lines[("use", "a")] == 2, "a merged key stands where it was written"
    assert marked.lines[("use", "b")] == 5, "a key of its own keeps its own line, before or after the merge"


def test_the_first_of_several_merges_wins() -> None:
    text = "x: &x {a: 1}\ny: &y\n  a: 2\n  b: 2\nlist:\n  <<: [*x, *y]\ntwice:\n  <<: *x\n  <<: *y\n"
    marked = read_text(text, source="s.yaml")
    assert marked.data["list"] == marked.data["twice"] == {"a": 1, "b": 2}
    for key in ("list", "twice"):
        assert marked.lines[(key, "a")] == 1 and marked.lines[(key, "b")] == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\na: 2\n", "s.yaml:2: key 'a' is given twice, first in line 1"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", "s.yaml:4: key 'b' is given twice, first in line 2"),
        ("a: {b: 1, b: 1}\n", "s.yaml:1: key 'b' is given twice, first in line 1"),
        ("~: 3\n", "s.yaml:1: a key must be a word"),
        ("[1]: 3\n", "s.yaml:1: a key must be a word"),
        ("? {a: 1}\n: 3\n", "s.yaml:1: a key must be a word"),
        ("a:\n  <<: 3\n", "s.yaml:2: '<<' merges mappings only"),
        ("a:\n  <<: [1]\n", "s.yaml:2: '<<' merges mappings only"),
        ("a:\n\tb: 1\n", "s.yaml:2:1: tab not allowed for indentation; use spaces"),
        ("a:\n  b: 1\n\tc: 2\n", "s.yaml:3:1: tab not allowed for indentation; use spaces"),
        ("a: b: c\n", "s.yaml:1: mapping values are not allowed here"),
        ("a: @x\n", "s.yaml:1: found character '@' that cannot start any token"),
        ("a: [1\n", "s.yaml:2: expected ',' or ']', but got '<stream end>'"),
        ("a: *nowhere\n", "s.yaml:1: found undefined alias 'nowhere'"),
        ("a: 1\n---\nb: 2\n", "s.yaml:2: expected a single document in the stream, but found another document"),
        ("a: \x00\n", "s.yaml: character #x0000 is not allowed in YAML"),
        ("a: \x1b\n", "s.yaml: character #x001b is not allowed in YAML"),
        (f"a: {'9' * 5000}\n", f"s.yaml:1: '{'9' * 40}' is not a number"),
        ("a: !!float fast\n", "s.yaml:1: 'fast' is not a number"),
    ],
)
def test_faults_name_the_line(text: str, told: str) -> None:
    assert refusal(text) == told


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("a: !!python/object/apply:os.system ['true']\n", "python/object/apply:os.system"),
        ("a: !!python/object:os.system {}\n", "python/object:os.system"),
        ("a: !!python/name:os.system\n", "python/name:os.system"),
        ("a: !!python/name:os.system ''\n", "python/name:os.system"),
        ("!!python/object:os.system x: 1\n", "python/object:os.system"),
        ("a: !!binary aGk=\n", "binary"),
        ("a: !!set {b}\n", "set"),
        ("a: !!omap [b: 1]\n", "omap"),
        ("a: !!timestamp 2024-01-02\n", "timestamp"),
        ("a: !!bool maybe\n", "bool"),
        ("a: !custom 3\n", "!custom"),
    ],
)
def test_tags_are_refused(text: str, tag: str) -> None:
    assert refusal(text) == f"s.yaml:1: tag '{tag}' is not allowed"


def test_alias_bomb() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert refusal("\n".join(rows)).endswith(": too large or too deeply nested for a study")


def test_merge_bomb() -> None:
    rows = ["a0: &a0 {k: x}"]
    rows += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)]
    assert refusal("\n".join(rows)).endswith(": too large or too deeply nested for a study")


def test_an_alias_of_itself() -> None:
    assert refusal("a: &x [*x]\n") == "s.yaml:1: too large or too deeply nested for a study"
    assert refusal("a: &x {b: *x}\n") == "s.yaml:1: too large or too deeply nested for a study"
    assert refusal("a: &x\n  <<: *x\n") == "s.yaml:1: too large or too deeply nested for a study"


def test_deep_nesting() -> None:
    assert refusal("a: " + "[" * 60 + "]" * 60) == "s.yaml:1: too large or too deeply nested for a study"
    assert refusal("a: " + "[" * 5_000) == "s.yaml: not readable as YAML (RecursionError)"
    assert refusal("- " * 3000 + "x").startswith("s.yaml")


@pytest.mark.parametrize("text", ["", "\n\n", "# only a remark\n", "---\n", "~\n"])
def test_empty(text: str) -> None:
    assert read_text(text, source="s.yaml").data is None


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def told(name: str) -> str:
        with pytest.raises(ConfigError) as error:
            read_file(Path(name))
        return str(error.value)

    Path("latin.yaml").write_bytes("name: café\n".encode("latin-1"))
    Path("utf16.yaml").write_bytes("name: x\n".encode("utf-16"))
    Path("big.yaml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    Path("folder.yaml").mkdir()
    assert told("latin.yaml") == "latin.yaml: not UTF-8 text"
    assert told("utf16.yaml") == "utf16.yaml: not UTF-8 text"
    assert told("big.yaml") == f"big.yaml: larger than {MAX_FILE_BYTES} bytes, not a study file"
    assert told("folder.yaml") == "folder.yaml: is a folder, not a study file"
    assert told("missing.yaml") == "missing.yaml: no such file"
    assert told("a\0b.yaml") == "a?b.yaml: embedded null byte"


def test_a_byte_order_mark_and_windows_lines_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: caf\xc3\xa9\r\n")
    marked = read_file(path)
    assert marked.data == {"a": 1, "b": "café"}
    assert marked.lines[("b",)] == 2


@given(st.text(max_size=60))
def test_any_text_is_data_or_a_polite_refusal(text: str) -> None:
    try:
        read_text(text, source="s.yaml")
    except ConfigError as error:
        assert str(error).startswith("s.yaml")


@given(st.text(alphabet="a1:-&*x[]{},#'\"!|>%@ \n\t~<?", max_size=40))
def test_any_punctuation_is_data_or_a_polite_refusal(text: str) -> None:
    try:
        read_text(text, source="s.yaml")
    except ConfigError as error:
        assert str(error).startswith("s.yaml")
