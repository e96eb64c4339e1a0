"""The raw files that a recipe names: on this machine, or objects of a store."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from phalanx.data.errors import DataError, ObjectStoreError
from phalanx.data.file_times import settled_stats
from phalanx.data.remote.store import connect
from phalanx.data.tokenize.inputs import (
    COMPRESSIONS,
    LINE_SUFFIXES,
    PARQUET_SUFFIXES,
    TEXT_SUFFIXES,
)

if TYPE_CHECKING:
    from obstore import ReadableFile

HTML_SUFFIXES = (".html", ".htm")
WARC_SUFFIXES = (".warc", ".wet")
_NAMES = (*TEXT_SUFFIXES, *HTML_SUFFIXES, *LINE_SUFFIXES, *WARC_SUFFIXES)
SUFFIXES = (*(name + packed for name in _NAMES for packed in COMPRESSIONS), *PARQUET_SUFFIXES)

_BEGINS = 64  # one of so many names begins a group
_MOST_GROUPED = 512
_WILD = frozenset("*?[")
_RETRIES = 10  # of a request to a store, by its client
_AHEAD_BYTES = 8 << 20  # read of an object at once


class InputFile(NamedTuple):
    """A raw file as it is now."""

    path: str  # or URL
    bytes: int
    version: str  # changes whenever the content does; of an object its ETag

    @property
    def stored(self) -> bool:
        """Whether it is an object of a store, whose ETag identifies its content."""
        return is_url(self.path)


def is_url(path: str) -> bool:
    """Whether a path names an object of a store."""
    return "://" in path


def find_inputs(key: str, patterns: Sequence[str]) -> list[InputFile]:
    """Files that paths, folders, URLs and patterns name, sorted, each once."""
    files: dict[str, InputFile] = {}
    for pattern in patterns:
        found = list(_objects(pattern) if is_url(pattern) else _files(pattern))
        if not found:
            rule = f"matches nothing; of folders, files with these endings: {', '.join(SUFFIXES)}"
            raise DataError(key, pattern, rule, "correct the path or the pattern")
        files |= {file.path: file for file in found}
    local = [path for path, file in files.items() if not file.stored]
    for path, now in zip(local, settled_stats(local), strict=True):
        files[path] = InputFile(path, now.st_size, str(now.st_mtime_ns))
    return [files[path] for path in sorted(files)]


def group_inputs(files: Sequence[InputFile], most_bytes: int) -> list[list[InputFile]]:
    """Consecutive files that are one unit of work: several small ones, or a large one.

    Some names always begin a group, so that a new file changes its own group and no other.
    """
    groups: list[list[InputFile]] = []
    size = 0
    for file in files:
        begins = zlib.crc32(PurePosixPath(file.path).name.encode()) % _BEGINS == 0
        full = size + file.bytes > most_bytes or bool(groups and len(groups[-1]) == _MOST_GROUPED)
        if not groups or full or begins:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.bytes
    return groups


def stat_input(path: str) -> InputFile:
    """A single file or object; ``OSError`` where it is gone."""
    if is_url(path):
        folder, _, name = path.rpartition("/")
        store = connect(folder, _RETRIES)
        with _store_errors(folder, name):
            meta = store.head(name)
        return InputFile(path, meta["size"], meta["e_tag"] or str(meta["last_modified"]))
    now = Path(path).stat()
    return InputFile(path, now.st_size, str(now.st_mtime_ns))


def open_input(path: str) -> io.RawIOBase:
    """Its bytes as they are stored."""
    if not is_url(path):
        return io.FileIO(path)
    import obstore

    folder, _, name = path.rpartition("/")
    reader = obstore.open_reader(connect(folder, _RETRIES), name, buffer_size=_AHEAD_BYTES)
    return _ObjectReader(path, reader)


class _ObjectReader(io.RawIOBase):
    """An object of a store as a file that is read from its beginning."""

    def __init__(self, url: str, reader: ReadableFile) -> None:
        self._url, self._reader = url, reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        from obstore import exceptions

        try:
            content = memoryview(self._reader.read(len(buffer)))
        except exceptions.BaseError as error:
            raise OSError(f"{self._url}: {error}") from error
        buffer[: len(content)] = content
        return len(content)


def _files(pattern: str) -> Iterator[InputFile]:
    parts = Path(pattern).parts
    wild = next((at for at, part in enumerate(parts) if _WILD & set(part)), len(parts))
    base = Path(*parts[:wild])
    matches = base.glob(str(Path(*parts[wild:]))) if wild < len(parts) else [base]
    for match in matches:
        if match.is_dir():
            below = (path for path in match.rglob("*") if path.name.endswith(SUFFIXES))
            yield from (stat_input(str(path)) for path in below if path.is_file())
        elif match.is_file():
            yield stat_input(str(match))


def _objects(pattern: str) -> Iterator[InputFile]:
    """Objects below a URL; what stands behind the first wild card is compared with their names."""
    scheme, _, rest = pattern.partition("://")
    parts = rest.rstrip("/").split("/")
    wild = next((at for at, part in enumerate(parts) if _WILD & set(part)), len(parts))
    base = f"{scheme}://{'/'.join(parts[:wild])}"
    wanted = "/".join(parts[wild:])
    if not wanted and PurePosixPath(rest).name.endswith(SUFFIXES):
        with suppress(FileNotFoundError):
            yield stat_input(pattern)
        return
    store = connect(base, _RETRIES)
    with _store_errors(base, wanted):
        listed = [meta for chunk in store.list() for meta in chunk]
    for meta in listed:
        name = str(meta["path"])
        if fnmatch(name, wanted) if wanted else name.endswith(SUFFIXES):
            version = meta["e_tag"] or str(meta["last_modified"])
            yield InputFile(f"{base}/{name}", meta["size"], version)


@contextmanager
def _store_errors(url: str, name: str) -> Iterator[None]:
    """What a store refuses, as an error of ours."""
    from obstore import exceptions

    try:
        yield
    except exceptions.NotFoundError as error:
        raise FileNotFoundError(f"{url}/{name} does not exist") from error
    except exceptions.BaseError as error:
        raise ObjectStoreError(url, name, str(error).partition("\n")[0]) from None
