"""Repetition rules of Gopher's MassiveText: what repeats itself teaches a model to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.data.prepare.rules.registry import RULES
from phalanx.data.prepare.words import TextView, ngram_hashes

SOURCE = "Rae et al. 2021, arXiv 2112.11446, Table A1"
MOST_OF_TOP = {2: 0.20, 3: 0.18, 4: 0.16}  # by size of the n-gram
MOST_OF_REPEATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def repeated_share(parts: Sequence[str]) -> tuple[float, float]:
    """Shares of parts, and of their characters, that are repetitions of an earlier one."""
    seen: set[str] = set()
    count = characters = 0
    for part in parts:
        if part in seen:
            count += 1
            characters += len(part)
        seen.add(part)
    return count / max(1, len(parts)), characters / max(1, sum(map(len, parts)))


@RULES.add("repetition.lines", SOURCE)
def repeated_lines(
    view: TextView, *, most: float = 0.30, most_characters: float = 0.20
) -> str | None:
    """At most 30 % of the lines, and 20 % of their characters, repeat an earlier line."""
    return _judged("lines", view.lines, most, most_characters)


@RULES.add("repetition.paragraphs", SOURCE)
def repeated_paragraphs(
    view: TextView, *, most: float = 0.30, most_characters: float = 0.20
) -> str | None:
    """At most 30 % of the paragraphs, and 20 % of their characters, repeat an earlier one."""
    return _judged("paragraphs", view.paragraphs, most, most_characters)


def _judged(what: str, parts: Sequence[str], most: float, most_characters: float) -> str | None:
    share, characters = repeated_share(parts)
    if share > most:
        return f"{share:.0%} of the {what} repeat another"
    if characters > most_characters:
        return f"{characters:.0%} of the characters stand in {what} that repeat another"
    return None


@RULES.add("repetition.top_ngram", SOURCE)
def top_ngram(view: TextView, *, scale: float = 1.0) -> str | None:
    """The most frequent 2-, 3- and 4-gram holds at most 20, 18 and 16 % of the characters."""
    total = int(view.word_lengths.sum())
    for size, most in MOST_OF_TOP.items():
        hashes = ngram_hashes(view.word_hashes, size)
        if not len(hashes):
            break
        _, firsts, counts = np.unique(hashes, return_index=True, return_counts=True)
        # Of equally frequent ones the first in the text, so that the answer is one.
        top = min(zip(-counts, firsts, strict=True))
        first, count = int(top[1]), int(-top[0])
        share = count * int(view.word_lengths[first : first + size].sum()) / total
        if count > 1 and share > most * scale:
            words = " ".join(view.words[first : first + size])
            return f"{share:.0%} of the characters are “{words}”"
    return None


@RULES.add("repetition.repeated_ngrams", SOURCE)
def repeated_ngrams(view: TextView, *, scale: float = 1.0) -> str | None:
    """5- to 10-grams that occurred before hold at most 15 to 10 % of the characters."""
    total = int(view.word_lengths.sum())
    for size, most in MOST_OF_REPEATED.items():
        hashes = ngram_hashes(view.word_hashes, size)
        if not len(hashes):
            break
        _, firsts = np.unique(hashes, return_index=True)
        repeats = np.ones(len(hashes), bool)
        repeats[firsts] = False
        covered = np.zeros(len(view.words), bool)  # each word once, however n-grams overlap
        for at in range(size):
            covered[at : at + len(repeats)] |= repeats
        share = int(view.word_lengths[covered].sum()) / total
        if share > most * scale:
            return f"{share:.0%} of the characters stand in repeated {size}-grams"
    return None
