"""Idle and slow connections go, and keep nobody else out."""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from phalanx.control.server.http import http_connection
from phalanx.control.server.http.front import Turns
from phalanx.control.server.http.live import FIRST_SECONDS
from phalanx.control.server.main import LISTENERS
from phalanx.control.server.security.connection_gate import GRACE_SECONDS, ConnectionGate, gate_for
from tests.control.servers import ServerProcess
from tests.security.test_tls import WideServer


class Connection:
    """A connection that notes when it is told to go."""

    def __init__(self) -> None:
        self.gone = False

    def dismiss(self) -> None:
        self.gone = True


def test_the_oldest_stranger_makes_room() -> None:
    now = [0.0]
    gate = ConnectionGate(3, 10, lambda: now[0])
    connections = [Connection() for _ in range(5)]
    for index, connection in enumerate(connections[:4]):
        assert gate.enter(connection, f"address {index}")
    assert not any(
        connection.gone for connection in connections
    )  # a fleet that connects at once is let in
    now[0] += GRACE_SECONDS + 1
    gate.leave(connections[0])  # has shown a token
    gate.enter(connections[4], "another")
    assert [connection.gone for connection in connections] == [False, True, False, False, False]
    assert len(gate) == 3 and gate.dismissed == 1


def test_one_address_makes_room_for_itself() -> None:
    now = [0.0]
    gate = ConnectionGate(100, 2, lambda: now[0])
    other = Connection()
    gate.enter(other, "other")
    mine = [Connection() for _ in range(5)]
    for connection in mine:
        now[0] += GRACE_SECONDS + 1
        gate.enter(connection, "mine")
    assert [connection.gone for connection in mine] == [
        True,
        True,
        True,
        False,
        False,
    ] and not other.gone


def test_far_too_many_are_turned_away_at_once() -> None:
    gate = ConnectionGate(2, 100, lambda: 0.0)
    assert [gate.enter(Connection(), str(n)) for n in range(17)] == [True] * 16 + [False]


@pytest.mark.parametrize(
    ("files", "strangers", "hard"),
    [(1024, 4096, 32768), (13_000, 4096, 32768), (65_536, 16_384, 32768), (10**6, 16_384, 131_072)],
)
def test_as_many_strangers_as_there_are_files_for(files: int, strangers: int, hard: int) -> None:
    gate = gate_for(files)
    assert (gate.most, gate.hard) == (strangers, hard)
    assert gate.most_of_address < strangers


def test_strangers_take_turns_and_an_error_of_one_holds_nobody_up() -> None:
    served: list[int] = []
    rounds: list[int] = []

    async def play() -> None:
        loop = asyncio.get_running_loop()
        errors: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        turns = Turns(4)
        for number in range(10):
            turns.wait(partial(served.append, number))
        turns.wait(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        turns.wait(partial(served.append, 10))
        while len(served) < 11:
            rounds.append(len(served))
            await asyncio.sleep(0)
        assert len(errors) == 1

    asyncio.run(play())
    assert served == list(range(11))
    assert max(after - before for before, after in pairwise([*rounds, 11])) <= 4


def closed_within(opened: socket.socket, seconds: float, drip: bytes) -> float:
    """Sends a little now and then until the server closes; how long that took."""
    began = time.monotonic()
    opened.settimeout(0.2)
    while time.monotonic() - began < seconds:
        try:
            if drip:
                opened.sendall(drip)
            if opened.recv(4096) == b"":
                return time.monotonic() - began
        except TimeoutError:
            continue
        except OSError:
            return time.monotonic() - began
    raise AssertionError(f"still open after {seconds} s")


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("first", "drip", "seconds"),
    [
        (b"", b"", http_connection.HEAD_SECONDS),
        (b"GET /v1/status HTTP/1.1\r\n", b"a: b\r\n", http_connection.HEAD_SECONDS),
        (b"GET /v1/agent HTTP/1.1\r\n", b"a: b\r\n", http_connection.HEAD_SECONDS),
        (
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n",
            b"{",
            http_connection.BODY_SECONDS,
        ),
        (
            b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\n",
            b"a: b\r\n",
            http_connection.HEAD_SECONDS,
        ),
    ],
    ids=["idle", "head", "agent", "body", "second head"],
)
def test_whoever_is_slow_is_cut_off(
    tmp_path: Path, first: bytes, drip: bytes, seconds: float
) -> None:
    with ServerProcess(tmp_path / "state") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as opened:
            opened.sendall(first)
            assert closed_within(opened, seconds + 20, drip) <= seconds + 5
        assert "Traceback" not in server.output()


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_whoever_does_not_finish_the_handshake_is_cut_off(tmp_path: Path) -> None:
    allowed = http_connection.HEAD_SECONDS
    with (
        WideServer(tmp_path / "state") as server,
        socket.create_connection(("127.0.0.1", server.port)) as opened,
    ):
        opened.sendall(b"\x16\x03\x01")
        assert closed_within(opened, allowed + 20, b"") <= allowed + 5


