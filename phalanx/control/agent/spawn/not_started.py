"""A process of a job that cannot begin: its agent is told why before it ends."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import NoReturn

from phalanx.checkpoint.keeper.frames import framed
from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.messages import THIS_NODE, WorkerExited
from phalanx.control.wire.worker_messages import Present

NOT_STARTED = 127  # as a shell says it
FIRST_LINE_BYTES = 256  # as much of it as Linux reads
ELF = b"\x7fELF"
TELL_SECONDS = 10.0  # for an agent to have heard it


class CannotStartError(Exception):
    """What is asked for cannot be executed here; the next try would not be different."""


def enter(folder: str) -> None:
    """Work in a folder from here on."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise CannotStartError(f"cannot enter the folder {folder}: {error.strerror}") from error


def execute(argv: tuple[str, ...]) -> NoReturn:
    """Become another program."""
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        why = _why(argv[0]) or error.strerror
        raise CannotStartError(f"cannot start {argv[0]}: {why}") from error
    except ValueError as error:  # a NUL in an argument
        raise CannotStartError(f"cannot start {argv[0]!r}: {error}") from error


def _why(program: str) -> str:
    """What is wrong with a file that cannot be executed, where the system's words mislead."""
    path = Path(shutil.which(program, mode=os.F_OK) or program)
    if path.is_dir():
        return "it is a folder"
    if not path.is_file():  # a pipe would be waited for
        return ""
    try:
        with path.open("rb") as file:
            first_line = file.readline(FIRST_LINE_BYTES).rstrip(b"\n")
    except OSError:
        return ""
    if not os.access(path, os.X_OK):
        return f"it may not be executed (chmod +x {path}, or name what reads it before it)"
    interpreted = first_line[2:].split()
    if first_line.startswith(ELF):
        return ""
    if not first_line.startswith(b"#!") or not interpreted:
        return "it is no program, and has no first line like #!/bin/sh"
    interpreter = Path(os.fsdecode(interpreted[0]))
    if first_line.endswith(b"\r"):
        return "its lines end as on Windows (sed -i 's/\\r$//' mends it)"
    return "" if interpreter.exists() else f"its first line names {interpreter}, not there"


def tell_agent(environment: dict[str, str], detail: str) -> None:
    """Say it as a worker's last word; returns when it was heard, so that our end is no news."""
    job, index = int(environment["PHALANX_JOB"]), int(environment["PHALANX_INDEX"])
    left = WorkerExited(
        job=job,
        generation=0,
        node=THIS_NODE,
        rank=-1,
        step=0,
        cause=Cause.CONFIGURATION,
        detail=detail,
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TELL_SECONDS)
        connection.connect(environment["PHALANX_AGENT"])
        present = Present(job=job, index=index, pid=os.getpid())
        connection.sendall(framed(present) + framed(left))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
