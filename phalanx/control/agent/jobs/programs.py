"""Programs of a user's own: started and ended, since they know nothing of generations."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.keeper.messages import Saved
from phalanx.cluster.protocol.commands import Form
from phalanx.cluster.protocol.messages import (
    LocalFact,
    Restored,
    Sealed,
    WorkerAbort,
    WorkerDrain,
    WorkerFound,
    WorkerGo,
    WorkerLeft,
    WorkerRestore,
    WorkerUp,
)
from phalanx.control.agent.jobs.keeper_watch import save_kept
from phalanx.control.agent.jobs.local_job import Hand, Here
from phalanx.control.agent.jobs.program_notes import ProgramNote, note_program
from phalanx.control.agent.spawn.start import Processes
from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from phalanx.control.wire.payload import PayloadError, Script, decode_payload, encode_payload
from phalanx.control.wire.worker_messages import Passed
from phalanx.control.wire.zygote_messages import Ended, Spawn

log = logging.getLogger("phalanx.agent")


class Programs:
    """The programs of a node; ``processes`` knows as whom, where and with what they start."""

    def __init__(
        self,
        zygote: ZygoteClient,
        address: str,
        fact: Callable[[LocalFact], None],
        processes: Processes,
    ) -> None:
        self._zygote, self._address, self._fact = zygote, address, fact
        self._processes = processes

    def place(self, here: Here, index: int, rank: int, generation: int) -> None:
        """A rank is taken; its process starts when the whole gang may go."""
        hand = here.hands[index] = here.hand(index, rank)
        hand.generation = generation
        self._fact(WorkerUp(job=here.job, generation=generation, rank=rank))

    async def obey(self, here: Here, order: Passed) -> None:
        """Carry out an order of the core for a program's ranks."""
        match order:
            case WorkerRestore():
                here.restored, here.saves = order.step, order.saves
                for hand in here.hands.values():
                    restored = Restored(
                        job=here.job,
                        generation=order.generation,
                        rank=hand.rank,
                        step=order.step,
                        source=order.source,
                    )
                    self._fact(restored)
            case WorkerGo() if here.saves:
                if order.generation == here.generation:
                    await self._save(here)
            case WorkerGo():
                async with here.forming:
                    if order.generation == here.generation:
                        await self._start(here)
            case WorkerAbort() | WorkerDrain():
                for hand in here.hands.values():
                    hand.sent_away = isinstance(order, WorkerDrain)
                    hand.left |= isinstance(order, WorkerAbort)  # its end needs no explanation
                    self._zygote.signal(hand.key, signal.SIGTERM)

    async def _save(self, here: Here) -> None:
        """A job is given up: its keeper writes what it holds, and no program is needed for that."""
        generation, work = here.generation, here.work
        assert work is not None
        folder = Path(work.folder or here.own_folder) / f"phalanx-job-{here.job}" / "checkpoints"
        saved = Saved("")
        if here.restored:
            saved = await save_kept(here.keeper_socket, here.restored, folder)
            log.warning("job %d: %s: %s", here.job, saved.path, saved.problem or "saved")
        detail = f"{saved.path}: {saved.problem}" if saved.problem else ""
        for hand in here.hands.values():
            if here.restored and not saved.problem:
                done = Sealed(
                    job=here.job,
                    generation=generation,
                    rank=hand.rank,
                    step=here.restored,
                    at_ns=time.time_ns(),
                    acknowledged=False,
                    durable=here.restored,
                )
                self._fact(done)
            left = WorkerLeft(
                job=here.job,
                generation=generation,
                rank=hand.rank,
                step=here.restored,
                cause="checkpoint" if saved.problem else "",
                detail=detail,
            )
            self._fact(left)

    def adopt(self, here: Here, note: ProgramNote, ended: Callable[[str], Ended | None]) -> bool:
        """Take over what an earlier agent started; ``ended``: what became of one since then.

        False: nothing of it is known any more, as after a restart of the node.
        """
        hands = [here.hand(index, rank) for index, rank in enumerate(note.ranks)]
        lives = {hand.key: self._zygote.children.get(hand.key) for hand in hands}
        ends = {hand.key: ended(hand.key) for hand in hands}
        if not any(lives.values()) and not any(ends.values()):
            return False
        try:
            here.work = decode_payload(note.payload)
        except PayloadError:
            return False
        here.user, here.generation, here.gpus = note.user, note.generation, note.gpus
        here.restored, here.workers = note.restored, len(note.ranks)
        for hand in hands:
            child = lives[hand.key] or ends[hand.key]
            hand.generation, hand.adopted = note.generation, True
            hand.pid = child.pid if child is not None else 0
            here.hands[hand.index] = hand
            found = WorkerFound(
                job=here.job,
                generation=note.generation,
                rank=hand.rank,
                step=note.restored,
                committed=-1,
            )
            self._fact(found)
        for hand in hands:
            if lives[hand.key] is None and ends[hand.key] is None:
                self._fact(_lost(here, hand))
        return True

    async def _start(self, here: Here) -> None:
        work, form = here.work, here.form
        assert isinstance(work, Script) and form is not None
        self._note(here, work)
        host, _, port = here.store.rpartition(":")
        own_port = 0
        if any(hand.rank == 0 for hand in here.hands.values()):
            own_port = await self._own_store(here)
        for hand in list(here.hands.values()):
            seat = self._processes.seat(here, hand)
            with suppress(OSError):
                hand.log_start = here.log(hand.index).lstat().st_size
            order = Spawn(
                key=hand.key,
                role="program",
                log=str(here.log(hand.index)),
                environment={
                    "PYTHONUNBUFFERED": "1",  # what it prints is in its log at once
                    **self._processes.given(here),
                    **self._processes.environment(here, hand),
                    **torchrun_environment(here, hand, form),
                },
                folder=work.folder or str(here.own_folder),
                user=self._processes.user(here),
                argv=work.argv,
                rank=hand.rank,
                store=(host, int(port or 0), here.meeting),
                own_port=own_port,
                cores=seat.cores,
                memory_node=seat.numa,
                containment=self._processes.containment(here),
            )
            await self._zygote.spawn(order, hand.started)

    def _note(self, here: Here, work: Script) -> None:
        ranks = tuple(here.hands[index].rank for index in sorted(here.hands))
        note = ProgramNote(
            job=here.job,
            generation=here.generation,
            ranks=ranks,
            payload=encode_payload(work),
            user=here.user,
            gpus=here.gpus,
            restored=here.restored,
        )
        note_program(here.folder, note)

    async def _own_store(self, here: Here) -> int:
        """A store for one generation of a program, hosted outside of its ranks."""
        key = f"job{here.job}/store{here.generation}"
        child = await self._zygote.spawn(Spawn(key=key, role="program-store", host=self._address))
        if not here.generation:  # it was stopped while the store came up
            self.end_stores(here.job)
        return child.port

    def store_ended(self, here: Here, end: Ended) -> None:
        """A store is gone: the ranks of its generation, if they still run, meet nowhere any more.

        Some would never notice, others fail by it or wait for minutes: all of them start again.
        """
        if not here.generation or end.key != f"job{here.job}/store{here.generation}":
            return  # it was ended because nobody needs it
        for hand in here.hands.values():
            if hand.rank == 0 and not hand.left and hand.status is None:
                hand.left = True
                self._fact(_store_lost(here, hand, end))

    def end_stores(self, job: int, but: int = 0) -> None:
        """End the stores of a job's generations; ``but``: that one goes on."""
        for key in list(self._zygote.children):
            if key.startswith(f"job{job}/store") and key != f"job{job}/store{but}":
                self._zygote.signal(key, signal.SIGKILL)


def _lost(here: Here, hand: Hand) -> WorkerLeft:
    """A rank ended, and neither agent was told how."""
    hand.left = True
    return WorkerLeft(
        job=here.job,
        generation=hand.generation,
        rank=hand.rank,
        step=hand.step,
        cause="worker_killed",
        detail="it ended while the node had no agent",
    )


def _store_lost(here: Here, hand: Hand, end: Ended) -> WorkerLeft:
    return WorkerLeft(
        job=here.job,
        generation=hand.generation,
        rank=hand.rank,
        step=hand.step,
        cause="worker_killed",
        detail=f"the store where its ranks meet was killed (process {end.pid})",
    )


def torchrun_environment(here: Here, hand: Hand, form: Form) -> dict[str, str]:
    """What torchrun would give a rank, and what ``phalanx.worker()`` asks for."""
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
        "PHALANX_FOLDER": str(here.own_folder),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
