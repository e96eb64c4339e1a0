"""The jobs of a node: their workers and keepers.

Actions of the agent's machine come in, facts for it go out; nothing is decided here.
"""

from __future__ import annotations

import logging
import shutil
import signal
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.commands import Form, Go, Stop, WorkerOrder
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    DeviceError,
    LocalFact,
    ProgramEnded,
    WorkerExited,
)
from phalanx.config.toml_text import parse_toml
from phalanx.control.agent.hooks import Hook, run_hook, told
from phalanx.control.agent.jobs.assignment import WorkerAssignment
from phalanx.control.agent.jobs.job_owner import own_job_folder, run_owner
from phalanx.control.agent.jobs.keeper_watch import (
    is_listened_to,
    keeper_port,
    ward_ranks,
    what_is_kept,
)
from phalanx.control.agent.jobs.local_job import KEEPER_SOCKET, LocalJob, NodeSettings
from phalanx.control.agent.jobs.program_notes import forget_program, noted_programs
from phalanx.control.agent.jobs.programs import MayStart, NodePrograms
from phalanx.control.agent.jobs.start import Processes
from phalanx.control.agent.jobs.worker_events import WorkerEvents
from phalanx.control.agent.rendezvous import publish
from phalanx.control.agent.socket_paths import clear_away, runtime_folder
from phalanx.control.agent.spawn.log_keeping import note_ranks, noted_ranks
from phalanx.control.agent.spawn.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.agent.tasks import Tasks
from phalanx.control.host.users import UnknownUserError, require_permitted, user_of
from phalanx.control.wire.payload import PayloadError, Script, TrainingWork, decode_payload
from phalanx.control.wire.worker_messages import TraceSteps
from phalanx.control.wire.zygote_messages import Ended
from phalanx.train.rank.orders import BACKUP_KEY

log = logging.getLogger("phalanx.agent")


