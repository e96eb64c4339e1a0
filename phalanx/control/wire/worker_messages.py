"""A worker and its agent: who it is, orders down, facts up; over the agent's Unix socket.

The worker outlives its agent: it connects again and says where it stands.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
from msgspec import Struct

from phalanx.checkpoint.keeper.frames import Unframer, framed
from phalanx.cluster.protocol.commands import WorkerOrder
from phalanx.cluster.protocol.messages import (
    Busy,
    FlushWanted,
    InspectGang,
    ReplicasDiffer,
    Restored,
    RestoreFailed,
    Sealed,
    WorkerExited,
    WorkerUp,
)
from phalanx.train.rank.orders import Formation

AGAIN_SECONDS = 0.1  # between two tries to reach the agent
GIVE_WAY = 75  # exit code of a process that leaves its place to another one (EX_TEMPFAIL)
SEND_SECONDS = 5.0  # an agent that takes nothing for so long counts as gone

log = logging.getLogger(__name__)


class WorkerFrame(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of the messages that are the shell's own."""


class Present(WorkerFrame, frozen=True, tag=True):
    """First word of a worker on a connection: who it is and where it stands."""

    job: int
    index: int  # among the workers of the job on this node
    pid: int
    generation: int = 0
    rank: int = -1
    running: bool = False
    step: int = 0
    committed: int = -1
    durable: int = 0


class Take(WorkerFrame, frozen=True, tag=True):
    """Take this place in a generation."""

    job: int
    formation: Formation
    asks_leave: bool = False  # before a durable checkpoint is written
    payload: str = ""


class Looked(WorkerFrame, frozen=True, tag=True):
    """A rank's answer to ``InspectGang``. ``waiting``: in a collective without the others."""

    job: int
    generation: int
    rank: int
    step: int
    waiting: bool


class LastGeneration(WorkerFrame, frozen=True, tag=True):
    """The process takes part in no generation after this one; why it ends, it says next."""

    job: int
    generation: int


class TraceSteps(WorkerFrame, frozen=True, tag=True):
    """Trace the next steps with torch's profiler."""

    steps: int


Order = Take | InspectGang | WorkerOrder | TraceSteps
Fact = (
    Present
    | WorkerUp
    | Restored
    | Sealed
    | RestoreFailed
    | FlushWanted
    | ReplicasDiffer
    | Busy
    | Looked
    | LastGeneration
    | WorkerExited
)

decode_order = msgspec.msgpack.Decoder(Order).decode
decode_fact = msgspec.msgpack.Decoder(Fact).decode


class AgentLink:
    """The worker's end. ``heard`` is called with every order, in a thread of its own.

    ``present`` says where the worker stands, for every new connection.
    """

    def __init__(
        self, path: str, present: Callable[[], Present], heard: Callable[[Order], None]
    ) -> None:
        self._path, self._present, self._heard = path, present, heard
        self._connection: socket.socket | None = None
        self._sending = threading.Lock()
        self._closed = False
        self.connected = threading.Event()

    def start(self) -> None:
        """Connect, and stay connected, behind the worker's back."""
        threading.Thread(target=self._run, name="agent-link", daemon=True).start()

    def say(self, fact: Fact) -> bool:
        """Tell the agent; False while there is none (it will be told where we stand)."""
        with self._sending:
            if self._connection is None:
                return False
            try:
                self._connection.sendall(framed(fact))
            except OSError:
                self._hang_up()
                return False
            return True

    def close(self) -> None:
        """No more words."""
        self._closed = True
        with self._sending:
            self._hang_up()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        self.connected.clear()
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while not self._closed:
            connection = self._reach()
            if connection is None:
                time.sleep(AGAIN_SECONDS)
                continue
            with connection:
                self._listen(connection)
            with self._sending:
                if self._connection is connection:
                    self._hang_up()

    def _reach(self) -> socket.socket | None:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # the program has used up its descriptors: it may close some
            return None
        try:
            connection.connect(self._path)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_SECONDS))
            with self._sending:
                connection.sendall(framed(self._present()))
                self._connection = connection
            self.connected.set()
            return connection
        except OSError:
            connection.close()
            return None

    def _listen(self, connection: socket.socket) -> None:
        unframer = Unframer()
        while True:
            try:
                data = connection.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            try:
                orders = [decode_order(body) for body in unframer.feed(data)]
            except (ValueError, RecursionError):  # no words of an agent: it is tried again
                return
            for order in orders:
                try:
                    self._heard(order)
                except Exception:  # no thread, no descriptor: the next connection brings it again
                    log.exception("an order of the agent cannot be followed")
                    return


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return whole.to_bytes(8, "little") + int((seconds - whole) * 1e6).to_bytes(8, "little")
