"""A worker stays connected to its agent, whatever its process lacks for a while."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.checkpoint.keeper.frames import Unframer, framed
from phalanx.cluster.protocol.commands import Go
from phalanx.cluster.reasons import reason
from phalanx.control.wire import worker_messages
from phalanx.control.wire.worker_messages import AgentLink, Order, Present, decode_fact
from tests.checkpoint.waiting import eventually


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    """The agent's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        listener.settimeout(60.0)
        yield listener


def linked(folder: Path, heard: list[Order], fails: int = 0) -> AgentLink:
    def hear(order: Order) -> None:
        nonlocal fails
        fails -= 1
        if fails >= 0:
            raise RuntimeError("can't start new thread")
        heard.append(order)

    link = AgentLink(str(folder / "agent"), lambda: Present(job=1, index=0, pid=7), hear)
    link.start()
    return link


def met(agent: socket.socket) -> tuple[socket.socket, object]:
    """A connection of the worker, and its first word."""
    connection, _ = agent.accept()
    connection.settimeout(60.0)
    unframer = Unframer()
    while not (words := list(unframer.feed(connection.recv(1 << 16)))):
        pass
    return connection, decode_fact(words[0])


def test_a_worker_that_could_open_no_socket_for_a_while_comes_back(
    agent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, tries = socket.socket, list[int]()

    def poor(*arguments: object) -> socket.socket:
        tries.append(1)
        if len(tries) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(worker_messages.socket, "socket", poor)
        link = linked(tmp_path, [])
        assert eventually(link.connected.is_set)
    connection, word = met(agent)
    assert isinstance(word, Present) and word.pid == 7 and len(tries) == 4
    link.close()
    connection.close()


def test_an_order_that_cannot_be_followed_now_is_heard_with_the_next_connection(
    agent: socket.socket, tmp_path: Path
) -> None:
    heard: list[Order] = []
    link = linked(tmp_path, heard, fails=1)
    go = Go(reason=reason("go"), job=1, generation=3)
    first, _ = met(agent)
    first.sendall(framed(go))
    assert first.recv(1) == b""
    second, word = met(agent)
    assert isinstance(word, Present) and not heard
    second.sendall(framed(go))
    assert eventually(lambda: bool(heard)) and heard[0] == go
    link.close()
    first.close()
    second.close()
