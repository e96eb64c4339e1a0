"""A fork server for a run of many tests: the zygotes of all their clusters import torch once.

Each cluster would import it for three seconds before its first node can start. Whoever starts many
of them opens a server before, in a process that has one thread and has imported everything; from
then on clusters of it and of its children find a zygote that is ready.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.checkpoint.keeper.frames import Unframer, framed
from phalanx.control.agent.spawn.job_environment import passed_on
from phalanx.control.wire.zygote_messages import Child, Lease, NotStarted, Spawn, decode_from_zygote

VARIABLE = "PHALANX_FORK_SERVER"  # where it listens
LEASE_SECONDS = 86_400.0  # it ends with the process that opened it
ANSWER_SECONDS = 60.0


@contextmanager
def fork_server(folder: Path) -> Iterator[None]:
    """A server while the block runs."""
    # torch: whoever only asks a server starts without it
    from phalanx.control.agent.spawn.zygote import preload, run
    from phalanx.train.rank.gang import die_with_parent

    path = folder / "fork.sock"
    preload()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        try:
            os.setsid()
            die_with_parent(parent)
            passed = passed_on(os.environ)
            os.environ.clear()
            os.environ.update(passed)
            run(str(path))
        finally:
            os._exit(1)
    os.environ[VARIABLE] = str(path)
    try:
        _wait_for(path)
        yield
    finally:
        del os.environ[VARIABLE]
        with suppress(ProcessLookupError, ChildProcessError):  # who waits for any child has it
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def fork_zygote(path: Path, log: Path) -> None:
    """Have the server, where there is one, fork a zygote that listens at ``path``."""
    server = os.environ.get(VARIABLE)
    if server is None:
        return
    order = Spawn(
        key=str(path),
        role="zygote",
        socket=str(path),
        log=str(log),
        environment=passed_on(os.environ),
    )
    with Path(server).with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a zygote hears one at a time
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(server)
            connection.sendall(framed(Lease(seconds=LEASE_SECONDS)) + framed(order))
            _wait_for_answer(connection, order)
    _wait_for(path)


def _wait_for_answer(connection: socket.socket, order: Spawn) -> None:
    unframer = Unframer()
    while data := connection.recv(1 << 16):
        for message in map(decode_from_zygote, unframer.feed(data)):
            if isinstance(message, Child | NotStarted) and message.key == order.key:
                if isinstance(message, NotStarted):
                    raise RuntimeError(f"no zygote was forked: {message.problem}")
                return
    raise RuntimeError("the fork server is gone")


def _wait_for(path: Path) -> None:
    """Until somebody listens there."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            return
        time.sleep(0.005)
    raise TimeoutError(f"nobody listens at {path}")
