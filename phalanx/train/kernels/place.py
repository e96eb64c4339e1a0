"""Folders that only their owner could have filled, and locks in them.

What compilers cache is code that a later process loads. Nothing is loaded from a folder into which
anybody else could have put it: what a folder or file is, and whose, is asked of it when it is open.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
POLL_SECONDS = 0.05


class NotPrivateError(OSError):
    """Others may have written what lies there."""


def make_private(path: Path) -> Path:
    """The folder, made where there is none; refused where others can write into it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, FOLDER)
    try:
        require_private(descriptor, path)
    finally:
        os.close(descriptor)
    return path


def require_private(descriptor: int, path: Path) -> None:
    """Refuse an open file or folder that is another user's, or that others can write."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise NotPrivateError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & OTHERS_WRITE:
        raise NotPrivateError(f"{path} can be written by others: chmod go-w it")


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[bool]:
    """Whether we have the lock within so many seconds; nobody waits for a dead holder."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + seconds
        while not (mine := try_lock(descriptor, fcntl.LOCK_EX)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        yield mine
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, how: int) -> bool:
    """Take an open file's lock unless somebody else is in the way."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def versions(device: torch.device) -> dict[str, str]:
    """All that compiled code depends on beside what it is compiled from."""
    found = {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "cuda": str(torch.version.cuda),
        "triton": _version("triton"),
        "python": f"{sys.implementation.cache_tag} {platform.machine()}",
        "processor": _processor(),  # C++ kernels are compiled for the very one
        "device": "cpu",
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["device"] = f"{about.name} {about.major}.{about.minor}"
    return found


def key_of(found: dict[str, str]) -> str:
    """A name for these versions."""
    text = json.dumps(found, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line for line in lines if line.startswith(("model name", "flags", "Features")))
    return " ".join(sorted(set(named)))
