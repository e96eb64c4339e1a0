"""The zygote: one process a node with torch imported and a single thread, which forks the others.

A fork takes hundredths of a second where a start takes seconds. Workers, keepers and stores are
its children: it tells the agent when one ends, and outlives the agent for a lease, so that the
next agent finds everything as it was. After the lease it ends with all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import os
import pwd
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from phalanx.train.rank.threads import keep_single_threaded, require_single_thread

keep_single_threaded()

# ruff: noqa: E402 - these load numpy and torch, whose pools must not exist when it forks
from phalanx.control.agent.inspect.output_pump import Pump, Pumps
from phalanx.control.agent.safe_files import Owner, open_log
from phalanx.control.agent.spawn.binding import prefer_memory
from phalanx.control.agent.spawn.cgroups import Cgroups, enter_group
from phalanx.control.agent.spawn.containment import contain
from phalanx.control.host.process_tree import become_subreaper, own_children
from phalanx.control.host.users import UnknownUserError, known_user
from phalanx.control.trust.secrets import SecretError, resolved
from phalanx.control.wire.zygote_messages import (
    Child,
    Ended,
    FromZygote,
    Heard,
    Lease,
    Leave,
    NotStarted,
    Ready,
    Signal,
    Spawn,
    ToZygote,
    Unframer,
    decode_to_zygote,
    framed,
)
from phalanx.control.worker.not_started import NOT_STARTED, CannotStartError, enter, tell_agent
from phalanx.train.rank.gang import die_with_parent
from phalanx.train.rank.launch import redirect_to

START_SECONDS = 600.0  # for the first agent to come
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
KEPT_ENDS = 1000  # ends of children that no agent has heard of


class Zygote:
    """Forks on request; ``serve`` returns when there is nothing left to do."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener, self._path = listener, path
        self._agent: socket.socket | None = None
        self._unframer = Unframer()
        self._children: dict[str, Child] = {}
        self._keys: dict[int, str] = {}  # by pid
        self._nodes: set[str] = set()  # children that are zygotes of nodes
        self._unheard: dict[int, Ended] = {}  # by pid
        self._ending: dict[str, None] = {}  # children that were killed and are not gone yet
        self._next: dict[str, Spawn] = {}  # who takes their place then
        self._lease_seconds = START_SECONDS
        self._alone_since = time.monotonic()
        self._leaving = False
        self._selector = selectors.DefaultSelector()
        self._pumps = Pumps(self._selector)
        self._groups = Cgroups(path)
        self._wake, self._wake_writer = socket.socketpair()

    def serve(self) -> None:
        """Until it is told to leave, or the lease is over."""
        require_single_thread()
        become_subreaper()
        self._catch_signals()
        self._listener.setblocking(False)
        for source in (self._listener, self._wake):
            self._selector.register(source, selectors.EVENT_READ)
        while not self._leaving:
            for key, _ in self._selector.select(self._patience()):
                self._attend(key.fileobj)
            self._reap()
            alone = self._agent is None
            if alone and time.monotonic() - self._alone_since > self._lease_seconds:
                break
        self._end_children()

    def _catch_signals(self) -> None:
        self._wake.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # its agent decides, or the lease

    def _patience(self) -> float | None:
        wait = self._pumps.wake()
        if self._agent is not None:
            return wait
        left = max(0.05, self._alone_since + self._lease_seconds - time.monotonic())
        return left if wait is None else min(left, wait)

    def _attend(self, source: object) -> None:
        if source is self._listener:
            self._meet()
        elif source is self._wake:
            with suppress(BlockingIOError):
                while self._wake.recv(4096):
                    pass
        elif isinstance(source, Pump):
            self._pumps.attend(source)
        elif source is self._agent:
            self._listen()

    def _meet(self) -> None:
        """An agent has connected; one before it is gone."""
        with suppress(OSError):
            connection, _ = self._listener.accept()
            self._part()
            self._agent, self._unframer = connection, Unframer()
            self._selector.register(connection, selectors.EVENT_READ)
            ready = Ready(pid=os.getpid(), hears=True)
            self._tell(*self._children.values(), *self._unheard.values(), ready)

    def _part(self) -> None:
        if self._agent is not None:
            self._selector.unregister(self._agent)
            self._agent.close()
            self._agent = None
            self._next.clear()
            self._alone_since = time.monotonic()

    def _listen(self) -> None:
        assert self._agent is not None
        try:
            data = self._agent.recv(1 << 16)
            messages = [decode_to_zygote(body) for body in self._unframer.feed(data)]
        except (OSError, ValueError, RecursionError):  # whoever speaks so is not heard any more
            data, messages = b"", []
        for message in messages:
            self._obey(message)
        if not data:
            self._part()

    def _tell(self, *messages: FromZygote) -> None:
        if self._agent is None:
            return
        with suppress(OSError):
            self._agent.sendall(b"".join(framed(message) for message in messages))

    def _obey(self, message: ToZygote) -> None:
        match message:
            case Spawn():
                self._spawn(message)
            case Signal():
                self._signal(message)
            case Lease():
                self._lease_seconds = message.seconds
            case Leave():
                self._leaving = True
            case Heard():
                self._unheard.pop(message.pid, None)

    def _signal(self, order: Signal) -> None:
        child = self._children.get(order.key)
        if child is None:
            return
        if order.number == signal.SIGKILL:
            self._ending[order.key] = None
            if self._next.pop(order.key, None) is not None:
                self._tell(NotStarted(key=order.key, problem="it was ended before it began"))
        signal_child(child.pid, order.number)

    def _spawn(self, order: Spawn) -> None:
        if order.key in self._ending:
            self._next[order.key] = order  # whoever was killed is not taken for its successor
            return
        if order.key in self._children:
            self._tell(self._children[order.key])
            return
        serving: socket.socket | None = None
        port, output = 0, -1
        group: Path | None = None
        try:
            require_single_thread()
            if order.role == "program" and order.log:
                output = self._pumps.open(order.key, Path(order.log), owner_of(order.user))
                group = self._groups.make(order.key, order.containment)
            elif order.role == "member" and order.containment.group:
                group = self._groups.make(order.key, order.containment)
            if order.role in ("store", "program-store"):
                serving = listen_for_ranks(order.host, order.port)
                port = int(serving.getsockname()[1])
            zygote = os.getpid()
            pid = os.fork()
        except (OSError, RuntimeError, UnknownUserError) as error:
            if output >= 0:
                os.close(output)
            self._tell(NotStarted(key=order.key, problem=str(error)))
            return
        if pid == 0:
            be_child(self, order, zygote, Inherited(serving, output, group))
        if serving is not None:
            serving.close()
        if output >= 0:
            os.close(output)
        child = Child(key=order.key, pid=pid, port=port)
        self._children[order.key], self._keys[pid] = child, order.key
        if order.role == "zygote":
            self._nodes.add(order.key)
        self._tell(child)

    def _reap(self) -> None:
        reaped = False
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                reaped = True
                self._bury(*ended)
        if reaped:
            self._end_orphans()

    def _bury(self, pid: int, status: int) -> None:
        key = self._keys.pop(pid, None)
        if key is None:
            return  # an orphan of a child that is gone
        self._children.pop(key, None)
        signal_group(pid, signal.SIGKILL)  # what it started ends with it
        self._groups.end(key)
        self._pumps.drain(key)
        # An agent that was killed may have been told, and not have read it.
        end = self._unheard[pid] = Ended(key=key, pid=pid, status=os.waitstatus_to_exitcode(status))
        if len(self._unheard) > KEPT_ENDS:
            del self._unheard[next(iter(self._unheard))]
        self._tell(end)
        self._ending.pop(key, None)
        if key in self._next:
            self._spawn(self._next.pop(key))

    def _end_orphans(self) -> None:
        """Whoever left its group is still found: every child holds its own descendants while it
        lives, so those that come to us belonged to one that is gone.
        """
        if self._nodes:  # keepers of a node whose zygote was killed outlive it
            return
        for pid in own_children():
            if pid not in self._keys:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        self._groups.sweep()

    def _end_children(self) -> None:
        for key, child in list(self._children.items()):
            if key in self._nodes and not self._leaving:
                self._keys.pop(child.pid)  # a node of its own, which has a lease of its own
            else:
                signal_child(child.pid, signal.SIGKILL)
        self._end_orphans()
        with suppress(ChildProcessError):
            while self._keys or (not self._nodes and own_children()):
                pid, _ = os.waitpid(-1, 0)
                ended = self._keys.pop(pid, None)
                if ended is not None:
                    self._groups.end(ended)
                self._end_orphans()
        self._groups.close()
        self._part()
        Path(self._path).unlink(missing_ok=True)

    def forget_parent(self) -> None:
        """In a child: what belongs to the zygote is closed."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for each in (self._listener, self._agent, self._wake, self._wake_writer):
            if each is not None:
                each.close()
        self._pumps.close()
        self._selector.close()


def signal_group(pid: int, number: int) -> None:
    """Signal the group that a child led."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def signal_child(pid: int, number: int) -> None:
    """Signal a child that was not reaped, and its group, if it has come so far as to lead one."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)
    except PermissionError:
        pass


class Inherited(NamedTuple):
    """What the zygote made for a child before it forked it."""

    serving: socket.socket | None  # of a store
    output: int  # end of a pipe that a program writes to; -1: none
    group: Path | None  # control group of a program


def be_child(zygote: Zygote, order: Spawn, parent: int, made: Inherited) -> NoReturn:
    """The life of a forked child; it never returns into the zygote's code."""
    code = 1
    try:
        os.setsid()
        # A keeper outlives everybody for its lease, and another node's zygote is not ours.
        if order.role not in ("keeper", "zygote"):
            die_with_parent(parent)
        if order.role == "program":
            become_subreaper()  # so that nothing that it starts gets out of sight
        if made.group is not None:
            enter_group(made.group)
        zygote.forget_parent()
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
        code = play(order, made.serving)
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
    """What the references of a job stand for, read as its user."""
    try:
        return {
            name: value
            for name, value in resolved(order.environment).items()
            if value != order.environment[name]
        }
    except SecretError as error:
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


