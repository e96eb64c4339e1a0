"""What a rank's own sends take, with and without a device."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from phalanx.train.measure.sends import MOST_OPEN, Sends
from phalanx.train.report.records import SendTimes
from tests.ranks import run_ranks

MIB = 1 << 20
LATE_SECONDS = 0.4


class FakeWork:
    """A work of NCCL, which tells its time when it is over."""

    def __init__(self, seconds: float, done: bool = True, timed: bool = True) -> None:
        self.seconds, self.done, self.timed = seconds, done, timed

    def is_completed(self) -> bool:
        return self.done

    def _get_duration(self) -> float:
        if not self.timed:
            raise RuntimeError("getDuration only works if timing was enabled")
        return self.seconds * 1000


def test_the_shortest_send_of_a_size_to_a_rank_stands_for_all_of_them() -> None:
    sends = Sends(on_device=True)
    for seconds in (0.9, 0.02, 0.4):  # two found their receiver late
        sends.sent(MIB, 1, FakeWork(seconds))
    sends.sent(MIB, 2, FakeWork(0.05))
    found = sends.take()
    assert found is not None
    assert found.bytes == 4 * MIB and found.seconds == pytest.approx(3 * 0.02 + 0.05)
    assert sends.take() is None


def test_a_send_that_is_not_over_is_read_later_and_never_waited_for() -> None:
    sends, work = Sends(on_device=True), FakeWork(0.1, done=False)
    sends.sent(MIB, 1, work)
    assert sends.take() is None
    work.done = True
    assert sends.take() == SendTimes(bytes=MIB, seconds=pytest.approx(0.1))


def test_few_works_are_kept_however_many_are_not_over() -> None:
    sends = Sends(on_device=True)
    works = [FakeWork(0.1, done=False) for _ in range(50)]
    for work in works:
        sends.sent(MIB, 1, work)
    for work in works:
        work.done = True
    found = sends.take()
    assert found is not None and found.bytes == MOST_OPEN * MIB


def test_a_group_that_keeps_no_time_tells_of_no_sends() -> None:
    sends = Sends(on_device=True)
    sends.sent(MIB, 1, FakeWork(0.1, timed=False))
    assert sends.take() is None


def send_to_a_late_one() -> tuple[SendTimes | None, SendTimes | None]:
    """Both ways of sending, in a batch with a reception and alone; rank 1 is late for each."""
    rank, sends = dist.get_rank(), Sends(on_device=False)
    big, got = torch.ones(16 * MIB // 4), torch.empty(16 * MIB // 4)
    if rank == 1:
        time.sleep(LATE_SECONDS)
    batch = [dist.P2POp(dist.isend, big, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    both = sends.take()
    if rank == 0:
        dist.send(big, 1)
    else:
        time.sleep(LATE_SECONDS)
        dist.recv(got, 0)
    return both, sends.take()


def test_gloo_sends_that_somebody_waited_for_are_timed() -> None:
    (batched, alone), (_, nothing) = run_ranks(2, send_to_a_late_one)
    for found in (batched, alone):
        assert found is not None and found.bytes == 16 * MIB
        assert 0.5 * LATE_SECONDS < found.seconds < 60
    assert nothing is None  # who only receives has sent nothing
