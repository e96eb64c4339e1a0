"""The jobs of a node: their workers and keepers.

Actions of the agent's machine come in, facts for it go out; nothing is decided here.
"""

from __future__ import annotations

import logging
import shutil
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path

from phalanx.cluster.protocol.commands import Form
from phalanx.cluster.protocol.messages import (
    Fault,
    LocalFact,
    WorkerForm,
    WorkerGo,
    WorkerLeft,
    WorkerStop,
)
from phalanx.config.toml_text import parse_toml
from phalanx.control.agent.hooks import Hook, run_hook, told
from phalanx.control.agent.inspect.log_keeping import note_ranks, noted_ranks
from phalanx.control.agent.jobs.assignment import Places
from phalanx.control.agent.jobs.keeper_watch import is_listened_to, ward_ranks, what_is_kept
from phalanx.control.agent.jobs.local_job import KEEPER_SOCKET, Here, Place
from phalanx.control.agent.jobs.program_notes import forget_program, noted_programs
from phalanx.control.agent.jobs.programs import Programs
from phalanx.control.agent.jobs.worker_events import Ears
from phalanx.control.agent.socket_paths import runtime_folder
from phalanx.control.agent.spawn.start import Processes
from phalanx.control.agent.spawn.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.agent.tasks import Tasks
from phalanx.control.host.users import UnknownUserError, require_permitted, user_of
from phalanx.control.wire.payload import PayloadError, Script, Train, decode_payload
from phalanx.control.wire.worker_messages import Passed, TraceSteps
from phalanx.control.wire.zygote_messages import Ended

log = logging.getLogger("phalanx.agent")


