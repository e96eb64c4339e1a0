"""The zygote: one process a node with torch imported and a single thread, which forks the others.

A fork takes hundredths of a second where a start takes seconds. Workers, keepers and stores are
its children: it tells the agent when one ends, and outlives the agent for a lease, so that the
next agent finds everything as it was. After the lease it ends with all of them.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from phalanx.train.rank.threads import keep_single_threaded, require_single_thread

keep_single_threaded()

# ruff: noqa: E402 - these load numpy and torch, whose pools must not exist when it forks
from phalanx.checkpoint.keeper.frames import Unframer, framed
from phalanx.checkpoint.keeper.open_saves import ABANDON
from phalanx.control.agent.spawn.cgroups import Cgroups
from phalanx.control.agent.spawn.child import Inherited, ParentZygote, be_child, owner_of
from phalanx.control.agent.spawn.output_pump import Pump, Pumps
from phalanx.control.agent.spawn.program_fence import ProgramFence
from phalanx.control.host.process_tree import become_subreaper, own_children
from phalanx.control.host.users import UnknownUserError
from phalanx.control.wire.zygote_messages import (
    Child,
    Ended,
    FromZygote,
    Heard,
    Lease,
    Leave,
    NotStarted,
    RenewPrograms,
    Signal,
    Spawn,
    ToZygote,
    ZygoteReady,
    decode_to_zygote,
)

START_SECONDS = 600.0  # for the first agent to come
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
        self._fence = ProgramFence()
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
            self._end_fenced()
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
        waits = (self._pumps.wake(), self._fence.wait_seconds())
        wait = min((each for each in waits if each is not None), default=None)
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
            ready = ZygoteReady(pid=os.getpid(), hears=True, program_lease=self._fence.lease)
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
            case RenewPrograms():
                self._fence.renew(message)
            case Leave():
                self._leaving = True
            case Heard():
                self._unheard.pop(message.pid, None)

    def _signal(self, order: Signal) -> None:
        child = self._children.get(order.key)
        if child is None:
            return
        if order.number in (signal.SIGKILL, ABANDON):
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
            parent = ParentZygote(zygote, self._forget, run)
            be_child(order, Inherited(serving, output, group), parent)
        if serving is not None:
            serving.close()
        if output >= 0:
            os.close(output)
        child = Child(key=order.key, pid=pid, port=port)
        self._children[order.key], self._keys[pid] = child, order.key
        if order.role == "zygote":
            self._nodes.add(order.key)
        elif order.role == "program":
            self._fence.programs[order.key] = None
        self._tell(child)

    def _end_fenced(self) -> None:
        """Others may start these programs from now on: they end, whatever they do."""
        for key in self._fence.due():
            self._signal(Signal(key=key, number=signal.SIGKILL))
            self._groups.end(key)

    def _reap(self) -> None:
        reaped = False
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                reaped = True
                self._report_exit(*ended)
        if reaped:
            self._end_orphans()

    def _report_exit(self, pid: int, status: int) -> None:
        key = self._keys.pop(pid, None)
        if key is None:
            return  # an orphan of a child that is gone
        self._children.pop(key, None)
        signal_group(pid, signal.SIGKILL)  # what it started ends with it
        self._groups.end(key)
        self._pumps.drain(key)
        # An agent that was killed may have been told, and not have read it.
        code, why = os.waitstatus_to_exitcode(status), self._fence.ended(key)
        end = self._unheard[pid] = Ended(key=key, pid=pid, status=code, why=why)
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
        if self._nodes and not self._leaving:
            return  # keepers of a node whose zygote was killed outlive it
        try:
            children = own_children()
        except OSError:  # no descriptor is left to look with: those that live end with the next
            children = []
        for pid in children:
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
        alone = self._leaving or not self._nodes
        with suppress(ChildProcessError):
            while self._keys or (alone and own_children()):
                self._end_orphans()  # also those that came since: whoever is left is about to end
                pid, _ = os.waitpid(-1, 0)
                ended = self._keys.pop(pid, None)
                if ended is not None:
                    self._groups.end(ended)
        self._end_orphans()
        self._groups.close()
        self._part()
        Path(self._path).unlink(missing_ok=True)

    def _forget(self) -> None:
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


def listen_for_ranks(host: str, port: int) -> socket.socket:
    """Where a store is to be: at a port that ranks know already, or at any."""
    if port:
        with suppress(OSError):
            return socket.create_server((host, port), backlog=1024)
    return socket.create_server((host, 0), backlog=1024)


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
    import phalanx.control.worker.process
    import phalanx.train.rank.rank  # noqa: F401

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
