"""The one task that owns the core: events are stored, then handled, then their commands leave.

Whatever arrives while a commit is under way goes into the next one, so that a busy server pays
one fsync for many events. Orders of people are answered when their event is stored and handled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from msgspec import Struct, structs

from phalanx import __version__
from phalanx.cluster.core import Core
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import ControllerStarted, Event, EventBody, Tick
from phalanx.control.server.alarms import Alarms
from phalanx.control.server.replay import Recovered
from phalanx.control.server.shell_memory import Outcome, ShellMemory, named
from phalanx.control.server.store.interface import (
    CommandRow,
    EventStore,
    Row,
    StoredSnapshot,
    StoreError,
    StoreLostError,
    command_row,
    event_row,
)

logger = logging.getLogger("phalanx.server")

MOST_BATCH = 2_000
MOST_WAITING = 200_000  # facts that may wait for a store that does not answer
SNAPSHOT_EVENTS = 5_000  # a restart replays at most so many
RETRY_SECONDS = 0.5
OVER = "this server has stopped leading; ask again"
SLICE_SECONDS = 0.02  # of handling events before sockets get their turn


class ServerClock:
    """The server's: wall time at its start, and the monotonic clock from there on.

    Somebody who sets the machine's clock by hours does not make every deadline pass at once. It
    begins no earlier than ``not_before_ns`` (the end of the log).
    """

    def __init__(self, not_before_ns: int = 0) -> None:
        self._offset_ns = max(time.time_ns(), not_before_ns) - time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.monotonic_ns() + self._offset_ns


class UnavailableError(Exception):
    """The order could not be stored; asking again with the same request is safe."""


class ReusedError(Exception):
    """A request's name stands for another order already."""


class CoreFailedError(Exception):
    """The core could not digest an event; its state is not to be trusted any more."""


class PendingWrite(Struct):
    """A body on its way into the log; a person waits for the answer if there is a future."""

    body: EventBody
    future: asyncio.Future[Outcome] | None = None


P = ParamSpec("P")
T = TypeVar("T")
Listener = Callable[[Event, Sequence[Command]], None]


