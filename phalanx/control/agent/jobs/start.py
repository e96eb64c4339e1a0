"""The processes of jobs on a node as they are started: as whom, where, with what, and keepers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress

from msgspec import structs

from phalanx.checkpoint.keeper.channel import REPLICA_KEY
from phalanx.checkpoint.keeper.open_saves import ABANDON
from phalanx.cluster.protocol.messages import LocalFact
from phalanx.control.agent.jobs.keeper_watch import KeeperWatch, keeper_pid
from phalanx.control.agent.jobs.local_job import LocalJob, NodeSettings, WorkerProcess
from phalanx.control.agent.safe_files import make_folder, open_log
from phalanx.control.agent.spawn.binding import (
    WorkerBinding,
    held_gpus,
    read_machine,
    seats,
    visible,
)
from phalanx.control.agent.spawn.containment import memory_share
from phalanx.control.agent.spawn.job_environment import passed_on
from phalanx.control.agent.spawn.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.host.process_tree import read_stat
from phalanx.control.wire.zygote_messages import Containment, Spawn

KEEPER_SECONDS = 10.0  # for a new one to come up
DISMISSED_SECONDS = 5.0  # for one to end whose job is over here
MOST_DESCENT = 64  # generations between a worker's process and one that it started

log = logging.getLogger("phalanx.agent")


class Processes:
    """Starts what a job needs here, through the node's zygote."""

    def __init__(
        self, settings: NodeSettings, zygote: ZygoteClient, fact: Callable[[LocalFact], None]
    ) -> None:
        self._settings, self._zygote, self._fact = settings, zygote, fact
        self.lease_seconds = 60.0
        self.silent_seconds = 20.0
        self._machine = read_machine()
        self._replicas = settings.config.replicas.resolved()
        self._passed = passed_on(os.environ, settings.config.environment.pass_)

    def user(self, job: LocalJob) -> str:
        """Whom a job runs as; "": the agent's own user."""
        return job.user if self._settings.switch_users else ""

    def binding(self, job: LocalJob, process: WorkerProcess) -> WorkerBinding:
        """Where a worker sits: its GPU, cores and memory."""
        policy = self._settings.config.binding.policy
        found = seats(job.workers, job.gpus, self._settings.gpus, self._machine, policy)
        binding = found[process.index] if process.index < len(found) else WorkerBinding()
        log.info(
            "job %d: rank %d (worker %d): %s", job.number, process.rank, process.index, binding
        )
        return binding

    def containment(self, job: LocalJob) -> Containment:
        """What holds the processes of a job in."""
        wanted = self._settings.config.containment
        bounds = Containment(
            no_new_privileges=wanted.no_new_privileges, core_bytes=wanted.core_bytes
        )
        if not wanted.cgroup:
            return bounds
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share = memory_share(total, job.gpus.bit_count(), self._settings.gpus)
        return structs.replace(
            bounds,
            group=wanted.cgroup,
            memory_bytes=share if wanted.memory == "share" else 0,
            processes=wanted.processes,
            cpu_weight=wanted.cpu_weight,
        )

    def root_of(self, job: LocalJob, pid: int) -> int:
        """The process of a job that another one is or descends from; 0: it is not the job's."""
        roots = {process.pid for process in (*job.processes.values(), *job.standbys.values())}
        children = self._zygote.children.items()
        roots |= {child.pid for key, child in children if key.startswith(f"job{job.number}/")}
        for _ in range(MOST_DESCENT):
            if pid in roots or pid <= 1:
                break
            stat = read_stat(pid)
            pid = stat.parent if stat is not None else 0
        return pid if pid > 1 and pid in roots else 0

    async def spawn(self, job: LocalJob, process: WorkerProcess, *, standby: bool = False) -> None:
        """A worker of our own trainer; ``standby``: one that waits for a place."""
        work = job.work
        assert work is not None
        binding = self.binding(job, process)
        variables = {**self.given(job), **self.environment(job, process)}
        if standby:
            variables["PHALANX_STANDBY"] = str(job.log(process.index))
            os.close(open_log(job.log(process.index), job.owner))  # it may write there, not make it
        order = Spawn(
            key=process.key,
            role="member",
            log=str(
                job.folder / f"standby-{process.index}.log" if standby else job.log(process.index)
            ),
            environment=variables,
            folder=work.folder,
            user=self.user(job),
            socket=str(job.agent_socket),
            cores=binding.cores,
            memory_node=binding.numa,
            containment=self.containment(job),
        )
        await self._zygote.spawn(order, process.started)

    def given(self, job: LocalJob) -> dict[str, str]:
        """What the site passes on of the agent's own environment, and what the job sets."""
        user = self.user(job)
        others = ("HOME", "USER", "LOGNAME", "SHELL") if user else ()  # the user has others
        passed = {name: value for name, value in self._passed.items() if name not in others}
        member = job.form.array if job.form is not None else None
        own = job.work.environment if job.work is not None else {}
        return passed | own | (member.environment if member is not None else {})

    def environment(self, job: LocalJob, process: WorkerProcess) -> dict[str, str]:
        """What every worker of a job finds."""
        return {
            "PHALANX_JOB": str(job.number),
            "PHALANX_INDEX": str(process.index),
            "PHALANX_NODE": self._settings.name,
            "PHALANX_KEEPER": str(job.keeper_socket),
            "PHALANX_AGENT": str(job.agent_socket),
            "PHALANX_FOLDER": str(job.own_folder),
            "PHALANX_OWNER": job.run_owner,
            **({} if self._settings.config.telemetry.steps else {"PHALANX_RECORDS": "0"}),
            **self._chaos(job),
            **visible(held_gpus(job.gpus, self._machine)),
            **self._replicas.environment(),
        }

    def _chaos(self, job: LocalJob) -> dict[str, str]:
        """Where workers find faults that a test or a chaos run orders, if this agent allows it."""
        if not os.environ.get("PHALANX_CHAOS"):
            return {}
        folder = job.folder / "chaos"
        os.close(make_folder(folder, 0o700, job.owner))
        return {"PHALANX_CHAOS": str(folder)}

    # Keepers.

    async def ensure_keeper(self, job: LocalJob, ward_ranks: int) -> None:
        """There is a keeper of the job, and it is listened to."""
        if job.watch is not None and not job.watch.lost:
            job.watch.ward_ranks = ward_ranks or job.watch.ward_ranks
            return
        if await self.watch(job, ward_ranks):
            return
        job.keeper_socket.unlink(missing_ok=True)
        order = Spawn(
            key=job.keeper_key,
            role="keeper",
            log=str(job.folder / "keeper.log"),
            socket=str(job.keeper_socket),
            host=self._settings.address,
            # It copies to the job's archive, with the job's keys.
            environment={
                **self.given(job),
                **self._replicas.environment(),
                REPLICA_KEY: job.replica_key.hex(),
            },
            user=self.user(job),
            lease_seconds=self.lease_seconds,
            containment=structs.replace(self.containment(job), group=""),
        )
        await self._zygote.spawn(order)
        if not await self.watch(job, ward_ranks, seconds=KEEPER_SECONDS):
            raise ZygoteError("no keeper comes up")

    def end_keeper(self, job: LocalJob) -> None:
        """End a job's keeper, also one whose zygote is gone."""
        if job.keeper_key in self._zygote.children:
            self._zygote.signal(job.keeper_key, signal.SIGKILL)
            return
        with suppress(OSError):
            os.kill(keeper_pid(job.keeper_socket), signal.SIGKILL)
        job.keeper_socket.unlink(missing_ok=True)

    def dismiss_keeper(self, job: LocalJob) -> None:
        """End a job's keeper, which takes what nobody can complete with it; soon by force."""
        child = self._zygote.children.get(job.keeper_key)
        if child is None:
            self.end_keeper(job)
            return

        def end_by_force() -> None:
            if self._zygote.children.get(child.key) is child:
                self._zygote.signal(child.key, signal.SIGKILL)

        self._zygote.signal(child.key, ABANDON)
        asyncio.get_running_loop().call_later(DISMISSED_SECONDS, end_by_force)

    async def watch(self, job: LocalJob, ward_ranks: int, seconds: float = 0.0) -> bool:
        """Listen to a job's keeper; whether there is one."""

        def replace() -> None:
            log.error("job %d: its keeper does not answer and is ended", job.number)
            self.end_keeper(job)

        watch = KeeperWatch(
            job.keeper_socket, job.number, ward_ranks, self._fact, self.silent_seconds, replace
        )
        if await watch.open(seconds):
            job.watch = watch
            return True
        return False