@pytest.mark.timeout(120)
def test_heads_without_end_are_refused_and_others_are_served(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as server:
        for line in (b"GET /v1/status HTTP/1.1\r\n", b"GET /v1/agent HTTP/1.1\r\n"):
            with socket.create_connection(("127.0.0.1", server.port)) as opened:
                opened.sendall(line)
                assert closed_within(opened, 30, b"a: " + b"b" * 8000 + b"\r\n") < 9
        with socket.create_connection(("127.0.0.1", server.port)) as opened:
            opened.sendall(b"\x16\x03\x01")  # TLS where there is none is told at once
            opened.settimeout(8)
            assert b" 400 " in opened.recv(4096)
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        assert server.call("GET", "/v1/status")[0] == 200
        text = server.call("GET", "/metrics")[1]
        found = [line for line in text.splitlines() if line.startswith("phalanx_connections_un")]
        assert float(found[0].split()[-1]) >= 300
        for each in idle:
            each.close()
        assert "Traceback" not in server.output()


@pytest.mark.timeout(120)
def test_a_connection_with_a_good_token_is_no_stranger(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for _ in range(2):
            headers = {"Authorization": f"Bearer {server.admin()}"}
            connection.request("GET", "/metrics", headers=headers)
            text = connection.getresponse().read().decode()
            assert "phalanx_connections_unknown 0" in text
        connection.close()


@pytest.mark.timeout(120)
def test_a_live_view_without_a_token_is_counted_and_goes(tmp_path: Path) -> None:
    def strangers() -> float:
        text = server.call("GET", "/metrics")[1]
        return float(re.findall(r"^phalanx_connections_unknown (\S+)", text, re.MULTILINE)[0])

    with ServerProcess(tmp_path / "state") as server:
        url = server.url.replace("http", "ws") + "/v1/live"
        with connect(url) as silent:
            assert strangers() >= 1
            with pytest.raises(ConnectionClosed):
                silent.recv(FIRST_SECONDS + 60)
        assert strangers() == 0


@pytest.mark.timeout(120)
def test_a_token_that_is_refused_again_and_again_has_to_wait(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as server:
        mallory, alice = server.token("user", "mallory"), server.token("user", "alice")
        deadline = time.monotonic() + 60
        while (status := server.call("GET", "/v1/jobs/77", token=mallory)[0]) != 429:
            assert status == 404 and time.monotonic() < deadline
        assert server.call("GET", "/v1/jobs", token=alice)[0] == 200


def test_many_connections_are_taken_in_a_turn(tmp_path: Path) -> None:
    """The loop takes one from each listener: behind one alone, a crowd that knocks is a queue."""
    with ServerProcess(tmp_path / "state") as server:
        assert server.process is not None
        folder = Path(f"/proc/{server.process.pid}/fd")
        sockets = Counter(str(each.readlink()) for each in folder.iterdir() if each.is_symlink())
        (listening, count), *_ = sockets.most_common()
        assert listening.startswith("socket:") and count == LISTENERS
