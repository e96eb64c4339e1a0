"""A place for checkpoints: a folder, or a prefix of an object store, with the same few words.

A checkpoint counts from the moment that it has a manifest, which is created once; removing one
begins with the manifest, so a crash in the middle leaves nothing that looks complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from phalanx.checkpoint.format.direct import WriteRate, write_file
from phalanx.checkpoint.format.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    no_manifest,
    parse_manifest,
    shard_name,
)
from phalanx.checkpoint.format.source import FolderSource, NamedSource, ShardReader
from phalanx.checkpoint.retention import (
    RetentionDecision,
    RetentionEntry,
    RetentionPolicy,
    decide,
)
from phalanx.config.errors import first_line
from phalanx.data.durable_files import create_once, write_atomically

if TYPE_CHECKING:
    from obstore.store import ObjectStore

BAD_FILE = "bad.json"  # in a checkpoint that failed its proof: it is not tried again
VERIFIED_FILE = "verified"  # in a checkpoint whose every byte was proved, and when
PIN_FILE = "pinned"  # in a checkpoint that retention leaves alone
SCORES_FILE = "scores.jsonl"  # beside the checkpoints: validation losses by step
DOOMED = ".removed"  # suffix of a folder that is being deleted
PART_BYTES = 16 << 20  # of a multipart upload


class Tier(Protocol):
    """Where checkpoints are. Names are those of steps' folders; failures are OSError."""

    @property
    def where(self) -> str: ...

    def names(self) -> list[str]:
        """Complete checkpoints."""

    def files(self, name: str) -> dict[str, int]:
        """Sizes of a checkpoint's files, by name; empty where there is none."""

    def bytes_below(self) -> int:
        """Of everything here, whatever it is."""

    def read(self, file: str) -> bytes: ...

    def write(self, file: str, content: bytes) -> None: ...

    def drop(self, file: str) -> None:
        """Remove one file, if it is there."""

    def create(self, file: str, content: bytes) -> bool:
        """Write only if there is no such file; whether it was written."""

    def upload(self, file: str, size: int, buffers: Iterator[memoryview]) -> None:
        """Write a large file whose buffers are of WRITE_BYTES but for the last."""

    def delete(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""

    def source(self, name: str) -> NamedSource: ...


class FolderTier:
    """Checkpoints on a file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def names(self) -> list[str]:
        found = (path.parent.name for path in self.root.glob(f"step-*/{MANIFEST_FILE}"))
        return sorted(name for name in found if step_of(name) >= 0)

    def files(self, name: str) -> dict[str, int]:
        try:
            with os.scandir(self.root / name) as entries:
                return {entry.name: entry.stat().st_size for entry in entries}
        except FileNotFoundError:
            return {}

    def bytes_below(self) -> int:
        total = 0
        for file in self.root.rglob("*"):
            with suppress(OSError):  # it may go away under our eyes
                total += file.stat().st_size if file.is_file() else 0
        return total

    def read(self, file: str) -> bytes:
        return (self.root / file).read_bytes()

    def write(self, file: str, content: bytes) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, f"{os.getpid()}.tmp")

    def drop(self, file: str) -> None:
        (self.root / file).unlink(missing_ok=True)

    def create(self, file: str, content: bytes) -> bool:
        path = self.root / file
        return create_once(path, content, f"{os.getpid()}.tmp")

    def upload(self, file: str, size: int, buffers: Iterator[memoryview]) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of an attempt that failed
        write_file(path, size, buffers, WriteRate())

    def delete(self, name: str) -> None:
        shutil.rmtree(self.doom(name))

    def doom(self, name: str) -> Path:
        """Take a checkpoint out of sight; what is left of it only needs to be cleared away."""
        doomed = self.root / (name + DOOMED)
        (self.root / name).rename(doomed)
        return doomed

    def source(self, name: str) -> NamedSource:
        return FolderSource(self.root / name)


class ObjectTier:
    """Checkpoints in an object store."""

    def __init__(self, url: str) -> None:
        from phalanx.data.errors import DataError
        from phalanx.data.remote.store import connect

        self.where = url.rstrip("/")
        try:
            self._client: ObjectStore = connect(self.where)
        except DataError as error:  # it speaks of corpora
            fix = "name a folder, or an address such as s3://bucket/folder"
            raise CheckpointError(url, error.problems[0].rule, fix) from None

    def names(self) -> list[str]:
        return [n for n in self.folders() if step_of(n) >= 0 and self._has_manifest(n)]

    def folders(self) -> list[str]:
        """Names directly below the prefix that have something below them."""
        with translated(self.where):
            found = self._client.list_with_delimiter()["common_prefixes"]
        return sorted(name.rstrip("/") for name in found)

    def _has_manifest(self, name: str) -> bool:
        try:
            with translated(self.where):
                self._client.head(f"{name}/{MANIFEST_FILE}")
        except FileNotFoundError:
            return False
        return True

    def files(self, name: str) -> dict[str, int]:
        with translated(self.where):
            batches = list(self._client.list(prefix=f"{name}/"))
        return {
            str(item["path"]).rsplit("/", 1)[-1]: int(item["size"])
            for batch in batches
            for item in batch
        }

    def bytes_below(self) -> int:
        with translated(self.where):
            return sum(int(item["size"]) for batch in self._client.list() for item in batch)

    def read(self, file: str) -> bytes:
        with translated(f"{self.where}/{file}"):
            return bytes(self._client.get(file).bytes())

    def write(self, file: str, content: bytes) -> None:
        with translated(f"{self.where}/{file}"):
            self._client.put(file, content)

    def drop(self, file: str) -> None:
        with translated(f"{self.where}/{file}"):
            self._client.delete(file)

    def create(self, file: str, content: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            with translated(f"{self.where}/{file}"):
                self._client.put(file, content, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        except AlreadyExistsError:
            return False
        return True

    def upload(self, file: str, size: int, buffers: Iterator[memoryview]) -> None:
        with translated(f"{self.where}/{file}"):
            content = _cut_to(size, buffers)
            self._client.put(
                file, content, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=4
            )

    def delete(self, name: str) -> None:
        files = self.files(name)
        with translated(f"{self.where}/{name}"):
            if MANIFEST_FILE in files:
                self._client.delete(f"{name}/{MANIFEST_FILE}")
            for file in files:
                if file != MANIFEST_FILE:
                    self._client.delete(f"{name}/{file}")

    def source(self, name: str) -> NamedSource:
        return ObjectSource(self, name)

    def read_range(self, file: str, offset: int, length: int) -> memoryview:
        """Some bytes of an object."""
        with translated(f"{self.where}/{file}"):
            return memoryview(self._client.get_range(file, start=offset, length=length))


class ObjectSource(NamedSource):
    """A checkpoint in an object store."""

    def __init__(self, tier: ObjectTier, name: str) -> None:
        self.where = f"{tier.where}/{name}"
        self._tier, self._name = tier, name
        try:
            text = tier.read(f"{name}/{MANIFEST_FILE}")
        except FileNotFoundError as error:
            raise no_manifest(self.where, error) from error
        self.manifest = parse_manifest(self.where, text)
        self._sizes = tier.files(name)

    def read_small(self, name: str) -> bytes:
        return self._tier.read(f"{self._name}/{name}")

    def open_shard(self, rank: int, direct: bool) -> ShardReader:
        name = shard_name(rank, self.manifest.session)
        if name not in self._sizes:
            raise FileNotFoundError(2, "no such object", name)
        return ObjectReader(self._tier, f"{self._name}/{name}", self._sizes[name])


class ObjectReader:
    """A shard in an object store, by ranges."""

    def __init__(self, tier: ObjectTier, file: str, size: int) -> None:
        self._tier, self._file, self.bytes = tier, file, size

    def read(self, buffer: memoryview, offset: int) -> int:
        length = min(len(buffer), self.bytes - offset)
        found = self._tier.read_range(self._file, offset, length)
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None: ...


def open_tier(where: Path | str) -> Tier:
    """The tier at a path or address."""
    text = str(where)
    return ObjectTier(text) if "://" in text else FolderTier(Path(text))


def open_source(where: Path | str) -> NamedSource:
    """The checkpoint at a path or address."""
    text = str(where)
    if "://" not in text:
        return FolderSource(Path(text))
    root, _, name = text.rstrip("/").rpartition("/")
    return ObjectTier(root).source(name)


def step_of(name: str) -> int:
    """The step in a checkpoint's name; -1 for any other name."""
    match = re.fullmatch(r"step-(\d+)(?:\.g\d+)?", name)
    return int(match[1]) if match else -1


def read_scores(folder: Path) -> dict[int, float]:
    """Validation losses by step; damaged lines are passed over, since they prove nothing."""
    try:
        lines = (folder / SCORES_FILE).read_bytes().splitlines()
    except OSError:
        return {}
    scores = {}
    for line in lines:
        try:
            step, loss = msgspec.json.decode(line, type=tuple[int, float])
        except msgspec.DecodeError:
            continue
        scores[step] = loss
    return scores


def add_score(folder: Path, step: int, loss: float) -> None:
    """Remember a validation loss, for the retention of the best."""
    with (folder / SCORES_FILE).open("ab") as file:
        file.write(msgspec.json.encode((step, loss)) + b"\n")


def entries(tier: Tier, scores: dict[int, float], *, sized: bool) -> list[RetentionEntry]:
    """The complete checkpoints of a tier as retention sees them."""
    complete = []
    for name in tier.names():
        files = tier.files(name)
        complete.append(
            RetentionEntry(
                name,
                step_of(name),
                sum(files.values()) if sized else 0,
                scores.get(step_of(name)),
                PIN_FILE in files,
                BAD_FILE in files,
            )
        )
    return complete


def retain(
    tier: Tier,
    policy: RetentionPolicy,
    scores: dict[int, float],
    newest: str = "",
) -> RetentionDecision:
    """Remove from a tier what its policy does not keep."""
    found = entries(tier, scores, sized=policy.quota_bytes > 0)
    decision = decide(found, policy, newest)
    for name in decision.removed:
        tier.delete(name)
    return decision


def _cut_to(size: int, buffers: Iterator[memoryview]) -> Iterator[bytes]:
    left = size
    for buffer in buffers:
        yield bytes(buffer[:left])
        left -= min(left, len(buffer))


@contextmanager
def translated(what: str) -> Iterator[None]:
    """An object store's own errors as the OSError that files would raise."""
    from obstore import exceptions

    try:
        yield
    except (FileNotFoundError, exceptions.NotFoundError):
        raise FileNotFoundError(2, "no such object", what) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(13, f"access is refused: {_first_line(error)}", what) from None
    except exceptions.AlreadyExistsError:
        raise FileExistsError(17, "exists already", what) from None
    except exceptions.BaseError as error:
        if "403 Forbidden" in str(error):  # what the client has no name for
            raise PermissionError(13, "access is refused", what) from None
        if "404 Not Found" in str(error):  # of a list: there is no such bucket
            raise FileNotFoundError(2, "no such bucket", what) from None
        raise ConnectionError(5, _first_line(error), what) from error


def _first_line(error: Any) -> str:
    return first_line(error)[:300]
