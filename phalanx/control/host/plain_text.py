"""What programs and people wrote, as one line that a terminal only shows."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")  # colours, titles
_BREAK = re.compile(r"[^\S ]+")  # line ends, tabs


def one_line(text: str) -> str:
    """Text without line ends, and without characters that would steer a terminal."""
    text = _BREAK.sub(" ", _SEQUENCE.sub("", text))
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
