"""What a child of the zygote does between its fork and the work of its role."""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn

from phalanx.control.agent.safe_files import Owner, open_log
from phalanx.control.agent.spawn.binding import prefer_memory
from phalanx.control.agent.spawn.cgroups import enter_group
from phalanx.control.agent.spawn.containment import contain
from phalanx.control.agent.spawn.not_started import (
    NOT_STARTED,
    CannotStartError,
    enter,
    execute,
    tell_agent,
)
from phalanx.control.host.launchers import LauncherPlace, hidden_from, launched
from phalanx.control.host.process_tree import become_subreaper
from phalanx.control.host.users import known_user
from phalanx.control.trust.secrets import SecretError, resolved
from phalanx.control.wire.zygote_messages import Spawn
from phalanx.train.rank.gang import die_with_parent
from phalanx.train.rank.launch import redirect_to

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
MEET_SECONDS = 300.0


class Inherited(NamedTuple):
    """What the zygote made for a child before it forked it."""

    serving: socket.socket | None  # of a store
    output: int  # end of a pipe that a program writes to; -1: none
    group: Path | None  # control group of a program


class ParentZygote(NamedTuple):
    """What a child needs of the zygote that forks it."""

    pid: int
    forget: Callable[[], None]  # closes what belongs to it
    be_zygote: Callable[[str], None]  # another one, at an address


def be_child(order: Spawn, made: Inherited, zygote: ParentZygote) -> NoReturn:
    """The life of a forked child; it never returns into the zygote's code."""
    code = 1
    try:
        os.setsid()
        # A keeper outlives everybody for its lease, and another node's zygote is not ours.
        if order.role not in ("keeper", "zygote"):
            die_with_parent(zygote.pid)
        if order.role == "program":
            become_subreaper()  # so that nothing that it starts gets out of sight
        if made.group is not None:
            enter_group(made.group)
        zygote.forget()
        if made.output >= 0:
            redirect_to(made.output)
        elif order.log:
            redirect_to(open_log(Path(order.log), owner_of(order.user)))
        if order.cores:
            os.sched_setaffinity(0, order.cores)
        prefer_memory(order.memory_node)
        if order.namespace:
            enter_namespace(order.namespace)
        if order.role in ("member", "program", "keeper"):
            contain(order.containment, order.role)
        own = become(order.user)
        # The user's words come only now: nothing that runs as root reads them.
        os.environ |= {**order.environment, **secrets_of(order), **own}
        if order.folder:
            enter(order.folder)
        code = play(order, made.serving, zygote.be_zygote)
    except CannotStartError as error:
        code = NOT_STARTED
        with suppress(BaseException):
            sys.stderr.write(f"phalanx: {error}\n")
            tell_agent(order.environment, str(error))
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def owner_of(user: str) -> Owner | None:
    """Whose a child's log is; None: the zygote's own."""
    if not user or os.getuid() != 0:
        return None
    entry = known_user(user)
    return Owner(entry.pw_uid, entry.pw_gid)


def secrets_of(order: Spawn) -> dict[str, str]:
    """What the references of a job stand for, read as its user.

    Of one that cannot be read the job's workers tell; its keeper is there before them.
    """
    try:
        return {
            name: value
            for name, value in resolved(order.environment).items()
            if value != order.environment[name]
        }
    except SecretError as error:
        if order.role == "keeper":
            return {}
        raise CannotStartError(str(error)) from error


def become(user: str) -> dict[str, str]:
    """Run as somebody else from here on; only root can, and only to somebody it knows.

    Returns what the environment says of that user.
    """
    if not user or os.getuid() != 0 or user == pwd.getpwuid(0).pw_name:
        return {}
    entry = known_user(user)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    return {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user}


def enter_namespace(path: str) -> None:
    """Have this process, and all that it starts, use another network."""
    file = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(file)


def play(order: Spawn, serving: socket.socket | None, be_zygote: Callable[[str], None]) -> int:
    """What a child of a role does; returns its exit code."""
    match order.role:
        case "member":
            from phalanx.control.worker.process import run_rank

            return run_rank(order.socket)
        case "program":
            run_program(order)
        case "keeper":
            from phalanx.checkpoint.keeper.process import run_keeper

            run_keeper(order.socket, order.host, order.lease_seconds)
        case "store" | "program-store":
            assert serving is not None
            host_store(order, serving)
        case "doctor":
            from phalanx.control.agent.node_check import examine

            examine(*order.argv)
        case "zygote":
            be_zygote(order.socket)
    return 0


def run_program(order: Spawn) -> NoReturn:
    """Learn where the ranks of a user's program meet, then become it, as torchrun would."""
    host, port, prefix = order.store
    meeting = meet(host, port, prefix, order.rank, order.own_port)
    node, nodes, node_ranks = order.launches
    if nodes:
        place = LauncherPlace(node, nodes, node_ranks, meeting[0], int(meeting[1]))
        argv, variables = launched(order.argv, place)
        os.environ |= variables
        for name in hidden_from(order.argv):
            os.environ.pop(name, None)
        execute(argv)
    os.environ |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": meeting[1]}
    # An agent hosts the store, as torchrun's does: rank 0 is not to open one of its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    execute(order.argv)


def meet(host: str, port: int, prefix: str, rank: int, own_port: int) -> tuple[str, str]:
    """The address of this generation's own store, which the first rank's node has opened.

    Programs use a store as if they had it for themselves, so the agents' common one only serves
    to find it.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    timeout = timedelta(seconds=MEET_SECONDS)
    common = TCPStore(host, port, is_master=False, timeout=timeout)
    store = PrefixStore(prefix, common)
    if rank == 0:
        store.set("port", str(own_port))
    return host, store.get("port").decode()


def host_store(order: Spawn, listening: socket.socket) -> None:
    """Be the place where ranks meet, until somebody ends this process."""
    if order.role == "store":
        from phalanx.control.agent.rendezvous import host

        host(listening)
        return
    from torch._C._distributed_c10d import TCPStore

    address, port = listening.getsockname()[:2]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    while store is not None:
        signal.pause()
