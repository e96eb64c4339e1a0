"""Markdown: tables, code, headings that can be linked to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table; cells are one line each."""
    return [
        _row(head),
        "|" + "---|" * len(head),
        *(_row(row) for row in rows),
    ]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(one_line(cell).replace("|", r"\|") for cell in cells) + " |"


def one_line(text: str) -> str:
    """Text without line breaks."""
    return " ".join(text.split())


def code(text: str) -> str:
    """Text as code; nothing stays nothing."""
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    """A sentence of the code's as Markdown: no HTML, and one mark around code."""
    pieces = text.replace("``", "`").split("`")
    pieces[::2] = [piece.replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def paragraphs(text: str) -> list[str]:
    """Lines of a docstring's paragraphs, with an empty line behind each."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines += [one_line(prose(paragraph)), ""] if paragraph.strip() else []
    return lines


def anchor(heading: str) -> str:
    """What a link to a heading says, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"`([^`]*)`", r"\1", heading).strip().lower())
    return kept.replace(" ", "-")


def slug(heading: str, _separator: str) -> str:
    """The same for the site's generator, which has taken the marks of code away."""
    return anchor(heading)
