"""Faults for a job of a server that runs, on the nodes that are processes of this machine.

Nothing is set up for it and nothing is compared with a run in peace: what is judged is whether the
job goes on after every fault, and whether steps that were made twice gave the same loss.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct, structs

from phalanx.cluster.jobs.job import ENDED
from phalanx.control.backends.local import LocalNode, processes_of
from phalanx.control.client.client import Client, ClientError
from phalanx.control.wire.server_file import ServerFile
from phalanx.testing.chaos.injector import FaultError, JobFaults
from phalanx.testing.chaos.plan import ChaosPlan
from phalanx.testing.local_cluster import Commits
from phalanx.testing.played_network import NodeNamespaces

RECOVERY_SECONDS = 180.0  # for steps to go on after a fault
GONE_SECONDS = 10.0
START_SECONDS = 120.0  # on a busy machine
AGAIN_SECONDS = 0.5  # until a server that ended at once is started once more
SAID_CHARACTERS = 2000  # of its log, where it never comes up


class LiveError(Exception):
    """A job that cannot be harmed from here."""


class StartedProcess(Struct, frozen=True):
    """How a process was started, so that it can be started again."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: str

    @classmethod
    def of(cls, pid: int) -> StartedProcess:
        """As the kernel knows it."""
        process = Path(f"/proc/{pid}")
        argv = (process / "cmdline").read_bytes().decode().split("\0")[:-1]
        if "--follow" in argv:  # it would end at once: its parent is another one now
            at = argv.index("--follow")
            del argv[at : at + 2]
        pairs = (process / "environ").read_bytes().decode().split("\0")[:-1]
        environment = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
        return cls(tuple(argv), environment, str((process / "cwd").readlink()))

    def again(self, log: Path) -> subprocess.Popen[bytes]:
        """A process of its own, as the first one was."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.argv,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


class LiveTarget:
    """A running server and those of its agents that are processes here."""

    def __init__(self, client: Client, state: Path) -> None:
        self.client, self.state = client, state
        self.network: NodeNamespaces | None = None  # whose cards are not ours to cut
        self._nodes = {node.name: node for node in agents_here(client.urls)}
        self._killed: dict[str, StartedProcess] = {}

    def job(self, number: int) -> dict[str, Any]:
        """The job as the API shows it."""
        found: dict[str, Any] = self.client.get(f"/v1/jobs/{number}", dict)["job"]
        return found

    def node(self, name: str) -> LocalNode:
        """A node, if it is a process of this machine."""
        if name not in self._nodes:
            raise FaultError(f"{name} is not on this machine")
        return self._nodes[name]

    def commits(self, number: int, world_size: int) -> Commits:
        """An ear at the keepers of a job."""
        return Commits(list(self._nodes.values()), number, world_size)

    def kill_agent(self, node: LocalNode) -> None:
        """SIGKILL of a node's agent alone."""
        pid = agent_pid(node)
        self._killed[node.name] = StartedProcess.of(pid)
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)

    def kill_node(self, node: LocalNode) -> None:
        """SIGKILL of all that a node runs."""
        self._killed[node.name] = StartedProcess.of(agent_pid(node))
        pids = processes_of(node)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            wait_gone(pid)

    def restart_node(self, node: LocalNode) -> None:
        """Start the agent again as it was started; it starts what it needs."""
        self._killed.pop(node.name).again(node.state / "agent.log")

    def kill_server(self) -> None:
        """SIGKILL of the server, unless it has nodes of its own."""
        try:
            server = ServerFile.read(self.state)
            pid, port = server.pid, server.url.rstrip("/").rpartition(":")[2]
            started = StartedProcess.of(pid)
        except OSError:
            raise FaultError("the server is not on this machine") from None
        if "--nodes" in started.argv:
            raise FaultError("nodes of `phalanx up --nodes` end with their server")
        # The last of two counts: agents come back to the port that they know.
        self._killed["server"] = structs.replace(started, argv=(*started.argv, "--port", port))
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)

    def start_server(self) -> None:
        """Start it again as it was started; returns when it answers.

        One that ends at once (somebody else holds its port for a moment) is started once more.
        """
        started, log = self._killed.pop("server"), self.state / "server.log"
        deadline = time.monotonic() + START_SECONDS
        process = started.again(log)
        while True:
            with suppress(ClientError):
                self.client.get("/v1/status", dict)
                return
            if time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-SAID_CHARACTERS:]
                raise LiveError(f"the server does not come up again; {log} ends with:\n{said}")
            if process.poll() is not None:
                time.sleep(AGAIN_SECONDS)
                process = started.again(log)
            time.sleep(0.05)


class LiveOutcome(Struct, kw_only=True):
    """What became of a job that runs on."""

    plan: str
    done: list[str]  # faults, as they were done
    recovered_seconds: list[float]  # from each fault to the next committed step
    state: str
    generations: int
    made_again: int  # steps
    differences: list[str]  # between the losses of steps that were made twice

    @property
    def good(self) -> bool:
        """It goes on, or is done, and nothing differs."""
        return self.state in ("running", "done") and not self.differences


