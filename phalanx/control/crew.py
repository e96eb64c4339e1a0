"""The processes of jobs on a node: workers and keepers.

Actions of the agent's machine come in, facts for it go out; nothing is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tomllib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from phalanx.cluster.commands import Form
from phalanx.cluster.messages import (
    Fault,
    LocalFact,
    WorkerForm,
    WorkerGo,
    WorkerLeft,
    WorkerStop,
)
from phalanx.control.binding import Seat, held_gpus, read_machine, seats, visible
from phalanx.control.ears import Ears
from phalanx.control.hands import Hand, Here, Place
from phalanx.control.hooks import Hook, run_hook, told
from phalanx.control.keeper_watch import KeeperWatch
from phalanx.control.payload import Script, Train, decode_payload
from phalanx.control.programs import Programs
from phalanx.control.runtime import runtime_folder
from phalanx.control.users import UnknownUserError
from phalanx.control.worker_link import Passed, Take, TraceSteps
from phalanx.control.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.zygote_wire import Ended, Spawn

ANSWER_SECONDS = 2.0  # a worker that lives answers at once; one that does not is replaced
START_SECONDS = 60.0  # for a new process to come
GONE_SECONDS = 10.0  # for a killed one to be gone

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
        self.before_stop: Callable[[int], None] = lambda job: None
        self._ears = Ears(fact, self.here, self._give_way)
        self._programs = Programs(
            zygote, place.address, fact, self.environment, self.user, self.seat
        )
        if place.switch_users:
            place.state.chmod(0o711)  # users pass through to the folder of their job
        self._machine = read_machine()
        self._replicas = place.config.replicas.resolved()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen to workers that outlived an earlier agent."""
        for key in self.zygote.children:
            job, _, role = key.partition("/")
            if role.startswith(("worker", "standby")):
                here = self.here(int(job.removeprefix("job")))
                await self._ears.listen(here, self.user(here))
                if here.watch is None:
                    await self._watch(here, 0)

    @property
    def out_of_memory(self) -> Callable[[int], str]:
        """Says why a process was killed, where it was for its memory."""
        return self._ears.out_of_memory

    @out_of_memory.setter
    def out_of_memory(self, ask: Callable[[int], str]) -> None:
        self._ears.out_of_memory = ask

    def user(self, here: Here) -> str:
        """Whom a job runs as; "": the agent's own user."""
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
        here.orders = []
        here.work = decode_payload(action.payload)
        here.gpus, here.workers = action.gpus, len(action.ranks)
        self._later(self._form(here, action, form, store))

    async def _form(self, here: Here, action: WorkerForm, form: Form, store: str) -> None:
        async with here.forming:
            try:
                await self._ears.listen(here, self.user(here))
                if not await self._prepare(here, action):
                    return
                await self._ensure_keeper(here, len(action.ranks))
                for index in [i for i in here.hands if i >= len(action.ranks)]:
                    self._end(here, index)
                for index, rank in enumerate(action.ranks):
                    if here.generation != action.generation:
                        return  # a newer one waits, or the job was stopped
                    if isinstance(here.work, Train):
                        await self._place(here, index, rank, action, form, store)
                    else:
                        self._end(here, index)
                        self._programs.place(here, index, rank, action.generation)
            except (ZygoteError, OSError, UnknownUserError) as error:
                self._cannot(here, action, error)

    async def _prepare(self, here: Here, action: WorkerForm) -> bool:
        """The site's prolog, once a job; where it fails the node is at fault, not the job."""
        if here.prepared:
            return True
        hooks = self.place.config.hooks
        problem = await self._hook(here, Hook("prolog", hooks.prolog, hooks.prolog_seconds))
        if problem:
            self.fact(Fault(cause="system_service", job=here.job, detail=problem))
            return False
        here.prepared = True
        return here.generation == action.generation

    async def _hook(self, here: Here, hook: Hook) -> str:
        ranks = [hand.rank for hand in here.hands.values()]
        facts = told(
            here.job, here.generation, self.place.name, self.user(here), here.folder, ranks
        )
        problem = await run_hook(hook, here.folder / "hooks.log", facts)
        if problem:
            log.error("job %d: %s", here.job, problem)
        return problem

    async def _clean_up(self, here: Here) -> None:
        """The site's epilog; a node that cannot be cleaned is suspect."""
        hooks = self.place.config.hooks
        problem = await self._hook(here, Hook("epilog", hooks.epilog, hooks.epilog_seconds))
        if problem:
            self.fact(Fault(cause="system_service", detail=problem))

    def seat(self, here: Here, hand: Hand) -> Seat:
        """Where a worker sits: its GPU, cores and memory."""
        policy = self.place.config.binding.policy
        found = seats(here.workers, here.gpus, self.place.gpus, self._machine, policy)
        seat = found[hand.index] if hand.index < len(found) else Seat()
        log.info("job %d: rank %d (worker %d): %s", here.job, hand.rank, hand.index, seat)
        return seat

    def _cannot(self, here: Here, action: WorkerForm, error: Exception) -> None:
        detail = f"cannot start on {self.place.name}: {error}"
        log.error("job %d: %s", here.job, detail)
        cause = "configuration" if isinstance(error, UnknownUserError) else "system_service"
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
            asks_leave=form.asks_leave,
            payload=action.payload,
        )
        hand = here.hands.get(index)
        if hand is not None and hand.status is None:
            await self._give(here, hand, take)
        else:
            await self._replace(here, index, take)

    async def _give(self, here: Here, hand: Hand, take: Take) -> None:
        """A process, or one that is about to be, gets its place."""
        hand.rank, hand.generation, hand.take = take.rank, take.generation, take
        hand.answered = hand.restored = hand.left = False
        if hand.writer is not None:
            hand.say(take)
            for order in here.orders:
                hand.say(order)
        elif not hand.pid:
            await self._spawn(here, hand)
        self._later(self._insist(here, hand, take))

    async def _replace(self, here: Here, index: int, take: Take) -> None:
        """Another process for a place: one that stands by, else a new one."""
        hand = here.standbys.pop(index, None)
        if hand is None or hand.writer is None:
            hand = here.hand(index, take.rank)
        here.hands[index] = hand
        await self._give(here, hand, take)

    async def _insist(self, here: Here, hand: Hand, take: Take) -> None:
        """A worker that does not answer (stopped, or stuck for good) gives way to a new one."""
        waited = 0.0
        while not hand.answered and waited < START_SECONDS:
            await asyncio.sleep(ANSWER_SECONDS)
            waited += ANSWER_SECONDS
            if hand.writer is not None:
                break
        if hand.take is take and not hand.answered and here.hands.get(hand.index) is hand:
            log.warning("job %d: rank %d does not answer and is replaced", here.job, hand.rank)
            self._end(here, hand.index)
            await self._take_over(here, hand, take)

    def _give_way(self, here: Here, hand: Hand) -> None:
        """A worker left because it could not follow: the next one takes its place."""
        take = hand.take
        assert take is not None
        log.info("job %d: rank %d left its process for a new one", here.job, hand.rank)
        self._later(self._take_over(here, hand, take))

    async def _take_over(self, here: Here, hand: Hand, take: Take) -> None:
        """A new process takes a place of the current generation, once the old one is gone."""
        for _ in range(int(GONE_SECONDS / 0.01)):
            if hand.key not in self.zygote.children:
                break
            await asyncio.sleep(0.01)
        async with here.forming:
            held = here.hands.get(hand.index)
            if here.generation == take.generation and held in (None, hand):
                with suppress(ZygoteError):
                    await self._replace(here, hand.index, take)

    async def _spawn(self, here: Here, hand: Hand, *, standby: bool = False) -> None:
        work = here.work
        assert work is not None
        seat = self.seat(here, hand)
        variables = {**work.environment, **self.environment(here, hand)}
        if standby:
            variables["PHALANX_STANDBY"] = str(here.log(hand.index))
        order = Spawn(
            key=hand.key,
            role="member",
            log=str(here.folder / f"standby-{hand.index}.log" if standby else here.log(hand.index)),
            environment=variables,
            folder=work.folder,
            user=self.user(here),
            socket=str(here.agent_socket),
            cores=seat.cores,
            memory_node=seat.numa,
        )
        await self.zygote.spawn(order, hand.started)

    def environment(self, here: Here, hand: Hand) -> dict[str, str]:
        """What every worker of a job finds."""
        return {
            "PHALANX_JOB": str(here.job),
            "PHALANX_INDEX": str(hand.index),
            "PHALANX_NODE": self.place.name,
            "PHALANX_KEEPER": str(here.keeper_socket),
            "PHALANX_AGENT": str(here.agent_socket),
            **({} if self.place.config.telemetry.steps else {"PHALANX_RECORDS": "0"}),
            **self._chaos(here),
            **visible(held_gpus(here.gpus, self._machine)),
            **self._replicas.environment(),
        }

    def _chaos(self, here: Here) -> dict[str, str]:
        """Where workers find faults that a test or a chaos run orders, if this agent allows it."""
        if not os.environ.get("PHALANX_CHAOS"):
            return {}
        folder = here.folder / "chaos"
        folder.mkdir(exist_ok=True)
        return {"PHALANX_CHAOS": str(folder)}

    def pass_on(self, action: Passed) -> None:
        """An order for the workers of a job."""
        here = self.jobs.get(action.job)
        if here is None:
            return
        if isinstance(here.work, Script):
            self._later(self._programs.obey(here, action))
            return
        here.orders.append(action)
        for hand in here.hands.values():
            hand.say(action)
        if isinstance(action, WorkerGo) and uses_cuda(here.work):
            self._later(self._stand_by(here))

    def trace(self, job: int, ranks: tuple[int, ...], steps: int) -> None:
        """Have workers trace their next steps."""
        here = self.jobs.get(job)
        for hand in here.hands.values() if here is not None else ():
            if hand.rank in ranks:
                hand.say(TraceSteps(steps=steps))

    async def _stand_by(self, here: Here) -> None:
        """Processes with a CUDA context made, for the next generation of a job that runs."""
        async with here.forming:
            for index in here.hands:
                if index not in here.standbys:
                    hand = here.standbys[index] = here.standby(index)
                    with suppress(ZygoteError):
                        await self._spawn(here, hand, standby=True)

    def stop(self, action: WorkerStop) -> None:
        """Nothing of a job stays here but, if so ordered, the keeper's memory."""
        here = self.jobs.get(action.job)
        if here is None:
            return
        self.before_stop(action.job)
        here.generation, here.orders = 0, []
        for index in list(here.hands):
            self._end(here, index)
        for hand in here.standbys.values():
            self.zygote.signal(hand.key, signal.SIGKILL)
        here.standbys.clear()
        if not action.keep_snapshots:
            self.zygote.signal(here.keeper_key, signal.SIGKILL)
            here.close()
            shutil.rmtree(here.sockets, ignore_errors=True)
            del self.jobs[action.job]
            self._later(self._clean_up(here))

    def abandon(self, job: int) -> None:
        """End the workers of a job; its keeper ends with its own lease, if nobody asks for it."""
        here = self.jobs.pop(job)
        for hand in here.hands.values():
            hand.left = True
        for key in list(self.zygote.children):  # also programs that never said a word
            if key.startswith(f"job{job}/") and key != here.keeper_key:
                self.zygote.signal(key, signal.SIGKILL)
        here.close()

    def _end(self, here: Here, index: int) -> None:
        hand = here.hands.pop(index, None)
        if hand is not None:
            hand.left = True
            self.zygote.signal(hand.key, signal.SIGKILL)

    def signal_workers(self, job: int, number: int) -> None:
        """For the stacks of a hang."""
        here = self.jobs.get(job)
        for hand in here.hands.values() if here else ():
            self.zygote.signal(hand.key, number)

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
            environment=self._replicas.environment(),
            user=self.user(here),
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

    # Ends.

    def ended(self, end: Ended) -> None:
        """The zygote says that a process is gone."""
        job, _, role = end.key.partition("/")
        here = self.jobs.get(int(job.removeprefix("job"))) if role else None
        if here is None:
            return
        if role == "keeper":
            log.warning("job %d: its keeper ended (%d)", here.job, end.status)
        elif not role.startswith("store"):
            self._ears.ended(here, end)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an order failed", exc_info=task.exception())


def uses_cuda(work: Train | Script | None) -> bool:
    """Whether the workers of a job have a context on a GPU, which is slow to make."""
    from phalanx.hardware import count_cuda

    if not isinstance(work, Train) or not count_cuda():
        return False
    return bool(tomllib.loads(work.toml).get("train", {}).get("device", "auto") != "cpu")
