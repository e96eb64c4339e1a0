"""Corpora of other programs, read in place: Megatron's ``.bin/.idx`` and datatrove's ``.ds``.

These formats carry no checksums, and no vocabulary: tokens are compared with the model's, and with
checksums where one pass has recorded them. Their identity is taken from the sizes of their files
and from bytes at both ends and in the middle.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.index import document_hash
from phalanx.data.corpus.mapped import MappedFiles, map_bytes
from phalanx.data.corpus.stream import FileStream
from phalanx.data.corpus.sums import RecordedSums, load_sums
from phalanx.data.corpus.writer import BLOCK_BYTES, HASHED_TOKENS
from phalanx.data.errors import DataError

_RESTORE = "restore the file, or make it again with the program that wrote it"
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """One file of tokens, and where its documents start."""

    path: Path
    index_path: Path
    stored_type: np.dtype[Any]
    tokens: int
    documents: Sequence[int]  # ascending token positions
    mask_path: Path | None = None  # a byte for each token: whether it counts as a label

    @property
    def paths(self) -> list[Path]:
        """All that the file consists of."""
        masks = [self.mask_path] if self.mask_path else []
        return [self.path, self.index_path, *masks]


class ForeignStream(FileStream):
    """Files of another program as one stream."""

    def __init__(
        self, home: Path, files: list[ForeignFile], vocab: int, check_sizes: bool = True
    ) -> None:
        types = {file.stored_type for file in files}
        if len(types) > 1:
            names = ", ".join(sorted(kind.name for kind in types))
            rule = f"holds files of different token types ({names})"
            raise DataError("data.path", home, rule, "use files made with one tokenizer")
        sizes = [file.tokens for file in files]
        mapped = MappedFiles(lambda number: files[number].path, sizes, types.pop())
        for number in range(len(files)) if check_sizes else ():
            mapped.check_size(number)
        super().__init__(mapped, sizes, _masks(home, files, sizes))
        self.home = home
        self.vocab = vocab
        self.documents = sum(len(file.documents) for file in files)
        self.end_of_document = None
        self.tokenizer = ""
        self.block_tokens = BLOCK_BYTES // mapped.stored_type.itemsize
        self.fingerprint = _fingerprint(files)
        self._foreign = files
        self._mapped = mapped
        self._sums = load_sums(home, self.paths)
        self.checksums = self._sums is not None

    @property
    def paths(self) -> list[Path]:
        """All files of the corpus."""
        return [path for file in self._foreign for path in file.paths]

    @property
    def sums(self) -> RecordedSums | None:
        """Checksums that were recorded beside the corpus."""
        return self._sums

    def file_name(self, number: int) -> str:
        """Name of a file of the corpus."""
        return self._foreign[number].path.name

    def file_documents(self, number: int) -> Sequence[int]:
        """Ascending positions within file ``number`` at which documents start."""
        return self._foreign[number].documents

    def file_hashes(self, number: int) -> NDArray[np.uint32]:
        """Hash of each document that starts in file ``number``, from its first tokens."""
        content = self._mapped.content(number)
        starts = np.asarray(self.file_documents(number)[:], np.int64)
        ends = np.minimum(np.append(starts[1:], len(content)), starts + HASHED_TOKENS)
        hashes = (
            document_hash(content[start:end].astype("<u4").tobytes())
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        )
        return np.fromiter(hashes, np.uint32, len(starts))

    def check_index(self, number: int) -> None:
        """Refuse an index whose documents are not in order, or that was changed."""
        path = self._foreign[number].index_path
        if self._sums is not None:
            self._sums.refuse_damage(path, 0, path.stat().st_size)
        if (np.diff(self.file_documents(number)[:]) < 0).any():
            rule = "does not list its documents in order"
            raise DataError("data.path", path, rule, _RESTORE)

    def check_block(self, number: int, block: int) -> None:
        """Refuse a block that was changed, where that is known, or holds unknown tokens."""
        first = block * self.block_tokens
        if self._sums is not None:
            self._check_sums(self._foreign[number], first)
        content = self._mapped.content(number)[first : first + self.block_tokens]
        if int(content.min()) < 0 or int(content.max()) >= self.vocab:
            token = content[(content < 0) | (content >= self.vocab)][0]
            rule = f"block {block} holds token {token}, outside the vocabulary of {self.vocab}"
            raise DataError("data.path", self._foreign[number].path, rule, _RESTORE)

    def _check_sums(self, file: ForeignFile, first: int) -> None:
        assert self._sums is not None
        tokens, width = min(self.block_tokens, file.tokens - first), file.stored_type.itemsize
        self._sums.refuse_damage(file.path, first * width, tokens * width)
        if file.mask_path is not None:
            self._sums.refuse_damage(file.mask_path, first, tokens)


def _masks(home: Path, files: list[ForeignFile], sizes: list[int]) -> MappedFiles | None:
    """The loss masks of all files, where the corpus has them."""
    without = [file.path.name for file in files if file.mask_path is None]
    if len(without) == len(files):
        return None
    if without:
        rule = f"has loss masks (.ds.loss) for some of its files, but not for {without[0]}"
        raise DataError("data.path", home, rule, "restore the missing ones, or remove all")

    def path(number: int) -> Path:
        found = files[number].mask_path
        assert found is not None
        return found

    masks = MappedFiles(path, sizes, np.dtype(np.uint8))
    for number in range(len(files)):
        masks.check_size(number)
    return masks


def open_megatron(
    home: Path, index_paths: list[Path], vocab: int, check_sizes: bool = True
) -> ForeignStream:
    """The corpus in pairs of ``.bin`` and ``.idx`` files."""
    return ForeignStream(home, [_megatron_file(path) for path in index_paths], vocab, check_sizes)


def open_datatrove(home: Path, paths: list[Path], vocab: int) -> ForeignStream:
    """The corpus in ``.ds`` files, each beside its ``.ds.index``."""
    return ForeignStream(home, [_datatrove_file(path) for path in paths], vocab)


# Header of Megatron's index: magic, version, code of the token type, sequences, documents + 1.
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def is_megatron(index_path: Path) -> bool:
    """Whether a file begins as Megatron's indices do."""
    with index_path.open("rb") as file:
        return file.read(len(_MEGATRON_MAGIC)) == _MEGATRON_MAGIC