class NodeJobs:
    """All jobs of a node. ``fact`` takes what happens to the agent's machine; ``may_start``:
    returns when a program may.
    """

    def __init__(
        self,
        settings: NodeSettings,
        zygote: ZygoteClient,
        fact: Callable[[LocalFact], None],
        may_start: MayStart,
    ) -> None:
        self.settings, self.zygote, self.fact = settings, zygote, fact
        self.state = settings.state
        self.jobs: dict[int, LocalJob] = {}
        self.before_stop: Callable[[int], None] = lambda job: None
        self._tasks = Tasks()
        self.processes = Processes(settings, zygote, fact)
        self._assignment = WorkerAssignment(zygote, self.processes, self._tasks)
        self._worker_events = WorkerEvents(fact, self.processes.root_of, self._assignment.give_way)
        self._programs = NodePrograms(zygote, settings.address, fact, self.processes, may_start)
        # Ends that no agent has heard of, until it is known what they are the ends of.
        self._unheard: dict[str, Ended] | None = {}
        if settings.switch_users:
            settings.state.chmod(0o711)  # users pass through to the folder of their job

    async def open(self) -> None:
        """Listen to workers that outlived an earlier agent."""
        self._clear_sockets()
        for key, child in self.zygote.children.items():
            number, _, role = key.partition("/")
            if role.startswith(("worker", "standby")):
                job = self.job(int(number.removeprefix("job")))
                job.user = user_of(child.pid)
                try:
                    await self._worker_events.listen(job, self.processes.user(job))
                except (OSError, UnknownUserError) as error:  # its gang forms again without it
                    log.warning("job %d: nobody listens to its workers: %s", job.number, error)
                if job.watch is None:
                    await self.processes.watch(job, 0)
        ends, self._unheard = self._unheard, None
        assert ends is not None
        for note in noted_programs(self.state / "jobs"):
            job = self.job(note.job)
            if self._programs.adopt(job, note, ends.get):
                for end in [end for key, end in ends.items() if key.startswith(f"job{note.job}/")]:
                    self.ended(end)
            elif not job.processes and job.watch is None:
                del self.jobs[note.job]
                forget_program(job.folder)

    async def find_kept(self, known: set[int]) -> None:
        """Say what keepers hold of jobs without a worker that runs; ``known``: those that have one.

        The core decides whether it is needed. A keeper that holds nothing ends.
        """
        for number in self._kept() - known:
            job = self.job(number)
            kept = await what_is_kept(job.keeper_socket, number)
            if kept is None:
                self.processes.end_keeper(job)
                continue
            if job.watch is None:
                await self.processes.watch(job, 0)
            self.fact(kept)

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
        for number, folder in self._sockets().items():
            lives = any(key.startswith(f"job{number}/") for key in self.zygote.children)
            if not lives and number not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def out_of_memory(self) -> Callable[[int], str]:
        """Says why a process was killed, where it was for its memory."""
        return self._worker_events.out_of_memory

    @out_of_memory.setter
    def out_of_memory(self, ask: Callable[[int], str]) -> None:
        self._worker_events.out_of_memory = ask

    def close(self) -> None:
        """Stop listening; workers go on and look for the next agent."""
        self._tasks.close()
        for job in self.jobs.values():
            job.close()

    def job(self, number: int) -> LocalJob:
        """What this node has of a job."""
        if number not in self.jobs:
            folder = self.state / "jobs" / str(number)
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # only the agent writes here
            self.jobs[number] = LocalJob(number, folder, runtime_folder(self.state) / str(number))
        return self.jobs[number]

    # Orders of the machine.

    def form(self, form: Form, node: int, store: str, key: bytes) -> None:
        """Take this node's places in a generation; processes that live keep theirs.

        An order that cannot be carried out fails the job, and never the agent.
        """
        ranks = form.ranks_on(node)
        try:
            job = self._own(form.job, key)
            job.form, job.generation, job.store = form, form.generation, store
            job.orders, job.replica_key = [], key
            job.work, job.user = decode_payload(form.payload), form.user
            if self.settings.switch_users:
                users = self.settings.config.users
                require_permitted(form.user, least_uid=users.least_uid, also=users.also)
            job.gpus, job.workers = form.gpus_on(node), len(ranks)
            note_ranks(job.folder, ranks)
        except Exception as error:  # the order says what to run: it may say anything
            self._tasks.later(self._refuse(form, ranks, error))
            return
        self._tasks.later(self._form(job, form, node, store))

    def _own(self, number: int, key: bytes) -> LocalJob:
        """The job of this key; what another server's job of its number left here is set aside."""
        job = self.job(number)
        aside = own_job_folder(job.folder, run_owner(key))
        if aside is None:
            return job
        log.warning("job %d of another server ran here: what it left is in %s", number, aside)
        self.abandon(number, keep_snapshots=False)
        return self.job(number)

    async def _refuse(self, form: Form, ranks: tuple[int, ...], error: Exception) -> None:
        self._cannot(form, ranks, error)

    async def _form(self, job: LocalJob, form: Form, node: int, store: str) -> None:
        ranks = form.ranks_on(node)
        async with job.forming:
            try:
                await self._worker_events.listen(job, self.processes.user(job))
                if not await self._prepare(job, form):
                    return
                await self.processes.ensure_keeper(job, ward_ranks(form, node))
                if job.number not in self.jobs:  # it was stopped while the keeper came up
                    self.processes.end_keeper(job)
                    job.close()
                    return
                if ranks and job.watch is not None:
                    job.watch.fence(form.generation)
                if node == form.backup:
                    await self._offer_keeper(job, store)
                ours = isinstance(job.work, TrainingWork)
                for index in [i for i in job.processes if i >= len(ranks) or not ours]:
                    self._assignment.end(job, index)
                if not ours:
                    await self._programs.ended(job.number)
                    if not ranks:  # it stands by, where a rank may have run before
                        self._say_ended(job.number, form.generation)
                self._programs.end_stores(job.number, but=form.generation)
                for index, rank in enumerate(ranks):
                    if job.generation != form.generation:
                        return  # a newer one waits, or the job was stopped
                    if ours:
                        await self._assignment.place(job, index, rank, form, store)
                    else:
                        self._programs.place(job, index, rank, form.generation)
            except Exception as error:  # whatever the order says, the agent goes on
                self._cannot(form, ranks, error)

    async def _offer_keeper(self, job: LocalJob, store: str) -> None:
        """Tell the ranks of a gang on one node where this spare keeps their snapshots too."""
        try:
            port = await keeper_port(job.keeper_socket)
            address = f"{self.settings.address}:{port}"
            await publish(store, job.meeting, BACKUP_KEY, address)
        except OSError as error:  # the gang does without
            log.warning("job %d: its snapshots are not kept here: %s", job.number, error)

    async def _prepare(self, job: LocalJob, form: Form) -> bool:
        """The site's prolog, once a job; where it fails the node is at fault, not the job."""
        if job.prepared:
            return True
        hooks = self.settings.config.hooks
        problem = await self._hook(job, Hook("prolog", hooks.prolog, hooks.prolog_seconds))
        if problem:
            cause, number = Cause.SYSTEM_SERVICE, job.number
            self.fact(DeviceError(node=THIS_NODE, cause=cause, job=number, detail=problem))
            return False
        job.prepared = True
        return job.generation == form.generation

    async def _hook(self, job: LocalJob, hook: Hook) -> str:
        # Noted, since workers come after the prolog and are gone before the epilog.
        spare = job.form is not None and not job.workers
        ranks = () if spare else noted_ranks(job.folder)
        name, user = self.settings.name, self.processes.user(job)
        facts = told(job.number, job.generation, name, user, job.own_folder, ranks)
        problem = await run_hook(hook, job.folder / "hooks.log", facts)
        if problem:
            log.error("job %d: %s", job.number, problem)
        return problem

    async def _clean_up(self, job: LocalJob) -> None:
        """The site's epilog; a node that cannot be cleaned is suspect."""
        hooks = self.settings.config.hooks
        problem = await self._hook(job, Hook("epilog", hooks.epilog, hooks.epilog_seconds))
        if problem:
            self.fact(DeviceError(node=THIS_NODE, cause=Cause.SYSTEM_SERVICE, detail=problem))

    def _cannot(self, form: Form, ranks: tuple[int, ...], error: Exception) -> None:
        detail = f"cannot start on {self.settings.name}: {error}"
        if isinstance(error, UnknownUserError | PayloadError):
            cause = Cause.CONFIGURATION
        elif isinstance(error, ZygoteError | OSError):
            cause = Cause.SYSTEM_SERVICE
        else:
            cause = Cause.SOFTWARE_BUG
        known = cause != Cause.SOFTWARE_BUG
        log.error("job %d: %s", form.job, detail, exc_info=None if known else error)
        for rank in ranks[:1]:
            left = WorkerExited(
                job=form.job,
                generation=form.generation,
                node=THIS_NODE,
                rank=rank,
                step=0,
                cause=cause,
                detail=detail,
            )
            self.fact(left)

    def pass_on(self, order: WorkerOrder) -> None:
        """An order for the workers of a job."""
        job = self.jobs.get(order.job)
        if job is None:
            return
        if isinstance(job.work, Script):
            self._tasks.later(self._programs.obey(job, order))
            return
        job.orders.append(order)
        for process in job.processes.values():
            process.say(order)
        if isinstance(order, Go) and uses_cuda(job.work):
            self._tasks.later(self._assignment.stand_by(job))

    def trace(self, number: int, ranks: tuple[int, ...], steps: int) -> None:
        """Have workers trace their next steps."""
        job = self.jobs.get(number)
        for process in job.processes.values() if job is not None else ():
            if process.rank in ranks:
                process.say(TraceSteps(steps=steps))

    def stop(self, order: Stop) -> None:
        """Nothing of a job stays here but, if so ordered, the keeper's memory."""
        job = self.jobs.get(order.job)
        if order.confirm:
            self._tasks.later(self._confirm(order, job))
        if job is None:
            return
        self.before_stop(order.job)
        job.generation, job.orders = 0, []
        for index in list(job.processes):
            self._assignment.end(job, index)
        for process in job.standbys.values():
            self.zygote.signal(process.key, signal.SIGKILL)
        job.standbys.clear()
        self._programs.end_stores(job.number)
        forget_program(job.folder)
        if not order.keep_snapshots:
            self.processes.dismiss_keeper(job)
            job.close()
            shutil.rmtree(job.sockets, ignore_errors=True)
            del self.jobs[order.job]
            self._tasks.later(clear_away(job.sockets, lambda: order.job in self.jobs))
            self._tasks.later(self._clean_up(job))

    async def _confirm(self, order: Stop, job: LocalJob | None) -> None:
        """Say that a program has ended, once none of its processes is left."""
        async with job.forming if job is not None else nullcontext():  # one may start just now
            await self._programs.ended(order.job)
        self._say_ended(order.job, order.generation)

    def _say_ended(self, job: int, generation: int) -> None:
        self.fact(ProgramEnded(node=THIS_NODE, job=job, generation=generation))

    def abandon(self, number: int, *, keep_snapshots: bool) -> None:
        """End the workers of a job that nobody wants, and its keeper unless that is needed."""
        job = self.jobs[number]
        forget_program(job.folder)
        for process in job.processes.values():
            process.left = True
        for key in list(self.zygote.children):  # also programs that never said a word
            if key.startswith(f"job{number}/") and key != job.keeper_key:
                self.zygote.signal(key, signal.SIGKILL)
        if not keep_snapshots:
            self.processes.end_keeper(job)
            del self.jobs[number]
            job.close()

    # Ends.

    def ended(self, end: Ended) -> None:
        """The zygote says that a process is gone."""
        if self._unheard is not None:
            self._unheard[end.key] = end
            return
        number, _, role = end.key.partition("/")
        job = self.jobs.get(int(number.removeprefix("job"))) if role else None
        if job is None:
            return
        if role == "keeper":
            log.warning("job %d: its keeper ended (%d)", job.number, end.status)
        elif role.startswith("store"):
            self._programs.store_ended(job, end)
        else:
            if isinstance(job.work, Script):
                self.before_stop(job.number)  # what it printed last is read before its end is told
            self._worker_events.ended(job, end)


def uses_cuda(work: TrainingWork | Script | None) -> bool:
    """Whether the workers of a job have a context on a GPU, which is slow to make."""
    from phalanx.hardware import count_cuda

    if not isinstance(work, TrainingWork) or not count_cuda():
        return False
    try:
        train = parse_toml(work.toml).get("train", {})
    except tomllib.TOMLDecodeError:
        return False  # its workers will say what is wrong with it
    return not isinstance(train, dict) or train.get("device", "auto") != "cpu"
