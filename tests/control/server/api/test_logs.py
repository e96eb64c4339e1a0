"""Logs of several ranks as one: whole lines, each with its rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from phalanx.control.server.api.logs import LONGEST_LINE, MOST_RANKS, merged, ranks_named
from phalanx.control.server.http.endpoints import ApiError
from phalanx.control.wire.log_cursor import LogPiece, LogPlace


async def log(*parts: bytes, rank: int = 0) -> AsyncIterator[LogPiece]:
    behind = 0
    for part in parts:
        await asyncio.sleep(0)
        behind += len(part)
        yield LogPiece(part, LogPlace(rank, 1, 0, behind))


def lines(logs: dict[int, AsyncIterator[LogPiece]]) -> list[bytes]:
    async def read() -> bytes:
        return b"".join([piece.data async for piece in merged(logs)])

    return asyncio.run(read()).splitlines()


def test_lines_are_whole_wherever_their_parts_end() -> None:
    found = lines({0: log(b"a", b"b\nc\n", b"d"), 3: log(b"x\ny\n", rank=3), 4: log(rank=4)})
    assert [line for line in found if line.startswith(b"[0]")] == [b"[0] ab", b"[0] c", b"[0] d"]
    assert [line for line in found if line.startswith(b"[3]")] == [b"[3] x", b"[3] y"]
    assert len(found) == 5


def test_a_line_without_end_is_not_gathered_for_ever() -> None:
    half = b"x" * (LONGEST_LINE // 2 + 1)
    assert [len(line) for line in lines({0: log(half, half, half)})] == [
        2 * len(half) + 4,
        len(half) + 4,
    ]


def test_a_reader_who_leaves_ends_all_logs() -> None:
    ended: list[int] = []

    async def endless(rank: int) -> AsyncIterator[LogPiece]:
        try:
            while True:
                yield LogPiece(b"more\n", LogPlace(rank, 1, 0, 5))
                await asyncio.sleep(0)
        finally:
            ended.append(rank)

    async def scenario() -> None:
        stream = merged({0: endless(0), 1: endless(1)})
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(30):
            while len(ended) < 2:
                await asyncio.sleep(0)

    asyncio.run(scenario())
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize(
    ("text", "ranks"), [("", []), ("3", [3]), ("0,4-6,5", [0, 4, 5, 6]), ("7-3", [])]
)
def test_ranks_are_named_one_by_one_or_from_to(text: str, ranks: list[int]) -> None:
    assert ranks_named(text) == ranks


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ApiError, match=str(MOST_RANKS)):
        ranks_named("0-9999999")
