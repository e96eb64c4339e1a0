"""A feed whose samples change their length during the run: one feed for each length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import msgspec

from phalanx.data.feed import Feed, StepBatches
from phalanx.data.order.cursor import Cursor


class StagedFeed:
    """Which length comes next follows from the samples that the cursor's run has read.

    Samples are numbered on over all stages. Each stage has its own windows of the corpus, and so
    an identity of its own in the cursor.
    """

    def __init__(self, firsts: Sequence[int], open_stage: Callable[[int], Feed]) -> None:
        """``firsts``: samples read before each stage, from 0 on."""
        self._firsts, self._open_stage = list(firsts), open_stage
        self._feeds: dict[int, Feed] = {}
        self._balance: tuple[tuple[int, ...], bool] = ((), True)

    def start(self) -> Cursor:
        """The cursor of a run that has read nothing."""
        return self._feed(0).start()

    def advance(self, cursor: Cursor) -> Cursor:
        """The cursor after the step that starts at ``cursor``."""
        after = self._at(cursor).advance(cursor)
        return _identified(after, self._at(after))

    def seen(self, cursor: Cursor) -> dict[str, int]:
        """Samples of each source that a run at ``cursor`` has read."""
        return self._at(cursor).seen(cursor)

    def next(self, cursor: Cursor) -> StepBatches:
        """This replica's batches of the step that starts at ``cursor``."""
        stage = self._stage(cursor)
        wanted = self._feed(stage)
        if stage and cursor.fingerprint != _identity(wanted, cursor):
            before = self._feed(stage - 1)
            if cursor.fingerprint == _identity(before, cursor):
                # Its run did not know of this stage yet: it begins here.
                cursor = _identified(cursor, wanted)
        for feed in self._feeds.values():
            if feed is not wanted:
                feed.close()  # it has read ahead of its stage
        return wanted.next(cursor)

    def rebalance(self, shares: tuple[int, ...], *, padded: bool) -> None:
        """From the next step on, replicas take these numbers of micro-batches; (): equal ones."""
        self._balance = (shares, padded)
        for feed in self._feeds.values():
            feed.rebalance(shares, padded=padded)

    def close(self) -> None:
        """End the reading threads."""
        for feed in self._feeds.values():
            feed.close()

    def _at(self, cursor: Cursor) -> Feed:
        return self._feed(self._stage(cursor))

    def _stage(self, cursor: Cursor) -> int:
        return bisect_right(self._firsts, cursor.seen) - 1

    def _feed(self, stage: int) -> Feed:
        """Opened when its stage comes: few runs read all of them."""
        if stage not in self._feeds:
            feed = self._feeds[stage] = self._open_stage(stage)
            shares, padded = self._balance
            feed.rebalance(shares, padded=padded)
        return self._feeds[stage]


def _identity(feed: Feed, cursor: Cursor) -> str:
    return feed.reader.draws.fingerprint(cursor.consumed)


def _identified(cursor: Cursor, feed: Feed) -> Cursor:
    """The cursor, over the data of a feed."""
    return msgspec.structs.replace(cursor, fingerprint=_identity(feed, cursor))
