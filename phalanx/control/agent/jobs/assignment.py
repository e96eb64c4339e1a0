"""Who takes which place of a generation: a process that lives, one that stands by, a new one."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress

from phalanx.cluster.protocol.commands import Form
from phalanx.cluster.protocol.messages import WorkerForm
from phalanx.control.agent.jobs.local_job import Hand, Here
from phalanx.control.agent.spawn.start import Processes
from phalanx.control.agent.spawn.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.agent.tasks import Tasks
from phalanx.control.wire.worker_messages import Take

ANSWER_SECONDS = 2.0  # a worker that lives answers at once; one that does not is replaced
START_SECONDS = 60.0  # for a new process to come
GONE_SECONDS = 10.0  # for a killed one to be gone

log = logging.getLogger("phalanx.agent")


class Places:
    """The places of all jobs of a node."""

    def __init__(self, zygote: ZygoteClient, processes: Processes, tasks: Tasks) -> None:
        self._zygote, self._processes, self._tasks = zygote, processes, tasks

    async def place(
        self, here: Here, index: int, rank: int, action: WorkerForm, form: Form, store: str
    ) -> None:
        """A rank of a generation is taken, by whoever can."""
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
            meeting=here.meeting,
            buddy_shift=form.buddy_shift,
            replicas=form.replicas,
            micro_batches=action.micro_batches,
            asks_leave=form.asks_leave,
            payload=action.payload,
        )
        hand = here.hands.get(index)
        if hand is not None and hand.status is None and hand.last_generation:
            # It has said its last word: its exit, which is still to come, is not this generation's.
            self.end(here, index)
            self._tasks.later(self._take_over(here, hand, take))
        elif hand is not None and hand.status is None:
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
            await self._processes.spawn(here, hand)
        self._tasks.later(self._insist(here, hand, take))

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
            self.end(here, hand.index)
            await self._take_over(here, hand, take)

    def give_way(self, here: Here, hand: Hand) -> None:
        """A worker left because it could not follow: the next one takes its place."""
        take = hand.take
        assert take is not None
        log.info("job %d: rank %d left its process for a new one", here.job, hand.rank)
        self._tasks.later(self._take_over(here, hand, take))

    async def _take_over(self, here: Here, hand: Hand, take: Take) -> None:
        """A new process takes a place of the current generation, once the old one is gone."""
        for _ in range(int(GONE_SECONDS / 0.01)):
            if hand.key not in self._zygote.children:
                break
            await asyncio.sleep(0.01)
        async with here.forming:
            held = here.hands.get(hand.index)
            if here.generation == take.generation and held in (None, hand):
                with suppress(ZygoteError):
                    await self._replace(here, hand.index, take)

    async def stand_by(self, here: Here) -> None:
        """Processes with a CUDA context made, for the next generation of a job that runs."""
        async with here.forming:
            for index in here.hands:
                if index not in here.standbys:
                    hand = here.standbys[index] = here.standby(index)
                    with suppress(ZygoteError):
                        await self._processes.spawn(here, hand, standby=True)

    def end(self, here: Here, index: int) -> None:
        """A place is given up, and its process ends."""
        hand = here.hands.pop(index, None)
        if hand is not None:
            hand.left = True
            self._zygote.signal(hand.key, signal.SIGKILL)
