"""Forming a generation: nobody enters one that is over, or misses those who failed before."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from phalanx.checkpoint.keeper.frames import Unframer, framed
from phalanx.cluster.protocol.commands import Abort, Restore
from phalanx.cluster.protocol.messages import Restored
from phalanx.cluster.reasons import reason
from phalanx.config import Job, Train
from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from phalanx.control.wire.worker_messages import Fact, Take, decode_fact
from phalanx.control.wire.zygote_messages import Ended, Spawn
from phalanx.control.worker.orders import AgentOrders
from phalanx.testing.fork_server import fork_zygote
from phalanx.train.rank.formation import join_group
from phalanx.train.rank.orders import Formation
from tests.ranks import run_ranks

WAIT_SECONDS = 90.0


def take(generation: int) -> Take:
    return Take(job=1, formation=Formation(generation, 0, 2, 0, host="127.0.0.1", port=1))


def test_a_generation_that_is_over_is_not_entered(tmp_path: Path) -> None:
    """The worker is still leaving the one before when it is told of this one and of its end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        orders = AgentOrders(str(tmp_path / "agent"), 1, 0)
        link, _ = agent.accept()
        with link:
            over = framed(Abort(reason=reason("stop"), job=1, generation=1))
            link.sendall(framed(take(1)) + over + framed(take(1)))
            # Who it is, and twice that it has taken its first place: it has heard of the end, too.
            _heard(link, count=3)
            entered: list[Formation | None] = []
            waiting = threading.Thread(target=lambda: entered.append(orders.formation()))
            waiting.start()
            link.sendall(framed(take(2)))
            waiting.join(WAIT_SECONDS)
            orders.close()
    (found,) = entered
    assert found is not None and found.generation == 2


def _heard(link: socket.socket, count: int) -> list[Fact]:
    unframer, facts = Unframer(), []
    while len(facts) < count:
        facts += [decode_fact(body) for body in unframer.feed(link.recv(1 << 16))]
    return facts


def test_a_worker_that_has_restored_says_so_again_to_the_next_agent(tmp_path: Path) -> None:
    """It waits for its go, and the agent that it told is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        orders = AgentOrders(str(tmp_path / "agent"), 1, 0)
        restore = Restore(reason=reason("fresh"), job=1, generation=1, step=5, source="peer")
        first, _ = agent.accept()
        with first:
            first.sendall(framed(take(1)) + framed(restore))
            _heard(first, count=2)
            assert orders.formation() is not None
            orders.restored(orders.restore_point())
            *_, said = _heard(first, count=1)
        second, _ = agent.accept()
        with second:
            second.sendall(framed(take(1)) + framed(restore))
            *_, again = _heard(second, count=3)  # who it is, that it is there, what it restored
            orders.close()
    assert again == said == Restored(job=1, generation=1, rank=0, step=5, source="peer")


def test_ranks_that_could_not_form_a_generation_meet_new_ones_in_the_next() -> None:
    assert run_ranks(2, _meet_after_a_failure) == [3.0, 3.0]


def _meet_after_a_failure() -> float:
    rank = dist.get_rank()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank else None
    told = [store.port if store is not None else 0]
    dist.broadcast_object_list(told, src=1)
    dist.destroy_process_group()
    job = msgspec.structs.replace(Job(name="x"), train=Train(collective_timeout_seconds=2.0))
    device = torch.device("cpu")
    place = Formation(1, rank, 2, 0, "127.0.0.1", told[0], "first")
    if rank == 0:
        with pytest.raises((RuntimeError, dist.DistError)):
            join_group(place, job, device)  # the other one is not there
    place = place._replace(generation=2, prefix="second")
    job = msgspec.structs.replace(job, train=Train(collective_timeout_seconds=WAIT_SECONDS))
    join_group(place, job, device)
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    return float(total)


def test_a_child_that_was_killed_is_not_taken_for_its_successor(tmp_path: Path) -> None:
    asyncio.run(_spawn_kill_spawn(tmp_path))


async def _spawn_kill_spawn(root: Path) -> None:
    ends: list[Ended] = []
    fork_zygote(root / "zygote.sock", root / "zygote.log")
    zygote = ZygoteClient(root / "zygote.sock", root / "zygote.log", ends.append)
    await zygote.open()
    try:
        order = Spawn(key="job1/store", role="store", host="127.0.0.1")
        for _ in range(5):
            first = await zygote.spawn(order)
            os.kill(first.pid, signal.SIGSTOP)  # it cannot be gone yet when the next one is asked
            zygote.signal(order.key, signal.SIGKILL)
            second = await zygote.spawn(order)
            assert second.pid != first.pid
            assert [end.pid for end in ends] == [first.pid]
            zygote.signal(order.key, signal.SIGKILL)
            while len(ends) < 2:
                await asyncio.sleep(0.01)
            ends.clear()
    finally:
        await zygote.leave()


def test_a_store_that_takes_anothers_place_is_where_that_one_was(tmp_path: Path) -> None:
    asyncio.run(_replace_store(tmp_path))


async def _replace_store(root: Path) -> None:
    ends: list[Ended] = []
    fork_zygote(root / "zygote.sock", root / "zygote.log")
    zygote = ZygoteClient(root / "zygote.sock", root / "zygote.log", ends.append)
    await zygote.open()
    try:
        first = await zygote.spawn(Spawn(key="store", role="store", host="127.0.0.1"))
        rank = TCPStore("127.0.0.1", first.port, is_master=False)  # its connection stays open
        os.kill(first.pid, signal.SIGKILL)
        while not ends:
            await asyncio.sleep(0.01)
        again = Spawn(key="store", role="store", host="127.0.0.1", port=first.port)
        second = await zygote.spawn(again)
        assert second.port == first.port
        next_rank = TCPStore("127.0.0.1", first.port, is_master=False)
        next_rank.set("here", "yes")
        del rank
        elsewhere = await zygote.spawn(msgspec.structs.replace(again, key="other"))
        assert elsewhere.port not in (0, first.port)  # it is taken: any other will do
    finally:
        await zygote.leave()


def test_an_end_that_an_agent_did_not_live_to_read_is_told_to_the_next_one(tmp_path: Path) -> None:
    asyncio.run(_end_unread(tmp_path))


async def _end_unread(root: Path) -> None:
    def client(ends: list[Ended]) -> ZygoteClient:
        return ZygoteClient(root / "zygote.sock", root / "zygote.log", ends.append)

    fork_zygote(root / "zygote.sock", root / "zygote.log")
    first = client([])
    await first.open()
    child = await first.spawn(Spawn(key="store", role="store", host="127.0.0.1"))
    assert first._listening is not None
    first._listening.cancel()  # from here on it reads nothing, as if it was killed
    os.kill(child.pid, signal.SIGKILL)
    while Path(f"/proc/{child.pid}").exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    heard: list[list[Ended]] = [[], []]
    for number, ends in enumerate(heard):
        first.close()
        first = client(ends)
        await first.open()
        # Its word that it heard of the end has been read when what it asks for next is there.
        await first.spawn(Spawn(key=f"store{number}", role="store", host="127.0.0.1"))
    await first.leave()
    assert [end.pid for end in heard[0]] == [child.pid] and heard[1] == []
