"""A watcher of a keeper that reads nothing, as a stopped agent does."""

from __future__ import annotations

import threading

from phalanx.checkpoint.keeper.messages import Noted
from phalanx.checkpoint.keeper.notices import KEPT, Notices
from tests.checkpoint.waiting import eventually


def test_a_watcher_that_stands_still_holds_up_nobody_and_hears_the_newest() -> None:
    reads = threading.Event()
    heard: list[Noted] = []

    def tell(note: Noted) -> None:
        reads.wait()
        heard.append(note)

    notices = Notices(tell, lambda: False)
    for step in range(1000):  # returns: the keeper's own work goes on
        for rank in (0, 1):
            notices.put(Noted(rank, 1, step, False))
    notices.put(Noted(0, 1, 5, True))  # a replica is no older step of the rank itself
    reads.set()
    eventually(lambda: len(heard) >= 2 * KEPT + 1)
    newest = {(rank, step) for rank in (0, 1) for step in range(1000 - KEPT, 1000)}
    assert newest <= {(note.rank, note.step) for note in heard if not note.replica}
    assert Noted(0, 1, 5, True) in heard
    assert len(heard) <= 2 * KEPT + 2  # the one that was on its way, and the newest
    notices.close()


def test_a_watcher_that_reads_is_told_at_once() -> None:
    heard: list[Noted] = []
    notices = Notices(heard.append, lambda: True)
    notices.put(Noted(0, 1, 7, False))
    assert heard == [Noted(0, 1, 7, False)]
    notices.close()


def test_of_notes_that_wait_the_oldest_gives_way_also_where_a_generation_went_back() -> None:
    reads = threading.Event()
    heard: list[int] = []

    def tell(note: Noted) -> None:
        reads.wait()
        heard.append(note.step)

    notices = Notices(tell, lambda: False)
    for step in (20, 21, 22, 23, 10, 11, 12):
        notices.put(Noted(0, 1, step, True))
    reads.set()
    assert eventually(lambda: heard[-1:] == [12])
    assert heard[-KEPT:] == [10, 11, 12]
    notices.close()
