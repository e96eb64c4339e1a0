"""Text out of HTML with the standard library's parser.

Simple on purpose: what scripts, styles, forms and navigation hold is left out, and block elements
begin lines. It does not tell the article of a page from what stands around it, as trafilatura does.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

SILENT = frozenset(
    ("script", "style", "noscript", "template", "svg", "head", "nav", "footer", "aside", "form")
)
BLOCKS = frozenset(
    (
        *(
            "address",
            "article",
            "blockquote",
            "br",
            "dd",
            "div",
            "dl",
            "dt",
            "figcaption",
            "figure",
        ),
        *("h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "ol", "p", "pre"),
        *("section", "table", "td", "th", "tr", "ul"),
    )
)
PARAGRAPHS = frozenset(("p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "table", "ul", "ol"))

_BLANKS = re.compile(r"[^\S\n]+")
_EMPTY_LINES = re.compile(r"\n{3,}")


def html_to_text(html: str) -> str:
    """The visible text of a page, a line for each block; empty lines between paragraphs."""
    parser = _TextParser()
    parser.feed(html)
    parser.close()
    lines = (_BLANKS.sub(" ", line).strip() for line in "".join(parser.parts).split("\n"))
    return _EMPTY_LINES.sub("\n\n", "\n".join(lines)).strip()


class _TextParser(HTMLParser):
    """Gathers text outside of elements that show none."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent: list[str] = []  # open elements without text, outermost first

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SILENT:
            self._silent.append(tag)
        elif tag == "body":
            self._silent.clear()  # a head that was never closed
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]  # with what was left open inside
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data.replace("\n", " "))

    def _break(self, tag: str) -> None:
        if not self._silent and tag in BLOCKS:
            self.parts.append("\n\n" if tag in PARAGRAPHS else "\n")
