"""Between keepers nobody reads or writes who does not know the token, and changes are noticed."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from phalanx.checkpoint.keeper import channel
from phalanx.checkpoint.keeper.channel import (
    ByteStream,
    ChannelError,
    ReplicaOptions,
    SealedStream,
    Throttle,
    accept,
    connect,
    interface_address,
)
from phalanx.checkpoint.keeper.messages import AskSnapshots, Fetch, KeeperInventory, SnapshotBytes
from phalanx.checkpoint.keeper.wire import ask, expect, receive_bytes, send

TOKEN = secrets.token_bytes(32)


class Meeting:
    """One side of a connection in a thread, the other in the test."""

    def __init__(self, *, encrypt: bool = False) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.encrypt = encrypt
        self.stream: ByteStream | None = None
        self.problem: Exception | None = None
        self.raw: socket.socket | None = None
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        self.raw, _ = self.listener.accept()
        try:
            self.stream = accept(self.raw, TOKEN, encrypt=self.encrypt)
        except Exception as error:
            self.problem = error
            self.raw.close()

    def settled(self) -> ByteStream | None:
        self._thread.join(60)
        return self.stream

    def close(self) -> None:
        self.listener.close()
        if self.raw is not None:
            self.raw.close()


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def meeting(request: pytest.FixtureRequest) -> Iterator[Meeting]:
    made = Meeting(encrypt=request.param)
    yield made
    made.close()


def test_bytes_of_any_length_arrive_as_they_were(meeting: Meeting) -> None:
    with closing(connect("127.0.0.1", meeting.port, TOKEN, 60)) as mine:
        theirs = meeting.settled()
        assert theirs is not None
        assert isinstance(mine, SealedStream) == meeting.encrypt
        for size in (1, 31, 1 << 20, (5 << 20) + 7):
            data = secrets.token_bytes(size)
            sending = threading.Thread(target=mine.sendall, args=(memoryview(data),))
            sending.start()
            assert receive_bytes(theirs, size) == data
            sending.join()
        theirs.sendall(b"back")
        assert receive_bytes(mine, 4) == b"back"


def test_without_the_token_nobody_gets_in(meeting: Meeting) -> None:
    with pytest.raises(ConnectionError):
        connect("127.0.0.1", meeting.port, b"guess", 60)
    assert meeting.settled() is None
    assert "token" in str(meeting.problem)


def test_a_keeper_that_does_not_know_the_token_is_given_nothing() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes([0]) + os.urandom(32))
            receive_bytes(connection, channel.REPLY_BYTES)
            connection.sendall(os.urandom(64))

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(ChannelError, match="does not know the token"):
        connect("127.0.0.1", listener.getsockname()[1], TOKEN, 60)
    listener.close()


def test_whoever_wants_encryption_gets_it() -> None:
    meeting = Meeting(encrypt=False)
    with closing(connect("127.0.0.1", meeting.port, TOKEN, 60, encrypt=True)) as mine:
        assert isinstance(mine, SealedStream)
        assert isinstance(meeting.settled(), SealedStream)
    meeting.close()


def test_a_connection_is_not_talked_out_of_encryption() -> None:
    """Somebody between them says that the keeper does not want it."""
    meeting = Meeting(encrypt=True)
    with socket.create_connection(("127.0.0.1", meeting.port), 60) as connection:
        hello = receive_bytes(connection, channel.HELLO_BYTES)
        assert hello is not None
        reply = bytes([0]) + bytes(64)
        connection.sendall(reply + channel._proof(TOKEN, b"client", hello + reply))
        assert connection.recv(1) == b""
    assert meeting.settled() is None and "encrypt" in str(meeting.problem)
    meeting.close()


def test_sealed_bytes_cannot_be_read_or_changed_on_their_way() -> None:
    meeting = Meeting(encrypt=True)
    seen = bytearray()
    between = socket.create_server(("127.0.0.1", 0))
    changed = threading.Event()

    def relay() -> None:
        here, _ = between.accept()
        there = socket.create_connection(("127.0.0.1", meeting.port), 60)

        def pump(source: socket.socket, target: socket.socket, note: bool) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    if note:
                        seen.extend(data)
                        if changed.is_set():
                            data = data[:-1] + bytes([data[-1] ^ 1])
                    target.sendall(data)

        threading.Thread(target=pump, args=(there, here, False), daemon=True).start()
        pump(here, there, True)

    threading.Thread(target=relay, daemon=True).start()
    mine = connect("127.0.0.1", between.getsockname()[1], TOKEN, 60)
    theirs = meeting.settled()
    assert theirs is not None
    mine.sendall(b"the weights of a model")
    assert receive_bytes(theirs, 22) == b"the weights of a model"
    assert b"weights" not in seen and TOKEN not in seen
    changed.set()
    mine.sendall(b"the weights of a model")
    assert receive_bytes(theirs, 22) is None
    mine.close()
    meeting.close()
    between.close()


def test_a_rate_is_kept() -> None:
    throttle, data = Throttle(40_000_000), memoryview(bytes(8 << 20))
    began = time.monotonic()
    for part in throttle.parts(data):
        throttle.take(len(part))
    assert time.monotonic() - began >= (len(data) / 40_000_000) * 0.99
    free = Throttle(0)
    assert len(free.parts(data)) == 1


def test_options_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ReplicaOptions("10.0.0.7", True, 5_000_000)
    for name, value in given.environment().items():
        monkeypatch.setenv(name, value)
    assert ReplicaOptions.from_environment() == given


def test_an_interface_has_an_address_or_the_others_are_named() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(OSError, match="lo"):
        interface_address("no-such-card")


def ask_locally(address: Path) -> KeeperInventory:
    """What a keeper that is just starting tells on its own node."""
    deadline = time.monotonic() + 60
    while True:
        with socket.socket(socket.AF_UNIX) as local:
            try:
                local.connect(str(address))
                return ask(local, AskSnapshots(), KeeperInventory)
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.mark.parametrize("encrypt", ["", "1"])
def test_a_keeper_can_neither_be_read_nor_written_by_a_stranger(
    tmp_path: Path, encrypt: str
) -> None:
    """A whole keeper: a stranger speaks its language without the token, in every way there is."""
    address = tmp_path / "k.sock"
    command = [sys.executable, "-m", "phalanx.checkpoint.keeper.process", "--socket", str(address)]
    environment = {**os.environ, "PHALANX_REPLICA_ENCRYPT": encrypt}
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--lease", "30"], env=environment, stderr=subprocess.PIPE
    )
    try:
        known = ask_locally(address)
        for message in (AskSnapshots(), Fetch(0, "s", 1, 0, 8)):
            with socket.create_connection(("127.0.0.1", known.port), 5) as stranger:
                assert receive_bytes(stranger, channel.HELLO_BYTES) is not None
                send(stranger, message)
                stranger.sendall(bytes(channel.REPLY_BYTES))  # and no proof
                with pytest.raises(ConnectionError):
                    expect(
                        stranger, SnapshotBytes if isinstance(message, Fetch) else KeeperInventory
                    )
        with pytest.raises(ConnectionError):
            connect("127.0.0.1", known.port, secrets.token_bytes(32), 5)
        with closing(connect("127.0.0.1", known.port, known.token, 5)) as friend:
            assert isinstance(friend, SealedStream) == bool(encrypt)
            assert ask(friend, AskSnapshots(), KeeperInventory).port == known.port
    finally:
        process.kill()
        process.communicate()
