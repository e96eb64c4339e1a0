"""The processes of jobs on a node as they are started: as whom, where, with what, and keepers."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress

from msgspec import structs

from phalanx.checkpoint.keeper.channel import REPLICA_KEY
from phalanx.cluster.protocol.messages import LocalFact
from phalanx.control.agent.jobs.keeper_watch import KeeperWatch, keeper_pid
from phalanx.control.agent.jobs.local_job import Hand, Here, Place
from phalanx.control.agent.safe_files import make_folder, open_log
from phalanx.control.agent.spawn.binding import Seat, held_gpus, read_machine, seats, visible
from phalanx.control.agent.spawn.containment import memory_share
from phalanx.control.agent.spawn.job_environment import passed_on
from phalanx.control.agent.spawn.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.host.process_tree import read_stat
from phalanx.control.wire.zygote_messages import Containment, Spawn

KEEPER_SECONDS = 10.0  # for a new one to come up
MOST_DESCENT = 64  # generations between a worker's process and one that it started

log = logging.getLogger("phalanx.agent")


class Processes:
    """Starts what a job needs here, through the node's zygote."""

    def __init__(
        self, place: Place, zygote: ZygoteClient, fact: Callable[[LocalFact], None]
    ) -> None:
        self._place, self._zygote, self._fact = place, zygote, fact
        self.lease_seconds = 60.0
        self.silent_seconds = 20.0
        self._machine = read_machine()
        self._replicas = place.config.replicas.resolved()
        self._passed = passed_on(os.environ, place.config.environment.pass_)

    def user(self, here: Here) -> str:
        """Whom a job runs as; "": the agent's own user."""
        return here.user if self._place.switch_users else ""

    def seat(self, here: Here, hand: Hand) -> Seat:
        """Where a worker sits: its GPU, cores and memory."""
        policy = self._place.config.binding.policy
        found = seats(here.workers, here.gpus, self._place.gpus, self._machine, policy)
        seat = found[hand.index] if hand.index < len(found) else Seat()
        log.info("job %d: rank %d (worker %d): %s", here.job, hand.rank, hand.index, seat)
        return seat

    def containment(self, here: Here) -> Containment:
        """What holds the processes of a job in."""
        wanted = self._place.config.containment
        bounds = Containment(
            no_new_privileges=wanted.no_new_privileges, core_bytes=wanted.core_bytes
        )
        if not wanted.cgroup:
            return bounds
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share = memory_share(total, here.gpus.bit_count(), self._place.gpus)
        return structs.replace(
            bounds,
            group=wanted.cgroup,
            memory_bytes=share if wanted.memory == "share" else 0,
            processes=wanted.processes,
            cpu_weight=wanted.cpu_weight,
        )

    def root_of(self, here: Here, pid: int) -> int:
        """The process of a job that another one is or descends from; 0: it is not the job's."""
        roots = {hand.pid for hand in (*here.hands.values(), *here.standbys.values())}
        children = self._zygote.children.items()
        roots |= {child.pid for key, child in children if key.startswith(f"job{here.job}/")}
        for _ in range(MOST_DESCENT):
            if pid in roots or pid <= 1:
                break
            stat = read_stat(pid)
            pid = stat.parent if stat is not None else 0
        return pid if pid > 1 and pid in roots else 0

    async def spawn(self, here: Here, hand: Hand, *, standby: bool = False) -> None:
        """A worker of our own trainer; ``standby``: one that waits for a place."""
        work = here.work
        assert work is not None
        seat = self.seat(here, hand)
        variables = {**self.given(here), **self.environment(here, hand)}
        if standby:
            variables["PHALANX_STANDBY"] = str(here.log(hand.index))
            os.close(open_log(here.log(hand.index), here.owner))  # it may write there, not make it
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
            containment=self.containment(here),
        )
        await self._zygote.spawn(order, hand.started)

    def given(self, here: Here) -> dict[str, str]:
        """What the site passes on of the agent's own environment, and what the job sets."""
        user = self.user(here)
        own = ("HOME", "USER", "LOGNAME", "SHELL") if user else ()  # the user has others
        passed = {name: value for name, value in self._passed.items() if name not in own}
        return passed | (here.work.environment if here.work is not None else {})

    def environment(self, here: Here, hand: Hand) -> dict[str, str]:
        """What every worker of a job finds."""
        return {
            "PHALANX_JOB": str(here.job),
            "PHALANX_INDEX": str(hand.index),
            "PHALANX_NODE": self._place.name,
            "PHALANX_KEEPER": str(here.keeper_socket),
            "PHALANX_AGENT": str(here.agent_socket),
            **({} if self._place.config.telemetry.steps else {"PHALANX_RECORDS": "0"}),
            **self._chaos(here),
            **visible(held_gpus(here.gpus, self._machine)),
            **self._replicas.environment(),
        }

    def _chaos(self, here: Here) -> dict[str, str]:
        """Where workers find faults that a test or a chaos run orders, if this agent allows it."""
        if not os.environ.get("PHALANX_CHAOS"):
            return {}
        folder = here.folder / "chaos"
        os.close(make_folder(folder, 0o700, here.owner))
        return {"PHALANX_CHAOS": str(folder)}

    # Keepers.

    async def ensure_keeper(self, here: Here, ward_ranks: int) -> None:
        """There is a keeper of the job, and it is listened to."""
        if here.watch is not None and not here.watch.lost:
            here.watch.ward_ranks = ward_ranks or here.watch.ward_ranks
            return
        if await self.watch(here, ward_ranks):
            return
        here.keeper_socket.unlink(missing_ok=True)
        order = Spawn(
            key=here.keeper_key,
            role="keeper",
            log=str(here.folder / "keeper.log"),
            socket=str(here.keeper_socket),
            host=self._place.address,
            environment={**self._replicas.environment(), REPLICA_KEY: here.replica_key.hex()},
            user=self.user(here),
            lease_seconds=self.lease_seconds,
            containment=structs.replace(self.containment(here), group=""),
        )
        await self._zygote.spawn(order)
        if not await self.watch(here, ward_ranks, seconds=KEEPER_SECONDS):
            raise ZygoteError("no keeper comes up")

    def end_keeper(self, here: Here) -> None:
        """End a job's keeper, also one whose zygote is gone."""
        if here.keeper_key in self._zygote.children:
            self._zygote.signal(here.keeper_key, signal.SIGKILL)
            return
        with suppress(OSError):
            os.kill(keeper_pid(here.keeper_socket), signal.SIGKILL)
        here.keeper_socket.unlink(missing_ok=True)

    async def watch(self, here: Here, ward_ranks: int, seconds: float = 0.0) -> bool:
        """Listen to a job's keeper; whether there is one."""

        def replace() -> None:
            log.error("job %d: its keeper does not answer and is ended", here.job)
            self.end_keeper(here)

        watch = KeeperWatch(
            here.keeper_socket, here.job, ward_ranks, self._fact, self.silent_seconds, replace
        )
        if await watch.open(seconds):
            here.watch = watch
            return True
        return False
