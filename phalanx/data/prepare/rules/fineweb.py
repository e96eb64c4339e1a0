"""Rules that FineWeb adds to those of Gopher and C4."""

from __future__ import annotations

from phalanx.data.prepare.rules.registry import RULES
from phalanx.data.prepare.rules.repetition import repeated_share
from phalanx.data.prepare.words import TextView

SOURCE = "Penedo et al. 2024, arXiv 2406.17557, 3.6"
CODE = "the code of FineWeb, datatrove's FineWebQualityFilter"
PUNCTUATION = (*'.!?"”’', "。", "！", "？", "…", ":", ";")


@RULES.add("fineweb.punctuated_lines", SOURCE)
def punctuated_lines(view: TextView, *, least: float = 0.12) -> str | None:
    """More than 12 % of the lines end with punctuation."""
    share = sum(line.endswith(PUNCTUATION) for line in view.lines) / max(1, len(view.lines))
    return None if share > least else f"{share:.0%} of the lines end with punctuation"


@RULES.add("fineweb.repeated_lines", SOURCE)
def repeated_line_characters(view: TextView, *, most: float = 0.1) -> str | None:
    """Less than a tenth of the characters stand in lines that repeat another."""
    _, share = repeated_share(view.lines)
    return None if share < most else f"{share:.0%} of the characters in repeated lines"


@RULES.add("fineweb.short_lines", SOURCE)
def short_lines(view: TextView, *, most: float = 0.67, characters: int = 30) -> str | None:
    """Less than 67 % of the lines are shorter than 30 characters."""
    share = sum(len(line) < characters for line in view.lines) / max(1, len(view.lines))
    return None if share < most else f"{share:.0%} of the lines have under {characters} characters"


@RULES.add("fineweb.line_breaks", CODE)
def line_breaks(view: TextView, *, most: float = 0.3) -> str | None:
    """At most three line breaks on ten words: longer lists are no prose."""
    ratio = view.text.count("\n") / max(1, len(view.tokens))
    return None if ratio <= most else f"{ratio:.2f} line breaks a word"
