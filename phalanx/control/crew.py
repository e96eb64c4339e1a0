"""The processes of jobs on a node: workers, keepers, and what they tell.

Actions of the agent's machine come in, facts for it go out; nothing is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import shutil
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import structs

from phalanx.cluster.commands import Form
from phalanx.cluster.messages import (
    LocalFact,
    Restored,
    Sealed,
    WorkerAbort,
    WorkerDrain,
    WorkerForm,
    WorkerFound,
    WorkerGo,
    WorkerLeft,
    WorkerRestore,
    WorkerStop,
    WorkerUp,
)
from phalanx.control.hands import Hand, Here, Place, explained
from phalanx.control.keeper_watch import KeeperWatch
from phalanx.control.payload import Script, Train, decode_payload
from phalanx.control.runtime import runtime_folder
from phalanx.control.worker_link import Fact, Order, Passed, Present, Take, decode_fact
from phalanx.control.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.zygote_wire import Ended, Spawn, Unframer, framed

ANSWER_SECONDS = 5.0  # a worker that lives answers at once; one that does not is replaced

log = logging.getLogger("phalanx.agent")


class Crew:
    """All jobs of a node. ``fact`` takes what happens to the agent's machine."""

    def __init__(
        self, place: Place, zygote: ZygoteClient, fact: Callable[[LocalFact], None]
    ) -> None:
        self.place, self.zygote, self.fact = place, zygote, fact
        self.state = place.state
        self.lease_seconds = 60.0
        self.jobs: dict[int, Here] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen to workers that outlived an earlier agent."""
        for key in self.zygote.children:
            job, _, role = key.partition("/")
            if role.startswith("worker"):
                here = self.here(int(job.removeprefix("job")))
                await self._listen(here)
                await self._watch(here, 0)

    async def _listen(self, here: Here) -> None:
        """Open the socket that the workers of a job come to; its folder is their user's alone."""
        if here.server is not None:
            return
        here.sockets.mkdir(mode=0o700, exist_ok=True)
        here.agent_socket.unlink(missing_ok=True)
        here.server = await asyncio.start_unix_server(self._meet, str(here.agent_socket))
        if user := self._user(here):
            entry = pwd.getpwnam(user)
            for path in (here.folder, here.sockets, here.agent_socket):
                os.chown(path, entry.pw_uid, entry.pw_gid)

    def _user(self, here: Here) -> str:
        return here.work.user if self.place.switch_users and here.work is not None else ""

    def close(self) -> None:
        """Stop listening; workers go on and look for the next agent."""
        for task in self._tasks:
            task.cancel()
        for here in self.jobs.values():
            here.close()

    def here(self, job: int) -> Here:
        """What this node has of a job."""
        if job not in self.jobs:
            folder = self.state / "jobs" / str(job)
            folder.mkdir(parents=True, exist_ok=True)
            self.jobs[job] = Here(job, folder, runtime_folder(self.state) / str(job))
        return self.jobs[job]

    # Orders of the machine.

    def form(self, action: WorkerForm, form: Form, store: str) -> None:
        """Take places in a generation; processes that live keep theirs."""
        here = self.here(action.job)
        here.form, here.generation, here.store = form, action.generation, store
        here.work = decode_payload(action.payload)
        self._later(self._form(here, action, form, store))

    async def _form(self, here: Here, action: WorkerForm, form: Form, store: str) -> None:
        try:
            await self._listen(here)
            await self._ensure_keeper(here, len(action.ranks))
            for index in [i for i in here.hands if i >= len(action.ranks)]:
                self._end(here, index)
            for index, rank in enumerate(action.ranks):
                if isinstance(here.work, Train):
                    await self._place(here, index, rank, action, form, store)
                else:
                    self._end(here, index)
                    hand = here.hands[index] = Hand(index, rank)
                    hand.generation = action.generation
                    up = WorkerUp(job=here.job, generation=action.generation, rank=rank)
                    self.fact(up)
        except (ZygoteError, OSError, KeyError) as error:
            self._cannot(here, action, error)

    def _cannot(self, here: Here, action: WorkerForm, error: Exception) -> None:
        detail = f"cannot start on {self.place.name}: {error}"
        log.error("job %d: %s", here.job, detail)
        cause = "configuration" if isinstance(error, KeyError) else "system_service"
        for rank in action.ranks[:1]:
            left = WorkerLeft(
                job=here.job,
                generation=action.generation,
                rank=rank,
                step=0,
                cause=cause,
                detail=detail,
            )
            self.fact(left)

    async def _place(
        self, here: Here, index: int, rank: int, action: WorkerForm, form: Form, store: str
    ) -> None:
        host, _, port = store.rpartition(":")
        take = Take(
            job=here.job,
            generation=action.generation,
            rank=rank,
            world_size=action.world,
            local_rank=index,
            local_world_size=len(action.ranks),
            host=host,
            port=int(port or 0),
            buddy_shift=form.buddy_shift,
            replicas=form.replicas,
            micro_batches=action.micro_batches,
            payload=action.payload,
        )
        hand = here.hands.get(index)
        if hand is None or hand.status is not None:
            hand = here.hands[index] = Hand(index, rank)
        hand.rank, hand.generation, hand.take = rank, action.generation, take
        hand.answered = hand.left = False
        if hand.writer is not None:
            self._say(hand, take)
        elif not hand.pid:
            await self._spawn(here, hand)
        self._later(self._insist(here, hand, take))

    async def _insist(self, here: Here, hand: Hand, take: Take) -> None:
        """A worker that does not answer (stopped, or stuck for good) gives way to a new one."""
        await asyncio.sleep(ANSWER_SECONDS)
        if hand.take is take and not hand.answered and here.hands.get(hand.index) is hand:
            log.warning("job %d: rank %d does not answer and is replaced", here.job, hand.rank)
            self._end(here, hand.index)
            fresh = here.hands[hand.index] = Hand(hand.index, hand.rank)
            fresh.generation, fresh.take = hand.generation, take
            await self._spawn(here, fresh)

    async def _spawn(self, here: Here, hand: Hand) -> None:
        work = here.work
        assert work is not None
        order = Spawn(
            key=here.key(hand.index),
            role="member",
            log=str(here.log(hand.index)),
            environment={**work.environment, **self._environment(here, hand)},
            folder=work.folder,
            user=self._user(here),
            socket=str(here.agent_socket),
        )
        child = await self.zygote.spawn(order)
        hand.pid = child.pid

    def _environment(self, here: Here, hand: Hand) -> dict[str, str]:
        return {
            "PHALANX_JOB": str(here.job),
            "PHALANX_INDEX": str(hand.index),
            "PHALANX_NODE": self.place.name,
            "PHALANX_KEEPER": str(here.keeper_socket),
            "PHALANX_AGENT": str(here.agent_socket),
        }

    def pass_on(self, action: Passed) -> None:
        """An order for the workers of a job."""
        here = self.jobs.get(action.job)
        if here is None:
            return
        if isinstance(here.work, Script):
            self._later(self._pass_to_program(here, action))
            return
        for hand in here.hands.values():
            self._say(hand, action)

    async def _pass_to_program(self, here: Here, action: Passed) -> None:
        """A program knows nothing of generations: it is started, or ended."""
        match action:
            case WorkerRestore():
                here.restored = action.step
                for hand in here.hands.values():
                    restored = Restored(
                        job=here.job,
                        generation=action.generation,
                        rank=hand.rank,
                        step=action.step,
                        source=action.source,
                    )
                    self.fact(restored)
            case WorkerGo():
                await self._start_programs(here)
            case WorkerAbort() | WorkerDrain():
                for hand in here.hands.values():
                    self.zygote.signal(here.key(hand.index), signal.SIGTERM)

    async def _start_programs(self, here: Here) -> None:
        work, form = here.work, here.form
        assert isinstance(work, Script) and form is not None
        host, _, port = here.store.rpartition(":")
        own_port = 0
        if any(hand.rank == 0 for hand in here.hands.values()):
            own_port = await self._own_store(here)
        for hand in here.hands.values():
            order = Spawn(
                key=here.key(hand.index),
                role="program",
                log=str(here.log(hand.index)),
                environment={
                    **work.environment,
                    **self._environment(here, hand),
                    **self._torchrun_environment(here, hand, form),
                },
                folder=work.folder or str(here.folder),
                user=self._user(here),
                argv=work.argv,
                rank=hand.rank,
                store=(host, int(port or 0), f"job{here.job}/{here.generation}"),
                own_port=own_port,
            )
            hand.pid = (await self.zygote.spawn(order)).pid

    async def _own_store(self, here: Here) -> int:
        """A store for one generation of a program, hosted outside of its ranks."""
        key = f"job{here.job}/store{here.generation}"
        self.zygote.signal(f"job{here.job}/store{here.generation - 1}", signal.SIGKILL)
        child = await self.zygote.spawn(Spawn(key=key, role="store", host=self.place.address))
        return child.port

    def _torchrun_environment(self, here: Here, hand: Hand, form: Form) -> dict[str, str]:
        local = len(here.hands)
        world = str(local * len(form.nodes))
        return {
            "RANK": str(hand.rank),
            "WORLD_SIZE": world,
            "LOCAL_RANK": str(hand.index),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(hand.rank // local),
            "GROUP_WORLD_SIZE": str(len(form.nodes)),
            "ROLE_RANK": str(hand.rank),
            "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": str(here.generation - 1),
            "TORCHELASTIC_RUN_ID": f"phalanx-{here.job}",
            "PHALANX_GENERATION": str(here.generation),
            "PHALANX_RESTORE_STEP": str(here.restored),
            "PHALANX_BUDDY_SHIFT": str(form.buddy_shift),
            "PHALANX_FOLDER": str(here.folder),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def stop(self, action: WorkerStop) -> None:
        """Nothing of a job stays here but, if so ordered, the keeper's memory."""
        here = self.jobs.get(action.job)
        if here is None:
            return
        for index in list(here.hands):
            self._end(here, index)
        if not action.keep_snapshots:
            self.zygote.signal(here.keeper_key, signal.SIGKILL)
            here.close()
            shutil.rmtree(here.sockets, ignore_errors=True)
            del self.jobs[action.job]

    def _end(self, here: Here, index: int) -> None:
        hand = here.hands.pop(index, None)
        if hand is not None:
            hand.left = True
            self.zygote.signal(here.key(index), signal.SIGKILL)

    def signal_workers(self, job: int, number: int) -> None:
        """For the stacks of a hang."""
        here = self.jobs.get(job)
        for index in here.hands if here else ():
            self.zygote.signal(self.here(job).key(index), number)

    # Keepers.

    async def _ensure_keeper(self, here: Here, slot_ranks: int) -> None:
        if here.watch is not None and not here.watch.lost:
            here.watch.slot_ranks = slot_ranks or here.watch.slot_ranks
            return
        if await self._watch(here, slot_ranks):
            return
        here.keeper_socket.unlink(missing_ok=True)
        order = Spawn(
            key=here.keeper_key,
            role="keeper",
            log=str(here.folder / "keeper.log"),
            socket=str(here.keeper_socket),
            host=self.place.address,
            user=self._user(here),
            lease_seconds=self.lease_seconds,
        )
        await self.zygote.spawn(order)
        if not await self._watch(here, slot_ranks, seconds=10.0):
            raise ZygoteError("no keeper comes up")

    async def _watch(self, here: Here, slot_ranks: int, seconds: float = 0.0) -> bool:
        watch = KeeperWatch(here.keeper_socket, here.job, slot_ranks, self.fact)
        if await watch.open(seconds):
            here.watch = watch
            return True
        return False

    # Facts of the workers.

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unframer, hand, here = Unframer(), None, None
        try:
            while data := await reader.read(1 << 16):
                for body in unframer.feed(data):
                    fact = decode_fact(body)
                    if isinstance(fact, Present):
                        here = self.here(fact.job)
                        hand = self._present(here, fact, writer)
                    elif here is not None and hand is not None:
                        self._heard(here, hand, fact)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("a worker's words: %s", error)
        finally:
            writer.close()
            if hand is not None and here is not None and hand.writer is writer:
                hand.writer = None
                self._mourn(here, hand)

    def _present(self, here: Here, fact: Present, writer: asyncio.StreamWriter) -> Hand:
        hand = here.hands.get(fact.index)
        if hand is None or (hand.pid and hand.pid != fact.pid):
            if hand is not None or fact.generation <= 0:
                log.warning("job %d: process %d is not expected", here.job, fact.pid)
            hand = Hand(fact.index, fact.rank)
            hand.generation = fact.generation
            here.hands[fact.index] = hand
        hand.pid, hand.writer, hand.step = fact.pid, writer, fact.step
        if fact.running:
            here.generation = max(here.generation, fact.generation)
            found = WorkerFound(
                job=here.job,
                generation=fact.generation,
                rank=fact.rank,
                step=fact.step,
                committed=fact.committed,
                durable=fact.durable,
            )
            if hand.take is None:
                self.fact(found)
        if hand.take is not None and hand.take.generation > fact.generation:
            self._say(hand, hand.take)
        return hand

    def _heard(self, here: Here, hand: Hand, fact: Fact) -> None:
        match fact:
            case WorkerUp():
                hand.answered = True
            case Sealed():
                hand.step = fact.step
            case WorkerLeft():
                hand.left = True
        if not isinstance(fact, Present):
            self.fact(fact)

    def ended(self, end: Ended) -> None:
        """The zygote says that a process is gone."""
        job, _, role = end.key.partition("/")
        here = self.jobs.get(int(job.removeprefix("job"))) if role else None
        if here is None:
            return
        if role.startswith("store"):
            return
        if role == "keeper":
            log.warning("job %d: its keeper ended (%d)", here.job, end.status)
            return
        hand = here.hands.get(int(role.removeprefix("worker")))
        if hand is not None and hand.pid == end.pid:
            hand.status = end.status
            self._mourn(here, hand)

    def _mourn(self, here: Here, hand: Hand) -> None:
        """A process is gone and all its words are read: if none of them explained it, we do."""
        if hand.status is None or hand.writer is not None or hand.left:
            return
        hand.left = True
        cause, detail = explained(hand.status)
        left = WorkerLeft(
            job=here.job,
            generation=hand.generation,
            rank=hand.rank,
            step=hand.step,
            cause=cause,
            detail=detail,
        )
        self.fact(left)

    def _say(self, hand: Hand, order: Order) -> None:
        if hand.writer is not None:
            with suppress(OSError):
                hand.writer.write(framed(order))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an order failed", exc_info=task.exception())


def at_server_time(fact: LocalFact, skew_ns: int) -> LocalFact:
    """A fact with its time as the server's clock would tell it."""
    return structs.replace(fact, at_ns=fact.at_ns + skew_ns) if isinstance(fact, Sealed) else fact
