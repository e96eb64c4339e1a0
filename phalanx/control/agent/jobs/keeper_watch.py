"""The agent's ear at a job's keeper: which snapshots are safe, of its own ranks and of its ward."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from phalanx.checkpoint.keeper.frames import LENGTH, framed
from phalanx.checkpoint.keeper.messages import (
    AskSnapshots,
    FenceReplicas,
    FromKeeper,
    KeeperInventory,
    Noted,
    Ping,
    Pong,
    Save,
    Saved,
    ToKeeper,
    Watch,
)
from phalanx.checkpoint.keeper.wire import from_keeper
from phalanx.checkpoint.write.deadline import LEAST_SECONDS
from phalanx.cluster.protocol.commands import Form
from phalanx.cluster.protocol.keeper_state import KeptSteps
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    KeeperChange,
    KeeperFound,
    KeeperSilent,
    LocalFact,
    Sealed,
    WardSealed,
)
from phalanx.control.wire.socket_peer import peer_of

MOST_BYTES = 1 << 20  # of a keeper's word: it is a process of the user's
TELL_SECONDS = 0.3  # for a keeper to say what it holds; it does so at once
SAVE_SECONDS = 3600.0  # for one to write it: the core has a deadline of its own
PING_SECONDS = 1.0
CONNECT_SECONDS = 1.0
UNHEARD = (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.MsgspecError)


class KeeperWatch:
    """One connection to a keeper; ``ward_ranks``: how many ranks its node keeps snapshots for.

    ``replace`` ends a keeper that has not answered for ``silent_seconds``.
    """

    def __init__(
        self,
        path: Path,
        job: int,
        ward_ranks: int,
        fact: Callable[[LocalFact], None],
        silent_seconds: float,
        replace: Callable[[], None],
    ) -> None:
        self.path, self.job, self.ward_ranks = path, job, ward_ranks
        self.lost = True
        self._fact = fact
        # Training goes on without it first, and gets its snapshots back if it answers again.
        self._silent_seconds = max(silent_seconds, 2 * LEAST_SECONDS)
        self._replace = replace
        self._asked = False
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ward: dict[int, dict[int, int]] = {}  # by generation: rank, the step noted last

    async def open(self, seconds: float) -> bool:
        """Connect within a time; False where no keeper listens."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(OSError):
                reader, writer = await _connect(self.path)
                break
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.005)
        say(writer, Watch())
        self.lost, self._writer = False, writer
        work = (self._listen(reader, writer), self._look_after(writer))
        self._tasks = [asyncio.create_task(each) for each in work]
        return True

    def fence(self, generation: int) -> None:
        """Replicas of older generations come too late."""
        if self._writer is not None:
            say(self._writer, FenceReplicas(generation))

    def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()

    async def _look_after(self, writer: asyncio.StreamWriter) -> None:
        """Ask every second whether it is there. Turns are counted, not time: we may stand still."""
        turns, reported = 0, False
        while not self.lost:
            if self._asked:
                turns += 1
            else:
                if reported:
                    self._tell("answers", turns)
                turns, reported, self._asked = 0, False, True
                say(writer, Ping())
            if turns * PING_SECONDS >= LEAST_SECONDS and not reported:
                reported = True
                self._tell("silent", turns)
            if turns * PING_SECONDS >= self._silent_seconds:
                self._tell("replaced", turns)
                self._replace()
                return
            await asyncio.sleep(PING_SECONDS)

    def _tell(self, state: KeeperChange, turns: int) -> None:
        seconds = int(turns * PING_SECONDS)
        self._fact(KeeperSilent(node=THIS_NODE, job=self.job, state=state, seconds=seconds))

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                message = await _hear(reader)
                if isinstance(message, Noted):
                    self._noted(message)
                elif isinstance(message, Pong):
                    self._asked = False
        except UNHEARD:
            pass
        finally:
            self.lost = True
            writer.close()

    def _noted(self, note: Noted) -> None:
        if not note.replica:
            sealed = Sealed(
                job=self.job,
                generation=note.generation,
                rank=note.rank,
                step=note.step,
                at_ns=time.time_ns(),
            )
            self._fact(sealed)
            return
        ward = self._ward.setdefault(note.generation, {})
        ward[note.rank] = note.step  # below the last one where its generation restored again
        if len(ward) >= self.ward_ranks:
            step = min(ward.values())
            self._fact(WardSealed(job=self.job, generation=note.generation, step=step))
        for old in [g for g in self._ward if g < note.generation - 1]:
            del self._ward[old]


