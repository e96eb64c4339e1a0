"""Ranges of samples never to be read, packed into a text of bounded length.

Numbers as differences, seven bits a byte, in base 85: some eight characters a range. A range that
is passed decides nothing any more, so the oldest of these give way when the text would grow too
long; their number of samples is kept, so that what was read stays exact in total.
"""

from __future__ import annotations

from base64 import b85decode, b85encode
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

MOST_CHARACTERS = 64  # of a packed list: keeps a cursor below 256 bytes

Ranges: TypeAlias = tuple[tuple[int, int], ...]


class Skips(NamedTuple):
    """Skipped samples: a count of old ones, all before ``floor``, and the ranges since."""

    floor: int
    forgotten: int  # skipped samples before the floor
    ranges: Ranges  # half-open, ascending, apart

    def before(self, number: int) -> int:
        """Skipped samples below a sample number that is not below the floor."""
        inside = (max(0, min(stop, number) - start) for start, stop in self.ranges)
        return self.forgotten + sum(inside)


def pack(skips: Skips, consumed: int) -> str:
    """The text of a list; ranges that end before ``consumed`` may be reduced to a count."""
    while len(text := _encoded(skips)) > MOST_CHARACTERS:
        (first, past), *rest = skips.ranges
        if past > consumed:
            raise ValueError(
                f"{len(skips.ranges)} ranges of samples still ahead are to be skipped, more than a "
                "cursor holds. Skip the samples between two of them as well, to join them."
            )
        skips = Skips(past, skips.forgotten + past - first, tuple(rest))
    return text


@lru_cache(maxsize=64)
def unpack(text: str) -> Skips:
    """The list that ``pack`` made into a text."""
    if not text:
        return Skips(0, 0, ())
    try:
        floor, forgotten, *differences = _decoded(b85decode(text))
    except ValueError:
        raise ValueError(f"cursor.skipped = {text!r}: is no packed list of ranges") from None
    ranges, at = [], floor
    for gap, length in zip(differences[::2], differences[1::2], strict=True):
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    return Skips(floor, forgotten, tuple(ranges))


def _encoded(skips: Skips) -> str:
    if not skips.ranges and not skips.forgotten:
        return ""
    numbers, at = [skips.floor, skips.forgotten], skips.floor
    for first, past in skips.ranges:
        numbers += [first - at, past - first]
        at = past
    return b85encode(bytes(_septets(numbers))).decode()


def _septets(numbers: Iterable[int]) -> Iterator[int]:
    """Seven bits a byte, the lowest first; the eighth bit says that more follow."""
    for number in numbers:
        while number > 0x7F:
            yield number & 0x7F | 0x80
            number >>= 7
        yield number


def _decoded(data: bytes) -> list[int]:
    numbers, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    if shift or len(numbers) < 4 or len(numbers) % 2 or 0 in numbers[3::2]:
        raise ValueError("ends within a number or a pair, or holds no range or an empty one")
    return numbers
