"""One job on a real cluster: brought into a phase, harmed there, and judged.

A phase is held, so that the fault meets it: while a gang forms one of its workers stands still,
while it restores a keeper does, and what is written to disk is written slowly. Then the hold is
let go and the job is left to the shipped policy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from phalanx.checkpoint.format.manifest import MANIFEST_FILE
from phalanx.control.agent.socket_paths import runtime_folder
from phalanx.control.backends.local import LocalNode
from phalanx.control.client.client import ClientError
from phalanx.testing.chaos.verdict import (
    belonging,
    leaked_memory,
    leaked_ports,
    listening,
    orphans,
    shared_memory,
)
from phalanx.testing.local_cluster import Commits, TrialCluster
from phalanx.testing.local_processes import keeper_pid, store_pid, worker_pids, zygote_pid
from tests.control.jobs import FEW_STEPS, assert_same, losses, set_options, write_job

SLOTS = 4
STEPS = 160
SHORT_STEPS = FEW_STEPS  # of those in the normal suite
EVERY = 40  # steps between checkpoints
SHORT_EVERY = 12
# The last rank begins to write three seconds after the first; training does not wait for it.
SLOW_FLUSH = ("checkpoint.stagger_seconds=4",)
STEP_SECONDS = 0.4  # while something is to happen to a job of few steps
END_SECONDS = 240.0
GONE_SECONDS = 30.0  # for what a job had to be gone after its end, on a busy machine
SPARE_FILES = 12  # descriptors that a server or an agent may have more after a job than before


class Process(StrEnum):
    """What may be harmed."""

    SERVER = "server"
    AGENT = "agent"
    ZYGOTE = "zygote"
    KEEPER = "keeper"
    STORE = "store"
    WORKER = "worker"


class Phase(StrEnum):
    """Where a job may be."""

    FORMING = "forming"
    RESTORING = "restoring"
    TRAINING = "training"
    FLUSHING = "flushing"
    DRAINING = "draining"


class Trial:
    """A job under trial; everything that was harmed is started again or goes on by itself."""

    def __init__(
        self,
        cluster: TrialCluster,
        root: Path,
        *settings: str,
        steps: int = STEPS,
        options: Sequence[str] = (),
    ) -> None:
        self.cluster, self.root = cluster, root
        self._files = self._open_files()
        path = write_job(root, "disturbed", steps)
        self._paced = steps == SHORT_STEPS
        every = f"checkpoint.every={SHORT_EVERY if self._paced else EVERY}"
        chosen = set_options((every, *SLOW_FLUSH, *settings))
        self.job = cluster.submit(str(path), *chosen, *options)
        if self._paced:
            cluster.pace(self.job, STEP_SECONDS)
        self.commits: Commits = cluster.commits(self.job, SLOTS)
        self._healing: list[tuple[float, Callable[[], object]]] = []
        self._drained = False

    @property
    def folder(self) -> Path:
        return self.root / "runs" / "disturbed" / f"job-{self.job}"

    @property
    def step(self) -> int:
        """The newest step that is committed."""
        newest = self.commits.newest()
        return 0 if newest is None else newest.step

    @property
    def made(self) -> int:
        """The newest step that was made, safe or not; the server hears of it later."""
        return max(losses(self.folder), default=0)

    def node(self, slot: int) -> LocalNode:
        return self.cluster.node_of(slot, self.job)

    # Phases.

    def reach(self, step: int, seconds: float = 120.0) -> None:
        """Wait until a step is committed."""
        self.wait(lambda: self.step >= step, f"step {step}", seconds)

    def wait(self, ready: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        """Wait; what did not come is explained by the log of events.

        Meanwhile what was harmed is started again, or goes on, when its time has come.
        """

        def healed() -> bool:
            self._heal(time.monotonic())
            return bool(ready())

        try:
            self.cluster.wait(healed, what, seconds)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.story()}") from error

    def notices(self) -> list[dict[str, Any]]:
        """What people were told about the job: codes, sentences and facts."""
        events = self.cluster.get(f"/v1/events?limit=1000&job={self.job}")["events"]
        orders = [order for event in events for order in event["commands"]]
        return [order["why"] for order in orders if order["kind"] == "Notify"]

    def story(self) -> str:
        """What the server says of the job."""
        with suppress(ClientError):
            said = self.cluster.get(f"/v1/events?limit=60&job={self.job}")["events"]
            return "\n".join(map(str, [self.cluster.job(self.job), *said]))
        return "the server does not answer"

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """The job is in this phase until the context is left."""
        self.reach(5)
        match phase:
            case Phase.FORMING:
                with self._standing(self._worker(3)):
                    self._reform(0)
                    self.wait(lambda: self._gang("joining"), "a gang that forms", 30)
                    yield
            case Phase.RESTORING:
                with self._standing(self._keeper(3)):
                    self._reform(0)
                    self.wait(lambda: self._gang("restoring"), "a gang that restores", 30)
                    yield
            case Phase.TRAINING:
                yield
            case Phase.FLUSHING:
                self.wait(self._flushes, "a checkpoint that is written")
                yield
            case Phase.DRAINING:
                self._drained = True
                self.cluster.command("drain", str(self.job))
                self.wait(lambda: self._gang("draining"), "a gang that drains", 30)
                yield

    def _reform(self, slot: int) -> None:
        os.kill(self._worker(slot), signal.SIGKILL)

    def _gang(self, phase: str) -> bool:
        job = self.cluster.job(self.job)
        return bool(job["phase"] == phase)

    def _flushes(self) -> bool:
        found = self.folder.glob("checkpoints/step-*")
        return any(not (path / MANIFEST_FILE).exists() for path in found)

    @contextmanager
    def _standing(self, pid: int) -> Iterator[None]:
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # Harm.

    def pid(self, process: Process, slot: int = 1) -> int:
        """A process of a slot's node; the store is where the gang meets."""
        match process:
            case Process.SERVER:
                assert self.cluster.server is not None
                return self.cluster.server.pid
            case Process.AGENT:
                agent = self.node(slot).agent
                assert agent is not None
                return agent.pid
            case Process.ZYGOTE:
                found = zygote_pid(self.node(slot))
            case Process.KEEPER:
                return self._keeper(slot)
            case Process.STORE:
                found = store_pid(self._host())
            case Process.WORKER:
                return self._worker(slot)
        assert found is not None, f"no {process} on {self.node(slot).name}"
        return found

    def _worker(self, slot: int) -> int:
        self.cluster.wait(lambda: worker_pids(self.node(slot), self.job), "a worker", 30)
        return worker_pids(self.node(slot), self.job)[0]

    def _keeper(self, slot: int) -> int:
        found = keeper_pid(self.node(slot), self.job)
        assert found is not None, f"slot {slot} has no keeper"
        return found

    def _host(self) -> LocalNode:
        """The node where the ranks of the newest generation meet; they may not have come yet."""
        self.cluster.wait(lambda: self._meets_at() is not None, "ranks that meet", 20)
        found = self._meets_at()
        assert found is not None, "its ranks meet nowhere any more"
        return found

    def _meets_at(self) -> LocalNode | None:
        worker = psutil.Process(self._worker(2))
        ports = {each.raddr.port for each in worker.net_connections("tcp") if each.raddr}
        for node in self.cluster.local.nodes:
            store = store_pid(node)
            if store is not None and ports & listening({store: ""}).keys():
                return node
        return None

    def kill(self, process: Process, slot: int = 1) -> None:
        """SIGKILL; whoever supervises it elsewhere (systemd, say) starts it again soon."""
        node = self._host() if process is Process.STORE else self.node(slot)
        if process is Process.SERVER:
            self.cluster.kill_server()
            self._later(1.0, self.cluster.start_server)
        elif process is Process.AGENT:
            self.cluster.kill_agent(node)
            self._later(1.0, lambda: self.cluster.local.start_agent(node))
        else:
            os.kill(self.pid(process, slot), signal.SIGKILL)
        if process is Process.ZYGOTE:
            self._later(1.0, lambda: self._start_again(node))

    def stop(self, process: Process, seconds: float, slot: int = 1) -> None:
        """SIGSTOP, and SIGCONT after a time; it may have been ended meanwhile."""
        pid = self.pid(process, slot)
        node = self._host() if process is Process.STORE else self.node(slot)
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            self._start_again(node)

        self._later(seconds, go_on)

    def _start_again(self, node: LocalNode) -> None:
        """The agent of a node, if it ended with its zygote."""
        assert node.agent is not None
        with suppress(subprocess.TimeoutExpired):
            node.agent.wait(2.0)
            self.cluster.restart_node(node)

    def healed(self) -> bool:
        """Whether all that was harmed has been started again, or goes on."""
        return not self._healing

    def _later(self, seconds: float, heal: Callable[[], object]) -> None:
        # Not in a thread: servers and agents end with the thread that started them.
        self._healing.append((time.monotonic() + seconds, heal))

    def _heal(self, now: float) -> None:
        due = [each for each in self._healing if each[0] <= now]
        for each in due:
            self._healing.remove(each)
            each[1]()

    # Verdict.

    def goes_on(self, seconds: float) -> None:
        """Steps are committed within a time that had not been made before."""
        before = self.step
        ended = ("done", "failed", "cancelled", "held")
        gone_on = lambda: self.step >= before + 3 or self.state in ended  # noqa: E731
        self.wait(gone_on, f"steps after step {before}", seconds)

    @property
    def state(self) -> str:
        """Of the job; "held" when it was drained, "" while the server is dead."""
        with suppress(ClientError):
            job = self.cluster.job(self.job)
            return "held" if job["why"]["code"] == "held" else str(job["state"])
        return ""

    def ends_like(self, expected: Path, seconds: float = END_SECONDS) -> None:
        """It ends well within a time, with the losses and weights of an undisturbed run."""
        deadline = time.monotonic() + seconds
        self.wait(self.healed, "everything to be started again", seconds)
        if self._paced and self.state == "running":
            self.cluster.pace(self.job, 0.0)
        if self._drained:
            left = ("held", "done", "failed")
            self.wait(lambda: self.state in left, "it to leave", deadline - time.monotonic())
            if self.state == "held":
                self.cluster.command("resume", str(self.job))
        ended = ("done", "failed", "cancelled")
        self.wait(lambda: self.state in ended, "its end", deadline - time.monotonic())
        assert self.state == "done", self.story()
        assert_same(self.folder, expected)

    def ends_cancelled(self) -> None:
        """A job without end has shown enough; nothing of it stays."""
        self.cluster.command("cancel", str(self.job))
        assert self.cluster.wait_ended(self.job, END_SECONDS) == "cancelled", self.story()
        self.leaves_nothing()

    def leaves_nothing(self) -> None:
        """No process, socket, draft or descriptor of the job stays."""
        nodes = self.cluster.local.nodes
        folders = [node.state / "jobs" / str(self.job) for node in nodes]
        sockets = [runtime_folder(node.state) / str(self.job) for node in nodes]

        def left() -> list[str]:
            found = [f"{p}: {c}" for folder in folders for p, c in belonging(folder).items()]
            found += [str(path) for path in sockets if path.exists()]
            found += [str(path) for path in self.folder.rglob("*.tmp*")]
            return found + self._unfinished() + self._grown()

        deadline = time.monotonic() + GONE_SECONDS
        while (found := left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not found, "\n".join(found)

    def _unfinished(self) -> list[str]:
        found = self.folder.glob("checkpoints/step-*")
        return [str(path) for path in found if not (path / MANIFEST_FILE).exists()]

    def _open_files(self) -> dict[int, int]:
        """Descriptors of the server and of all agents."""
        pids = [node.agent.pid for node in self.cluster.local.nodes if node.agent is not None]
        pids += [self.cluster.server.pid] if self.cluster.server is not None else []
        found = {}
        for pid in pids:
            with suppress(OSError):
                found[pid] = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return found

    def _grown(self) -> list[str]:
        now = self._open_files()
        return [
            f"process {pid} has {now[pid]} open files, before the job {before}"
            for pid, before in self._files.items()
            if now.get(pid, 0) > before + SPARE_FILES
        ]


@contextmanager
def trial_cluster(
    root: Path, *, nodes: int = SLOTS, spares: int = 1, policy: str = ""
) -> Iterator[TrialCluster]:
    """A cluster under the shipped policy; after it no process, port or memory is left."""
    before, ports = shared_memory(), dict[int, int]()
    rules = f"[spares]\nnodes = {spares}\n{policy}"
    with TrialCluster(root, nodes=nodes, spares=spares, policy=rules) as cluster:
        yield cluster
        ports |= listening(belonging(root))
    assert not (left := orphans(root)), left
    assert not (open_ports := leaked_ports(ports)), open_ports
    assert not (memory := leaked_memory(before)), memory
