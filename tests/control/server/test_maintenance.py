"""What a leading server does beside its work."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

from phalanx.control.server.maintenance import NEVER, collect_garbage


class Circle:
    """Only the collector finds it."""

    def __init__(self) -> None:
        self.me = self


def test_long_lived_garbage_goes_now_and_then_and_never_in_between() -> None:
    before = gc.get_threshold()

    async def play() -> bool:
        circle = Circle()
        gc.collect()  # long-lived, as far as the collector knows
        seen = weakref.ref(circle)
        task = asyncio.create_task(collect_garbage(0.05))
        await asyncio.sleep(0)
        assert gc.get_threshold() == (*before[:2], NEVER)
        gc.freeze()
        del circle
        for _ in range(200):
            await asyncio.sleep(0.02)
            if seen() is None:
                break
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        gc.unfreeze()
        return seen() is None

    assert asyncio.run(play())
    assert gc.get_threshold() == before
