"""Foreign text made harmless for a page: in HTML, in the little markup that plotly reads, and inside a script."""

import html
import json
import re
from typing import Any

from ckbench.units import one_line

MAX_LABEL_CHARS = 34


def safe(text: object) -> str:
    """Write text so that HTML shows it as it is, in one line."""
    return html.escape(one_line(str(text)))


def marked(sentence: str) -> str:
    """Write a sentence of ours: what stands between backticks becomes code, everything is shown as it is."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", safe(sentence))


def label(text: str) -> str:
    """Write a name for a chart, shortened in the middle where it is long; plotly reads tags and entities in it."""
    text = one_line(text)
    if len(text) > MAX_LABEL_CHARS:
        half = MAX_LABEL_CHARS // 2 - 1
        text = f"{text[:half]}..{text[-half:]}"
    return html.escape(text, quote=False)


def in_script(data: Any) -> str:
    """Write data as JSON that no HTML parser can take for the end of its script."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def ascii_script(source: str) -> str:
    """Write a script in ASCII without control characters, by the escapes that its strings and patterns understand."""
    return re.sub(r"[^\t\n -~]", _escape, source.replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    units = match.group().encode("utf-16-be")
    return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))
