"""Token shards: plain files of little-endian tokens, each with an index, beside one manifest.

The files together are one stream of tokens; documents and samples may cross from one file into
the next. All files but the last are equally long, so a token's file is found by one division.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.checksum import crc32c
from phalanx.data.corpus.index import ShardIndex, decode_index
from phalanx.data.corpus.manifest import REDO_FIX, CorpusManifest, read_manifest
from phalanx.data.corpus.mapped import MappedFiles, map_bytes
from phalanx.data.corpus.stream import Files, FileStream
from phalanx.data.errors import DataError

# Above this many files, sizes are compared when a file is first read: on a parallel file system
# asking for the size of 60,000 files takes longer than the start of everything else.
_SIZES_AT_ONCE = 1024


class _IndexedLabels:
    """Which tokens count as labels, out of the indices of a corpus."""

    def __init__(self, stream: ShardStream) -> None:
        self._stream = stream

    def read(self, number: int, first: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with 1 for each token of file ``number`` that is one, else 0."""
        self._stream.index(number).read_labels(first, out)


class ShardStream(FileStream):
    """A corpus of token shards; ``files`` are those of its folder, mapped, unless given."""

    def __init__(
        self,
        folder: str | Path,
        manifest: CorpusManifest | None = None,
        files: Files | None = None,
        check_sizes: bool = True,
    ) -> None:
        self.home = Path(folder)
        self.manifest = manifest or read_manifest(self.home)
        sizes = [file.tokens for file in self.manifest.files]
        if files is None:
            files = self._map_files(sizes, check_sizes)
        super().__init__(files, sizes, _IndexedLabels(self) if self.manifest.masked else None)
        self.vocab = self.manifest.vocab
        self.documents = self.manifest.documents
        self.fingerprint = self.manifest.fingerprint
        # Packed documents end as their own text does, and the token may stand inside of them.
        packed = self.manifest.packed > 0
        self.end_of_document = None if packed else self.manifest.end_of_document
        self.tokenizer = self.manifest.tokenizer
        self.block_tokens = self.manifest.block_bytes // self.manifest.stored_type.itemsize
        self.checksums = True
        self._indices: dict[int, ShardIndex] = {}

    def check_index(self, number: int) -> None:
        """Compare the checksum of a file's index with the manifest's."""
        self.index(number, proved=True)

    def check_block(self, number: int, block: int) -> None:
        """Compare the checksum of one block of one file."""
        first = block * self.block_tokens
        count = min(self.block_tokens, self.manifest.files[number].tokens - first)
        content = np.empty(count, self.manifest.stored_type)
        self._files.read(number, first, content)
        actual, expected = crc32c(content.data), int(self.index(number).sums[block])
        if actual != expected:
            rule = (
                f"block {block} (tokens {first} to {first + count - 1} of the file) is damaged: "
                f"checksum {actual:08x}, where the index says {expected:08x}"
            )
            path = self.home / self.manifest.files[number].name
            raise DataError("data.path", path, rule, REDO_FIX)

    def index(self, number: int, proved: bool = False) -> ShardIndex:
        """Checksums and documents of a file; ``proved`` compares the index's own checksum."""
        if number not in self._indices or proved:
            file = self.manifest.files[number]
            path = self.home / file.index_name
            try:
                index = decode_index(map_bytes(path), file.index_crc32c if proved else None)
                if (index.tokens, len(index.starts)) != (file.tokens, file.documents):
                    raise ValueError("belongs to another shard: its counts are not the manifest's")
            except ValueError as error:
                raise DataError("data.path", path, str(error), REDO_FIX) from None
            self._indices[number] = index
        return self._indices[number]

    def file_name(self, number: int) -> str:
        """Name of a file of the corpus."""
        return self.manifest.files[number].name

    def file_documents(self, number: int) -> NDArray[Any]:
        """Ascending positions within file ``number`` at which documents start."""
        return self.index(number).starts

    def file_hashes(self, number: int) -> NDArray[np.uint32]:
        """Hash of each document that starts in file ``number``."""
        return self.index(number).hashes

    def _file_of(self, token: int) -> int:
        return token // self.manifest.file_tokens

    def _map_files(self, sizes: list[int], check_sizes: bool) -> MappedFiles:
        def path(number: int) -> Path:
            return self.home / self.manifest.files[number].name

        files = MappedFiles(path, sizes, self.manifest.stored_type)
        if check_sizes and len(sizes) <= _SIZES_AT_ONCE:
            for number in range(len(sizes)):
                files.check_size(number)
        return files
