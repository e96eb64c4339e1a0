"""Files in folders that a user can write, opened by an agent that may be root.

Whoever owns a folder can put a link, a pipe or another's file there at any moment. So nothing is
followed, nothing is waited for, and what a file is and whose it is, is asked of the open file and
never of its name. ``chown`` and ``chmod`` by a path are never used.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: neither a pipe without a writer nor a lease of the file's owner holds us up.
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
LOG_MODE = 0o600  # what a job prints is its user's

_libc = ctypes.CDLL(None, use_errno=True)


class UnsafeFileError(OSError):
    """What lies there is not what it should be; nothing was read or written."""


class Owner(NamedTuple):
    """A user of this node."""

    uid: int
    gid: int


def open_regular(path: Path, flags: int = os.O_RDONLY, *, owner: int | None = None) -> int:
    """A file that is there, as a descriptor. ``owner``: whose it must be; None: anybody's.

    Neither the file nor the folder that it lies in may be a link. Where the file is not its
    ``owner``'s it must have one name only: hard links to others' files are refused.
    """
    folder = os.open(path.parent, FOLDER)
    try:
        return open_at(folder, path.name, flags, owner=owner, shown=str(path))
    finally:
        os.close(folder)


def open_at(
    folder: int, name: str, flags: int = os.O_RDONLY, *, owner: int | None = None, shown: str = ""
) -> int:
    """The same in a folder that is open."""
    if flags & (os.O_CREAT | os.O_TRUNC):
        raise ValueError("a file is made by create_at, and cut when it is known what it is")
    file = os.open(name, flags | FILE, dir_fd=folder)
    try:
        _require(os.fstat(file), owner, shown or name)
        os.set_blocking(file, True)
    except OSError:
        os.close(file)
        raise
    return file


def _require(status: os.stat_result, owner: int | None, shown: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFileError(f"{shown} is not a regular file")
    if owner is not None and status.st_uid not in (owner, os.geteuid()):
        raise UnsafeFileError(f"{shown} belongs to user {status.st_uid}, not to {owner}")
    if status.st_uid != owner and status.st_nlink > 1:
        raise UnsafeFileError(f"{shown} has several names")


def read_regular(path: Path) -> IO[bytes]:
    """The same to read from."""
    return os.fdopen(open_regular(path), "rb")


def create_at(folder: int, name: str, owner: Owner | None = None) -> int:
    """A file that was not there before, to write to; FileExistsError where something is."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | FILE
    file = os.open(name, flags, LOG_MODE, dir_fd=folder)
    try:
        os.set_blocking(file, True)
        if owner is not None and os.geteuid() == 0:
            os.fchown(file, *owner)
    except OSError:
        os.close(file)
        raise
    return file


def open_log(path: Path, owner: Owner | None = None) -> int:
    """The end of a log, which is made if it is not there; ``owner``: whose it is."""
    folder = os.open(path.parent, FOLDER)
    try:
        with suppress(FileExistsError):
            return create_at(folder, path.name, owner)
        whose = owner.uid if owner is not None and os.geteuid() == 0 else None
        flags = os.O_RDWR | os.O_APPEND
        file = open_at(folder, path.name, flags, owner=whose, shown=str(path))
        if whose is not None and os.fstat(file).st_uid != whose:
            os.close(file)
            raise UnsafeFileError(f"{path} is not its job's")
        return file
    finally:
        os.close(folder)


def replace_at(folder: int, name: str, data: bytes, owner: Owner | None = None) -> None:
    """A whole file in the place of whatever had its name."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    with os.fdopen(create_at(folder, name, owner), "wb") as file:
        file.write(data)


def make_folder(path: Path, mode: int = 0o755, owner: Owner | None = None) -> int:
    """A folder, open; its parent is there. One that lies there must be ours or its owner's."""
    parent = os.open(path.parent, FOLDER)
    try:
        made, ours = False, os.fstat(parent).st_uid == os.geteuid()
        # In a folder of the user's own, what we made could be another one a moment later.
        with suppress(FileExistsError), files_as(None if ours else owner):
            os.mkdir(path.name, 0o700, dir_fd=parent)  # nobody's but ours until it is whole
            made = ours
        folder = os.open(path.name, FOLDER, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        whose = os.fstat(folder).st_uid
        allowed = (os.geteuid(), *(owner[:1] if owner is not None else ()))
        if whose not in allowed and os.geteuid() == 0:
            raise UnsafeFileError(f"{path} belongs to user {whose}")
        if made:
            os.fchmod(folder, mode)
            if owner is not None and os.geteuid() == 0:
                os.fchown(folder, *owner)
    except OSError:
        os.close(folder)
        raise
    return folder


@contextmanager
def files_as(owner: Owner | None) -> Iterator[None]:
    """This thread makes and reaches files as a user; nothing else of it changes. Never awaited in.

    For what cannot be made through a descriptor: a socket is bound to a path.
    """
    if owner is None or os.geteuid() != 0:
        yield
        return
    _libc.setfsgid(owner.gid)
    _libc.setfsuid(owner.uid)
    try:
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(os.getegid())