class Controller:
    """Owns a core and the writing side of its store. ``listeners`` hear of every handled event."""

    def __init__(self, store: EventStore, recovered: Recovered, epoch: int) -> None:
        self.core: Core = recovered.core
        self.memory: ShellMemory = recovered.memory
        self.epoch = epoch
        self.clock = ServerClock(recovered.core.view.now_ns)
        self.listeners: list[Listener] = []
        self.alarms = Alarms()
        self.longest_handling_seconds = 0.0
        self.problem = ""  # why nothing can be stored at the moment
        self._store = store
        self._unusable = recovered.unusable
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting: list[PendingWrite] = []
        self._in_hand: list[PendingWrite] = []  # the batch that is being stored or handled
        self._over = False
        self._broken = False  # the core failed in the middle of an event
        self._in_flight: dict[str, tuple[asyncio.Future[Outcome], str]] = {}  # and what is asked
        self._given: list[CommandRow] = []  # commands that the next transaction stores
        self._wake = asyncio.Event()
        self._since_snapshot = 0

    async def start(self, policy: Policy | None = None) -> None:
        """Makes the state of this moment the point that a restart goes on from; takes over."""
        if policy is not None:
            self.core.view.policy = policy
        for sequence in self._unusable:
            await self._store_call(self._store.drop_snapshot, sequence)
        await self.snapshot()
        # With the policy, so that a replay from before this snapshot has it too.
        self.tell([ControllerStarted(epoch=self.epoch, policy=policy)])

    async def order(self, body: EventBody, request: str = "", asked: str = "") -> Outcome:
        """Has a person's order stored and handled. The same request is done only once.

        ``asked`` stands for what is asked for: a request that asks for something else is refused.
        """
        if self._over:
            raise UnavailableError(OVER)
        if request:
            outcome = self.memory.answers.get(request)
            waiting = self._in_flight.get(request)
            before = (
                outcome.asked if outcome is not None else waiting[1] if waiting is not None else ""
            )
            if before and asked and before != asked:
                raise ReusedError
            if outcome is not None:
                return outcome
            if waiting is not None:
                return await asyncio.shield(waiting[0])
            if "request" in body.__struct_fields__:
                body = structs.replace(body, request=named(request, asked))
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if request:
            self._in_flight[request] = future, asked
            future.add_done_callback(lambda _: self._in_flight.pop(request, None))
        self._waiting.append(PendingWrite(body, future))
        self._wake.set()
        # A caller that goes away does not undo what is already on its way into the log.
        return await asyncio.shield(future)

    def tell(self, bodies: Sequence[EventBody]) -> None:
        """Facts for the log. They wait for a store that is down, up to a bound."""
        if len(self._waiting) + len(bodies) > MOST_WAITING:
            logger.error("%d facts dropped: the store does not answer", len(bodies))
            return
        self._waiting += [PendingWrite(body) for body in bodies]
        self._wake.set()

    async def run(self) -> None:
        """Works until it is cancelled; StoreLostError when another server has taken over."""
        try:
            while True:
                await self._wait()
                self._in_hand = self._next_batch()
                if self._in_hand:
                    await self._finish(asyncio.create_task(self._process(self._in_hand)))
        finally:
            self._over = True
            self._refuse([*self._in_hand, *self._waiting], OVER)

    async def _finish(self, work: asyncio.Task[None]) -> None:
        """A batch to its end, also when this server is told to stop meanwhile.

        What is stored is handled and answered: else it is refused now, and done by the next start.
        """
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    async def snapshot(self) -> None:
        """Stores the state, so that a restart replays little."""
        self._since_snapshot = 0
        try:
            core, answers = self.core.snapshot(), self.memory.dump()
        except Exception as error:  # a restart replays more; the events are all there
            self.alarms.raised("the snapshot", error, f"event {self.core.sequence}")
            return
        kept = StoredSnapshot(
            sequence=self.core.sequence, version=__version__, core=core, answers=answers
        )
        await self._store_call(self._store.save_snapshot, kept)

    async def renew(self) -> None:
        """Proves that this server still leads."""
        await self._store_call(self._store.renew)

    async def close(self) -> None:
        """Stores what is left and a snapshot, if the store still takes it."""
        try:
            if self._broken:
                return  # what is in memory is no state to go on from; the log is
            if self._given:
                await self._store_call(self._store.append, [], self._given)
            await self.snapshot()
        except StoreError as error:
            logger.warning("no snapshot at the end: %s", error)
        finally:
            self._writer.shutdown()

    async def _wait(self) -> None:
        if self._waiting and not self.problem:
            return
        deadline = self.core.next_deadline_ns()
        timeout = None if deadline is None else (deadline - self.clock.now_ns()) / 1e9
        if self.problem:
            timeout = RETRY_SECONDS
        self._wake.clear()
        if timeout is None or timeout > 0:
            # Not wait_for: before Python 3.12 it can swallow a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wake.wait()

    def _next_batch(self) -> list[PendingWrite]:
        batch, self._waiting = self._waiting[:MOST_BATCH], self._waiting[MOST_BATCH:]
        deadline = self.core.next_deadline_ns()
        if not batch and deadline is not None and deadline <= self.clock.now_ns():
            batch = [PendingWrite(Tick())]
        return batch

    async def _process(self, batch: list[PendingWrite]) -> None:
        batch, events, rows = self._storable(batch)
        if not batch:
            return
        given, self._given = self._given, []
        try:
            await self._store_call(self._store.append, rows, given)
        except StoreError as error:
            self._given = given
            self._waiting = [each for each in batch if each.future is None] + self._waiting
            self._refuse([each for each in batch if each.future], str(error))
            if isinstance(error, StoreLostError):
                raise
            self._report_problem(str(error))
            return
        self._report_problem("")
        await self._handle(batch, events)

    def _storable(
        self, batch: list[PendingWrite]
    ) -> tuple[list[PendingWrite], list[Event], list[Row]]:
        """The events of a batch as rows; what cannot be written down is refused alone."""
        now = self.clock.now_ns()
        kept: list[PendingWrite] = []
        events: list[Event] = []
        rows: list[Row] = []
        for each in batch:
            event = Event(self.core.sequence + 1 + len(events), now, each.body)
            try:
                rows.append(event_row(event))
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                self.alarms.raised("the log", error, type(each.body).__name__)
                self._refuse([each], f"this cannot be stored: {error}")
                continue
            kept.append(each)
            events.append(event)
        return kept, events, rows

    async def _handle(self, batch: list[PendingWrite], events: list[Event]) -> None:
        began = time.monotonic()
        for each, event in zip(batch, events, strict=True):
            try:
                commands = self._timed(event)
                outcome = self.memory.note(event, commands)
                given = command_row(event.sequence, commands)
            except Exception as error:
                logger.exception("event %d: the core failed", event.sequence)
                self._broken = True
                self._refuse([each], f"an error in the server: {error!r}")
                self._refuse(batch, "the server starts again")
                raise CoreFailedError(f"event {event.sequence}: {error!r}") from error
            if commands:
                self._given.append(given)
            self._tell_listeners(event, commands)
            if each.future is not None and not each.future.done():
                each.future.set_result(outcome)
            if time.monotonic() - began > SLICE_SECONDS:
                await asyncio.sleep(0)
                began = time.monotonic()
        self._since_snapshot += len(events)
        if self._since_snapshot >= SNAPSHOT_EVENTS:
            await self.snapshot()

    def _timed(self, event: Event) -> list[Command]:
        began = time.perf_counter()
        commands = self.core.handle(event)
        spent = time.perf_counter() - began
        if spent > self.longest_handling_seconds:
            self.longest_handling_seconds = spent
        return commands

    def _tell_listeners(self, event: Event, commands: Sequence[Command]) -> None:
        """The event is stored and handled: a fault of whoever hears of it changes neither."""
        for listener in self.listeners:
            try:
                listener(event, commands)
            except Exception as error:
                about = f"event {event.sequence} ({type(event.body).__name__})"
                self.alarms.raised(_name(listener), error, about)

    def _report_problem(self, problem: str) -> None:
        if problem != self.problem:
            if problem:
                logger.error("nothing can be stored: %s", problem)
            else:
                logger.info("events are stored again")
        self.problem = problem

    def _refuse(self, waiting: Sequence[PendingWrite], why: str) -> None:
        for each in waiting:
            if each.future is not None and not each.future.done():
                each.future.set_exception(UnavailableError(why))

    async def _store_call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, lambda: call(*args, **kwargs))


def _name(listener: Listener) -> str:
    """Whose part hears of events, for people."""
    owner = getattr(listener, "__self__", None)
    return type(owner).__name__ if owner is not None else getattr(listener, "__name__", "listener")
