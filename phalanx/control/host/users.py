"""Users of a node: jobs run as whoever submitted them."""

from __future__ import annotations

import os
import pwd

from phalanx.control.host.process_tree import PROC


class UnknownUserError(Exception):
    """A job's user does not exist on this node, or may not run jobs here."""


def own_name() -> str:
    """Of the user that this process runs as; "admin" where the system has no name for it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return "admin"


def known_user(name: str) -> pwd.struct_passwd:
    """The user of this name; UnknownUserError says what to do where there is none."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise UnknownUserError(
            f"there is no user {name!r} here: make one, submit with a token of a user that "
            "exists, or start the agent with --as-agent"
        ) from None


def user_of(pid: int) -> str:
    """The name of the user that a process runs as; "" where it is gone or its user has no name."""
    try:
        # Not the owner of its folder: that is root for a process that was root before.
        status = (PROC / str(pid) / "status").read_text()
        uid = int(status.partition("\nUid:")[2].split()[0])
        return pwd.getpwuid(uid).pw_name
    except (OSError, ValueError, IndexError, KeyError):
        return ""


def require_permitted(name: str, *, least_uid: int, also: tuple[str, ...]) -> None:
    """UnknownUserError unless a root agent may run jobs as this user: never as root by itself."""
    if not name:
        raise UnknownUserError("the order names no user to run as")
    entry = known_user(name)
    if name not in also and entry.pw_uid < max(least_uid, 1):
        raise UnknownUserError(
            f"the agent is root and runs no jobs as {name} (uid {entry.pw_uid}): submit with the "
            "token of a person, name the user in `users.also` or lower `users.least_uid` of the "
            "agent's --config, or start it with --as-agent"
        )
