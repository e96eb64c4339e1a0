"""What a checkpoint says about itself: its place in the run, and what proves its files.

The manifest is created last, once, and never changed, so a folder that has one is complete.
It has two numbers a rank; all else about a shard is in the rank's sidecar, whose checksum is
one of the two.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from phalanx.checkpoint.format.geometry import RankGroup
from phalanx.data.corpus.checksum import crc32c
from phalanx.data.order.cursor import Cursor

VERSION = 2  # 1 was a folder of torch.distributed.checkpoint
MANIFEST_FILE = "manifest.json"
SEAL = b'{"checksum":"'  # what every sealed file begins with


class CheckpointError(Exception):
    """A checkpoint cannot be written or trusted: which one, what is wrong, what to do."""

    def __init__(
        self,
        path: Path | str,
        problems: str | list[str],
        fix: str = "",
        errno: int = 0,
        ranks: tuple[int, ...] = (),
    ) -> None:
        self.path = path
        self.problems = [problems] if isinstance(problems, str) else problems
        self.fix = fix
        self.errno = errno  # of the operating system, where that refused; 0: it did not
        self.ranks = ranks  # whose shards cannot be read or are not what was written
        super().__init__(path, self.problems, fix, errno, ranks)

    def __str__(self) -> str:
        lines = [f"checkpoint {self.path}: {self.problems[0]}", *self.problems[1:]]
        return "\n  ".join(lines) + (f"\n  fix: {self.fix}" if self.fix else "")


class LostPlaceError(CheckpointError):
    """A gang of a higher generation has taken over: this one must not go on."""


class KeeperLostError(CheckpointError):
    """The keeper process of a node is gone, and with it what it had not written."""


class BadCheckpointError(CheckpointError):
    """What is on disk is not what was written: an older checkpoint may do."""


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer adds to its tensors so that a run continues bit for bit."""

    tokens: int
    cursor: Cursor
    mesh: dict[str, int]  # size of each axis
    config_hash: str
    generation: int = 0
    config: dict[str, Any] = {}  # the resolved job, so that a checkpoint can be read alone
    rng: bytes = b""  # this rank's random generators


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """One rank's file."""

    bytes: int
    checksum: int  # crc32c of the sidecar, which has those of the file's chunks


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of one complete checkpoint."""

    version: int
    step: int
    generation: int
    tokens: int
    cursor: Cursor
    mesh: dict[str, int]
    world_size: int
    config_hash: str
    created: str  # UTC, ISO 8601
    session: str  # the writers' name, in the names of all files
    groups: tuple[RankGroup, ...]
    shards: tuple[Shard, ...] = ()  # by rank
    config: dict[str, Any] = {}
    ranks: int = 0  # of the run, where its files were divided anew; 0: one a shard
    origin: str = ""  # what it was imported from, where that says nothing of a run
    # Kept in the sidecars, not in the JSON; filled on load when the world size is the same.
    rng: bytes = b""

    @property
    def total_bytes(self) -> int:
        """Size of all shards together."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def run_ranks(self) -> int:
        """Ranks of the run that saved it, into however many files."""
        return self.ranks or self.world_size


class _ManifestVersion(msgspec.Struct, frozen=True):
    """The one field that every version has."""

    version: int


class _Sealed(msgspec.Struct, frozen=True):
    """The file around a manifest, the same in every version."""

    checksum: str
    manifest: msgspec.Raw


def shard_name(rank: int, session: str) -> str:
    """File of a rank's tensors."""
    return f"rank-{rank:05d}.{session}.safetensors"


def sidecar_name(rank: int, session: str, shard: Shard) -> str:
    """A sidecar's name says what the manifest must know: a listing is all a commit reads."""
    return f"rank-{rank:05d}.{session}.{shard.bytes}.{shard.checksum:08x}.json"


def parse_sidecar_name(name: str, session: str) -> tuple[int, Shard] | None:
    """Rank and shard of a sidecar of this session; None for any other file."""
    match = re.fullmatch(rf"rank-(\d+)\.{session}\.(\d+)\.([0-9a-f]{{8}})\.json", name)
    return (int(match[1]), Shard(int(match[2]), int(match[3], 16))) if match else None


def table_name(digest: str, session: str) -> str:
    """File of the table that the ranks of a group share."""
    return f"table-{digest}.{session}.json"


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, with its checksum around it."""
    return seal(msgspec.json.encode(msgspec.structs.replace(manifest, rng=b"")))


def seal(content: bytes) -> bytes:
    """JSON with its checksum around it."""
    return SEAL + b'%08x","manifest":%s}' % (crc32c(content), content)


def unseal(path: Path | str, name: str, text: bytes) -> bytes:
    """What ``seal`` was given; ``name`` is the file's in ``path``."""
    try:
        content = bytes(msgspec.json.decode(text, type=_Sealed).manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadCheckpointError(path, f"{name} is corrupt: {error}") from error
    if seal(content) != text:
        raise BadCheckpointError(path, f"{name} is corrupt: its checksum does not match")
    return content


def read_manifest(path: Path) -> Manifest:
    """Read and prove the manifest of a checkpoint folder."""
    try:
        text = (path / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise no_manifest(path, error) from error
    return parse_manifest(path, text)


def no_manifest(path: Path | str, error: OSError) -> BadCheckpointError:
    """Where there is none, nothing is complete."""
    reason = error.strerror or "not found"
    return BadCheckpointError(
        path, f"no readable {MANIFEST_FILE} ({reason}): incomplete or no checkpoint"
    )


def parse_manifest(path: Path | str, text: bytes) -> Manifest:
    """Prove and decode a manifest; ``path`` is where it was found."""
    _refuse_old(path, text)
    content = unseal(path, MANIFEST_FILE, text)
    try:
        version = msgspec.json.decode(content, type=_ManifestVersion).version
        if version != VERSION:
            problem = f"{MANIFEST_FILE} has version {version}, this Phalanx reads {VERSION}"
            raise CheckpointError(path, problem, "load it with the Phalanx that wrote it")
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadCheckpointError(path, f"{MANIFEST_FILE} is corrupt: {error}") from error
    for name in (manifest.session, *(group.table for group in manifest.groups)):
        if "/" in name or "\0" in name:  # it is part of the names of files
            problem = f"{MANIFEST_FILE} names files outside of its folder ({name!r})"
            raise BadCheckpointError(path, problem)
    return manifest


def _refuse_old(path: Path | str, text: bytes) -> None:
    """Version 1 had no seal around it."""
    try:
        version = msgspec.json.decode(text, type=_ManifestVersion).version
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    problem = f"was written as version {version}, a folder of torch.distributed.checkpoint"
    raise CheckpointError(path, problem, f"phalanx ckpt import {path} NEW_FOLDER")
