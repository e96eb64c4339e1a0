"""What the workers of a node say, and what their end says: facts for the agent's machine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import structs

from phalanx.cluster.protocol.messages import (
    LocalFact,
    Restored,
    Sealed,
    SiteNotice,
    WorkerFound,
    WorkerLeft,
    WorkerUp,
)
from phalanx.control.agent.jobs.local_job import Hand, Here
from phalanx.control.agent.jobs.wrapper_exits import KilledChild, killed_child, last_output
from phalanx.control.agent.safe_files import Owner, files_as
from phalanx.control.host.users import known_user
from phalanx.control.wire.payload import Script, Train
from phalanx.control.wire.socket_peer import Peer, peer_of
from phalanx.control.wire.worker_messages import GIVE_WAY, Fact, Looked, Present, decode_fact
from phalanx.control.wire.zygote_messages import Ended, Unframer
from phalanx.control.worker.exit_causes import SHELL, cause_of_signal, explained

log = logging.getLogger("phalanx.agent")

SHELL_TERM = SHELL + signal.SIGTERM
KNOWN_SECONDS = 2.0  # for the zygote to say whom it has forked
MOST_CONNECTIONS = 256  # of a job's processes here
MOST_FACT_BYTES = 1 << 20
MOST_REFUSALS_TOLD = 20  # of a job, in the agent's log


class Ears:
    """Listens to the workers of all jobs. ``give_way`` starts another process for a worker;
    ``root_of`` is the process of a job that another one descends from, or 0.
    """

    def __init__(
        self,
        fact: Callable[[LocalFact], None],
        root_of: Callable[[Here, int], int],
        give_way: Callable[[Here, Hand], None],
    ) -> None:
        self._fact, self._root_of, self._give_way = fact, root_of, give_way
        self.out_of_memory: Callable[[int], str] = lambda pid: ""

    async def listen(self, here: Here, user: str) -> None:
        """Open the socket that the workers of a job come to; its folder is their user's alone."""
        if here.server is not None:
            return
        # Asked for first: where nobody listens yet, the next attempt finds the same fault again.
        entry = known_user(user) if user else None
        owner = Owner(entry.pw_uid, entry.pw_gid) if entry is not None else None
        here.make_folders(owner)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The folder is the user's, who could put anything in the place of a socket: it is
            # made as theirs, and no right to it is changed afterwards.
            with files_as(owner):
                here.agent_socket.unlink(missing_ok=True)
                listening.bind(str(here.agent_socket))
            meet = partial(self._meet, here)
            here.server = await asyncio.start_unix_server(meet, sock=listening)
        except OSError:
            listening.close()
            raise

    async def _meet(
        self, here: Here, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        unframer, hand = Unframer(MOST_FACT_BYTES), None
        here.connections += 1
        try:
            pid = await self._recognise(here, peer_of(writer.get_extra_info("socket")))
            while data := await reader.read(1 << 16):
                for body in unframer.feed(data):
                    fact = decode_fact(body)
                    if fact.job != here.job:
                        raise PermissionError(f"process {pid} speaks for job {fact.job}")
                    if isinstance(fact, Present):
                        hand = self._present(here, structs.replace(fact, pid=pid), writer)
                    elif hand is not None:
                        self._heard(hand, fact)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            here.refused += 1
            if here.refused <= MOST_REFUSALS_TOLD:
                log.warning("job %d: a worker's words are refused: %s", here.job, error)
        except asyncio.CancelledError:
            return  # the agent ends, and asyncio would print a traceback for every worker
        finally:
            here.connections -= 1
            writer.close()
            if hand is not None and hand.writer is writer:
                hand.writer = None
                self._mourn(here, hand)

    async def _recognise(self, here: Here, peer: Peer) -> int:
        """The process of the job that speaks; PermissionError where it is somebody else's."""
        if here.connections > MOST_CONNECTIONS:
            raise PermissionError(f"there are {MOST_CONNECTIONS} connections already")
        own = os.geteuid()
        if peer.uid not in (own, here.owner.uid if here.owner is not None else own):
            raise PermissionError(f"process {peer.pid} is user {peer.uid}'s")
        # The zygote may not have told us yet of a process that it has just forked.
        for _ in range(int(KNOWN_SECONDS / 0.02)):
            if root := self._root_of(here, peer.pid):
                return root
            await asyncio.sleep(0.02)
        raise PermissionError(f"process {peer.pid} is not one of the job's")

    def _present(self, here: Here, fact: Present, writer: asyncio.StreamWriter) -> Hand:
        hand = here.find(fact.pid)
        outlived = hand is None or hand.adopted  # the agent before this one started it
        if hand is None:
            expected = here.hands.get(fact.index)
            if expected is not None and not expected.pid:
                hand, outlived = expected, False  # the zygote has not told us yet who it is
            else:
                if expected is not None or fact.generation <= 0:
                    log.warning("job %d: process %d is not expected", here.job, fact.pid)
                hand = here.hand(fact.index, fact.rank)
                hand.generation = fact.generation
                here.hands[fact.index] = hand
        hand.pid, hand.writer, hand.step = fact.pid, writer, fact.step
        if fact.running:
            here.generation = max(here.generation, fact.generation)
            if hand.take is None and outlived:
                found = WorkerFound(
                    job=here.job,
                    generation=fact.generation,
                    rank=fact.rank,
                    step=fact.step,
                    committed=fact.committed,
                    durable=fact.durable,
                )
                self._fact(found)
        if hand.take is not None and hand.take.generation > fact.generation:
            hand.say(hand.take)
            for order in here.orders:
                hand.say(order)
        return hand

    def _heard(self, hand: Hand, fact: Fact) -> None:
        match fact:
            case WorkerUp():
                hand.answered = True
            case Restored(refused=""):
                hand.restored = True
            case Sealed():
                hand.step = fact.step
            case WorkerLeft():
                hand.left = True
                if not fact.generation:  # it never came so far as to know its place
                    fact = structs.replace(fact, generation=hand.generation, rank=hand.rank)
                if fact.ends:
                    hand.last_generation = fact.generation
            case Looked():
                hand.looked = fact
        if not isinstance(fact, Present | Looked):
            self._fact(fact)

    def ended(self, here: Here, end: Ended) -> None:
        """The zygote says that a process of a job is gone."""
        hand = here.find(end.pid)
        if hand is None:
            return
        hand.status = end.status
        if here.standbys.get(hand.index) is hand:
            log.warning("job %d: a standby ended (%d)", here.job, end.status)
            del here.standbys[hand.index]
        elif end.status == GIVE_WAY:
            hand.left = True
            # One that never got out of an older generation: its place in the new one is free.
            if hand.take is not None and not hand.restored:
                self._give_way(here, hand)
        elif hand.take is not None and 0 < hand.last_generation < hand.take.generation:
            # It had said why it ends before it was given this place: that is no news.
            hand.left = True
            self._give_way(here, hand)
        else:
            self._mourn(here, hand)

    def _mourn(self, here: Here, hand: Hand) -> None:
        """A process is gone and all its words are read: if none of them explained it, we do."""
        if hand.status is None or hand.writer is not None or hand.left:
            return
        hand.left = True
        cause, detail = explained(hand.status, ours=isinstance(here.work, Train))
        if hand.sent_away and hand.status in (-signal.SIGTERM, SHELL_TERM):
            cause = detail = ""  # as it was asked to
        ended_by, pid = -hand.status, hand.pid
        child = self._killed_child(here, hand) if cause == "user_error" else None
        if child is not None:
            ended_by, pid = child.number, child.pid
            cause = cause_of_signal(ended_by)
            which = f"process {pid}, which it had started," if pid else "a process of it"
            detail = f"{detail}: {which} was ended by {child.number.name}"
        if ended_by == signal.SIGKILL and (told := self.out_of_memory(pid)):
            cause, detail = "host_out_of_memory", told
        left = WorkerLeft(
            job=here.job,
            generation=hand.generation,
            rank=hand.rank,
            step=hand.step,
            cause=cause,
            detail=detail,
        )
        self._fact(left)

    def _killed_child(self, here: Here, hand: Hand) -> KilledChild | None:
        """Which process of a program that starts others a signal ended, where it told."""
        if not isinstance(here.work, Script):
            return None
        return killed_child(last_output(here.log(hand.index), hand.log_start))


def at_server_time(fact: LocalFact, skew_ns: int) -> LocalFact:
    """A fact with its time as the server's clock would tell it."""
    match fact:
        case Sealed():
            return structs.replace(fact, at_ns=fact.at_ns + skew_ns)
        case SiteNotice():
            return structs.replace(fact, deadline_ns=fact.deadline_ns + skew_ns)
        case _:
            return fact
