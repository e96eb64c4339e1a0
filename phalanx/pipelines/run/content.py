"""Content hashes of files and folders; an unchanged file is read only once."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.data.corpus.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    CorpusManifest,
    read_manifest,
)
from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError

_MAGIC = re.compile(r"[*?\[]")
_CHECKPOINT = re.compile(r"(step-\d+)(?:\.g(\d+))?")  # a gang's has its generation in its name
_SHARD = re.compile(r"(rank-\d+)\.[^.]+\.safetensors")
RECENT_NS = 2_000_000_000  # a file changed so lately may change again within one tick of its clock


class FileHash(Struct, frozen=True, array_like=True):
    """The hash of a file, with the size, time and inode that it was valid for."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str


class RawFile(Struct, frozen=True, array_like=True):
    """A raw input file."""

    path: str
    size: int
    sha256: str


class RawContent(Struct, frozen=True):
    """All files that a path or a pattern matches."""

    content: str
    files: tuple[RawFile, ...]


class ContentCache:
    """Hashes of files by path, kept in a file; trusted while size, time and inode stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known = msgspec.json.decode(path.read_bytes(), type=dict[str, FileHash])
        except (OSError, msgspec.MsgspecError):  # none yet, or damaged: files are read again
            self._known = {}
        self._changed = False

    def of_file(self, path: Path) -> FileHash:
        """The hash of a file."""
        seen = path.stat()
        known = self._known.get(str(path))
        if known is not None and (known.size, known.mtime_ns, known.inode) == (
            seen.st_size,
            seen.st_mtime_ns,
            seen.st_ino,
        ):
            return known
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            after = os.fstat(file.fileno())
        made = FileHash(after.st_size, after.st_mtime_ns, after.st_ino, digest)
        if seen.st_mtime_ns == after.st_mtime_ns and not _fresh(after):
            self._known[str(path)] = made
            self._changed = True
        return made

    def of_pattern(self, pattern: str) -> RawContent:
        """Content hash of a file, folder or pattern, independent of its location."""
        base, paths = pattern_files(pattern)
        files = [(path, self.of_file(path)) for path in paths]
        if len(files) == 1 and not files[0][0].relative_to(base).parts:
            content = files[0][1].sha256
        else:
            content = _digest((str(path.relative_to(base)), each.sha256) for path, each in files)
        listed = tuple(RawFile(str(path), each.size, each.sha256) for path, each in files)
        return RawContent(content, listed)

    def save(self) -> None:
        """Write the cache to its file."""
        if self._changed:
            write_atomically(self._path, msgspec.json.encode(self._known))
            self._changed = False


def _fresh(seen: os.stat_result) -> bool:
    return time.time_ns() - seen.st_mtime_ns < RECENT_NS


def pattern_files(pattern: str) -> tuple[Path, list[Path]]:
    """Files that a path or pattern matches, in order, and the folder that names are relative to."""
    if not _MAGIC.search(pattern):
        path = Path(pattern).absolute()
        return path, folder_files(path) if path.is_dir() else [path] * path.exists()
    absolute = Path(pattern).absolute()
    fixed = Path(*takewhile(lambda part: not _MAGIC.search(part), absolute.parts))
    found = fixed.glob(str(absolute.relative_to(fixed)))
    files = [each for path in found for each in (folder_files(path) if path.is_dir() else [path])]
    return fixed, sorted(set(files))


def pattern_paths(pattern: str) -> list[str]:
    """Arguments for a command: the path itself, or the files that the pattern matches."""
    if not _MAGIC.search(pattern):
        return [str(Path(pattern).absolute())]
    return [str(path) for path in pattern_files(pattern)[1]]


def has_files(pattern: str) -> bool:
    """Whether the path exists or the pattern matches anything."""
    return bool(pattern_paths(pattern)) if _MAGIC.search(pattern) else Path(pattern).exists()


def folder_files(folder: Path) -> list[Path]:
    """All files below a folder, in order; follows links but not cycles."""
    files: list[Path] = []
    for where, folders, names in os.walk(folder, followlinks=True):
        here = Path(where)
        files += (here / name for name in names)
        folders[:] = [
            name
            for name in folders
            if not (here / name).is_symlink()
            or not here.resolve().is_relative_to((here / name).resolve())
        ]
    return sorted(files)


def output_content(path: Path) -> str:
    """Content of a step's output; of a run only the weights of its last checkpoint count.

    Logs and times of a run differ whenever it is repeated, its weights do not. Likewise reports of
    a corpus say where it was made: it is its tokens and its tokenizer.
    """
    if path.is_file():
        return _sha256(path)
    if (checkpoint := last_checkpoint(path)) is not None:
        shards = sorted(
            (found[1], each)
            for each in checkpoint.iterdir()
            if (found := _SHARD.fullmatch(each.name)) is not None
        )
        step = checkpoint.name.partition(".")[0]
        return _digest((f"{step}/{name}", _sha256(each)) for name, each in shards)
    if (corpus := _corpus(path)) is not None:
        names = [name for shard in corpus.files for name in shard.names]
        names += [TOKENIZER_NAME] * (path / TOKENIZER_NAME).exists()
        whole = [(MANIFEST_NAME, corpus.fingerprint)]
        return _digest([*whole, *((name, _sha256(path / name)) for name in names)])
    return _digest((str(each.relative_to(path)), _sha256(each)) for each in folder_files(path))


def _corpus(path: Path) -> CorpusManifest | None:
    """The manifest of a folder of token shards, all of which are there."""
    try:
        found = read_manifest(path)
    except DataError:
        return None
    names = (name for shard in found.files for name in shard.names)
    return found if all((path / name).is_file() for name in names) else None


def last_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run's folder."""
    complete = {
        path: (int(found[1][5:]), int(found[2] or 0))
        for path in (run / "checkpoints").glob("step-*")
        if (found := _CHECKPOINT.fullmatch(path.name)) and (path / "manifest.json").exists()
    }
    return max(complete, key=lambda path: complete[path], default=None)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(named: Iterable[tuple[str, str]]) -> str:
    whole = hashlib.sha256()
    for name, digest in named:
        whole.update(f"{digest}  {name}\n".encode())
    return whole.hexdigest()
