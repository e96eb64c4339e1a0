"""What the controller machine wants its shell to do."""

from __future__ import annotations

from enum import Enum, auto
from typing import Generic, TypeVar

from msgspec import Struct

from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import EventBody
from phalanx.cluster.protocol.message_rights import MessageRefusal
from phalanx.cluster.protocol.messages import AgentMessage, InspectGang

Connection = TypeVar("Connection")


class CloseReason(Enum):
    """Why the controller ends a connection."""

    REPLACED = auto()  # the agent has connected again
    GIVEN_UP = auto()  # it speaks again after it was given up: what it runs may be wrong by now
    SILENT = auto()
    WRONG_NODE = auto()  # it spoke for another node


class Close(Struct, Generic[Connection], frozen=True):
    """End a connection, and say why."""

    node: int
    connection: Connection
    reason: CloseReason


class Send(Struct, frozen=True):
    """A command for nodes; those without a connection miss it, and it is sent again."""

    command: Command
    nodes: tuple[int, ...]


class AskRanks(Struct, frozen=True):
    """Ask nodes what their ranks do; where one cannot be asked, say so by ``not_asked``."""

    order: InspectGang
    nodes: tuple[int, ...]


class GangRuns(Struct, frozen=True):
    """The steps of a job's gang are watched from now on."""

    job: int


class GangOver(Struct, frozen=True):
    """They no longer are."""

    job: int


class Disbelieved(Struct, frozen=True):
    """A message was not taken in."""

    node: int
    message: AgentMessage
    why: MessageRefusal


# Events are for the log and the core; the rest is for the shell.
Output = EventBody | Send | Close[Connection] | AskRanks | GangRuns | GangOver | Disbelieved
