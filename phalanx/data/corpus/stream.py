"""A corpus as one stream of tokens, whatever the format of its files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "validation", "all"]


class TokenPosition(msgspec.Struct, frozen=True):
    """Where a token of a stream lies on disk."""

    file: str
    token: int  # position within the file
    block: int  # checksummed block of the file


class TokenStream(Protocol):
    """The documents of a corpus packed one after the other, readable from any token on.

    Streams are used by one thread at a time for each object, and survive a fork.
    """

    @property
    def vocab(self) -> int:
        """Number of different tokens that may occur."""

    @property
    def tokens(self) -> int:
        """Length of the stream."""

    @property
    def documents(self) -> int:
        """Number of documents in the stream."""

    @property
    def fingerprint(self) -> str:
        """Short identity of the content: equal only when every token is equal."""

    @property
    def end_of_document(self) -> int | None:
        """Token that ends every document; None where the corpus has none."""

    @property
    def tokenizer(self) -> str:
        """Identity of the tokenizer (sha256 of its file), or "" where it is not known."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a checksummed block: reads of whole blocks can be proved."""

    @property
    def masked(self) -> bool:
        """Whether the corpus says of each token if it counts as a label."""

    def read_tokens(self, first: int, count: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with ``count`` tokens of the stream from token ``first`` on."""

    def read_mask(self, first: int, count: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with 1 for each token that counts as a label, else 0."""

    def read_rows(self, firsts: Sequence[int], rows: Iterable[NDArray[Any]]) -> None:
        """Fill each row with the tokens of the stream from its first one on."""

    def document_starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Ascending positions in [first, first + count) at which documents start."""

    def place(self, token: int) -> TokenPosition:
        """Where a token of the stream is stored."""

    def check(self, first: int, count: int) -> None:
        """Compare the checksums of all blocks that hold these tokens, naming a bad one."""


class Files(Protocol):
    """The files under a stream: mapped here, or fetched from elsewhere."""

    def read(self, number: int, first: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with the tokens of file ``number`` from its token ``first`` on."""


class FileStream(ABC):
    """What all formats share: a stream that runs through files of given lengths.

    ``home`` is the corpus as the user names it; what is recorded about it lies there.
    """

    home: Path
    vocab: int
    documents: int
    fingerprint: str
    end_of_document: int | None
    tokenizer: str
    block_tokens: int
    checksums: bool  # whether blocks can be proved

    def __init__(self, files: Files, file_tokens: list[int], masks: Files | None = None) -> None:
        self.tokens = sum(file_tokens)
        self.masked = masks is not None
        self._files = files
        self._masks = masks
        self._starts = [0, *accumulate(file_tokens)]

    def read_tokens(self, first: int, count: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with ``count`` tokens of the stream from token ``first`` on."""
        self._read(self._files, first, count, out)

    def read_mask(self, first: int, count: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with 1 for each token that counts as a label, else 0."""
        if self._masks is None:
            out[:count] = 1
        else:
            self._read(self._masks, first, count, out)

    def _read(self, files: Files, first: int, count: int, out: NDArray[Any]) -> None:
        self._refuse_outside(first, count)
        number = self._file_of(first)
        filled = 0
        while filled < count:
            at = first + filled
            left = self._starts[number + 1] - at
            if left >= count - filled:
                files.read(number, at - self._starts[number], out[filled:count])
                return
            files.read(number, at - self._starts[number], out[filled : filled + left])
            filled += left
            number += 1

    def read_rows(self, firsts: Sequence[int], rows: Iterable[NDArray[Any]]) -> None:
        """Fill each row with the tokens of the stream from its first one on."""
        starts, file_of, read = self._starts, self._file_of, self._files.read
        for first, row in zip(firsts, rows, strict=True):
            number = file_of(first)
            if first >= 0 and first + len(row) <= starts[number + 1]:  # inside one file
                read(number, first - starts[number], row)
            else:
                self.read_tokens(first, len(row), row)

    def document_starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Ascending positions in [first, first + count) at which documents start."""
        self._refuse_outside(first, count)
        starts = []
        for number in range(self._file_of(first), len(self._starts) - 1):
            begin = self._starts[number]
            if begin >= first + count:
                break
            inside = self.file_documents(number)
            # bisect looks at a few entries of a mapped array; searchsorted may copy all of it.
            low = bisect_left(inside, first - begin)
            high = bisect_left(inside, first + count - begin, lo=low)
            starts.append(np.asarray(inside[low:high], np.int64) + begin)
        return np.concatenate(starts) if starts else np.empty(0, np.int64)

    def place(self, token: int) -> TokenPosition:
        """Where a token of the stream is stored."""
        self._refuse_outside(token, 1)
        number = self._file_of(token)
        inside = token - self._starts[number]
        return TokenPosition(self.file_name(number), inside, inside // self.block_tokens)

    def check(self, first: int, count: int) -> None:
        """Compare the checksums of all blocks that hold these tokens, naming a bad one."""
        self._refuse_outside(first, count)
        at = first
        while at < first + count:
            number = self._file_of(at)
            block = (at - self._starts[number]) // self.block_tokens
            self.check_block(number, block)
            at = min(
                self._starts[number] + (block + 1) * self.block_tokens, self._starts[number + 1]
            )

    @property
    def file_starts(self) -> Sequence[int]:
        """Position of the first token of each file, and the end of the stream."""
        return self._starts

    @abstractmethod
    def file_name(self, number: int) -> str:
        """Name of a file of the corpus."""

    @abstractmethod
    def file_documents(self, number: int) -> Any:
        """Ascending positions within file ``number`` at which documents start."""

    @abstractmethod
    def file_hashes(self, number: int) -> NDArray[np.uint32]:
        """Hash of each document that starts in file ``number``."""

    @abstractmethod
    def check_index(self, number: int) -> None:
        """Refuse a damaged index of a file."""

    @abstractmethod
    def check_block(self, number: int, block: int) -> None:
        """Refuse a damaged block of a file."""

    def _file_of(self, token: int) -> int:
        return bisect_right(self._starts, token) - 1

    def _refuse_outside(self, first: int, count: int) -> None:
        if first < 0 or count < 0 or first + count > self.tokens:
            raise IndexError(f"tokens [{first}, {first + count}) of a stream of {self.tokens}")


def number_documents(tokens: NDArray[np.int64], end_of_document: int) -> NDArray[np.int32]:
    """Document number per position, from 0; an end token belongs to the document it ends."""
    ended = np.zeros(tokens.shape, np.int32)
    np.cumsum(tokens[..., :-1] == end_of_document, axis=-1, dtype=np.int32, out=ended[..., 1:])
    return ended
