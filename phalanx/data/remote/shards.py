"""Token shards in an object store, read through a cache on the node."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from phalanx.config import Store
from phalanx.data.corpus.index import ShardIndex
from phalanx.data.corpus.manifest import MANIFEST_NAME, CorpusManifest, parse_manifest
from phalanx.data.corpus.shards import ShardStream
from phalanx.data.corpus.stream import TokenPosition
from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError
from phalanx.data.remote.parts import PART_BYTES, Part, PartCache, open_cache
from phalanx.data.remote.store import RangeStore, open_store


class RemoteFiles:
    """Files of tokens of which parts are fetched when they are asked for, or before."""

    def __init__(self, cache: PartCache, manifest: CorpusManifest) -> None:
        self._cache, self._manifest = cache, manifest
        self._type = manifest.stored_type
        self._numbers = {file.name: at for at, file in enumerate(manifest.files)}
        # Whole blocks, so that checksums can be compared without reading a neighbour.
        blocks = max(1, PART_BYTES // manifest.block_bytes)
        self.part_tokens = blocks * manifest.block_bytes // self._type.itemsize

    def read(self, number: int, first: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with the tokens of file ``number`` from its token ``first`` on."""
        filled = 0
        while filled < len(out):
            part, inside = divmod(first + filled, self.part_tokens)
            content = self._cache.content(self._part(number, part)).view(self._type)
            piece = content[inside : inside + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)

    def request(self, name: str, token: int) -> None:
        """Fetch the part that holds a token of a file, without waiting for it."""
        self._cache.request(self._part(self._numbers[name], token // self.part_tokens))

    def forget(self, number: int, token: int) -> None:
        """Fetch the part that holds a token of a file anew when it is next read."""
        self._cache.forget(self._part(number, token // self.part_tokens))

    def _part(self, number: int, part: int) -> Part:
        file, width = self._manifest.files[number], self._type.itemsize
        first = part * self.part_tokens
        tokens = min(self.part_tokens, file.tokens - first)
        return file.name, first * width, tokens * width


class RemoteStream(ShardStream):
    """A corpus of token shards in an object store; its ``home`` is where the cache is."""

    def __init__(self, cache: PartCache, manifest: CorpusManifest) -> None:
        self._cache = cache
        self._remote = RemoteFiles(cache, manifest)
        self._coming: dict[str, Future[bytes]] = {}  # indices that were asked for
        super().__init__(cache.folder, manifest, self._remote)

    @property
    def store(self) -> RangeStore:
        """What the corpus is read from."""
        return self._cache.store

    @property
    def part_tokens(self) -> int:
        """Tokens that are fetched at once."""
        return self._remote.part_tokens

    def request(self, place: TokenPosition) -> None:
        """Begin to fetch what holds a token, without waiting for it."""
        self._remote.request(place.file, place.token)
        self._ask_for(str(Path(place.file).with_suffix(".idx")))

    def index(self, number: int, proved: bool = False) -> ShardIndex:
        """Checksums and documents of a file; fetched on first use, and then proved."""
        path = self.home / self.manifest.files[number].index_name
        if number not in self._indices and not path.exists():
            self._ask_for(path.name)
            write_atomically(path, self._coming.pop(path.name).result())
            proved = True
        return super().index(number, proved)

    def fetch(self, name: str) -> Path | None:
        """A small file beside the shards, brought into the cache; None where there is none."""
        path = self.home / name
        if not path.exists():
            try:
                content = self._cache.store.submit(self._cache.store.read_all(name)).result()
            except DataError:
                return None
            write_atomically(path, content)
        return path

    def check_block(self, number: int, block: int) -> None:
        """Compare the checksum of one block; a wrong one may be the transfer's fault, once."""
        try:
            super().check_block(number, block)
        except DataError:
            self._remote.forget(number, block * self.block_tokens)
            try:
                super().check_block(number, block)
            except DataError as error:
                (problem,) = error.problems
                path = f"{self._cache.store.url}/{self.file_name(number)}"
                raise DataError(problem.key, path, problem.rule, problem.fix) from None

    def _ask_for(self, name: str) -> None:
        if name not in self._coming and not (self.home / name).exists():
            self._coming[name] = self._cache.store.submit(self._cache.store.read_all(name))


def open_remote(url: str, settings: Store) -> RemoteStream:
    """Open a corpus of token shards by its URL."""
    store = open_store(url, settings)
    try:
        text = store.submit(store.read_all(MANIFEST_NAME)).result()
    except DataError:
        rule = f"there is no {MANIFEST_NAME} in it, so it is no complete corpus of token shards"
        fix = "copy one there as `phalanx data tokenize` made it, or correct the URL"
        raise DataError("data.path", url, rule, fix) from None
    manifest = parse_manifest(text, f"{url}/{MANIFEST_NAME}")
    # What was fetched of another state of the corpus is of no use.
    return RemoteStream(open_cache(url, manifest.fingerprint, settings), manifest)