def play(order: Spawn, serving: socket.socket | None) -> int:
    """What a child of a role does; returns its exit code."""
    match order.role:
        case "member":
            from phalanx.control.worker.member import run_member

            return run_member(order.socket)
        case "program":
            from phalanx.control.agent.jobs.program import run_program

            return run_program(order)
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
            run(order.socket)
    return 0


def listen_for_ranks(host: str, port: int) -> socket.socket:
    """Where a store is to be: at a port that ranks know already, or at any."""
    if port:
        with suppress(OSError):
            return socket.create_server((host, port), backlog=1024)
    return socket.create_server((host, 0), backlog=1024)


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


def listen(path: str) -> socket.socket:
    """The zygote's socket, which only its own user can reach."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    Path(path).chmod(0o600)
    listener.listen(8)
    return listener


def run(path: str) -> None:
    """Be a zygote at this address."""
    Zygote(listen(path), path).serve()


def preload() -> None:
    """Import what workers need, so that they share it and start at once."""
    import phalanx.checkpoint.keeper.process
    import phalanx.control.worker.member
    import phalanx.train.rank.member  # noqa: F401

    gc.collect()
    gc.freeze()  # collection in a child would copy the pages that it shares


def main() -> None:
    """Entry point of the process that an agent starts."""
    parser = argparse.ArgumentParser(prog="phalanx.control.agent.spawn.zygote")
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    # Bound first: an agent may connect while torch is still being imported.
    listener = listen(options.socket)
    preload()
    try:
        Zygote(listener, options.socket).serve()
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise


if __name__ == "__main__":
    main()
