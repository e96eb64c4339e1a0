"""Quality rules of Gopher's MassiveText."""

from __future__ import annotations

from phalanx.data.prepare.rules.registry import RULES
from phalanx.data.prepare.words import TextView

SOURCE = "Rae et al. 2021, arXiv 2112.11446, A.1.1 Quality Filtering"
STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
BULLETS = ("•", "-", "*", "‣", "●", "◦")


@RULES.add("gopher.word_count", SOURCE)
def word_count(view: TextView, *, least: int = 50, most: int = 100_000) -> str | None:
    """A document has between 50 and 100,000 words."""
    count = len(view.tokens)
    return None if least <= count <= most else f"{count:,} words"


@RULES.add("gopher.mean_word_length", SOURCE)
def mean_word_length(view: TextView, *, least: float = 3, most: float = 10) -> str | None:
    """The mean length of words lies between 3 and 10 characters."""
    mean = sum(map(len, view.tokens)) / max(1, len(view.tokens))
    return None if least <= mean <= most else f"words of {mean:.1f} characters on average"


@RULES.add("gopher.symbol_ratio", SOURCE)
def symbol_ratio(view: TextView, *, most: float = 0.1) -> str | None:
    """Hash signs, and ellipses, are each at most a tenth of the number of words."""
    words = max(1, len(view.tokens))
    hashes = view.text.count("#") / words
    ellipses = (view.text.count("...") + view.text.count("…")) / words
    worst = max(hashes, ellipses)
    return None if worst <= most else f"{worst:.2f} hash signs or ellipses a word"


@RULES.add("gopher.bullet_lines", SOURCE)
def bullet_lines(view: TextView, *, most: float = 0.9) -> str | None:
    """At most 90 % of the lines start with a bullet."""
    share = sum(line.startswith(BULLETS) for line in view.lines) / max(1, len(view.lines))
    return None if share <= most else f"{share:.0%} of the lines start with a bullet"


@RULES.add("gopher.ellipsis_lines", SOURCE)
def ellipsis_lines(view: TextView, *, most: float = 0.3) -> str | None:
    """At most 30 % of the lines end with an ellipsis."""
    share = sum(line.endswith(("...", "…")) for line in view.lines) / max(1, len(view.lines))
    return None if share <= most else f"{share:.0%} of the lines end with an ellipsis"


@RULES.add("gopher.alphabetic_words", SOURCE)
def alphabetic_words(view: TextView, *, least: float = 0.8) -> str | None:
    """At least 80 % of the words have a letter."""
    with_letter = sum(any(map(str.isalpha, word)) for word in view.tokens)
    share = with_letter / max(1, len(view.tokens))
    return None if share >= least else f"{share:.0%} of the words have a letter"


@RULES.add("gopher.stop_words", SOURCE)
def stop_words(view: TextView, *, least: int = 2) -> str | None:
    """At least two of: the, be, to, of, and, that, have, with (so that it is English)."""
    count = len(STOP_WORDS.intersection(view.words))
    return None if count >= least else f"{count} different English stop words"
