"""What rules and hashes look at: the lines, words and word n-grams of a text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_WORD = re.compile(r"\w+")
_PARAGRAPH = re.compile(r"\n\s*\n")
_MOST_REMEMBERED = 1 << 20  # words, in a process
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class TextView:
    """A text and, made when first asked for, what rules measure of it."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def lines(self) -> list[str]:
        """Lines that hold anything, without blanks at their ends."""
        return [line for each in self.text.splitlines() if (line := each.strip())]

    @cached_property
    def paragraphs(self) -> list[str]:
        """What empty lines separate."""
        return [part for each in _PARAGRAPH.split(self.text) if (part := each.strip())]

    @cached_property
    def tokens(self) -> list[str]:
        """What blanks separate, with its punctuation and case."""
        return self.text.split()

    @cached_property
    def words(self) -> list[str]:
        """Runs of letters and digits, in lower case."""
        return _WORD.findall(self.text.lower())

    @cached_property
    def word_hashes(self) -> Hashes:
        """A number for each word, the same on every machine."""
        return hash_words(self.words)

    @cached_property
    def word_lengths(self) -> NDArray[np.int64]:
        """Characters of each word."""
        return np.fromiter(map(len, self.words), np.int64, len(self.words))


class _WordHashes(dict[str, int]):
    """Hashes of words, remembered: a language has few of them."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _MOST_REMEMBERED:
            self.clear()
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        number = self[word] = int.from_bytes(digest, "little")
        return number


_remembered = _WordHashes()


def hash_words(words: Sequence[str]) -> Hashes:
    """A number for each word, the same on every machine."""
    return np.fromiter(map(_remembered.__getitem__, words), np.uint64, len(words))


def ngram_hashes(word_hashes: Hashes, size: int) -> Hashes:
    """A number for each run of ``size`` words; none where there are fewer words."""
    count = len(word_hashes) - size + 1
    if count < 1:
        return np.empty(0, np.uint64)
    hashes = word_hashes[:count].copy()
    for at in range(1, size):
        hashes *= _MULTIPLIER
        hashes += word_hashes[at : at + count]
    return mix(hashes)


def mix(numbers: Hashes) -> Hashes:
    """Scatter numbers over all 64 bits (the finaliser of SplitMix64), in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def content_hash(text: str) -> bytes:
    """Identity of a text up to the blanks at line ends and around it."""
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return hashlib.blake2b(lines.encode("utf-8", "surrogatepass"), digest_size=16).digest()
