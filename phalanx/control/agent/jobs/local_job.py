"""What an agent remembers of a job on its node: its workers, sockets and keeper."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from phalanx.checkpoint.keeper.frames import framed
from phalanx.cluster.protocol.commands import Form, WorkerOrder
from phalanx.control.agent.config import AgentConfig
from phalanx.control.agent.jobs.job_owner import run_owner
from phalanx.control.agent.jobs.keeper_watch import KeeperWatch
from phalanx.control.agent.rendezvous import meeting_name
from phalanx.control.agent.safe_files import Owner, make_folder
from phalanx.control.wire.payload import Script, TrainingWork
from phalanx.control.wire.worker_messages import Looked, Order, Take
from phalanx.control.wire.zygote_messages import Child

KEEPER_SOCKET = "keeper"  # in the folder of a job's sockets


class WorkerProcess:
    """One worker process of a job on this node; ``key``: the zygote's name of it."""

    def __init__(self, index: int, rank: int, key: str) -> None:
        self.index, self.rank, self.key = index, rank, key
        self.generation = 0
        self.pid = 0
        self.step = 0
        self.take: Take | None = None  # what it was told last
        self.writer: asyncio.StreamWriter | None = None
        self.answered = False
        self.restored = False  # in the generation of ``take``
        self.left = False  # it has said its last word of this generation
        self.last_generation = 0  # that its process takes part in: it is about to end; 0: it lives
        self.sent_away = False  # a program was asked to save its state and go
        self.adopted = False  # an earlier agent started it
        self.launched = False  # the launcher of its node, the first process, starts and ends it
        self.status: int | None = None  # of a process that ended
        self.ended_why = ""  # where its zygote ended it
        self.log_start = 0  # where the output of its process begins in its log
        self.looked: Looked | None = None  # what it does, when somebody asked last

    def started(self, child: Child) -> None:
        """The zygote has forked it."""
        self.pid = child.pid

    def say(self, order: Order) -> None:
        """Tell the process, if it listens."""
        if self.writer is not None:
            with suppress(OSError):
                self.writer.write(framed(order))


class LocalJob:
    """One job on this node."""

    def __init__(self, number: int, folder: Path, sockets: Path) -> None:
        self.number, self.folder, self.sockets = number, folder, sockets
        self.agent_socket, self.keeper_socket = sockets / "agent", sockets / KEEPER_SOCKET
        self.owner: Owner | None = None  # its user, where that is not the agent's
        self.server: asyncio.Server | None = None
        self.connections = 0  # of its processes, to the agent
        self.refused = 0  # words that were not theirs to say
        self.form: Form | None = None
        self.store = ""  # host:port where the ranks of its generation meet
        self.replica_key = b""  # of its keepers and stores, on all nodes
        self.generation = 0
        self.restored = 0  # step that a program is to continue from
        self.saves = False  # it is only written, and the program not started
        self.work: TrainingWork | Script | None = None
        self.user = ""  # whom it runs as, where the agent is root
        self.processes: dict[int, WorkerProcess] = {}
        self.standbys: dict[int, WorkerProcess] = {}  # warm processes that wait for a place
        self.watch: KeeperWatch | None = None
        self.forming = asyncio.Lock()  # generations form one after the other
        self.orders: list[WorkerOrder] = []  # of this generation, for whoever comes late to it
        self.serial = 0  # of standbys
        self.prepared = False  # the prolog has run
        self.gpus = 0  # mask of those that it holds here; 0: all
        self.workers = 0  # in its generation

    def new_process(self, index: int, rank: int) -> WorkerProcess:
        """A new worker, without a process so far."""
        return WorkerProcess(index, rank, f"job{self.number}/worker{index}")

    def standby(self, index: int) -> WorkerProcess:
        """A new process that waits for a place."""
        self.serial += 1
        return WorkerProcess(index, -1, f"job{self.number}/standby{index}.{self.serial}")

    def find(self, pid: int) -> WorkerProcess | None:
        """The worker, or the one that waits, with this process."""
        known = (*self.processes.values(), *self.standbys.values())
        return next((process for process in known if process.pid == pid), None)

    @property
    def meeting(self) -> str:
        """The secret under which the ranks of its generation meet."""
        return meeting_name(self.replica_key, self.number, self.generation)

    @property
    def run_owner(self) -> str:
        """What tells this job from those of other servers with its number."""
        return run_owner(self.replica_key)

    def program_saves(self, folder: Path) -> Path:
        """Where keepers write a program's last snapshot, below the folder that it runs in."""
        return folder / f"phalanx-job-{self.number}-{self.run_owner[:8]}" / "checkpoints"

    @property
    def keeper_key(self) -> str:
        return f"job{self.number}/keeper"

    @property
    def own_folder(self) -> Path:
        """What its processes may write; the folder around it, with their logs, is the agent's."""
        return self.folder / "work"

    def make_folders(self, owner: Owner | None) -> None:
        """For a job of this user, None: the agent's own."""
        self.owner = owner
        os.close(make_folder(self.own_folder, 0o700, owner))
        os.close(make_folder(self.sockets, 0o700, owner))

    def log(self, index: int) -> Path:
        """Where a worker's output goes."""
        return self.folder / f"worker-{index}.log"

    def close(self) -> None:
        """Hear no more of it."""
        if self.server is not None:
            self.server.close()
        if self.watch is not None:
            self.watch.close()


class NodeSettings(NamedTuple):
    """What an agent knows of its node."""

    name: str
    state: Path
    address: str  # that other nodes reach this one at
    switch_users: bool  # workers run as whoever submitted the job
    gpus: int  # that the node offers
    config: AgentConfig