def play_live(
    ground: LiveTarget, number: int, plan: ChaosPlan, say: Callable[[str], None]
) -> LiveOutcome:
    """Do what a plan says to a running job; steps count from where it is now."""
    job = ground.job(number)
    if job["state"] != "running":
        raise LiveError(f"job {number} is {job['state']}: only a running job can be harmed")
    ranks = world_of(ground, number)
    commits, faults = ground.commits(number, ranks), JobFaults(ground, number)
    begun = _wait_for(ground, number, commits, 1)
    if not begun:
        raise LiveError(f"job {number} commits no steps to keepers on this machine")
    try:
        recovered = _do_all(ground, number, plan, commits, faults, begun, say)
    finally:  # also when somebody has seen enough: nothing stays stopped or dead
        faults.heal()
    state = _state(ground, number)
    again, differences = made_twice(run_folder(ground, number))
    return LiveOutcome(
        plan=plan.name,
        done=faults.done,
        recovered_seconds=recovered,
        state=state,
        generations=int(ground.job(number)["generation"]),
        made_again=again,
        differences=differences,
    )


def _do_all(
    ground: LiveTarget,
    number: int,
    plan: ChaosPlan,
    commits: Commits,
    faults: JobFaults,
    begun: int,
    say: Callable[[str], None],
) -> list[float]:
    """Fault after fault; seconds from each to the second committed step behind it."""
    recovered: list[float] = []
    for action in plan.actions:
        if not _wait_for(ground, number, commits, begun + action.at_step, faults):
            break
        began = time.monotonic()
        faults.do(action)
        at = _step(commits)  # steps were made until it was done
        say(f"   {faults.done[-1]}")
        if "left out" in faults.done[-1]:
            continue
        if not _wait_for(ground, number, commits, at + 2, faults):
            break
        recovered.append(round(time.monotonic() - began, 2))
        say(f"   steps go on after {recovered[-1]:g} s")
    return recovered


def from_here(plan: ChaosPlan, steps_left: int) -> ChaosPlan:
    """A plan without what the job is too near to its end for."""
    fitting = tuple(action for action in plan.actions if action.at_step < steps_left - 1)
    return structs.replace(plan, actions=fitting)


def _wait_for(
    ground: LiveTarget, number: int, commits: Commits, step: int, faults: JobFaults | None = None
) -> int:
    """Until a step is committed; which one is then, 0: the job ended before, or never got there."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        if faults is not None:
            faults.due()
        if (at := _step(commits)) >= step:
            return at
        if _state(ground, number) in ENDED:
            return 0
        time.sleep(0.05)
    return 0


def _step(commits: Commits) -> int:
    newest = commits.newest()
    return newest.step if newest is not None else 0


def _state(ground: LiveTarget, number: int) -> str:
    with suppress(ClientError):  # the controller may be dead just now
        return str(ground.job(number)["state"])
    return "unknown"


def world_of(ground: LiveTarget, number: int) -> int:
    """Ranks of a job."""
    gang = ground.client.get(f"/v1/jobs/{number}", dict)["spec"]["gang"]
    axes = (gang.get(axis, 1) for axis in ("tensor", "context", "pipeline"))
    ranks = int(ground.job(number)["replicas"])
    for size in axes:
        ranks *= int(size)
    return ranks


def run_folder(ground: LiveTarget, number: int) -> Path | None:
    """Where a job's records are, if that is known and here."""
    with suppress(ClientError, KeyError):
        folder = ground.client.get(f"/v1/runs/{number}", dict)["folder"]
        return Path(folder) if folder else None
    return None


def made_twice(folder: Path | None) -> tuple[int, list[str]]:
    """Steps that were made more than once, and those of them whose losses differ."""
    from phalanx.train import StepRecord, read_records

    path = folder / "metrics" / "steps.jsonl" if folder is not None else None
    if path is None or not path.exists():
        return 0, []
    seen: dict[int, float | None] = {}
    again, differences = 0, []
    for record in read_records(path, StepRecord):
        if record.step in seen:
            again += 1
            if seen[record.step] != record.loss:
                text = f"loss of step {record.step}: {seen[record.step]}, then {record.loss}"
                differences.append(text)
        seen[record.step] = record.loss
    return again, differences


def agents_here(servers: Sequence[str]) -> list[LocalNode]:
    """Nodes of these servers whose agents are processes of this machine.

    Clusters of others may be here too, whose nodes have the same names. A server has many
    addresses, but one port.
    """
    ports, agents = {urlsplit(url).port for url in servers}, []
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if process.name.isdigit():
                arguments = (process / "cmdline").read_bytes().decode().split("\0")
                if "agent" in arguments and "--join" in arguments and "--state" in arguments:
                    joined = arguments[arguments.index("--join") + 1].split(",")
                    if ports.isdisjoint(urlsplit(url.strip()).port for url in joined):
                        continue
                    state = Path(arguments[arguments.index("--state") + 1]).absolute()
                    agents.append(LocalNode(arguments[arguments.index("--name") + 1], state))
    return agents


def agent_pid(node: LocalNode) -> int:
    """The process of a node's agent."""
    for pid in processes_of(node):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"agent" in words and str(node.state).encode() in words:
                return pid
    raise FaultError(f"the agent of {node.name} does not run")


def wait_gone(pid: int) -> None:
    """Until a killed process is no more, or only its parent has not noticed."""
    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                time.sleep(0.01)
                continue
        return
