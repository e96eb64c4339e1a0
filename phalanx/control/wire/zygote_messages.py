"""What an agent and its zygote say to each other: msgpack with a length, over a Unix socket."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

Role = Literal["member", "program", "keeper", "store", "program-store", "zygote", "doctor"]


class Containment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The bounds of one process; what is 0 is not bounded."""

    no_new_privileges: bool = True
    core_bytes: int = 0  # of a core dump
    group: str = ""  # control group below which jobs have theirs; "": the zygote's own
    memory_bytes: int = 0  # of all processes of the job here
    processes: int = 0  # of the job here, threads too
    cpu_weight: int = 0


class ZygoteFrame(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all messages."""


# Agent to zygote.


class Spawn(ZygoteFrame, frozen=True, tag=True):
    """Fork a child. ``key`` names it; there is one of a key at a time."""

    key: str
    role: Role
    log: str = ""  # file for its output; "": the zygote's own
    environment: dict[str, str] = {}
    folder: str = ""
    user: str = ""  # whom it runs as, where the zygote is root
    argv: tuple[str, ...] = ()  # of a program; what a doctor is to examine, and where to report
    socket: str = ""  # of a keeper, a zygote, or the agent that a member talks to
    host: str = ""  # where a store or a keeper listens
    port: int = 0  # of a store that takes another's place, if it is still free; 0: any
    lease_seconds: float = 60.0  # of a keeper
    cores: tuple[int, ...] = ()  # that it is bound to; (): all
    namespace: str = ""  # of the network; "": the zygote's own
    memory_node: int = -1  # NUMA node whose memory it prefers; -1: any
    containment: Containment = Containment()
    rank: int = -1  # of a program
    store: tuple[str, int, str] = ("", 0, "")  # where a program's ranks meet: host, port, prefix
    own_port: int = 0  # of a store for this program alone, told by its first rank
    launches: tuple[int, int, int] = (0, 0, 0)  # of a launcher: its node, nodes, ranks a node


class Signal(ZygoteFrame, frozen=True, tag=True):
    """Send a signal to a child and to everything that it started."""

    key: str
    number: int


class Lease(ZygoteFrame, frozen=True, tag=True):
    """Without an agent, the zygote and its children end after this time."""

    seconds: float


class RenewPrograms(ZygoteFrame, frozen=True, tag=True):
    """Programs may run for ``left`` seconds more, which is a part of ``lease``; then they end.

    Until the first such word they end with the zygote's own lease.
    """

    lease: float
    left: float


class Leave(ZygoteFrame, frozen=True, tag=True):
    """End all children, and the zygote."""


class Heard(ZygoteFrame, frozen=True, tag=True):
    """The agent knows of the end of a child: the next one needs not be told."""

    pid: int


# Zygote to agent.


class Child(ZygoteFrame, frozen=True, tag=True):
    """A child that lives."""

    key: str
    pid: int
    port: int = 0  # of a store


class Ended(ZygoteFrame, frozen=True, tag=True):
    """A child is gone. ``status``: its exit code, or minus the signal that ended it."""

    key: str
    pid: int
    status: int
    why: str = ""  # the zygote ended it; "": it did not


class NotStarted(ZygoteFrame, frozen=True, tag=True):
    """A child could not be forked."""

    key: str
    problem: str


class ZygoteReady(ZygoteFrame, frozen=True, tag="Ready"):
    """The zygote has told of all its children; ``hears``: it understands ``Heard``.

    ``program_lease``: the last one of ``RenewPrograms``; 0: none came, -1: it knows no such word.
    """

    pid: int
    hears: bool = False
    program_lease: float = -1.0


ToZygote = Spawn | Signal | Lease | RenewPrograms | Leave | Heard
FromZygote = Child | Ended | NotStarted | ZygoteReady

decode_to_zygote = msgspec.msgpack.Decoder(ToZygote).decode
decode_from_zygote = msgspec.msgpack.Decoder(FromZygote).decode
