"""What a checkpoint says about itself: its place in the run, and every file with its checksum.

The manifest is written last and never changed, so a folder that has one is complete.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Self

import msgspec

from phalanx.data.cursor import Cursor

VERSION = 1
MANIFEST_FILE = "manifest.json"
CHUNK_BYTES = 8 << 20  # of a file read at a time for its checksum


class CheckpointError(Exception):
    """A checkpoint cannot be written or trusted: which one, what is wrong, what to do."""

    def __init__(self, path: Path, problems: str | list[str], fix: str = "") -> None:
        self.path = path
        self.problems = [problems] if isinstance(problems, str) else problems
        self.fix = fix
        super().__init__(path, self.problems, fix)

    def __str__(self) -> str:
        lines = [f"checkpoint {self.path}: {self.problems[0]}", *self.problems[1:]]
        return "\n  ".join(lines) + (f"\n  fix: {self.fix}" if self.fix else "")


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer adds to its tensors so that a run continues bit for bit."""

    tokens: int
    cursor: Cursor
    mesh: dict[str, int]  # size of each axis
    config_hash: str
    generation: int = 0
    config: dict[str, Any] = {}  # the resolved job, so that a checkpoint can be read alone
    rng: bytes = b""  # this rank's random generators


class Shard(msgspec.Struct, frozen=True):
    """One file of the checkpoint."""

    file: str  # relative to the checkpoint's folder
    bytes: int
    checksum: int  # crc32

    @classmethod
    def of(cls, path: Path) -> Self:
        """Describe a file as it is on disk now."""
        return cls(path.name, path.stat().st_size, file_checksum(path))


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
    shards: tuple[Shard, ...]
    config: dict[str, Any] = {}
    checksum: int = 0  # crc32 of this manifest's encoding without this field
    # Kept in a file a rank, not in the JSON; filled on load when the world size is the same.
    rng: bytes = b""

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(shard.bytes for shard in self.shards)


class _Versioned(msgspec.Struct, frozen=True):
    """The one field that every version has."""

    version: int


def file_checksum(path: Path) -> int:
    """crc32 of a file's content."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, with its own checksum."""
    bare = msgspec.structs.replace(manifest, checksum=0, rng=b"")
    sealed = msgspec.structs.replace(bare, checksum=zlib.crc32(msgspec.json.encode(bare)))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1)


def read_manifest(path: Path) -> Manifest:
    """Read and prove the manifest of a checkpoint folder."""
    try:
        text = (path / MANIFEST_FILE).read_bytes()
    except OSError as error:
        problem = f"no readable {MANIFEST_FILE} ({error.strerror}): incomplete or no checkpoint"
        raise CheckpointError(path, problem) from error
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
        if version > VERSION:
            problem = f"{MANIFEST_FILE} has version {version}, this Phalanx reads {VERSION}"
            raise CheckpointError(path, problem, "load it with a newer Phalanx")
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"{MANIFEST_FILE} is corrupt: {error}") from error
    if encode(manifest) != text:
        raise CheckpointError(path, f"{MANIFEST_FILE} is corrupt: its checksum does not match")
    return manifest


def verify_shard(path: Path, shard: Shard) -> str | None:
    """What is wrong with one file of the checkpoint at ``path``, or None."""
    file = path / shard.file
    try:
        size = file.stat().st_size
        if size != shard.bytes:
            return f"{shard.file} has {size} bytes instead of {shard.bytes} (truncated or replaced)"
        if file_checksum(file) != shard.checksum:
            return f"{shard.file} is corrupt: its checksum does not match the manifest"
    except OSError as error:
        return f"{shard.file} cannot be read: {error.strerror}"
    return None
