"""Users of a node: jobs run as whoever submitted them."""

from __future__ import annotations

import os
import pwd


class UnknownUserError(Exception):
    """A job's user does not exist on this node."""


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
