"""Checksums of the log: each event's covers the one before it, every other row's only itself."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

LINK_BYTES = 16
START = bytes(LINK_BYTES)  # before the first event
_NUMBERS = Struct(">qq")


class StoredEvent(NamedTuple):
    """An event as the log keeps it."""

    sequence: int
    time_ns: int
    body: bytes
    chain: bytes  # checksum of this event and, through the one before it, of all before
    aside: bool = False  # it was set aside: whatever it says, it counts as a tick


def link(before: bytes, sequence: int, time_ns: int, body: bytes) -> bytes:
    """The checksum of an event behind another one."""
    numbers = _NUMBERS.pack(sequence, time_ns)
    return blake2b(before + numbers + body, digest_size=LINK_BYTES).digest()


def follows(before: bytes, record: StoredEvent) -> bool:
    """Whether a record is what was written behind the one before it.

    What was set aside is not looked into: its own checksum holds the chain together.
    """
    if record.aside:
        return len(record.chain) == LINK_BYTES
    return link(before, record.sequence, record.time_ns, record.body) == record.chain


def seal(*fields: int | str | bytes) -> bytes:
    """The checksum of a row, fields in order."""
    total = blake2b(digest_size=LINK_BYTES)
    for field in fields:
        data = field if isinstance(field, bytes) else str(field).encode()
        total.update(len(data).to_bytes(8, "big") + data)
    return total.digest()


def together(seals: Iterable[bytes]) -> bytes:
    """One checksum of many rows in any order; adding a row twice takes it out again."""
    total = 0
    for each in seals:
        total ^= int.from_bytes(each, "big")
    return total.to_bytes(LINK_BYTES, "big")
