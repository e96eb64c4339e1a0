"""A private Slurm on one machine: munge, slurmctld and N slurmd, to try things and for tests.

All of it lives below one folder and on loopback, beside whatever Slurm the machine belongs to.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from phalanx.testing.slurm.database import Database, DatabaseError
from phalanx.testing.slurm.files import SandboxOptions, find_program, write_files

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
START_SECONDS = 120.0  # daemons take one or two; a busy machine has to be waited for
END_SECONDS = 10.0
CANCEL_SECONDS = 8.0  # for jobs that end when they are told to


class SandboxError(Exception):
    """The sandbox cannot start, and what to change."""


class Sandbox:
    """One private Slurm. ``up`` leaves daemons behind, which ``down`` ends, from any process."""

    def __init__(self, options: SandboxOptions) -> None:
        self.options, self.root = options, options.root

    @classmethod
    def at(cls, root: Path) -> Sandbox:
        """The sandbox that was started in a folder."""
        try:
            saved = (root / "sandbox.json").read_bytes()
        except OSError:
            raise SandboxError(f"{root} holds no sandbox: start one with `up`") from None
        return cls(msgspec.json.decode(saved, type=SandboxOptions, dec_hook=_path))

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's programs need to find it."""
        return {"SLURM_CONF": str(self.options.conf)}

    # Start and end.

    def up(self) -> None:
        """Start every daemon; returns when all nodes are idle. Leaves nothing where it fails."""
        require_programs()
        self._refuse_second()
        self._refuse_taken_ports()
        write_files(self.options)
        saved = msgspec.json.encode(self.options, enc_hook=str)
        (self.root / "sandbox.json").write_bytes(saved)
        try:
            self._start_munge()
            if self.options.accounting:
                Database(self.options).start()
            self._daemon("slurmctld", "-f", str(self.options.conf))
            for name in self.options.node_names:
                self.start_node(name)
            self._wait(self._all_idle, "nodes to be idle", "slurmctld")
            if self.options.accounting:
                Database(self.options).register()
        except DatabaseError as error:
            self.down()
            raise SandboxError(str(error)) from None
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End all of it, with the jobs that still run there."""
        if self.running():
            self._cancel_jobs()
        names = ["slurmctld", *(f"slurmd-{name}" for name in self.options.node_names)]
        self._end([pid for name in names if (pid := self._pid(name))])
        self._end_steps()  # now that no daemon can start another
        self._end([pid for name in ("slurmdbd", "mariadbd", "munged") if (pid := self._pid(name))])
        shutil.rmtree(self.root / "state", ignore_errors=True)  # the next one knows no old jobs
        (self.root / "sandbox.json").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """Up for as long as a block runs, and no longer than its process, however that ends."""
        self.up()
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "phalanx.testing.slurm.guard", str(self.root)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # what ends our group must not end the guard
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
        self._guard.communicate()

    def _cancel_jobs(self) -> None:
        """Jobs end in order while there is a controller: their clients would wait for ever."""
        deadline = time.monotonic() + CANCEL_SECONDS
        with suppress(SandboxError, subprocess.TimeoutExpired):
            self.run("scancel", f"--user={getpass.getuser()}", timeout=CANCEL_SECONDS)
            while self.run("squeue", "--noheader", timeout=CANCEL_SECONDS).strip():
                if time.monotonic() > deadline:
                    return
                time.sleep(0.1)

    def running(self) -> bool:
        """Whether its controller is there."""
        return bool(self._pid("slurmctld"))

    # Nodes.

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self._daemon("slurmd", "-f", str(self.options.conf), "-N", name)

    def node_runs(self, name: str) -> bool:
        """Whether a node's daemon is there."""
        return bool(self._pid(f"slurmd-{name}"))

    def kill_node(self, name: str) -> None:
        """Everything of a node ends at once, as if its power failed: daemon, steps, processes."""
        if pid := self._pid(f"slurmd-{name}"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._end_steps(name)

    def _end_steps(self, node: str = "") -> None:
        """Kill the steps of jobs and what they started, also what that starts meanwhile."""
        deadline = time.monotonic() + END_SECONDS
        while found := [*self.step_daemons(node), *self.job_processes(node)]:
            self._end(found, signal.SIGKILL)
            if time.monotonic() > deadline:
                return

    def job_processes(self, node: str = "") -> list[int]:
        """Processes that jobs started here (on one node), found by their environment."""
        conf = f"SLURM_CONF={self.options.conf}".encode()
        where = f"SLURMD_NODENAME={node}".encode()
        pids = []
        for pid in _processes():
            with suppress(OSError):
                given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                inside = any(each.startswith(b"SLURMD_NODENAME=") for each in given)
                if conf in given and inside and (not node or where in given):
                    pids.append(pid)
        return pids

    def step_daemons(self, node: str = "") -> list[int]:
        """The slurmstepd processes of this sandbox (of one node), found by their open log."""
        logs = self.root / "log"
        names = [node] if node else self.options.node_names
        wanted = {logs / f"slurmd-{name}.log" for name in names}
        pids = []
        for pid in _processes():
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() != "slurmstepd":
                    continue
                files = {path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()}
                if files & wanted:
                    pids.append(pid)
        return pids

    # Slurm's programs.

    def run(self, *command: str, timeout: float = 100.0) -> str:
        """What a program of Slurm prints here; SandboxError with its own words where it fails."""
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env={**os.environ, **self.environment},
        )
        if done.returncode:
            raise SandboxError(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def job_field(self, job: int, field: str) -> str:
        """A field of ``scontrol show job``."""
        text = self.run("scontrol", "--oneliner", "show", "job", str(job))
        return text.partition(f" {field}=")[2].split()[0]

    def _all_idle(self) -> bool:
        try:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").split("\n")
        except SandboxError:
            return False
        idle = {line.split()[0] for line in states if line.endswith(" idle")}
        return len(idle) == self.options.nodes

    def _start_munge(self) -> None:
        root = self.root
        self._daemon(
            "munged",
            f"--socket={self.options.munge_socket}",
            f"--key-file={root}/munge/munge.key",
            f"--pid-file={root}/run/munged.pid",
            f"--log-file={root}/log/munged.log",
            f"--seed-file={root}/munge/munged.seed",
            "--num-threads=2",
            "--force",  # below a temporary folder others may write beside it
        )
        self._wait(self.options.munge_socket.exists, "munge's socket", "munged")

    def _daemon(self, program: str, *arguments: str) -> None:
        """Start something that goes into the background by itself."""
        command = [find_program(program), *arguments]
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=START_SECONDS,
            env=environment,
        )
        if done.returncode:
            name = f"{program}-{arguments[-1]}" if program == "slurmd" else program
            said = (done.stderr or done.stdout).strip() or self._log_end(name)
            raise SandboxError(f"{program} does not start: {said}; see {self.root}/log")

    def _refuse_second(self) -> None:
        if self.running():
            raise SandboxError(
                f"a sandbox runs in {self.root} already: `phalanx slurm sandbox down` ends it"
            )

    def _refuse_taken_ports(self) -> None:
        first = self.options.port - 2 * int(self.options.accounting)
        for port in range(first, self.options.port + self.options.nodes + 1):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    raise SandboxError(
                        f"port {port} is taken: choose another --port (it takes "
                        f"{self.options.nodes + 1} in a row)"
                    ) from None

    def _wait(self, ready: Callable[[], bool], what: str, program: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"waited {START_SECONDS:.0f} s for {what}: {self._log_end(program)}"
                )
            time.sleep(0.05)

    def _log_end(self, program: str) -> str:
        with suppress(OSError):
            lines = (self.root / "log" / f"{program}.log").read_text(errors="replace").splitlines()
            return " | ".join(lines[-3:])
        return "it says nothing"

    def _pid(self, name: str) -> int:
        """A daemon that runs; 0: it does not."""
        with suppress(OSError, ValueError):
            pid = int((self.root / "run" / f"{name}.pid").read_text())
            program = Path(f"/proc/{pid}/comm").read_text().strip()
            return pid if name.startswith(program) else 0
        return 0

    def _end(self, pids: list[int], how: signal.Signals = signal.SIGTERM) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, how)
        deadline = time.monotonic() + END_SECONDS
        for pid in pids:
            while _lives(pid):
                if time.monotonic() > deadline:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    break
                time.sleep(0.01)


def require_programs() -> None:
    """Refuses in words where Slurm's or munge's packages are missing."""
    missing = [name for name in PROGRAMS if not find_program(name)]
    if missing:
        packages = "munge" if missing == ["munged"] else "slurm-wlm and munge"
        raise SandboxError(
            f"{', '.join(missing)} not found: install Debian's packages {packages} "
            "(as root: `make slurm`)"
        )


def _processes() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            yield int(path.name)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _path(kind: type, value: object) -> object:
    return Path(str(value)) if kind is Path else value
