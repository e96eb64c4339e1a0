"""The short way of agents: frames of any cut, broken ones refused, others served as ever."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from phalanx.control.server.http import front
from phalanx.control.server.http.front import accepted, headers_of
from phalanx.control.trust.server_key import ServerKey
from phalanx.control.wire.websocket_frames import (
    BYTES,
    CLOSE,
    PING,
    FrameError,
    Frames,
    close_frame,
    framed,
)
from tests.control.servers import ServerProcess

MOST = 1 << 20
SERVER = ServerKey(bytes(32))
HANDSHAKE = {
    b"upgrade": b"websocket",
    b"connection": b"keep-alive, Upgrade",
    b"sec-websocket-version": b"13",
    b"sec-websocket-key": b"dGhlIHNhbXBsZSBub25jZQ==",
}


def sent(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    """A frame as a client of the websockets library sends it, masked."""
    return Frame(opcode, data, fin).serialize(mask=True)


def taken(data: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    frames = Frames(lambda opcode, payload: found.append((opcode, payload)), MOST)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for first, last in pairwise(edges):
        frames.feed(data[first:last])
    return found


@given(
    st.lists(st.binary(max_size=300) | st.integers(0, 70_000).map(bytes), max_size=5),
    st.lists(st.integers(0, 1 << 20), max_size=6),
)
def test_messages_come_out_whole_however_they_are_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(sent(Opcode.BINARY, each) for each in messages)
    assert taken(stream, cuts) == [(BYTES, each) for each in messages]


def test_a_message_in_several_frames_is_one_and_a_ping_may_come_between() -> None:
    stream = sent(Opcode.BINARY, b"one ", fin=False) + sent(Opcode.PING, b"there?")
    stream += sent(Opcode.CONT, b"two ", fin=False) + sent(Opcode.CONT, b"three")
    assert taken(stream, [3, 9]) == [(PING, b"there?"), (BYTES, b"one two three")]


@pytest.mark.parametrize(
    ("stream", "code"),
    [
        (Frame(Opcode.BINARY, b"bare").serialize(mask=False) + bytes(8), 1002),
        (sent(Opcode.TEXT, b"words"), 1003),
        (sent(Opcode.CONT, b"of nothing"), 1002),
        (sent(Opcode.BINARY, b"a", fin=False) + sent(Opcode.BINARY, b"b"), 1002),
        (b"\xc2" + sent(Opcode.BINARY, b"compressed?")[1:], 1002),
        (b"\x82\xff" + (1 << 40).to_bytes(8, "big") + bytes(4), 1009),
        (sent(Opcode.BINARY, bytes(MOST), fin=False) + sent(Opcode.CONT, b"more"), 1009),
    ],
)
def test_what_breaks_the_protocol_is_refused_with_its_code(stream: bytes, code: int) -> None:
    with pytest.raises(FrameError) as refused:
        taken(stream, [])
    assert refused.value.code == code


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_the_servers_frames_are_those_of_the_library(size: int) -> None:
    assert framed(bytes(size)) == Frame(Opcode.BINARY, bytes(size)).serialize(mask=False)
    assert close_frame(4000, "why")[0] == 0x80 | CLOSE


def test_a_handshake_is_answered_as_the_standard_says() -> None:
    answer = accepted(HANDSHAKE, b"", SERVER)
    assert answer is not None and b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in answer  # RFC 6455, 1.3


@pytest.mark.parametrize(
    "change",
    [
        {b"sec-websocket-key": b"short"},
        {b"sec-websocket-key": b"\xff\xff"},
        {b"sec-websocket-version": b"8"},
        {b"connection": b"close"},
    ],
)
def test_another_handshake_is_not_accepted(change: dict[bytes, bytes]) -> None:
    assert accepted(HANDSHAKE | change, b"", SERVER) is None


@pytest.mark.parametrize("head", [b"no colon", b": empty", b"a : b", b"a: 1\r\nA: 2"])
def test_headers_that_can_be_read_in_two_ways_are_not_read(head: bytes) -> None:
    assert headers_of(head) is None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("front") / "state") as running:
        yield running


def answer_to(server: ServerProcess, *parts: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        for part in parts:
            raw.sendall(part)
        found = b""
        while b"\r\n\r\n" not in found:
            more = raw.recv(65_536)
            if not more:
                break
            found += more
        return found


UPGRADE = b"".join(name + b": " + value + b"\r\n" for name, value in HANDSHAKE.items())


def test_whoever_is_no_agent_is_served_as_ever_also_byte_by_byte(server: ServerProcess) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert answer_to(server, *(request[i : i + 1] for i in range(len(request)))).startswith(
        b"HTTP/1.1 200"
    )
    plain = b"GET /v1/agent HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert answer_to(server, plain[:9], plain[9:]).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize(
    ("more", "status"),
    [
        (b"", b"401"),
        (b"Authorization: Bearer phx_agent_guess\r\n", b"401"),
        (b"Authorization: Basic \xff\xfe\r\n", b"401"),
    ],
)
def test_an_agent_without_a_good_token_is_refused_in_words(
    server: ServerProcess, more: bytes, status: bytes
) -> None:
    found = answer_to(server, b"GET /v1/agent HTTP/1.1\r\n" + UPGRADE, more + b"\r\n")
    assert found.startswith(b"HTTP/1.1 " + status)
    assert b"error" in found


def test_a_token_of_another_role_opens_no_agents_socket(server: ServerProcess) -> None:
    admin = (server.state / "admin.token").read_bytes().strip()
    head = b"GET /v1/agent HTTP/1.1\r\n" + UPGRADE + b"Authorization: Bearer " + admin
    assert answer_to(server, head + b"\r\n\r\n").startswith(b"HTTP/1.1 403")
    wrong = head.replace(b"version: 13", b"version: 12")
    assert answer_to(server, wrong + b"\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_a_head_without_end_is_not_kept_for_ever(server: ServerProcess) -> None:
    endless = b"GET /v1/agent HTTP/1.1\r\nX: " + b"a" * (80 << 10)
    assert answer_to(server, endless).startswith(b"HTTP/1.1 431")


def test_whoever_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "FIRST_SECONDS", 0.1)

    async def scenario() -> None:
        state = SimpleNamespace(connections=set())
        made = partial(front.NewConnection, None, server_state=state)  # type: ignore[arg-type]
        server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET /v1/ag")  # and no more
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        assert state.connections == set()
        server.close()

    asyncio.run(scenario())
