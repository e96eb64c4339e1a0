"""A job led from a login node: Slurm gives nodes by salloc, and the loss of any of them is ours.

A batch script lives on the first node of its allocation and dies with it. Here nothing of the job
but agents is on the nodes; allocation after allocation is asked for until the job has ended.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, structs

from phalanx.control.backends.lead import AGAIN, CANCELLED, BatchLeader, options_in
from phalanx.control.backends.slurm.directives import ScriptOptions, allocation_words
from phalanx.control.backends.slurm.facts import SlurmSite, expand
from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError, explained, require
from phalanx.control.backends.slurm.script import agents_script, agents_step
from phalanx.control.backends.slurm.submit import (
    SlurmBackend,
    remember_quarantined,
    run_folder,
)
from phalanx.control.server.http.submission import RequestedWork

GRANTED = re.compile(r"Granted job allocation (\d+)")
LOOK_SECONDS = 5.0  # between two questions whether the allocation is still there
END_SECONDS = 20.0  # for agents to end what they started
LEFT = ("SIGINT", "SIGTERM")  # somebody ends us, and not an allocation
STILL_OURS = ("RUNNING", "SUSPENDED", "COMPLETING")  # the last: it will say soon what ended it

log = logging.getLogger("phalanx.slurm")


class LedJobResult(Struct, frozen=True, kw_only=True):
    """How a job came out."""

    code: int
    run: str
    allocations: tuple[int, ...]


class Allocation:
    """Nodes that Slurm has given us; given back when the block is left."""

    def __init__(self, options: ScriptOptions, programs: SlurmCommands) -> None:
        self._options, self._programs = options, programs
        self._agents: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Allocation:
        command = ["salloc", "--no-shell", *allocation_words(self._options)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        granted = GRANTED.search(done.stderr)
        if done.returncode or granted is None:
            raise SlurmError(explained("salloc", done.stderr.strip()))
        self.job = int(granted[1])
        try:
            shown = self._programs.run("scontrol", "--oneliner", "show", "job", str(self.job))
            fields = dict(re.findall(r"(\w+)=(\S*)", shown))
            self.nodes, self._ends = expand(fields["NodeList"]), fields.get("EndTime", "")
            log.info("allocation %d: %s", self.job, fields["NodeList"])
            listed = {"SLURM_JOB_NODELIST": fields["NodeList"], "SLURM_JOB_ID": str(self.job)}
            self.site = SlurmSite(listed, self._programs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._agents is not None:
            self._end_agents(self._agents)
        with suppress(SlurmError):
            self._programs.run("scancel", str(self.job))

    def address(self) -> str:
        """Ours, as its nodes see it."""
        shown = self._programs.run("scontrol", "--oneliner", "show", "node", self.nodes[0])
        found = re.search(r" NodeAddr=(\S+)", shown)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((found[1] if found else self.nodes[0], 9))
            return str(probe.getsockname()[0])

    def start_agents(self, url: str, state: Path) -> None:
        """One step for all of them."""
        environment = {
            **os.environ,
            "SLURM_JOB_ID": str(self.job),
            "SLURM_JOB_NUM_NODES": str(len(self.nodes)),
            "url": url,
            "state": str(state),
            "leader": str(os.getpid()),
        }
        self._agents = subprocess.Popen(
            ["bash", "-c", agents_script(self._options)],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us: a checkpoint comes first
        )

    def _end_agents(self, agents: subprocess.Popen[bytes]) -> None:
        with suppress(SlurmError):
            step = f"{self.job}.{agents_step(self._options)}"
            self._programs.run("scancel", "--signal=INT", step)
        with suppress(subprocess.TimeoutExpired):
            agents.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(agents.pid, signal.SIGKILL)
        agents.wait()

    def warn_in_time(self, seconds: float, over: threading.Event) -> None:
        """Tell this process that the allocation ends soon, or that Slurm has taken it back."""
        threading.Thread(target=self._warn, args=(seconds, over), daemon=True).start()

    def _warn(self, seconds: float, over: threading.Event) -> None:
        ends = float("inf")
        with suppress(ValueError):  # "Unknown": it has no limit
            ends = time.mktime(time.strptime(self._ends, "%Y-%m-%dT%H:%M:%S"))
        while not over.wait(max(0.0, min(LOOK_SECONDS, ends - seconds - time.time()))):
            state = self._state()
            if state == "CANCELLED":
                os.kill(os.getpid(), signal.SIGTERM)  # somebody's wish, and not the end of a turn
                return
            if state not in STILL_OURS or time.time() >= ends - seconds:
                os.kill(os.getpid(), signal.SIGUSR1)
                return

    def _state(self) -> str:
        """What Slurm says of the allocation; "": it has forgotten it."""
        with suppress(SlurmError):  # one that does not answer is no reason to stop
            said = self._programs.run(
                *("squeue", "--noheader", "--format=%i %T", "--me", "--states=all")
            )
            jobs = dict(line.split() for line in said.splitlines() if line.strip())
            return jobs.get(str(self.job), "")
        return "RUNNING"


def lead_here(wanted: RequestedWork, backend: SlurmBackend, policy: Path | None) -> LedJobResult:
    """Lead a job from this process, through as many allocations as it takes."""
    require("salloc")
    options = backend.options(wanted)
    run, turns = Path(), list[int]()
    before = {path.name for path in options.runs.iterdir()} if options.runs.exists() else set()
    while True:
        with Allocation(options, backend.programs) as allocation:
            turns.append(allocation.job)
            run = options.runs / run_folder(turns[0], before)
            code, leaving, bad = _turn(allocation, options, wanted, run, policy)
        remember_quarantined(bad)
        exclude = tuple(dict.fromkeys((*options.exclude, *bad)))
        options = structs.replace(options, exclude=exclude)
        if code not in (AGAIN, CANCELLED) or leaving in LEFT:
            return LedJobResult(code=code, run=str(run), allocations=tuple(turns))


def _turn(
    allocation: Allocation,
    options: ScriptOptions,
    wanted: RequestedWork,
    run: Path,
    policy: Path | None,
) -> tuple[int, str, list[str]]:
    """One allocation: exit code, why it was left, nodes that did harm."""
    with socket.socket() as probe:
        probe.bind(("", options.backend.port))
        port = probe.getsockname()[1]
    scheme = "https" if options.backend.tls else "http"
    url = f"{scheme}://{allocation.address()}:{port}"
    lead = BatchLeader(options_in(run, url, wanted, options.need, policy), allocation.site)
    over = threading.Event()
    lead.start()
    try:
        allocation.start_agents(url, run / "control")
        allocation.warn_in_time(options.backend.slurm.signal_seconds, over)
        code = lead.finish()
    finally:
        over.set()
        lead.end()
    return code, lead.leaving, lead.quarantined
