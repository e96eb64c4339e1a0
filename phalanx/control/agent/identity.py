"""What an agent is and keeps on its node: its identity."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from phalanx.control.trust.secret_file import read_text, write_secret

CLAIM_SECONDS = 3.0  # for an agent before to end


def machine_id(state: Path) -> str:
    """Made once: tells two agents of one name apart."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = state / "machine"
    name = read_text(path)
    if not name:  # also where its disk was full the first time
        name = secrets.token_hex(16)
        write_secret(path, name)
    return name


class AlreadyRunsError(Exception):
    """Another agent has this state folder."""


@cache
def claim(state: Path) -> int:
    """Make this process, while it lives, the one agent of a state folder.

    An agent that is about to end is waited for: this one may be started in its place.
    """
    return lock_state(state, CLAIM_SECONDS)


def lock_state(state: Path, patience_seconds: float) -> int:
    """The lock of a state folder; AlreadyRunsError where another agent has it."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(state / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                owner = os.pread(lock, 100, 0).decode(errors="replace")
                os.close(lock)
                raise AlreadyRunsError(
                    f"an agent already runs with the state of {state} (process {owner}): "
                    "end that one, or give this one another --name and --state"
                ) from None
            time.sleep(0.05)
        except OSError:  # a file system without locks: nobody can be told apart
            break
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


@cache
def next_incarnation(state: Path) -> int:
    """Rises with every start of the agent's process, also of one that waits for work first."""
    path = state / "incarnation"
    before = read_text(path)
    number = int(before) + 1 if before.isdecimal() else 1  # a power cut may leave anything
    write_secret(path, str(number))
    return number


def own_address(url: str) -> str:
    """The address of this machine that the server, and so other nodes, can reach."""
    where = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((where.hostname or "127.0.0.1", where.port or 80))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
