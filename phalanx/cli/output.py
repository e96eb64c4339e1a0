"""What every command prints: JSON, what is wrong with a configuration, an early stop."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import typer

from phalanx.config import ConfigError


def print_json(value: object) -> None:
    """One JSON document, indented."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


# What a file system refuses a person, and what would help.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
MISPLACED = (errno.ENOTDIR, errno.EEXIST)


def file_problem(error: OSError, out: Path | None = None) -> str:
    """What a file system or store refused, where, and what would help."""
    where = error.filename or out or ""
    named = f"{where}: " if where else ""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        left = f" (nothing of {out} is left there)" if out else ""
        return f"{named}there is no room: {reason}{left}\n  fix: free space, or name a larger disk"
    if error.errno in FORBIDDEN:
        keys = "give the store's endpoint and keys in the environment"
        fix = keys if "://" in str(where) else "name a folder that you may read and write"
        return f"{named}is not allowed: {reason}\n  fix: {fix}"
    if error.errno in MISPLACED:
        return f"{named}{reason}\n  fix: name a new folder, not below a file"
    return f"{named}{reason}"


def fail(error: object, code: int = 1, shown: object = None) -> NoReturn:
    """End a command with what is wrong, in words or, where ``shown`` is given, as that in JSON."""
    if shown is not None:
        print_json(shown)
    else:
        text = file_problem(error) if isinstance(error, OSError) else error
        print(f"error: {text}", file=sys.stderr)
    raise typer.Exit(code) from None


def refuse_unwritable(path: Path | None, option: str) -> None:
    """Refuse a file that cannot be written, before the minutes of work that it is to hold."""
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder: name a file", param_hint=option)
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        rule = f"{path}: {path.parent} is no folder to write into"
        raise typer.BadParameter(rule, param_hint=option)


def write_out(path: Path, data: bytes, option: str = "--out") -> None:
    """Write a file that the user named; what is wrong with it is said in words."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None


@contextmanager
def exit_on(*errors: type[Exception], code: int = 1) -> Iterator[None]:
    """Have such errors end the command."""
    try:
        yield
    except errors as error:
        fail(error, code)


@contextmanager
def exit_on_config_error(json: bool = False) -> Iterator[None]:
    """Print what is wrong with a configuration and end with exit code 2."""
    try:
        yield
    except ConfigError as error:
        if json:
            print_json({"problems": error.problems})
        else:
            for found in error.problems:
                print(f"error: {found}", file=sys.stderr)
        raise typer.Exit(2) from None


def print_stopped_early(json: bool, reason: str) -> None:
    """The last word of a command that was asked to stop before any rank ran."""
    message = "stopped on request before the run began"
    if json:
        last = {"kind": "exit", "code": 0, "reason": reason, "message": message}
        print(msgspec.json.encode(last).decode(), flush=True)
    else:
        print(f"{message} ({reason})", flush=True)
