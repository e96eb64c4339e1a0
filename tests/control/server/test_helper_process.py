"""The process beside the server: one question cannot have it for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from phalanx.control.server.helper_process import LIMIT_SECONDS, Helper, TooLongError


def square(number: int) -> int:
    """A question that is answered at once."""
    return number * number


def never() -> None:
    """A question without an end."""
    while True:
        time.sleep(0.01)


def test_a_question_that_takes_too_long_is_ended_and_the_next_one_is_answered() -> None:
    async def scenario() -> None:
        helper = Helper()
        try:
            assert await helper.call(square, 3) == 9
            helper.limit_seconds = 0.3
            with pytest.raises(TooLongError, match="ask for less"):
                await helper.call(never)
            helper.limit_seconds = LIMIT_SECONDS
            assert await helper.call(square, 4) == 16
        finally:
            helper.close()

    asyncio.run(scenario())
