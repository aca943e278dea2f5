"""Read YAML strictly and remember where every key stands, so that errors can name file and line.

PyYAML's safe loader is kept for the grammar; what it guesses is not: ``1e-4`` is a number, ``010``,
``1:30`` and dates are text, a repeated key is refused, and only ``~``, ``null`` and an empty value are null.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ckbench.errors import ConfigError

MAX_FILE_BYTES = 100_000
"""Ours have 2,000; the time to read one grows with its size, and beyond this it would look like a hang."""
MAX_NODES = 20_000
MAX_DEPTH = 40

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Marked:
    """Plain data with the line of every key and list item."""

    source: str
    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Give ``file:line`` of a key, or of its nearest parent that has a line."""
        for length in range(len(path), -1, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.source}:{line}"
        return self.source


class _Loader(yaml.SafeLoader):
    """SafeLoader with our scalars; the pure-Python one, whose nodes carry marks."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_NULL = "tag:yaml.org,2002:null"
_STR = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"

_Loader.add_implicit_resolver(_BOOL, re.compile(r"(?:true|false|yes|no|on|off)\Z", re.IGNORECASE), list("tTfFyYnNoO"))
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"[-+]?(?:(?:0|[1-9][0-9_]*)?\.[0-9]+|(?:0|[1-9][0-9_]*)\.?)(?:[eE][-+]?[0-9]+)?\Z"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_MERGE, re.compile(r"<<\Z"), ["<"])

_BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def read_file(path: Path) -> Marked:
    """Read one YAML file. Raises ConfigError with one line for people."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder, not a study file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)  # not all of it: /dev/zero has no end
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes, not a study file")
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return read_text(text, source=str(path))


def read_text(text: str, source: str) -> Marked:
    """Read YAML text. ``source`` names it in errors."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_explain(error, text, source)) from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{source}: character #x{error.character:04x} is not allowed in YAML") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # \\UFFFFFFFF overflows
        raise ConfigError(f"{source}: not readable as YAML ({type(error).__name__})") from None
    lines: dict[KeyPath, int] = {(): 1}
    data = None if node is None else _Plain(source, lines).convert(node, ())
    return Marked(source=source, data=data, lines=lines)


def read_value(text: str) -> Any:
    """Read one value given on the command line, by the same rules."""
    return read_text(text, source="command line").data


class _Plain:
    """Turn nodes into plain data, with bounds: aliases may not blow a small file up."""

    def __init__(self, source: str, lines: dict[KeyPath, int]) -> None:
        self.source, self.lines, self.n_nodes = source, lines, 0
        self.open_merges = 0

    def convert(self, node: yaml.Node, path: KeyPath) -> Any:
        self.n_nodes += 1
        if self.n_nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise self.fault(node, "too large or too deeply nested for a study")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if isinstance(node, yaml.SequenceNode):
            self.check_tag(node, "seq")
            for i, child in enumerate(node.value):
                self.lines[(*path, i)] = child.start_mark.line + 1
            return [self.convert(child, (*path, i)) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        self.check_tag(node, "map")
        return self.mapping(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for _, value_node in reversed([pair for pair in node.value if pair[0].tag == _MERGE]):
            merged.update(self.merge(value_node, path))  # the first of several wins, so it is written last
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                continue
            line = key_node.start_mark.line + 1
            key = self.key(key_node)
            if key in seen:
                raise self.fault(key_node, f"key {key!r} is given twice, first in line {seen[key]}")
            seen[key] = line
            self.lines[(*path, key)] = line
            own[key] = self.convert(value_node, (*path, key))
        return {**merged, **own}

    def merge(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Any] = {}
        self.open_merges += 1
        if self.open_merges > MAX_DEPTH:  # a mapping that merges itself
            raise self.fault(node, "too large or too deeply nested for a study")
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                raise self.fault(node, "'<<' merges mappings only")
            result.update(self.convert(source, path))
        self.open_merges -= 1
        return result

    def key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL:
            raise self.fault(node, "a key must be a word")
        if node.tag not in (_STR, _INT, _FLOAT, _BOOL):
            raise self.fault(node, f"tag {node.tag.removeprefix('tag:yaml.org,2002:')!r} is not allowed")
        return self.word(node)

    def word(self, node: yaml.ScalarNode) -> str:
        text = str(node.value)
        if any("\ud800" <= char <= "\udfff" for char in text):  # an escape can write one; no encoding can
            raise self.fault(node, "half a surrogate pair is no character")
        return text

    def scalar(self, node: yaml.ScalarNode) -> Any:
        tag, text = node.tag, self.word(node)
        if tag == _NULL:
            return None
        if tag == _BOOL and text.lower() in _BOOL_WORDS:
            return _BOOL_WORDS[text.lower()]
        if tag not in (_INT, _FLOAT, _STR):
            raise self.fault(node, f"tag {tag.removeprefix('tag:yaml.org,2002:')!r} is not allowed")
        try:
            if tag == _INT:
                return int(text.replace("_", ""))
            if tag == _FLOAT:
                return float(text.replace("_", ""))
        except ValueError:
            raise self.fault(node, f"{text[:40]!r} is not a number") from None
        return text

    def check_tag(self, node: yaml.Node, kind: str) -> None:
        if node.tag != f"tag:yaml.org,2002:{kind}":
            raise self.fault(node, f"tag {node.tag.removeprefix('tag:yaml.org,2002:')!r} is not allowed")

    def fault(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self.source}:{node.start_mark.line + 1}: {text}")


def _explain(error: yaml.MarkedYAMLError, text: str, source: str) -> str:
    """Say in one line what is wrong, with the usual causes by name."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"{source}: {error.problem or error}"
    line = mark.line + 1
    rows = text.splitlines()
    if mark.line < len(rows) and re.match(r" *\t", rows[mark.line]):
        return f"{source}:{line}:{mark.column + 1}: tab not allowed for indentation; use spaces"
    problem = " ".join(str(error.problem or "cannot be read").split())
    if problem.startswith("but ") and error.context:
        problem = f"{error.context}, {problem}"
    return f"{source}:{line}: {problem}"
