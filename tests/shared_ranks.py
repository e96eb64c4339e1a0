"""Ranks that serve one run after another: what torch prepares in a process, it prepares once.

A fresh rank spends most of a short run on first uses (of operators, meshes, shards, autograd). Each
run has a process group of its own, as the ranks of a gang that forms again. What sets a process up,
or proves something of a new one, takes `tests.ranks.run_ranks`.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from phalanx.train.parity.ranks import GRACE_SECONDS, RankError


class Call(NamedTuple):
    """What a rank shall do."""

    rank: int
    world_size: int
    store: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


class Member(NamedTuple):
    """A process that becomes a rank for each run."""

    pid: int
    connection: Connection


class SharedRanks:
    """Processes that wait to be ranks; a run takes as many of them as it needs."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = 270.0,
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank of a new gloo group; results in order of ranks.

        Function and arguments are pickled. After a failure, the next run has new processes.
        """
        while len(self._members) < world_size:
            self._members.append(self._start())
        members = self._members[:world_size]
        results: list[tuple[str, Any]] = []
        try:
            with tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder:
                store = str(Path(folder) / "store")
                for rank, member in enumerate(members):
                    call = Call(rank, world_size, store, function, args)
                    member.connection.send_bytes(pickle.dumps(call))
                results = _receive(members, timeout_seconds)
        finally:
            errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error]
            if errors or not results:
                self._kill()
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in results]

    def close(self) -> None:
        """Let all processes end."""
        for member in self._members:
            member.connection.close()
        for member in self._members:
            os.waitpid(member.pid, 0)
        self._members.clear()

    def _kill(self) -> None:
        for member in self._members:
            os.kill(member.pid, signal.SIGKILL)
        self.close()

    def _start(self) -> Member:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return Member(pid, ours)
        try:
            ours.close()
            for member in self._members:
                member.connection.close()  # or it would not see that the test process is gone
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)
            _serve(theirs)
        finally:
            # Whatever happened: a child that returned from here would go on running the tests.
            os._exit(0)


def _serve(connection: Connection) -> None:
    while True:
        try:
            order = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = pickle.dumps(("", _run(pickle.loads(order))))
        except BaseException:
            answer = pickle.dumps((traceback.format_exc(), None))
        connection.send_bytes(answer)


def _run(call: Call) -> Any:
    dist.init_process_group(
        "gloo",
        store=FileStore(call.store, call.world_size),
        rank=call.rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=240),
    )
    value = call.function(*call.args)
    dist.barrier()  # nobody leaves while a neighbour still talks
    dist.destroy_process_group()
    return value


def _receive(members: list[Member], timeout_seconds: float) -> list[tuple[str, Any]]:
    """An error or a value of each; after the first failure the others get a while."""
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, tuple[str, Any]] = {}
    waiting = {id(member.connection): rank for rank, member in enumerate(members)}
    while len(results) < len(members):
        open_ones = [each.connection for rank, each in enumerate(members) if rank not in results]
        ready = wait(open_ones, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            result = _result(connection)
            results[waiting[id(connection)]] = result
            if result[0]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    late = ("still ran when time was up, and was killed", None)
    return [results.get(rank, late) for rank in range(len(members))]


def _result(connection: Any) -> tuple[str, Any]:
    try:
        result: tuple[str, Any] = pickle.loads(connection.recv_bytes())
    except EOFError:
        return "ended without a result", None
    return result
