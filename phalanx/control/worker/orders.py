"""Orders of an agent to its worker: they come over the link, and the main thread waits for them."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.commands import (
    Abort,
    Drain,
    FailureRate,
    Flush,
    Go,
    Rebalance,
    Restore,
)
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    Busy,
    InspectGang,
    ReplicasDiffer,
    Restored,
    RestoreFailed,
    Sealed,
    WorkerExited,
    WorkerUp,
)
from phalanx.config import Job
from phalanx.control.wire.worker_messages import (
    GIVE_WAY,
    AgentLink,
    LastGeneration,
    Looked,
    Order,
    Present,
    Take,
    TraceSteps,
)
from phalanx.control.worker.exit_causes import cause_of_exit
from phalanx.control.worker.sockets import shut_network_sockets
from phalanx.control.worker.write_lease import AgentWriteLease
from phalanx.train.exits import NOT_ARCHIVED, ExitInfo
from phalanx.train.measure.profile import ProfileAsk
from phalanx.train.optim.fingerprint import ReplicaDivergence
from phalanx.train.rank.formation import join_group
from phalanx.train.rank.launch import redirect_output
from phalanx.train.rank.look import look
from phalanx.train.rank.orders import Formation, GenerationOver, WriteLease
from phalanx.train.rank.stop import StopFlag
from phalanx.train.report.records import StepWaits
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.resume.interval import FleetRate
from phalanx.train.resume.ordered import RestorePoint

if TYPE_CHECKING:
    import torch

SHUT_AGAIN_SECONDS = 0.02
# Where the main thread does not wake up (gloo waits for ever for a peer that has yet to connect),
# the process gives way to a new one: soon while it forms, since it has nothing to lose yet.
FORMING_SECONDS, RUNNING_SECONDS = 0.3, 1.0
LOST_PEER_SECONDS = 0.2  # to be told why by somebody else, before it is reported as a fault
BYE_SECONDS = 5.0

log = logging.getLogger(__name__)


class AgentOrders:
    """Orders that come over the link (its thread) and are waited for by the main thread."""

    def __init__(self, path: str, job: int, index: int) -> None:
        self.job, self.index = job, index
        self.stop = StopFlag()
        self.keeps_process = True
        self._changed = threading.Condition()
        self._take: Take | None = None  # the newest order to take a place
        self._generation = 0  # of the main thread
        self._over = 0  # generations up to this one are over
        self._out = True  # the main thread is in no group
        self._formed = False  # it has met the others of its generation
        self._restore: Restore | None = None
        self._said: Restored | RestoreFailed | None = None  # the last answer to one
        self._go = 0
        self._shares: tuple[int, tuple[int, ...]] = (0, ())  # wanted, and in which generation
        self._rate: FleetRate | None = None
        self._running = False
        self._step, self._durable = 0, 0
        self.ask = ProfileAsk()
        self._link = AgentLink(path, self._present, self._hear)
        self._lease = AgentWriteLease(self._link, job)
        self._link.start()

    # The link's thread.

    def _present(self) -> Present:
        formation = self._place
        return Present(
            job=self.job,
            index=self.index,
            pid=os.getpid(),
            generation=formation.generation if formation else 0,
            rank=formation.rank if formation else -1,
            running=self._running,
            step=self._step,
            committed=self._step - 1,
            durable=self._durable,
        )

    def _hear(self, order: Order) -> None:
        with self._changed:
            match order:
                case Take(formation=place):
                    if self._place is None or place.generation > self._place.generation:
                        if self._take is not None and order.payload != self._take.payload:
                            log.info("the job has another mapping: a new process goes on")
                            os._exit(GIVE_WAY)
                        self._take = order
                        self._end_generations(place.generation - 1)
                    up = WorkerUp(job=self.job, generation=place.generation, rank=place.rank)
                    self._link.say(up)
                case Restore():
                    if _same(order, self._said):
                        assert self._said is not None
                        self._link.say(self._said)  # the agent that was told is gone
                    else:
                        self._restore = order
                case Rebalance():
                    self._shares = (order.generation, order.micro_batches)
                case FailureRate():
                    self._rate = FleetRate(
                        order.per_million_node_days, order.failures, order.node_days
                    )
                case Flush():
                    self._lease.granted = order
                case Go():
                    self._go = order.generation
                case Abort():
                    self._end_generations(order.generation)
                case Drain():
                    self.stop.reason = "drain"
                case TraceSteps(steps=steps):
                    self.ask.ask(steps)
                case InspectGang():
                    self._look(order)
            self._changed.notify_all()

    def _look(self, order: InspectGang) -> None:
        """Somebody wants to know what this rank is doing."""
        if order.generation == self._generation and self._take is not None:
            waiting = look(Path(order.folder), self._rank)
            looked = Looked(
                job=self.job,
                generation=order.generation,
                rank=self._rank,
                step=self._step,
                waiting=waiting,
            )
            self._link.say(looked)

    def _end_generations(self, last: int) -> None:
        if last <= self._over:
            return
        self._over = last
        if not self.keeps_process and self._generation:
            # An error of CUDA stays with its process, and a collective of NCCL cannot be left.
            log.info("generation %d is over: a new process goes on", self._generation)
            os._exit(GIVE_WAY)
        if not self._out and self._generation <= last:
            threading.Thread(target=self._break_out, args=(self._generation,), daemon=True).start()

    def _break_out(self, generation: int) -> None:
        """Wake the main thread wherever it waits in the group, until it is out of it."""
        began = time.monotonic()
        patience = RUNNING_SECONDS if self._formed else FORMING_SECONDS
        while True:
            with self._changed:  # it may not open sockets of the next generation meanwhile
                if self._out or self._generation != generation:
                    return
                shut_network_sockets()
            if time.monotonic() - began > patience:
                log.warning("generation %d cannot be left: a new process goes on", generation)
                faulthandler.dump_traceback()  # what it waits for
                os._exit(GIVE_WAY)
            time.sleep(SHUT_AGAIN_SECONDS)

    # The main thread.

    def wait_for_place(self) -> tuple[str, int]:
        """Waits until there is a place to take; returns what runs there, and its generation."""
        with self._changed:
            while self._take is None:
                self._changed.wait()
            take = self._take
        if log_file := os.environ.get("PHALANX_STANDBY"):
            redirect_output(Path(log_file))  # from here on it is a worker like others
        return take.payload, take.formation.generation

    def formation(self) -> Formation | None:
        """The newest place to take."""
        with self._changed:
            while (formation := self._next_place()) is None:
                self._changed.wait()
            self._generation, self._out = formation.generation, False
            self._lease.generation = formation.generation
            self._running = self._formed = False
        return formation

    def _next_place(self) -> Formation | None:
        # One that is over already is not entered: nobody would call us back.
        place, last = self._place, max(self._generation, self._over)
        return place if place is not None and place.generation > last else None

    def meet(
        self, formation: Formation, job: Job, device: torch.device, folder: RunFolder | None
    ) -> RunFolder:
        """At the store that the gang's generation has."""
        join_group(formation, job, device)
        assert folder is not None  # it has its name from the submitted job
        return folder

    def restore_point(self) -> RestorePoint:
        """Waits until everybody has joined."""
        with self._changed:
            self._formed = True
            while True:
                if self.over():
                    raise GenerationOver
                order = self._restore
                if order is not None and order.generation == self._generation:
                    self._restore = None
                    left_out = (order.skipped, order.skip_step)
                    return RestorePoint(
                        order.step, order.source, *left_out, order.told, order.saves
                    )
                self._changed.wait()

    def restored(
        self,
        point: RestorePoint,
        refused: str = "",
        skipped: tuple[int, int] = (0, 0),
        there: tuple[int, ...] | None = None,
    ) -> None:
        """Tells the agent what became of the restore."""
        self._step = point.step
        fact: Restored | RestoreFailed
        if refused:
            fact = RestoreFailed(
                job=self.job,
                generation=self._generation,
                node=THIS_NODE,
                source=point.source,
                step=point.step,
                detail=refused,
                there=there,
            )
        else:
            fact = Restored(
                job=self.job,
                generation=self._generation,
                rank=self._rank,
                step=point.step,
                source=point.source,
                skipped=skipped,
            )
        with self._changed:
            self._said = fact
            if self._restore is not None and _same(self._restore, fact):
                self._restore = None  # it was ordered again meanwhile, by the next agent
        self._link.say(fact)

    def go(self) -> None:
        """Waits until the whole gang is ready."""
        with self._changed:
            while self._go != self._generation:
                if self.over():
                    raise GenerationOver
                self._changed.wait()
            self._running = True

    def stepped(self, step: int, durable: int, seconds: StepWaits) -> None:
        """Tells the agent of a step; that it is safe, the keeper tells it."""
        self._step, self._durable = step, durable
        fact = Sealed(
            job=self.job,
            generation=self._generation,
            rank=self._rank,
            step=step,
            at_ns=time.time_ns(),
            acknowledged=False,
            durable=durable,
            checkpoint_ns=int(seconds.stall * 1e9),
            data_wait_ns=int(seconds.data * 1e9),
            flush_ns=int(seconds.flush * 1e9),
        )
        self._link.say(fact)

    def busy(self, what: str, step: int) -> None:
        """Tells the agent that no step comes for a while, and why."""
        fact = Busy(node=THIS_NODE, job=self.job, generation=self._generation, step=step, what=what)
        self._link.say(fact)

    def failure_rate(self) -> FleetRate | None:
        """As the controller last counted."""
        return self._rate

    def shares(self) -> tuple[int, ...]:
        """Micro-batches by replica that the core wants in this generation."""
        generation, shares = self._shares
        return shares if generation == self._generation else ()

    def write_lease(self) -> WriteLease | None:
        """Where the site shares out the storage's time, the agent is asked."""
        assert self._take is not None
        return self._lease if self._take.asks_leave else None

    def diverged(self, finding: ReplicaDivergence) -> None:
        """Tells the agent what all replicas found."""
        assert self._place is not None
        fact = ReplicasDiffer(
            node=THIS_NODE,
            job=self.job,
            generation=self._generation,
            step=finding.step,
            clean_step=finding.clean_step,
            world=self._place.world_size,
            copies=finding.copies,
            changed=finding.changed,
        )
        self._link.say(fact)

    def over(self) -> bool:
        """Whether the main thread's generation is over."""
        return self._over >= self._generation

    def left(self, lost_peer: str = "") -> None:
        """The main thread is out; what it noticed by itself is said if nobody else explains it."""
        with self._changed:
            self._out, self._running = True, False
            generation = self._generation
        if lost_peer and not self.over():
            args = (generation, self._rank, lost_peer)
            threading.Timer(LOST_PEER_SECONDS, self._complain, args).start()

    def _complain(self, generation: int, rank: int, detail: str) -> None:
        with self._changed:
            explained = self._over >= generation
        if not explained:
            self.leave(generation, rank, Cause.LOST_PEER, detail)

    def leave(self, generation: int, rank: int, cause: str, detail: str = "") -> None:
        """Says why this rank takes no more part."""
        self._link.say(
            WorkerExited(
                job=self.job,
                generation=generation,
                node=THIS_NODE,
                rank=rank,
                step=self._step,
                cause=cause,
                detail=detail[:2000],
            )
        )

    def bye(self, info: ExitInfo | None) -> None:
        """The last word of the process, heard before it ends."""
        if info is None:
            return
        cause = cause_of_exit(info.code, info.reason)
        detail = info.message if cause else str(info.details.get(NOT_ARCHIVED, ""))
        if cause == Cause.STORAGE:
            detail = info.advice  # which folder, what the system says of it, and what helps
        self._link.connected.wait(BYE_SECONDS)
        self._link.say(LastGeneration(job=self.job, generation=self._generation))
        self.leave(self._generation, self._rank, cause, detail)

    def close(self) -> None:
        self._link.close()

    @property
    def _place(self) -> Formation | None:
        """The newest one; may be ahead of the main thread's."""
        return self._take.formation if self._take is not None else None

    @property
    def _rank(self) -> int:
        assert self._place is not None
        return self._place.rank


def _same(order: Restore, said: Restored | RestoreFailed | None) -> bool:
    """Whether an order to restore has this answer."""
    asked = (order.generation, order.step, order.source)
    return said is not None and asked == (said.generation, said.step, said.source)
