"""Slurm's programs: run with a limit on their rate, and their refusals with what to change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TIMEOUT_SECONDS = 60.0
BURST = 10  # calls at once
CALLS_PER_SECOND = 5.0  # in the long run, of one user on one machine
REMEMBERED_SECONDS = 60.0  # of what changes when a site is rebuilt

# What Slurm says, and what helps. The first that matches is told.
HINTS = (
    (
        "Invalid account",
        "set backend.slurm.account to one of `sacctmgr show associations user=$USER`",
    ),
    ("invalid partition", "set backend.slurm.partition to one of `sinfo --format=%P`"),
    ("Invalid qos", "set backend.slurm.qos to one of `sacctmgr show qos`"),
    (
        "Invalid generic resource",
        "no node of the partition has such GPUs: see `sinfo -o '%P %G'`, and "
        "set backend.gpus_per_node or backend.slurm.gpu_type",
    ),
    (
        "Requested node configuration is not available",
        "no set of nodes has what is asked for: see "
        "`sinfo -o '%P %D %c %m %G %f'`; lower backend.gpus_per_node, backend.spares or the mesh",
    ),
    (
        "Node count specification invalid",
        "the partition has fewer nodes: lower the mesh or backend.spares",
    ),
    (
        "Requested time limit is invalid",
        "the partition's limit is shorter: see `sinfo -o '%P %l'`, and set backend.hours",
    ),
    ("Invalid feature", "set backend.slurm.constraint to features of `sinfo -o '%P %f'`"),
    (
        "Invalid node name",
        "backend.slurm.nodelist or exclude names a node that Slurm does not know: see `sinfo -N`",
    ),
    ("Job dependency problem", "set backend.slurm.dependency to jobs of `squeue --me`"),
    ("reservation", "set backend.slurm.reservation to one of `scontrol show reservation`"),
    (
        "accounting storage is disabled",
        "this Slurm keeps no accounting (a sandbox: `phalanx slurm sandbox up --accounting`)",
    ),
    ("configuration", "no configuration of Slurm: is this a login node, or is SLURM_CONF right?"),
    (
        "Unable to contact slurm controller",
        "slurmctld does not answer: is SLURM_CONF right, and does `scontrol ping` work?",
    ),
    ("unge", "authentication failed: is munged running on this machine (`munge -n | unmunge`)?"),
    ("Unexpected message received", "the versions of Slurm here and at the controller differ"),
)


class SlurmError(Exception):
    """Slurm refused, in its own words, and what to change."""


class SlurmCommands:
    """Runs Slurm's programs. All callers of a user on a machine share one limit on the rate."""

    def __init__(
        self, folder: Path | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        default = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"
        self._ticket, self._sleep = (folder or default) / "slurm-calls", sleep

    def remembered(self, *command: str) -> str:
        """What a question about the site was answered lately: a loop of submissions asks once."""
        asked = "\0".join((os.environ.get("SLURM_CONF", ""), *command)).encode()
        path = self._ticket.with_name(f"answer-{hashlib.sha256(asked).hexdigest()[:16]}")
        with suppress(OSError):
            if 0 <= time.time() - path.stat().st_mtime < REMEMBERED_SECONDS:
                return path.read_text()
        answer = self.run(*command)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(answer)
        draft.rename(path)
        for old in path.parent.glob("answer-*"):
            with suppress(OSError):  # somebody else clears away, too
                if time.time() - old.stat().st_mtime > REMEMBERED_SECONDS:
                    old.unlink()
        return answer

    def run(
        self,
        *command: str,
        text: str | None = None,
        asks_controller: bool = True,
        within_seconds: float = TIMEOUT_SECONDS,
    ) -> str:
        """What a program prints; SlurmError where it fails."""
        require(command[0])
        if asks_controller:
            self._wait_turn()
        try:
            done = subprocess.run(
                command,
                input=text,
                capture_output=True,
                text=True,
                check=False,
                timeout=within_seconds,
            )
        except subprocess.TimeoutExpired:
            raise SlurmError(
                f"{command[0]} did not answer within {within_seconds:.0f} s: is slurmctld busy?"
            ) from None
        if done.returncode:
            raise SlurmError(explained(command[0], (done.stderr or done.stdout).strip()))
        return done.stdout

    def _wait_turn(self) -> None:
        """A bucket of tokens in a file, so that a loop of submissions leaves slurmctld in peace."""
        self._ticket.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        descriptor = os.open(self._ticket, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            free_at = time.time()
            with suppress(ValueError):
                free_at = max(free_at - BURST / CALLS_PER_SECOND, float(file.read() or 0))
            file.seek(0)
            file.truncate()
            file.write(repr(free_at + 1 / CALLS_PER_SECOND))
            file.flush()
            delay = free_at - time.time()
        if delay > 0:
            self._sleep(delay)


def require(program: str) -> None:
    """Refuses where a program of Slurm is not installed, or its configuration is not there."""
    if not shutil.which(program):
        raise SlurmError(
            f"{program} not found: this machine is no login node of a Slurm cluster "
            "(to try it here: `phalanx slurm sandbox up`)"
        )
    conf = os.environ.get("SLURM_CONF")
    if conf and not Path(conf).is_file():  # Slurm itself looks for it for minutes
        raise SlurmError(
            f"SLURM_CONF={conf} is no file: unset it, or set it to this cluster's slurm.conf"
        )


def explained(program: str, said: str) -> str:
    """Slurm's own message, and what to change."""
    hint = next((what for words, what in HINTS if words.lower() in said.lower()), "")
    return f"{program}: {said}" + (f"\n{hint}" if hint else "")
