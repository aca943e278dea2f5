"""Any text as LaTeX that shows it as it is: plain ASCII, no command, no ligature, safe in captions and cells."""

import re
import unicodedata

SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\symbol{34}",
    "`": r"\textasciigrave{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "·": r"\textperiodcentered{}",
    "×": r"\ensuremath{\times}",
    "±": r"\ensuremath{\pm}",
    "≤": r"\ensuremath{\leq}",
    "≥": r"\ensuremath{\geq}",
    "≈": r"\ensuremath{\approx}",
    "√": r"\ensuremath{\surd}",
    "→": r"\ensuremath{\rightarrow}",
    "²": r"\ensuremath{^2}",
    "³": r"\ensuremath{^3}",
    "°": r"\ensuremath{^\circ}",
    "µ": r"\ensuremath{\mu}",
    "μ": r"\ensuremath{\mu}",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
}
"""Brackets and stars too: behind a line's end, LaTeX would read them as the line end's own options."""
ACCENTS = {
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0304": "=",
    "\u0306": "u",
    "\u0307": ".",
    "\u0308": '"',
    "\u030a": "r",
    "\u030b": "H",
    "\u030c": "v",
    "\u0327": "c",
}
"""Only those that every font encoding of LaTeX can set."""


def escape(text: str) -> str:
    """Write text for LaTeX; a character that its fonts lack is named by its code point.

    >>> escape("50 % of d_model"), escape("--quick"), escape("naïve 日")
    ('50 \\\\% of d\\\\_model', '-{}-quick', 'na\\\\"{i}ve {[}U+65E5{]}')
    """
    text = " ".join(text.split())
    apart = re.sub(r"(?<=([-',?!]))(?=\1)", "\0", text)  # two of these become one other sign in LaTeX
    return "".join("{}" if char == "\0" else _character(char) for char in apart)


def comment(text: str) -> str:
    """Write one line of comment, whatever is in the text."""
    line = " ".join(text.split())
    return f"% {line.encode('ascii', 'backslashreplace').decode('ascii')}"


def _character(char: str) -> str:
    if char in SPECIAL:
        return SPECIAL[char]
    if char.isascii():
        return char if char.isprintable() else "?"
    base, *marks = list(unicodedata.normalize("NFD", char))
    if base.isascii() and base.isalpha() and len(marks) == 1 and marks[0] in ACCENTS:
        return f"\\{ACCENTS[marks[0]]}{{{base}}}"
    return f"{{[}}U+{ord(char):04X}{{]}}"
