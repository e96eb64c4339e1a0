"""How far the log was acknowledged, in a small file outside the database.

A database that loses its newest transactions (its WAL deleted, a disk put back to yesterday) is
whole as far as it can tell. This file says how far it must go. It is overwritten in place with
every commit, two slots in turn, so that a torn write leaves the one before. A killed server loses
nothing of it; the disk has it within a second (``sync``), which is all that a power cut can cost.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from phalanx.control.server.store.chain import LINK_BYTES, START, seal

SLOT_BYTES = 4096  # a page each, so that no write touches both
_MAGIC = b"phalanxA"
_FIELDS = struct.Struct(f">8sQQQ{LINK_BYTES}s{LINK_BYTES}s{LINK_BYTES}s")


class AnchorError(Exception):
    """The file is there and says nothing that can be believed."""


class AnchorMark(Struct, frozen=True):
    """What the log must hold."""

    epoch: int  # of the leader that wrote it
    sequence: int  # of the last acknowledged event
    chain: bytes = START  # its checksum
    keys: bytes = START  # checksum of tokens and secrets
    next_keys: bytes = START  # the same once the transaction under way is stored


class Anchor:
    """The file; written by whoever leads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._writes = 0
        self._unsynced = False
        self._draft = False

    def read(self) -> AnchorMark | None:
        """The newest mark; None: there is no file. AnchorError where it is damaged."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        found = [slot for slot in map(_slot, (data, data[SLOT_BYTES:])) if slot is not None]
        if not found:
            raise AnchorError(f"{self.path} is damaged")
        self._writes, mark = max(found, key=lambda slot: slot[0])
        return mark

    def write(self, mark: AnchorMark) -> None:
        """Overwrite the older slot; OSError leaves the newer one."""
        if self._file < 0:
            self._open()
        self._writes += 1
        fields = (mark.epoch, mark.sequence, mark.chain, mark.keys, mark.next_keys)
        data = _FIELDS.pack(_MAGIC, self._writes, *fields)
        os.pwrite(self._file, data + seal(data), self._writes % 2 * SLOT_BYTES)
        self._unsynced = True
        if self._draft:
            self._show()

    def _open(self) -> None:
        """The file as it is, or a draft of one that is shown once it says something."""
        whole = self.path.exists() and self.path.stat().st_size >= 2 * SLOT_BYTES
        with suppress(AnchorError):  # a damaged one is written anew
            self.read()
        path = self.path if whole else self.path.with_name(f".{self.path.name}.new")
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not whole:
                os.posix_fallocate(handle, 0, 2 * SLOT_BYTES)  # later writes need no new room
        except OSError:
            os.close(handle)
            raise
        self._file, self._draft = handle, not whole

    def _show(self) -> None:
        self.sync()
        self.path.with_name(f".{self.path.name}.new").rename(self.path)
        _sync_folder(self.path.parent)
        self._draft = False

    def sync(self) -> None:
        """On the disk when this returns."""
        if self._unsynced:
            self._unsynced = False
            os.fdatasync(self._file)

    def close(self) -> None:
        """Sync and let go."""
        if self._file >= 0:
            with suppress(OSError):
                self.sync()
            os.close(self._file)
            self._file = -1


def _slot(data: bytes) -> tuple[int, AnchorMark] | None:
    body, sealed = data[: _FIELDS.size], data[_FIELDS.size : _FIELDS.size + LINK_BYTES]
    if len(body) < _FIELDS.size or not body.startswith(_MAGIC) or seal(body) != sealed:
        return None
    _, writes, *fields = _FIELDS.unpack(body)
    return writes, AnchorMark(*fields)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
