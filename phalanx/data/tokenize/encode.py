"""From pieces of text to tokens, on as many processes as there are cores, in the order given."""

from __future__ import annotations

import multiprocessing
import os
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from phalanx.data.corpus.index import document_hash
from phalanx.data.errors import DataError
from phalanx.data.tokenize.inputs import InputPiece
from phalanx.data.tokenize.records import RecordReader, Unreadable
from phalanx.data.worker_process import follow_parent

HASHED_CHARACTERS = 1 << 14  # the beginning of a document that its hash is made of

_AHEAD = 3  # runs handed out to each worker beyond those waited for


class EncodeSettings(msgspec.Struct, frozen=True):
    """Everything that decides which tokens a text becomes."""

    tokenizer: str  # content of tokenizer.json
    end_of_document: int
    text_key: str
    dtype: str


class PieceRun(NamedTuple):
    """Consecutive pieces that are encoded at once, and the place of the first."""

    file: int
    piece: int
    pieces: list[InputPiece]


@dataclass(slots=True)
class Encoded:
    """What a run became."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]  # positions in ``tokens`` at which documents start
    hashes: NDArray[np.uint32]  # of these documents
    text_bytes: int = 0
    empty: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)


class Encoder:
    """Encodes runs; the same tokens however pieces are grouped into runs."""

    def __init__(self, settings: EncodeSettings) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_str(settings.tokenizer)
        # A document that spells out "<|endoftext|>" must not end there.
        self._tokenizer.encode_special_tokens = True
        self._records = RecordReader(settings.text_key)
        self._settings = settings

    def __call__(self, pieces: list[InputPiece]) -> Encoded:
        """Tokens of consecutive pieces, each document closed by the end-of-document token."""
        unreadable: list[Unreadable] = []
        parts = list(self._records.parts(pieces, unreadable))
        encodings = self._tokenizer.encode_batch_fast(
            [part.text for part in parts], add_special_tokens=False
        )
        tokens, starts, hashes = array("I"), array("q"), array("I")
        text_bytes = empty = 0
        for part, encoding in zip(parts, encodings, strict=True):
            ids = encoding.ids
            if part.first and part.last and not ids:  # no text, or none that has tokens
                empty += 1
                continue
            if part.first:
                starts.append(len(tokens))
                hashes.append(document_hash(part.text[:HASHED_CHARACTERS].encode()))
            tokens.extend(ids)
            if part.last:
                tokens.append(self._settings.end_of_document)
            text_bytes += len(part.text.encode())
        return Encoded(
            np.frombuffer(tokens, np.uint32).astype(self._settings.dtype),
            np.frombuffer(starts, np.int64),
            np.frombuffer(hashes, np.uint32),
            text_bytes,
            empty,
            unreadable,
        )


def encode_in_order(
    runs: Iterator[PieceRun], settings: EncodeSettings, workers: int
) -> Iterator[tuple[PieceRun, Encoded]]:
    """Encode each run on some worker; results come in the order of the runs."""
    with tokenizer_threads_off():
        if workers == 1:
            encoder = Encoder(settings)
            yield from ((run, encoder(run.pieces)) for run in runs)
        else:
            yield from _encode_on_pool(runs, settings, workers)


def _encode_on_pool(
    runs: Iterator[PieceRun], settings: EncodeSettings, workers: int
) -> Iterator[tuple[PieceRun, Encoded]]:
    # Spawned, not forked: threads may be alive here, which fork would leave in pieces.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (settings,))
    waiting: deque[tuple[PieceRun, Future[Encoded]]] = deque()
    try:
        for run in runs:
            waiting.append((run, pool.submit(_encode, run.pieces)))
            if len(waiting) > _AHEAD * workers:  # bounds memory
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    except BrokenProcessPool:
        rule = "a worker process died; finished shards are kept (out of memory?)"
        fix = "run the same command again to continue, with fewer --workers"
        raise DataError("workers", workers, rule, fix) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def tokenizer_threads_off() -> Iterator[None]:
    """The library's own threads would only compete with the other workers."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


_encoder: Encoder | None = None  # of this worker process


def _start_worker(settings: EncodeSettings) -> None:
    global _encoder
    follow_parent()
    _encoder = Encoder(settings)


def _encode(pieces: list[InputPiece]) -> Encoded:
    assert _encoder is not None
    return _encoder(pieces)
