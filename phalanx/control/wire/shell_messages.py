"""What a shell on a node says on its way through the server: frames of the agent's connection."""

from __future__ import annotations

from msgspec import Struct

MOST_UNREAD = 64  # pieces of output that may be on their way
PIECE_BYTES = 16 << 10


class ShellFrame(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all; ``request`` names the shell."""

    request: int


# Down.


class OpenShell(ShellFrame, frozen=True, tag=True):
    """Start a shell in the environment of a job; ``argv`` (): the user's own shell."""

    job: int
    argv: tuple[str, ...] = ()
    rows: int = 24
    columns: int = 80
    terminal: str = "xterm"


class ShellInput(ShellFrame, frozen=True, tag=True):
    """What was typed, or a new size."""

    data: bytes = b""
    rows: int = 0
    columns: int = 0
    read: int = 0  # pieces of output that arrived: so many more may be sent


class CloseShell(ShellFrame, frozen=True, tag=True):
    """Nobody is there any more."""


# Up.


class ShellOutput(ShellFrame, frozen=True, tag=True):
    """What it prints; ``end``: it is over."""

    data: bytes = b""
    end: bool = False
    status: int = 0
    problem: str = ""


ShellDown = OpenShell | ShellInput | CloseShell
