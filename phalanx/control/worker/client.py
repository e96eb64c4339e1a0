"""``phalanx.worker()``: what any program may tell its agent, and have kept.

    worker = phalanx.worker()
    step = worker.restore(state)           # 0, or the step that the gang continues from
    while step < steps and not worker.stopping:
        ...
        step += 1
        worker.snapshot(step, state)       # safe here and at a neighbour, asynchronously
        worker.stepped(step, loss=loss, tokens=tokens)

``state`` is a dictionary of tensors (DTensors too). Outside of Phalanx all of it does nothing, so
that a program runs the same under torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.messages import THIS_NODE, Busy, Sealed, WorkerExited
from phalanx.control.wire.worker_messages import AgentLink, LastGeneration, Present
from phalanx.observe.node.worker_ring import RingSink, ring_path
from phalanx.train.report.records import StepParts, StepRecord

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.checkpoint import Checkpointer
    from phalanx.train.measure.waits import PeerWaits

BUFFERS = 4
# torchrun and those like it, Open MPI, MPICH and Intel's.
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


class WorkerClient:
    """A program's rank under an agent."""

    def __init__(self) -> None:
        self.under_phalanx = "PHALANX_AGENT" in os.environ
        self.stopping = False  # somebody wants the program to save and end
        self._generation = int(os.environ.get("PHALANX_GENERATION", "0"))
        self._rank = _number(*RANKS)
        # A launcher gives its ranks its own environment, and each of them its number.
        launched = "PHALANX_LAUNCHED" in os.environ
        self._index = _number(*LOCAL_RANKS) if launched else _number("PHALANX_INDEX")
        self._step = 0
        self._handed = self._kept = -1  # newest snapshots: handed over; safe at a neighbour
        self._link: AgentLink | None = None
        self._checkpointer: Checkpointer | None = None
        self._ring: RingSink | None = None
        self._stepped_at, self._tokens = 0.0, 0
        self._waits: PeerWaits | None = None
        if self.under_phalanx:
            signal.signal(signal.SIGTERM, self._stop)
            self._link = AgentLink(os.environ["PHALANX_AGENT"], self._present, lambda order: None)
            self._link.start()
            folder = Path(os.environ["PHALANX_AGENT"]).parent
        if self.under_phalanx and os.environ.get("PHALANX_RECORDS") != "0":
            self._ring = RingSink(ring_path(folder, self._index))

    def stepped(
        self,
        step: int,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float = 0.0,
        tokens: int = 0,
        own_seconds: float | None = None,
    ) -> None:
        """A step is complete; numbers that are given are shown and kept. ``tokens``: of all ranks.

        They must be numbers of the host: asking a device for them is the program's choice.
        ``own_seconds``: of the step, without waiting for peers; it is what tells a slow rank from
        the others. On CPU it is measured where the program does not say.
        """
        self._step = step
        self._record(step, loss, grad_norm, learning_rate, tokens, own_seconds)
        if self._link is not None:
            fact = Sealed(
                job=int(os.environ["PHALANX_JOB"]),
                generation=self._generation,
                rank=self._rank,
                step=step,
                at_ns=time.time_ns(),
                acknowledged=False,
            )
            self._link.say(fact)

    def busy(self, what: str) -> None:
        """No step comes for a while: ``what`` (an evaluation, a checkpoint) is under way.

        Until the next step the program has the allowance of a first step.
        """
        if self._link is not None:
            fact = Busy(
                node=THIS_NODE,
                job=int(os.environ["PHALANX_JOB"]),
                generation=self._generation,
                step=self._step,
                what=what,
            )
            self._link.say(fact)

    def _record(
        self,
        step: int,
        loss: float | None,
        grad_norm: float | None,
        learning_rate: float,
        tokens: int,
        own_seconds: float | None,
    ) -> None:
        now, before = time.perf_counter(), self._stepped_at
        self._stepped_at = now
        if self._ring is None:
            return
        seconds = now - before
        parts = self._parts(seconds, own_seconds)
        if not before:
            return  # nobody knows when the first step began
        self._tokens += tokens
        record = StepRecord(
            job=os.environ["PHALANX_JOB"],
            generation=self._generation,
            rank=self._rank,
            step=step,
            first_sample=0,
            samples=0,
            tokens=tokens,
            tokens_seen=self._tokens,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            step_seconds=seconds,
            parts=parts,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            mfu=None,
            hfu=None,
            mfu_basis="the program does not say",
            peak_memory_bytes=0,
            eta_seconds=None,
            skipped=False,
            non_finite=False,
        )
        self._ring.write(record)
        self._ring.flush()

    def _parts(self, seconds: float, own_seconds: float | None) -> StepParts:
        """What of a step is known to have been this rank's own work."""
        torch = sys.modules.get("torch")  # whoever has not imported it has no collectives
        if own_seconds is not None or torch is None or torch.cuda.is_initialized():
            return StepParts(own=own_seconds)
        from phalanx.train.measure.waits import PeerWaits

        if self._waits is None:
            self._waits = PeerWaits()
            return StepParts()
        waits = self._waits.take()
        blocked = seconds - waits.working - waits.cores
        # Some libraries wait inside C++, where nobody sees it: then only time on a core is surely
        # its own. Where the waits that are seen explain the blocked time, all the rest is.
        seen = 2 * waits.peers >= blocked
        own = max(waits.working, seconds - waits.peers - waits.cores) if seen else waits.working
        return StepParts(peer_wait=waits.peers, own=min(own, seconds))

    def restore(self, state: dict[str, Tensor]) -> int:
        """Fill the tensors with what the gang continues from; its step. Collective."""
        step = int(os.environ.get("PHALANX_RESTORE_STEP", "0"))
        if self.under_phalanx:
            _need_group()
        if not self.under_phalanx or step == 0:
            return 0
        loaded = self._keepers().load_memory(Path(), state, step=step)
        if loaded is None:
            raise RuntimeError(f"step {step} is in no keeper's memory any more")
        self._step = self._handed = self._kept = loaded.step
        return loaded.step

    def snapshot(self, step: int, state: dict[str, Tensor]) -> None:
        """Have the state kept in this node's memory and at a neighbour's. Collective.

        Where a keeper stands still this waits for the snapshot deadline, once; until it answers
        again, or another one takes its place, steps have no snapshots and the program goes on.
        """
        if not self.under_phalanx:
            return
        from phalanx.checkpoint.format.manifest import KeeperLostError

        try:
            self._snapshot(step, state)
        except KeeperLostError as error:
            self._explain(Cause.KEEPER_LOST, str(error))  # it ends by it, and is not to be blamed
            raise

    def _snapshot(self, step: int, state: dict[str, Tensor]) -> None:
        from phalanx.checkpoint import Extra
        from phalanx.data import Cursor

        checkpointer = self._keepers()
        if not checkpointer.in_background:
            _need_group()
            shift = int(os.environ.get("PHALANX_BUDDY_SHIFT", "0"))
            spare = checkpointer.agreed(self._spare_keeper())
            checkpointer.prepare_background(
                state,
                generation=self._generation,
                step=step - 1,
                device=next(iter(state.values())).device,
                buffers=BUFFERS,
                replicate=shift > 0 or bool(spare),
                buddy_shift=shift,
                spare=spare,
                prompt=True,
            )
        extra = Extra(
            tokens=0,
            cursor=Cursor(0, (), ""),
            mesh={},
            config_hash="",
            generation=self._generation,
        )
        checkpointer.poll()  # a keeper that was late may have answered
        if checkpointer.some_rank_late():
            return
        checkpointer.save(step, state, extra, write=False, patient=False)
        if checkpointer.late:
            return  # left out
        # A step is taken over only when the one before it is safe.
        self._kept, self._handed = self._handed, step

    def _spare_keeper(self) -> str:
        """host:port of a spare's keeper, which holds the snapshots of a program on one node too."""
        store, _, prefix = os.environ.get("PHALANX_SPARE_STORE", "").rpartition("/")
        if not store or self._rank:
            return ""
        from phalanx.train.rank.formation import find_spare_keeper

        host, _, port = store.rpartition(":")
        return find_spare_keeper(host, int(port), prefix)

    def _explain(self, cause: str, detail: str) -> None:
        """Says why this rank takes no more part, before its process ends by it."""
        if self._link is not None:
            job = int(os.environ["PHALANX_JOB"])
            self._link.say(LastGeneration(job=job, generation=self._generation))
            fact = WorkerExited(
                job=job,
                generation=self._generation,
                node=THIS_NODE,
                rank=self._rank,
                step=self._step,
                cause=cause,
                detail=detail[:2000],
            )
            self._link.say(fact)

    def _keepers(self) -> Checkpointer:
        from phalanx.checkpoint import Checkpointer

        if self._checkpointer is None:
            folder = Path(os.environ["PHALANX_FOLDER"]) / "checkpoints"
            self._checkpointer = Checkpointer(folder, exclusive=False)
        return self._checkpointer

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _present(self) -> Present:
        return Present(
            job=int(os.environ["PHALANX_JOB"]),
            index=self._index,
            pid=os.getpid(),
            generation=self._generation,
            rank=self._rank,
            running=True,
            step=self._step,
            committed=self._kept,
        )


def _number(*names: str) -> int:
    """The first of some variables that is set; 0: none is."""
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def _need_group() -> None:
    """RuntimeError where ranks cannot ask each other what each of them holds."""
    import torch.distributed as dist

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"WORLD_SIZE is {world} and there is no process group: call "
            "torch.distributed.init_process_group() before worker.restore() and worker.snapshot()"
        )
