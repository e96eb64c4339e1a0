"""The store where ranks meet, asked by torch's own client and by strangers."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from phalanx.control.agent import rendezvous
from phalanx.control.agent.rendezvous import MAGIC, MOST_BYTES, Query, meeting_name, publish

NAME = meeting_name(b"key of a job", 1, 1)
OTHER = meeting_name(b"key of another", 2, 1)
SIZE = struct.Struct("<Q")
FORK = get_context("fork")


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = FORK.Process(target=rendezvous.host, args=(listening,), daemon=True)
        serving.start()
        found = int(listening.getsockname()[1])
    yield found
    serving.kill()
    serving.join()


def client(port: int, name: str = NAME, seconds: float = 120) -> PrefixStore:
    """As a rank has it."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=seconds))
    return PrefixStore(name, store)


def stranger(port: int) -> socket.socket:
    """Somebody who speaks the protocol and knows no secret."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(bytes([Query.VALIDATE]) + struct.pack("<I", MAGIC))
    return sock


def text(data: bytes) -> bytes:
    return SIZE.pack(len(data)) + data


def test_every_request_of_torchs_client_is_answered_as_torchs_server_does(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        own_port = free.getsockname()[1]
    theirs = TCPStore("127.0.0.1", own_port, is_master=True, wait_for_workers=False)
    answers = [_ask_everything(store) for store in (client(port), PrefixStore(NAME, theirs))]
    assert answers[0] == answers[1]


def _ask_everything(store: PrefixStore) -> list[object]:
    store.set("a", "1")
    store.set("empty", "")
    store.append("list", "x")
    store.append("list", "yz")
    store.multi_set(["m1", "m2"], ["v1", "v2"])
    return [
        store.get("a"),
        store.get("empty"),
        store.get("list"),
        store.add("count", 5),
        store.add("count", -2),
        store.get("count"),
        store.check(["a", "m1"]),
        store.check(["a", "nowhere"]),
        store.compare_set("a", "1", "2"),
        store.compare_set("a", "1", "3"),
        store.compare_set("new", "", "first"),
        store.compare_set("absent", "something", "else"),
        store.multi_get(["m1", "m2"]),
        store.delete_key("a"),
        store.delete_key("a"),
        sorted(store.list_keys()),
        store.num_keys(),
        store.wait(["m1", "m2"]),
        store.has_extended_api(),
    ]


def test_an_agent_leaves_word_for_the_ranks(port: int) -> None:
    asyncio.run(publish(f"127.0.0.1:{port}", NAME, "keeper", "host:1234"))
    assert client(port).get("keeper") == b"host:1234"
    with pytest.raises(OSError, match=r"hung up|reset by peer"):
        asyncio.run(publish(f"127.0.0.1:{port}", "no secret", "keeper", "host:1234"))


def test_a_key_that_comes_later_ends_the_waiting(port: int) -> None:
    threading.Timer(0.2, lambda: client(port).set("late", "here")).start()
    assert client(port).get("late") == b"here"
    with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
        client(port, seconds=2.0).get("never")


def test_a_client_goes_on_after_it_gave_up_waiting(port: int) -> None:
    store = client(port, seconds=2.0)
    with pytest.raises(dist.DistStoreError):
        store.get("never")
    store.set("never", "now")
    assert store.get("never") == b"now"


def test_no_secret_shows_anything_of_another(port: int) -> None:
    store, other = client(port), client(port, OTHER)
    store.set("address", "10.0.0.1")
    assert not other.check(["address"]) and other.num_keys() == 0 and other.list_keys() == []
    other.set("address", "10.6.6.6")
    assert store.get("address") == b"10.0.0.1" and store.num_keys() == 1


@pytest.mark.parametrize("name", ["job1/1", "", "0" * 31, "Z" * 32])
def test_keys_without_a_secret_are_refused(port: int, name: str) -> None:
    with pytest.raises(dist.DistError):
        client(port, name).add("x", 1)
    assert client(port).add("x", 1) == 1


def test_whoever_knows_no_secret_lists_nothing(port: int) -> None:
    client(port).set("address", "10.0.0.1")
    open_store = TCPStore("127.0.0.1", port, is_master=False)
    assert open_store.list_keys() == [] and open_store.num_keys() == 0
    with pytest.raises(dist.DistError):
        open_store.compare_set("address", "", "10.6.6.6")


def _half_a_request(sock: socket.socket) -> None:
    sock.sendall(bytes([Query.SET]) + SIZE.pack(100) + b"/")


def _endless_value(sock: socket.socket) -> None:
    sock.sendall(bytes([Query.SET]) + text(f"/{OTHER}/x".encode()) + SIZE.pack(1 << 60))


def _too_many_keys(sock: socket.socket) -> None:
    sock.sendall(bytes([Query.WAIT]) + SIZE.pack(1 << 40))


def _unknown_request(sock: socket.socket) -> None:
    sock.sendall(bytes([14]) + text(b"/queue"))


def _no_protocol(sock: socket.socket) -> None:
    sock.sendall(b"GET / HTTP/1.1\r\nHost: store\r\n\r\n")


def _adds_to_text(sock: socket.socket) -> None:
    key = text(f"/{OTHER}/x".encode())
    sock.sendall(bytes([Query.SET]) + key + text(b"no number"))
    sock.sendall(bytes([Query.ADD]) + key + struct.pack("<q", 1))


def _reads_no_answers(sock: socket.socket) -> None:
    key = text(f"/{OTHER}/x".encode())
    sock.sendall(bytes([Query.SET]) + key + text(bytes(MOST_BYTES - 100)))
    sock.sendall((bytes([Query.GET]) + key) * 500)
    sock.sendall(bytes([Query.GET_MANY]) + SIZE.pack(500) + key * 500)


@pytest.mark.parametrize(
    "harm",
    [
        _half_a_request,
        _endless_value,
        _too_many_keys,
        _unknown_request,
        _no_protocol,
        _adds_to_text,
        _reads_no_answers,
    ],
)
def test_no_stranger_holds_the_others_up(port: int, harm: Callable[[socket.socket], None]) -> None:
    store = client(port)
    with stranger(port) as sock:
        harm(sock)
        assert [store.add("steps", 1) for _ in range(50)] == list(range(1, 51))


def test_one_connection_stores_only_so_much(port: int) -> None:
    store = client(port)
    value = "x" * (MOST_BYTES // 4)
    for _ in range(8):
        store.set("same", value)  # in its place, not beside it
    for index in range(3):
        store.set(f"key{index}", value)
    with pytest.raises(dist.DistError):
        store.compare_set("one too many", "", value)
    assert client(port).add("x", 1) == 1


def test_a_meeting_is_dropped_when_nobody_has_been_there_for_long() -> None:
    async def visit() -> None:
        both = rendezvous.Rendezvous()
        held, left = both.named(b"held"), both.named(b"left")
        held.users, left.left = 1, both.loop.time() - 10
        both.forget(both.loop.time() - 20)
        assert set(both.meetings) == {b"held", b"left"}
        both.forget(both.loop.time())
        assert set(both.meetings) == {b"held"}

    asyncio.run(visit())


def test_refused_clients_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def visit() -> None:
        meetings = rendezvous.Rendezvous()
        for number in range(1000):
            meetings.refused(("stranger", number), rendezvous.RequestRefusedError("no name"))

    asyncio.run(visit())
    assert [record.getMessage() for record in caplog.records] == [
        "('stranger', 0) is refused: no name (1 since the last line)"
    ]


def test_whoever_names_no_meeting_is_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "NAME_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = FORK.Process(target=rendezvous.host, args=(listening,), daemon=True)
        serving.start()
        port = listening.getsockname()[1]
    store = client(port)
    store.set("x", "1")
    with stranger(port) as sock:
        assert sock.recv(1) == b""  # ended by the other side
    assert store.get("x") == b"1"
    serving.kill()
    serving.join()


def test_a_gang_forms_and_trains_by_it(port: int) -> None:
    ranks = [FORK.Process(target=_sum, args=(port, rank)) for rank in range(3)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0, 0, 0]


def _sum(port: int, rank: int) -> None:
    dist.init_process_group("gloo", store=client(port, seconds=30), rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    dist.barrier()
    assert float(total) == 3.0 and pair is not None
    gathered: list[object] = [None] * 3
    dist.all_gather_object(gathered, rank)
    assert gathered == [0, 1, 2]