def ward_ranks(form: Form, node: int) -> int:
    """Ranks of the slot whose snapshots a node keeps; 0: it keeps none.

    The last slot may have fewer ranks than the others.
    """
    if node == form.backup:
        return form.world_size
    ranks = form.ranks_on(node)
    if not form.buddy_shift or not ranks:
        return 0
    each = form.slot_gpus or 1
    world = form.world or each * len(form.nodes)
    ward = (ranks[0] // each - form.buddy_shift) % len(form.nodes)
    return min(each, world - ward * each)


def say(writer: asyncio.StreamWriter, message: ToKeeper) -> None:
    """A word to a keeper; one that is gone is noticed by whoever listens to it."""
    writer.write(framed(message))


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To the keeper of a job; PermissionError where the process there is another user's."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        _require_owner(path, writer.get_extra_info("socket"))
    except OSError:
        writer.close()
        raise
    return reader, writer


def _require_owner(path: Path, connection: socket.socket) -> int:
    """The process behind a keeper's socket. Its folder is the user's, who could lead us elsewhere:
    into the arms of a service that takes its visitor for root.
    """
    found = peer_of(connection)
    if found.uid != path.parent.lstat().st_uid:
        raise PermissionError(f"{path} leads to a process of user {found.uid}")
    return found.pid


def keeper_pid(path: Path) -> int:
    """The process of a keeper; OSError where there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS)  # whoever is there may never take us
        connection.connect(str(path))
        return _require_owner(path, connection)


async def _hear(reader: asyncio.StreamReader) -> FromKeeper:
    size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
    if size > MOST_BYTES:
        raise OSError(f"a keeper's word of {size} bytes")
    return from_keeper.decode(await reader.readexactly(size))


def is_listened_to(path: Path) -> bool:
    """Whether a process has this socket; the name outlives one that was killed."""
    with suppress(OSError):
        return keeper_pid(path) > 0
    return False


async def keeper_port(path: Path) -> int:
    """Where keepers of other nodes reach that of a job; OSError where it does not say."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await _connect(path)
            try:
                say(writer, AskSnapshots())
                while True:
                    message = await _hear(reader)
                    if isinstance(message, KeeperInventory):
                        return message.port
            finally:
                writer.close()
    except UNHEARD as error:
        raise OSError(f"the keeper does not answer: {error or 'too late'}") from error


async def save_kept(path: Path, step: int, folder: Path) -> Saved:
    """Have the keeper of a job write a step, where no worker can."""
    try:
        async with asyncio.timeout(SAVE_SECONDS):
            reader, writer = await _connect(path)
            try:
                say(writer, Save(step, str(folder)))
                while True:
                    message = await _hear(reader)
                    if isinstance(message, Saved):
                        return message
            finally:
                writer.close()
    except UNHEARD as error:
        return Saved(str(folder), f"its keeper does not answer: {error or 'too late'}")


async def what_is_kept(path: Path, job: int) -> KeeperFound | None:
    """What the keeper of a job holds whose workers are gone; None: nothing, or it is gone too."""
    notes: list[Noted] = []
    with suppress(*UNHEARD):
        async with asyncio.timeout(TELL_SECONDS):
            reader, writer = await _connect(path)
            try:
                say(writer, Watch())
                while True:
                    message = await _hear(reader)
                    if isinstance(message, Noted):
                        notes.append(message)
            finally:
                writer.close()
    if not notes:
        return None
    generation = max(note.generation for note in notes)
    own, ward = (
        _whole_steps([n for n in notes if n.generation == generation and n.replica is replica])
        for replica in (False, True)
    )
    return KeeperFound(job=job, kept_generation=generation, kept=KeptSteps.newest(own, ward))


def _whole_steps(notes: list[Noted]) -> set[int]:
    """Steps that every rank of some notes has."""
    ranks: dict[int, set[int]] = {}
    for note in notes:
        ranks.setdefault(note.rank, set()).add(note.step)
    return set.intersection(*ranks.values()) if ranks else set()
