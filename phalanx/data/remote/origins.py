"""Where the files of a corpus are copied from: a folder, or an object store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.foreign import ForeignStream
from phalanx.data.corpus.index import decode_index, index_bytes
from phalanx.data.corpus.manifest import MANIFEST_NAME, TOKENIZER_NAME, ShardFile
from phalanx.data.corpus.mapped import map_bytes
from phalanx.data.corpus.shards import ShardStream
from phalanx.data.corpus.stream import FileStream
from phalanx.data.corpus.sums import RECORD_NAME
from phalanx.data.corpus.writer import beside
from phalanx.data.remote.parts import PART_BYTES
from phalanx.data.remote.shards import RemoteStream

PIECE_BYTES = 1 << 20


class Proof(NamedTuple):
    """Checksums that the blocks of a file must have."""

    block_bytes: int
    sums: NDArray[np.uint32]


class OriginFiles(Protocol):
    """The files of a corpus, by their names within it."""

    @property
    def names(self) -> list[Path]:
        """All files in the order of copying; what makes a corpus complete comes last."""

    def size(self, name: Path) -> int:
        """Bytes of a file."""

    def changed_ns(self, name: Path) -> int:
        """When a file was last changed; 0 where that is not known."""

    def pieces(self, name: Path) -> Iterator[memoryview]:
        """The content of a file, piece by piece."""

    def proof(self, name: Path) -> Proof | None:
        """What a file must be, or None where nothing is known."""

    def shown(self, name: Path) -> str:
        """A file as the user would name it."""


def origin_of(stream: FileStream, copied: Path) -> OriginFiles:
    """Where to copy a corpus from; ``copied`` is the folder that receives its files."""
    if isinstance(stream, RemoteStream):
        return _StoreFiles(stream, copied)
    return _ShardFiles(stream) if isinstance(stream, ShardStream) else _ForeignFiles(stream)


class _LocalFiles:
    """Files on a local or parallel file system."""

    def __init__(self, base: Path, names: list[Path]) -> None:
        self._base, self.names = base, names

    def size(self, name: Path) -> int:
        return (self._base / name).stat().st_size

    def changed_ns(self, name: Path) -> int:
        return (self._base / name).stat().st_mtime_ns

    def pieces(self, name: Path) -> Iterator[memoryview]:
        with (self._base / name).open("rb") as reader:
            while data := reader.read(PIECE_BYTES):
                yield memoryview(data)

    def shown(self, name: Path) -> str:
        return str(self._base / name)


class _ShardFiles(_LocalFiles):
    """Token shards: the manifest proves the indices, and these the blocks."""

    def __init__(self, stream: ShardStream) -> None:
        home = stream.home
        names = [Path(name) for file in stream.manifest.files for name in file.names]
        names += [path.relative_to(home) for path in sorted(home.glob("*.heldout"))]
        others = [TOKENIZER_NAME, MANIFEST_NAME]
        super().__init__(home, [*names, *(Path(one) for one in others if (home / one).exists())])
        self._stream, self._numbers = stream, _numbers(stream)

    def proof(self, name: Path) -> Proof | None:
        number = self._numbers.get(str(name))
        if number is None:
            return None
        file = self._stream.manifest.files[number]
        if str(name) == file.index_name:
            return _index_proof(file, self.size(name))
        index = self._stream.index(number, proved=True)
        return Proof(index.block_bytes, index.sums)


class _ForeignFiles(_LocalFiles):
    """Corpora of other programs: proved where checksums were recorded beside them."""

    def __init__(self, stream: FileStream) -> None:
        assert isinstance(stream, ForeignStream)
        home = stream.home
        base = home if home.is_dir() else home.parent
        pattern = "*.heldout" if home.is_dir() else f"{home.name}.*.heldout"
        record = beside(home, RECORD_NAME)
        paths = [*stream.paths, *sorted(base.glob(pattern)), *([record] if stream.sums else [])]
        super().__init__(base, [path.relative_to(base) for path in paths])
        self._sums = stream.sums

    def proof(self, name: Path) -> Proof | None:
        if self._sums is None or self._base / name not in self._sums.sums:
            return None
        return Proof(self._sums.block_bytes, self._sums.sums[self._base / name])


class _StoreFiles:
    """Token shards in an object store, fetched in long ranges, several at once."""

    def __init__(self, stream: RemoteStream, copied: Path) -> None:
        self._stream, self._copied, self._numbers = stream, copied, _numbers(stream)
        # An index goes before its shard, which it proves.
        names = [name for file in stream.manifest.files for name in reversed(file.names)]
        small = {
            name: path
            for name in (TOKENIZER_NAME, MANIFEST_NAME)
            if (path := stream.fetch(name)) is not None
        }
        self._small = small
        self.names = [Path(name) for name in (*names, *small)]

    def size(self, name: Path) -> int:
        number = self._numbers.get(str(name))
        if number is None:
            return self._small[str(name)].stat().st_size
        manifest = self._stream.manifest
        file, size = manifest.files[number], manifest.file_bytes(number)
        if str(name) == file.name:
            return size
        return index_bytes(-(-size // manifest.block_bytes), file.documents, file.label_runs)

    def changed_ns(self, name: Path) -> int:
        return 0

    def pieces(self, name: Path) -> Iterator[memoryview]:
        if str(name) in self._small:
            yield memoryview(self._small[str(name)].read_bytes())
            return
        store, size = self._stream.store, self.size(name)
        coming: deque[Future[memoryview]] = deque()
        firsts = iter(range(0, size, PART_BYTES))
        while True:
            while len(coming) < store.parallel_reads and (first := next(firsts, None)) is not None:
                length = min(PART_BYTES, size - first)
                coming.append(store.submit(store.read(str(name), first, length)))
            if not coming:
                return
            yield coming.popleft().result()

    def proof(self, name: Path) -> Proof | None:
        number = self._numbers.get(str(name))
        if number is None:
            return None
        file = self._stream.manifest.files[number]
        if str(name) == file.index_name:
            return _index_proof(file, self.size(name))
        index = decode_index(map_bytes(self._copied / file.index_name), None)
        return Proof(index.block_bytes, index.sums)

    def shown(self, name: Path) -> str:
        return f"{self._stream.store.url}/{name}"


def _numbers(stream: ShardStream) -> dict[str, int]:
    """Which shard each file belongs to."""
    return {name: at for at, file in enumerate(stream.manifest.files) for name in file.names}


def _index_proof(file: ShardFile, size: int) -> Proof:
    return Proof(size, np.array([file.index_crc32c], np.uint32))
