"""Applies faults to a job of a trial cluster, and undoes later what can be undone."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from phalanx.control.backends.local import LocalNode, processes_of
from phalanx.control.client.client import ClientError
from phalanx.testing.chaos.plan import Action
from phalanx.testing.local_processes import keeper_pid, worker_pids, zygote_pid
from phalanx.testing.played_network import NodeNamespaces

SLICE_SECONDS = 0.05  # that a slowed worker runs and stands, by turns
SNAPSHOT = "phalanx-snapshot"  # name of the keepers' memory
WORKER_SECONDS = 30.0  # for a slot to have a worker to harm
FULL_BYTES = 1 << 20

log = logging.getLogger("phalanx.chaos")


class FaultError(Exception):
    """A fault that cannot be done here."""


class FaultTarget(Protocol):
    """Where faults are applied: a cluster that was made for it, or one that runs."""

    @property
    def network(self) -> NodeNamespaces | None: ...

    def job(self, number: int) -> dict[str, Any]: ...

    def node(self, name: str) -> LocalNode: ...

    def kill_agent(self, node: LocalNode) -> object: ...

    def kill_node(self, node: LocalNode) -> object: ...

    def restart_node(self, node: LocalNode) -> object: ...

    def kill_server(self) -> object: ...

    def start_server(self) -> object: ...


class JobFaults:
    """All that is done to one job; ``heal`` undoes what still stands."""

    def __init__(self, cluster: FaultTarget, job: int, disk: Path | None = None) -> None:
        self.cluster, self.job, self._disk = cluster, job, disk
        self._chance = random.Random(job)
        self._held: list[str] = []
        self._later: dict[object, tuple[float, Callable[[], object]]] = {}  # by what is undone
        self._threads: list[threading.Thread] = []
        self.done: list[str] = []
        self.applied = 0.0  # when the last one was done (monotonic clock)

    def do(self, action: Action) -> None:
        """Do it; what it cannot do now (nobody holds the slot) is left out and said."""
        self._nodes()  # after this fault there may be nobody to ask
        self.applied = time.monotonic()
        try:
            getattr(self, f"_{action.do}")(action)
            self.done.append(str(action))
        except (FaultError, ProcessLookupError) as error:
            self.done.append(f"{action}: left out, {error}")
        log.info("%s", self.done[-1])

    def due(self) -> None:
        """Undo what has lasted long enough."""
        now = time.monotonic()
        for what in [what for what, (at, _) in self._later.items() if at <= now]:
            _, undo = self._later.pop(what)
            undo()

    def heal(self) -> None:
        """Undo all that is left."""
        for _, undo in self._later.values():
            undo()
        self._later = {}
        for thread in self._threads:
            thread.join()

    def _after(self, action: Action, what: object, undo: Callable[[], object]) -> None:
        """Undo it later, once: what is killed again while it is dead is started a single time."""
        self._later[what] = (time.monotonic() + action.seconds, undo)

    # Who is meant.

    def _nodes(self) -> list[str]:
        """Who holds the slots; while the controller is dead, who held them last."""
        with suppress(ClientError):
            self._held = self.cluster.job(self.job)["nodes"] or self._held
        return self._held

    def _node(self, action: Action) -> LocalNode:
        nodes = self._nodes()
        if action.slot >= len(nodes):
            raise FaultError("nobody holds that slot")
        return self.cluster.node(nodes[action.slot])

    def _worker(self, action: Action) -> int:
        deadline = time.monotonic() + WORKER_SECONDS
        while time.monotonic() < deadline:
            self.due()  # the controller that would tell who holds the slot may be dead
            with suppress(FaultError):
                if found := worker_pids(self._node(action), self.job):
                    return next(iter(found.values()))
            time.sleep(0.02)
        raise FaultError("it has no worker")

    def _keeper(self, node: LocalNode) -> int:
        pid = keeper_pid(node, self.job)
        if pid is None:
            raise FaultError("it has no keeper")
        return pid

    # What is done.

    def _signal(self, pid: int, number: int) -> None:
        self.applied = time.monotonic()
        os.kill(pid, number)

    def _kill_worker(self, action: Action) -> None:
        self._signal(self._worker(action), signal.SIGKILL)

    def _stop_worker(self, action: Action) -> None:
        pid = self._worker(action)
        self._signal(pid, signal.SIGSTOP)
        self._after(action, pid, partial(_signal, pid, signal.SIGCONT))

    def _slow_worker(self, action: Action) -> None:
        pid, until = self._worker(action), time.monotonic() + action.seconds

        def slow() -> None:
            while time.monotonic() < until and _signal(pid, signal.SIGSTOP):
                time.sleep(SLICE_SECONDS)
                _signal(pid, signal.SIGCONT)
                time.sleep(SLICE_SECONDS)

        thread = threading.Thread(target=slow, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _kill_keeper(self, action: Action) -> None:
        self._signal(self._keeper(self._node(action)), signal.SIGKILL)

    def _kill_agent(self, action: Action) -> None:
        node = self._node(action)
        self.cluster.kill_agent(node)
        self._after(action, node.name, partial(self.cluster.restart_node, node))

    def _kill_zygote(self, action: Action) -> None:
        """Its agent ends with it, and is started again."""
        node = self._node(action)
        pid = zygote_pid(node)
        if pid is None:
            raise FaultError("it has no zygote")
        self._signal(pid, signal.SIGKILL)
        self.cluster.kill_agent(node)  # it is about to end by itself
        self._after(action, node.name, partial(self.cluster.restart_node, node))

    def _kill_node(self, action: Action) -> None:
        node = self._node(action)
        self.cluster.kill_node(node)
        self._after(action, node.name, partial(self.cluster.restart_node, node))

    def _freeze_node(self, action: Action) -> None:
        pids = processes_of(self._node(action))
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        for pid in pids:
            self._after(action, pid, partial(_signal, pid, signal.SIGCONT))

    def _partition(self, action: Action) -> None:
        network = self.cluster.network
        if network is None:
            raise FaultError("nodes have no network of their own (root, --namespaces)")
        node = self._node(action)
        network.cut(node.name)
        self._after(action, f"network of {node.name}", partial(network.mend, node.name))

    def _corrupt_replica(self, action: Action) -> None:
        """The next node in order keeps this one's replicas; where it does not, no harm is done."""
        nodes = self._nodes()
        victim, holder = (
            self._node(action),
            self.cluster.node(nodes[(action.slot + 1) % len(nodes)]),
        )
        corrupted = self._corrupt(self._keeper(holder))
        self.cluster.kill_node(victim)
        self._after(action, victim.name, partial(self.cluster.restart_node, victim))
        if not corrupted:
            raise FaultError("its neighbour held no snapshot")

    def _corrupt(self, pid: int) -> int:
        """Flip bytes in all that a keeper holds; it finds out when it is asked for them."""
        count = 0
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if SNAPSHOT not in str(path.readlink()):
                    continue
                with path.open("r+b", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    for offset in (size // 3, size // 2, size - size // 5):
                        os.pwrite(file.fileno(), bytes([self._chance.randrange(256)]), offset)
                    count += 1
        return count

    def _flip_bit(self, action: Action) -> None:
        self._order(action, "flip-0")

    def _deadlock_worker(self, action: Action) -> None:
        self._order(action, "deadlock-0")

    def _order(self, action: Action, name: str) -> None:
        """What only the worker can do to itself; see ``train/rank/drill.py``."""
        folder = self._node(action).state / "jobs" / str(self.job) / "chaos"
        if not folder.is_dir():
            raise FaultError("its agents take no such orders (PHALANX_CHAOS=1)")
        (folder / name).write_text("")

    def _fill_disk(self, action: Action) -> None:
        if self._disk is None:
            raise FaultError("the runs have no disk of their own (needs root)")
        ballast = self._disk / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(FULL_BYTES))
        self._after(action, ballast, lambda: ballast.unlink(missing_ok=True))

    def _kill_controller(self, action: Action) -> None:
        self.cluster.kill_server()
        self._after(action, "server", self.cluster.start_server)


def _signal(pid: int, number: int) -> bool:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        return True
    return False
