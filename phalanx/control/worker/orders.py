"""Orders of an agent to its worker: they come over the link, and the main thread waits for them."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cluster.protocol.messages import (
    Differs,
    FlushAsk,
    Restored,
    Sealed,
    WorkerAbort,
    WorkerBusy,
    WorkerDrain,
    WorkerFlush,
    WorkerGo,
    WorkerLeft,
    WorkerRebalance,
    WorkerRestore,
    WorkerUp,
)
from phalanx.config import Job
from phalanx.control.wire.worker_messages import (
    GIVE_WAY,
    AgentLink,
    Look,
    Looked,
    Order,
    Present,
    Take,
    TraceSteps,
)
from phalanx.control.worker.exit_causes import cause_of_exit
from phalanx.control.worker.sockets import shut_network_sockets
from phalanx.train.exits import ExitInfo
from phalanx.train.measure.profile import ProfileAsk
from phalanx.train.optim.fingerprint import ReplicaDivergence
from phalanx.train.rank.formation import join_group
from phalanx.train.rank.launch import redirect_output
from phalanx.train.rank.look import look
from phalanx.train.rank.orders import Formation, GenerationOver, WriteLease
from phalanx.train.rank.stop import StopFlag
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.resume.ordered import RestorePoint

if TYPE_CHECKING:
    import torch

SHUT_AGAIN_SECONDS = 0.02
# Where the main thread does not wake up (gloo waits for ever for a peer that has yet to connect),
# the process gives way to a new one: soon while it forms, since it has nothing to lose yet.
FORMING_SECONDS, RUNNING_SECONDS = 0.3, 1.0
LOST_PEER_SECONDS = 0.2  # to be told why by somebody else, before it is reported as a fault
BYE_SECONDS = 5.0
ASK_AGAIN_SECONDS = 5.0  # for leave to write

log = logging.getLogger(__name__)


class AgentOrders:
    """Orders that come over the link (its thread) and are waited for by the main thread."""

    def __init__(self, path: str, job: int, index: int) -> None:
        self.job, self.index = job, index
        self.stop = StopFlag()
        self.keeps_process = True
        self._changed = threading.Condition()
        self._take: Take | None = None  # newest place; may be ahead of the main thread's
        self._generation = 0  # of the main thread
        self._over = 0  # generations up to this one are over
        self._out = True  # the main thread is in no group
        self._formed = False  # it has met the others of its generation
        self._restore: WorkerRestore | None = None
        self._said: Restored | None = None  # the last answer to one
        self._go = 0
        self._shares: tuple[int, tuple[int, ...]] = (0, ())  # wanted, and in which generation
        self._running = False
        self._step, self._durable = 0, 0
        self._lease: WorkerFlush | None = None  # to write a durable checkpoint
        self._asked = 0.0  # for it, when
        self.ask = ProfileAsk()
        self._link = AgentLink(path, self._present, self._hear)
        self._link.start()

    # The link's thread.

    def _present(self) -> Present:
        take = self._take
        return Present(
            job=self.job,
            index=self.index,
            pid=os.getpid(),
            generation=take.generation if take else 0,
            rank=take.rank if take else -1,
            running=self._running,
            step=self._step,
            committed=self._step - 1,
            durable=self._durable,
        )

    def _hear(self, order: Order) -> None:
        with self._changed:
            match order:
                case Take():
                    if self._take is None or order.generation > self._take.generation:
                        self._take = order
                        self._end_generations(order.generation - 1)
                    up = WorkerUp(job=self.job, generation=order.generation, rank=order.rank)
                    self._link.say(up)
                case WorkerRestore():
                    if _same(order, self._said):
                        assert self._said is not None
                        self._link.say(self._said)  # the agent that was told is gone
                    else:
                        self._restore = order
                case WorkerRebalance():
                    self._shares = (order.generation, order.micro_batches)
                case WorkerFlush():
                    self._lease = order
                case WorkerGo():
                    self._go = order.generation
                case WorkerAbort():
                    self._end_generations(order.generation)
                case WorkerDrain():
                    self.stop.reason = "drain"
                case TraceSteps(steps=steps):
                    self.ask.ask(steps)
                case Look():
                    self._look(order)
            self._changed.notify_all()

    def _look(self, order: Look) -> None:
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

    def wait_for_place(self) -> str:
        """Waits until there is a place to take; returns what is to be run there."""
        with self._changed:
            while self._take is None:
                self._changed.wait()
            payload = self._take.payload
        if log_file := os.environ.get("PHALANX_STANDBY"):
            redirect_output(Path(log_file))  # from here on it is a worker like others
        return payload

    def formation(self) -> Formation | None:
        """The newest place to take."""
        with self._changed:
            # One that is over already is not entered: nobody would call us back.
            while self._take is None or self._take.generation <= max(self._generation, self._over):
                self._changed.wait()
            take = self._take
            self._generation, self._out = take.generation, False
            self._running = self._formed = False
        return Formation(
            generation=take.generation,
            rank=take.rank,
            world_size=take.world_size,
            local_rank=take.local_rank,
            host=take.host,
            port=take.port,
            prefix=take.meeting,
            buddy_shift=take.buddy_shift,
            replicas=take.replicas,
            shares=take.micro_batches,
        )

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
                self._leave_if_over()
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
        fact = Restored(
            job=self.job,
            generation=self._generation,
            rank=self._rank,
            step=point.step,
            source=point.source,  # type: ignore[arg-type]
            refused=refused,
            there=there,
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
                self._leave_if_over()
                self._changed.wait()
            self._running = True

    def stepped(self, step: int, durable: int, stall_seconds: float, data_seconds: float) -> None:
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
            checkpoint_ns=int(stall_seconds * 1e9),
            data_wait_ns=int(data_seconds * 1e9),
        )
        self._link.say(fact)

    def busy(self, what: str, step: int) -> None:
        """Tells the agent that no step comes for a while, and why."""
        fact = WorkerBusy(
            job=self.job, generation=self._generation, rank=self._rank, step=step, what=what
        )
        self._link.say(fact)

    def shares(self) -> tuple[int, ...]:
        """Micro-batches by replica that the core wants in this generation."""
        generation, shares = self._shares
        return shares if generation == self._generation else ()

    def write_lease(self) -> WriteLease | None:
        """Where the site shares out the storage's time, the agent is asked."""
        assert self._take is not None
        return self if self._take.asks_leave else None

    def ask_lease(self) -> None:
        """Asks for leave to write, and again every few seconds: words get lost."""
        now = time.monotonic()
        if now - self._asked > ASK_AGAIN_SECONDS:
            self._asked = now
            self._link.say(FlushAsk(job=self.job, generation=self._generation))

    def may_write(self) -> int | None:
        """What this rank may write a second (0: any), while it may."""
        order = self._lease
        if order is None or order.generation != self._generation:
            return None
        if order.until_ns < time.time_ns():
            self._lease = None
            return None
        return order.bytes_per_second

    def used_lease(self) -> None:
        """A checkpoint was handed over: the next one asks again."""
        self._lease, self._asked = None, 0.0

    def diverged(self, finding: ReplicaDivergence) -> None:
        """Tells the agent what all replicas found."""
        assert self._take is not None
        fact = Differs(
            job=self.job,
            generation=self._generation,
            rank=self._rank,
            step=finding.step,
            clean_step=finding.clean_step,
            world=self._take.world_size,
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
            self.leave(generation, rank, "lost_peer", detail)

    def leave(
        self, generation: int, rank: int, cause: str, detail: str = "", *, ends: bool = False
    ) -> None:
        """Says why this rank takes no more part; ``ends``: nor its process in any other."""
        fact = WorkerLeft(
            job=self.job,
            generation=generation,
            rank=rank,
            step=self._step,
            cause=cause,
            detail=detail[:2000],
            ends=ends,
        )
        self._link.say(fact)

    def bye(self, info: ExitInfo | None) -> None:
        """The last word of the process, heard before it ends."""
        if info is None:
            return
        cause = cause_of_exit(info.code, info.reason)
        detail = info.message if cause else ""
        if cause == "storage":
            detail = info.advice  # which folder, what the system says of it, and what helps
        self._link.connected.wait(BYE_SECONDS)
        self.leave(self._generation, self._rank, cause, detail, ends=True)

    def close(self) -> None:
        self._link.close()

    @property
    def _rank(self) -> int:
        assert self._take is not None
        return self._take.rank

    def _leave_if_over(self) -> None:
        if self._over >= self._generation:
            raise GenerationOver


def _same(order: WorkerRestore, said: Restored | None) -> bool:
    """Whether an order to restore has this answer."""
    asked = (order.generation, order.step, order.source)
    return said is not None and asked == (said.generation, said.step, said.source)