def _megatron_file(index_path: Path) -> ForeignFile:
    def refuse(rule: str) -> DataError:
        return DataError("data.path", index_path, rule, _RESTORE)

    data = map_bytes(index_path)
    if len(data) < _MEGATRON_HEADER.size:
        raise refuse(f"is truncated: {len(data)} bytes")
    magic, version, code, sequences, edges = _MEGATRON_HEADER.unpack_from(data.data)
    if magic != _MEGATRON_MAGIC or version != 1:
        raise refuse("is no Megatron index of version 1")
    if code not in _MEGATRON_TYPES:
        raise refuse(f"stores tokens of type {code}, which is no whole number: wrong dtype")
    stored_type = np.dtype(_MEGATRON_TYPES[code])
    at = _MEGATRON_HEADER.size
    if len(data) < at + 12 * sequences + 8 * edges:
        raise refuse(f"is truncated: {len(data)} bytes for {sequences} sequences")
    lengths = data[at : at + 4 * sequences].view("<i4")
    pointers = data[at + 4 * sequences : at + 12 * sequences].view("<i8")
    first_sequence = data[at + 12 * sequences :][: 8 * edges].view("<i8")
    width = stored_type.itemsize
    tokens = int(pointers[-1]) // width + int(lengths[-1]) if sequences else 0
    if edges and int(first_sequence[-1]) != sequences:
        raise refuse(f"ends its documents at {first_sequence[-1]} of {sequences} sequences")
    starts = _MegatronDocuments(pointers, first_sequence, width)
    return ForeignFile(index_path.with_suffix(".bin"), index_path, stored_type, tokens, starts)


class _MegatronDocuments(Sequence[int]):
    """Token positions of documents, looked up in the mapped index: nothing is loaded."""

    def __init__(
        self, pointers: NDArray[np.int64], first_sequence: NDArray[np.int64], width: int
    ) -> None:
        self._pointers, self._first_sequence, self._width = pointers, first_sequence, width

    def __len__(self) -> int:
        return max(0, len(self._first_sequence) - 1)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            chosen = self._first_sequence[:-1][item]
            return self._pointers[chosen] // self._width
        return int(self._pointers[self._first_sequence[:-1][item]]) // self._width


def _datatrove_file(path: Path) -> ForeignFile:
    index_path = path.with_name(path.name + ".index")
    data = map_bytes(index_path)
    if len(data) % 8:
        raise DataError("data.path", index_path, f"is truncated: {len(data)} bytes", _RESTORE)
    ends = data.view("<u8")
    tokens = int(ends[-1]) if len(ends) else 0
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        rule = f"is missing, though {index_path.name} is there"
        raise DataError("data.path", path, rule, _RESTORE) from None
    width = size // tokens if tokens else 2
    if size != width * tokens or width not in (2, 4):
        rule = (
            f"has {size} bytes: neither uint16 nor uint32 for the {tokens} tokens that "
            f"{index_path.name} counts (truncated, or wrong dtype)"
        )
        raise DataError("data.path", path, rule, _RESTORE)
    masks = path.with_name(path.name + ".loss")
    return ForeignFile(
        path,
        index_path,
        np.dtype(f"<u{width}"),
        tokens,
        _DatatroveDocuments(ends),
        masks if masks.exists() else None,
    )


class _DatatroveDocuments(Sequence[int]):
    """Starts of documents, from their ends in the mapped index."""

    def __init__(self, ends: NDArray[np.uint64]) -> None:
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            first, past, _ = item.indices(len(self))
            if first >= past:
                return np.empty(0, np.int64)
            before = [0] if first == 0 else []
            ends = self._ends[max(first - 1, 0) : past - 1].astype(np.int64)
            return np.concatenate([np.array(before, np.int64), ends])
        if item >= len(self):
            raise IndexError(item)
        return 0 if item == 0 else int(self._ends[item - 1])


def _fingerprint(files: list[ForeignFile]) -> str:
    digest = hashlib.sha256(b"foreign 1")
    for file in files:
        for path in file.paths:
            data = map_bytes(path)
            digest.update(f"{path.name}|{len(data)}|{file.stored_type.name}".encode())
            for at in (0, len(data) // 2, max(0, len(data) - _PROBE_BYTES)):
                digest.update(data[at : at + _PROBE_BYTES].data)
    return digest.hexdigest()[:16]
