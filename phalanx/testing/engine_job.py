"""A job on an engine, for trials: its parts are killed or stopped, and every step is seen."""

from __future__ import annotations

import json
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from phalanx.control.backends.local import LocalNode
from phalanx.control.client.client import Client, ClientError
from phalanx.testing.local_cluster import Commit, Commits, fault_orders
from phalanx.testing.local_processes import worker_pids

START_SECONDS = 300.0  # on a busy machine
RECOVER_SECONDS = 300.0
POLL_SECONDS = (0.02, 0.2)  # at first, and when it takes long
WARM_STEPS = 10  # between two faults
NUMBER = 1  # of the job at a controller of its own

FaultKind = Literal["worker", "node", "hang", "controller"]
FAULT_KINDS: tuple[FaultKind, ...] = ("worker", "node", "hang", "controller")
Found = TypeVar("Found")


def wait(ready: Callable[[], Found], what: str, seconds: float = START_SECONDS) -> Found:
    """Until something is true; TimeoutError says what was not."""
    began, (least, most) = time.monotonic(), POLL_SECONDS
    while not (result := ready()):
        waited = time.monotonic() - began
        if waited > seconds:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        # Whoever asks all the time keeps the cores from what is waited for.
        time.sleep(min(most, max(least, waited / 20)))
    return result


class EngineJob(ABC):
    """One job whose controller runs where the engine put it, followed from outside."""

    world_size: int

    # What differs between engines.

    @property
    @abstractmethod
    def state(self) -> Path:
        """The controller's folder."""

    @abstractmethod
    def nodes(self) -> list[LocalNode]:
        """Nodes whose agents have started."""

    @abstractmethod
    def kill_node(self, name: str) -> float:
        """End everything on a node at once; returns when."""

    @abstractmethod
    def said(self) -> str:
        """What the job printed."""

    def protected(self) -> str:
        """A node that harm leaves alone; "": none."""
        return ""

    # Looking.

    @property
    def client(self) -> Client:
        """Of the job's controller."""
        return Client("", self.state)

    def job(self) -> dict[str, Any]:
        """The job as its controller shows it; {}: there is none yet, or no answer."""
        try:
            return self._detail("job")
        except (ClientError, OSError):
            return {}

    def spec(self) -> dict[str, Any]:
        """What its controller was asked for."""
        return self._detail("spec")

    def _detail(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(f"/v1/jobs/{NUMBER}", dict)[part]
        return found

    def commits(self) -> Commits:
        """An ear at the keepers."""
        return Commits(self.nodes(), NUMBER, self.world_size)

    def wait(self, ready: Callable[[], Found], what: str, seconds: float = START_SECONDS) -> Found:
        """Until something is true; TimeoutError says what was not, and what the job printed."""
        try:
            return wait(ready, what, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the job printed:\n{self.said()}") from None

    def wait_running(self) -> None:
        """Until it makes steps."""
        self.wait(lambda: self.job().get("state") == "running", "the job to run")

    def reach(self, commits: Commits, step: int) -> Commit:
        """Until a step is committed."""

        def there() -> Commit | None:
            found = commits.newest()
            return found if found is not None and found.step >= step else None

        reached = self.wait(there, f"step {step}")
        assert reached is not None
        return reached

    # Harm.

    def node_of(self, slot: int) -> LocalNode:
        """The node that holds a slot."""
        name = self.job()["nodes"][slot]
        return next(node for node in self.nodes() if node.name == name)

    def harmed_slot(self) -> int:
        """A slot that harm may come to."""
        safe = self.protected()
        return next(s for s, name in enumerate(self.job()["nodes"]) if name != safe)

    def signal_worker(self, slot: int, number: int = signal.SIGKILL) -> float:
        """Signal the first worker of a slot; returns when."""
        pid = worker_pids(self.node_of(slot), NUMBER)[0]
        at = time.monotonic()
        os.kill(pid, number)
        return at

    def pace(self, step_seconds: float) -> None:
        """Have the first worker of each node sleep so long before each step from now on, as
        ``TrialCluster.pace`` does.
        """
        for slot in range(len(self.job()["nodes"])):
            orders = fault_orders(self.node_of(slot), NUMBER)
            self.wait(orders.exists, f"a worker of slot {slot}")
            (orders / "slow-0").write_text(str(step_seconds))

    def kill_controller(self) -> float:
        """SIGKILL of the server; returns when."""
        pid = json.loads((self.state / "server.json").read_text())["pid"]
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at

    def apply_fault(self, what: FaultKind, commits: Commits, warm_steps: int = WARM_STEPS) -> float:
        """Do it to a job that makes steps; seconds until the next committed step."""
        start = self.reach(commits, 1)
        before = self.reach(commits, start.step + warm_steps)
        if what == "controller":
            at = self.kill_controller()
            after: Commit | None = self.reach(commits, before.step + 1)
        else:
            at = self._apply(what)
            after = self.wait(
                lambda: commits.first_after(before.generation),
                f"recovery from {what}",
                RECOVER_SECONDS,
            )
        self.wait_running()
        assert after is not None
        return after.at - at

    def _apply(self, what: FaultKind) -> float:
        slot = self.harmed_slot()
        if what == "node":
            return self.kill_node(self.node_of(slot).name)
        return self.signal_worker(slot, signal.SIGSTOP if what == "hang" else signal.SIGKILL)
