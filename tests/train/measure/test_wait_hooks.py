"""Each way in which training waits for peers is told once, whoever waits."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from phalanx.train.measure import wait_hooks
from phalanx.train.measure.waits import PeerWaits
from tests.ranks import run_ranks

LATE_SECONDS = 1.0  # half of it is more than a busy machine holds a rank up


def blocking() -> None:
    dist.all_reduce(torch.ones(4))


def asynchronous() -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    work.wait()


def within_an_operator() -> None:
    summed = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert (summed + 0).tolist() == [2.0] * 4


def differentiated() -> None:
    x = torch.ones(4, requires_grad=True)
    gather: Any = getattr(functional, "all_gather_single_autograd", None)
    gather = gather or functional.all_gather_tensor_autograd
    gather(x, 0, dist.group.WORLD).sum().backward()


@functools.cache
def compiled_sum() -> Any:
    """Compiled once a process: that takes as long as a peer is late."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x + 1

    return torch.compile(summed, backend="aot_eager", fullgraph=True)


def compiled() -> None:
    compiled_sum()(torch.ones(4))


def exchanged() -> None:
    peer, got = 1 - dist.get_rank(), torch.empty(4)
    ops = [dist.P2POp(dist.isend, torch.ones(4), peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def wait_for_a_late_peer(wait: Callable[[], None]) -> float:
    """Seconds of waiting that were seen, with rank 1 late."""
    wait()  # whatever is set up or compiled first
    waits = PeerWaits()
    dist.barrier()
    waits.take()
    if dist.get_rank() == 1:
        time.sleep(LATE_SECONDS)
    wait()
    return waits.take().peers


@pytest.mark.parametrize(
    "wait",
    [blocking, asynchronous, within_an_operator, differentiated, compiled, exchanged],
    ids=lambda each: each.__name__,
)
def test_who_waits_for_a_late_peer_is_seen_to_and_the_late_one_is_not(
    wait: Callable[[], None],
) -> None:
    waiting, late = run_ranks(2, wait_for_a_late_peer, wait)
    assert 0.8 * LATE_SECONDS <= waiting < 2 * LATE_SECONDS  # once: not also in what it calls
    assert late < 0.5 * LATE_SECONDS


def count_while_waiting(wait: Callable[[], None]) -> int:
    """How often another thread got its turn while this one waited for a late peer."""
    PeerWaits()
    wait()
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.wait(0.01):
            turns += 1

    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(LATE_SECONDS)
    counting = threading.Thread(target=count)
    counting.start()
    wait()
    over.set()
    counting.join()
    return turns


@pytest.mark.parametrize("wait", [blocking, within_an_operator], ids=lambda each: each.__name__)
def test_other_threads_run_while_one_waits(wait: Callable[[], None]) -> None:
    waiting, _ = run_ranks(2, count_while_waiting, wait)
    assert waiting >= 5  # of about fifty


class Told:
    """A watcher that counts."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def wait_begins(self) -> int:
        self.begun += 1
        return self.begun

    def wait_ends(self, begun: int) -> None:
        self.ended = begun


def raise_within_a_wait() -> tuple[int, int, bool]:
    told = Told()
    wait_hooks.watch(told)

    def broken() -> None:
        assert wait_hooks.waits_now()
        raise ConnectionError

    with pytest.raises(ConnectionError):
        wait_hooks.watched(broken)
    return told.begun, told.ended, wait_hooks.waits_now()


def test_a_wait_that_fails_is_over() -> None:
    assert run_ranks(1, raise_within_a_wait)[0] == (1, 1, False)


class FakeStream:
    """A stream by its number."""

    device_index = 0
    waited: list[tuple[int, str]]

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited = number, []

    def wait_event(self, event: str) -> None:
        self.waited.append((self.cuda_stream, event))


def test_a_stream_that_waits_counts_only_where_it_is_the_one_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    monkeypatch.setattr(wait_hooks, "_watching", told)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    wait_event = wait_hooks._wait_event(FakeStream.wait_event)
    compute, copies = FakeStream(0), FakeStream(1)
    wait_event(compute, "gathered")
    assert (told.begun, told.ended, compute.waited) == (1, 1, [(0, "gathered")])
    wait_event(copies, "computed")
    assert told.begun == 1 and copies.waited == [(1, "computed")]