class Crew:
    """All jobs of a node. ``fact`` takes what happens to the agent's machine."""

    def __init__(
        self, place: Place, zygote: ZygoteClient, fact: Callable[[LocalFact], None]
    ) -> None:
        self.place, self.zygote, self.fact = place, zygote, fact
        self.state = place.state
        self.jobs: dict[int, Here] = {}
        self.before_stop: Callable[[int], None] = lambda job: None
        self._tasks = Tasks()
        self.processes = Processes(place, zygote, fact)
        self._places = Places(zygote, self.processes, self._tasks)
        self._ears = Ears(fact, self.processes.root_of, self._places.give_way)
        self._programs = Programs(zygote, place.address, fact, self.processes)
        # Ends that no agent has heard of, until it is known what they are the ends of.
        self._unheard: dict[str, Ended] | None = {}
        if place.switch_users:
            place.state.chmod(0o711)  # users pass through to the folder of their job

    async def open(self) -> None:
        """Listen to workers that outlived an earlier agent."""
        self._clear_sockets()
        for key, child in self.zygote.children.items():
            job, _, role = key.partition("/")
            if role.startswith(("worker", "standby")):
                here = self.here(int(job.removeprefix("job")))
                here.user = user_of(child.pid)
                try:
                    await self._ears.listen(here, self.processes.user(here))
                except (OSError, UnknownUserError) as error:  # its gang forms again without it
                    log.warning("job %d: nobody listens to its workers: %s", here.job, error)
                if here.watch is None:
                    await self.processes.watch(here, 0)
        ends, self._unheard = self._unheard, None
        assert ends is not None
        for note in noted_programs(self.state / "jobs"):
            here = self.here(note.job)
            if self._programs.adopt(here, note, ends.get):
                for end in [end for key, end in ends.items() if key.startswith(f"job{note.job}/")]:
                    self.ended(end)
            elif not here.hands and here.watch is None:
                del self.jobs[note.job]
                forget_program(here.folder)

    async def find_kept(self, known: set[int]) -> None:
        """Say what keepers hold of jobs without a worker that runs; ``known``: those that have one.

        The core decides whether it is needed. A keeper that holds nothing ends.
        """
        for number in self._kept() - known:
            here = self.here(number)
            found = await what_is_kept(here.keeper_socket, number)
            if found is None:
                self.processes.end_keeper(here)
                continue
            if here.watch is None:
                await self.processes.watch(here, 0)
            self.fact(found)

    def left_over(self) -> bool:
        """Whether something outlived an earlier agent."""
        roles = (key.partition("/")[2] for key in self.zygote.children)
        return any(role.startswith(("worker", "standby")) for role in roles) or bool(self._kept())

    def _kept(self) -> set[int]:
        """Jobs with a keeper here; it outlives the zygote, too, which then knows nothing of it."""
        keys = (key.partition("/") for key in self.zygote.children)
        found = {int(job.removeprefix("job")) for job, _, role in keys if role == "keeper"}
        folders = self._sockets().items()
        return found | {job for job, path in folders if is_listened_to(path / KEEPER_SOCKET)}

    def _sockets(self) -> dict[int, Path]:
        """The folders of sockets that are here, by job."""
        folders = runtime_folder(self.state).iterdir()
        return {int(path.name): path for path in folders if path.name.isdigit()}

    def _clear_sockets(self) -> None:
        """Of jobs that nothing is left of: the node died, and this is all that outlived it."""
        kept = self._kept()
        for job, folder in self._sockets().items():
            lives = any(key.startswith(f"job{job}/") for key in self.zygote.children)
            if not lives and job not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def out_of_memory(self) -> Callable[[int], str]:
        """Says why a process was killed, where it was for its memory."""
        return self._ears.out_of_memory

    @out_of_memory.setter
    def out_of_memory(self, ask: Callable[[int], str]) -> None:
        self._ears.out_of_memory = ask

    def close(self) -> None:
        """Stop listening; workers go on and look for the next agent."""
        self._tasks.close()
        for here in self.jobs.values():
            here.close()

    def here(self, job: int) -> Here:
        """What this node has of a job."""
        if job not in self.jobs:
            folder = self.state / "jobs" / str(job)
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # only the agent writes here
            self.jobs[job] = Here(job, folder, runtime_folder(self.state) / str(job))
        return self.jobs[job]

    # Orders of the machine.

    def form(self, action: WorkerForm, form: Form, store: str, key: bytes) -> None:
        """Take places in a generation; processes that live keep theirs.

        An order that cannot be carried out fails the job, and never the agent.
        """
        try:
            here = self.here(action.job)
            here.form, here.generation, here.store = form, action.generation, store
            here.orders, here.replica_key = [], key
            here.work, here.user = decode_payload(action.payload), form.user
            if self.place.switch_users:
                users = self.place.config.users
                require_permitted(form.user, least_uid=users.least_uid, also=users.also)
            here.gpus, here.workers = action.gpus, len(action.ranks)
            note_ranks(here.folder, action.ranks)
        except Exception as error:  # the order says what to run: it may say anything
            self._tasks.later(self._refuse(action, error))
            return
        self._tasks.later(self._form(here, action, form, store))

    async def _refuse(self, action: WorkerForm, error: Exception) -> None:
        self._cannot(action, error)

    async def _form(self, here: Here, action: WorkerForm, form: Form, store: str) -> None:
        async with here.forming:
            try:
                await self._ears.listen(here, self.processes.user(here))
                if not await self._prepare(here, action):
                    return
                await self.processes.ensure_keeper(here, ward_ranks(form, action.ranks))
                if here.job not in self.jobs:  # it was stopped while the keeper came up
                    self.processes.end_keeper(here)
                    here.close()
                    return
                for index in [i for i in here.hands if i >= len(action.ranks)]:
                    self._places.end(here, index)
                self._programs.end_stores(here.job, but=action.generation)
                for index, rank in enumerate(action.ranks):
                    if here.generation != action.generation:
                        return  # a newer one waits, or the job was stopped
                    if isinstance(here.work, Train):
                        await self._places.place(here, index, rank, action, form, store)
                    else:
                        self._places.end(here, index)
                        self._programs.place(here, index, rank, action.generation)
            except Exception as error:  # whatever the order says, the agent goes on
                self._cannot(action, error)

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
        # Noted, since workers come after the prolog and are gone before the epilog.
        spare = here.form is not None and not here.workers
        ranks = () if spare else noted_ranks(here.folder)
        name, user = self.place.name, self.processes.user(here)
        facts = told(here.job, here.generation, name, user, here.own_folder, ranks)
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

    def _cannot(self, action: WorkerForm, error: Exception) -> None:
        detail = f"cannot start on {self.place.name}: {error}"
        if isinstance(error, UnknownUserError | PayloadError):
            cause = "configuration"
        elif isinstance(error, ZygoteError | OSError):
            cause = "system_service"
        else:
            cause = "software_bug"
        known = cause != "software_bug"
        log.error("job %d: %s", action.job, detail, exc_info=None if known else error)
        for rank in action.ranks[:1]:
            left = WorkerLeft(
                job=action.job,
                generation=action.generation,
                rank=rank,
                step=0,
                cause=cause,
                detail=detail,
            )
            self.fact(left)

    def pass_on(self, action: Passed) -> None:
        """An order for the workers of a job."""
        here = self.jobs.get(action.job)
        if here is None:
            return
        if isinstance(here.work, Script):
            self._tasks.later(self._programs.obey(here, action))
            return
        here.orders.append(action)
        for hand in here.hands.values():
            hand.say(action)
        if isinstance(action, WorkerGo) and uses_cuda(here.work):
            self._tasks.later(self._places.stand_by(here))

    def trace(self, job: int, ranks: tuple[int, ...], steps: int) -> None:
        """Have workers trace their next steps."""
        here = self.jobs.get(job)
        for hand in here.hands.values() if here is not None else ():
            if hand.rank in ranks:
                hand.say(TraceSteps(steps=steps))

    def stop(self, action: WorkerStop) -> None:
        """Nothing of a job stays here but, if so ordered, the keeper's memory."""
        here = self.jobs.get(action.job)
        if here is None:
            return
        self.before_stop(action.job)
        here.generation, here.orders = 0, []
        for index in list(here.hands):
            self._places.end(here, index)
        for hand in here.standbys.values():
            self.zygote.signal(hand.key, signal.SIGKILL)
        here.standbys.clear()
        self._programs.end_stores(here.job)
        forget_program(here.folder)
        if not action.keep_snapshots:
            self.processes.end_keeper(here)
            here.close()
            shutil.rmtree(here.sockets, ignore_errors=True)
            del self.jobs[action.job]
            self._tasks.later(self._clean_up(here))

    def abandon(self, job: int, *, keep_snapshots: bool) -> None:
        """End the workers of a job that nobody wants, and its keeper unless that is needed."""
        here = self.jobs[job]
        forget_program(here.folder)
        for hand in here.hands.values():
            hand.left = True
        for key in list(self.zygote.children):  # also programs that never said a word
            if key.startswith(f"job{job}/") and key != here.keeper_key:
                self.zygote.signal(key, signal.SIGKILL)
        if not keep_snapshots:
            self.processes.end_keeper(here)
            del self.jobs[job]
            here.close()

    # Ends.

    def ended(self, end: Ended) -> None:
        """The zygote says that a process is gone."""
        if self._unheard is not None:
            self._unheard[end.key] = end
            return
        job, _, role = end.key.partition("/")
        here = self.jobs.get(int(job.removeprefix("job"))) if role else None
        if here is None:
            return
        if role == "keeper":
            log.warning("job %d: its keeper ended (%d)", here.job, end.status)
        elif role.startswith("store"):
            self._programs.store_ended(here, end)
        else:
            self._ears.ended(here, end)


def uses_cuda(work: Train | Script | None) -> bool:
    """Whether the workers of a job have a context on a GPU, which is slow to make."""
    from phalanx.hardware import count_cuda

    if not isinstance(work, Train) or not count_cuda():
        return False
    try:
        train = parse_toml(work.toml).get("train", {})
    except tomllib.TOMLDecodeError:
        return False  # its workers will say what is wrong with it
    return not isinstance(train, dict) or train.get("device", "auto") != "cpu"
