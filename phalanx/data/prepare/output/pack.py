"""Tokens of all files, in their order, as one corpus, with the map back to its sources."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.manifest import (
    TOKENIZER_NAME,
    CorpusManifest,
    CorpusOrigin,
    StoredTokens,
    token_type,
)
from phalanx.data.corpus.writer import ShardWriter
from phalanx.data.durable_files import write_atomically
from phalanx.data.prepare.output.places import IDS_NAME, PLACE, PLACES_NAME, SourceFile
from phalanx.data.prepare.output.tokenize_files import TOKENS_NAME
from phalanx.data.prepare.output.trace import DOCUMENTS_NAME, FILES_NAME, TRACE_FOLDER

_CHUNK = 1 << 24  # tokens in memory at once


def pack(
    out: Path,
    tokenized: Sequence[tuple[Path, int]],
    sources: Sequence[SourceFile],
    tokenizer: bytes,
    vocab: int,
    end_of_document: int,
    file_bytes: int,
    origin: CorpusOrigin,
) -> CorpusManifest:
    """Write shards and map; what an interrupted call left is replaced.

    ``tokenized``: the folder of each group of files, and how many files it has.
    """
    trace = out / TRACE_FOLDER
    digest = hashlib.sha256(tokenizer).hexdigest()
    with ShardWriter(out, vocab, end_of_document, digest, file_bytes, replace=True) as writer:
        shutil.rmtree(trace, ignore_errors=True)
        trace.mkdir()
        write_atomically(out / TOKENIZER_NAME, tokenizer)
        dtype = np.dtype(token_type(vocab)).newbyteorder("<")
        first_token = first_file = ids_before = 0
        with (trace / DOCUMENTS_NAME).open("wb") as documents, (trace / IDS_NAME).open("wb") as ids:
            for folder, files in tokenized:
                places = np.load(folder / PLACES_NAME, allow_pickle=False)
                tokens = np.fromfile(folder / TOKENS_NAME, dtype)
                _append(writer, tokens, places)
                names = (folder / IDS_NAME).read_bytes()
                ids.write(names)
                places["token"] += first_token
                places["file"] += first_file
                places["id_end"] += ids_before
                documents.write(places.astype(PLACE).tobytes())
                first_token += len(tokens)
                first_file += files
                ids_before += len(names)
        write_atomically(trace / FILES_NAME, msgspec.json.encode(list(sources)))
        return writer.finish(origin)


def _append(writer: ShardWriter, tokens: StoredTokens, places: NDArray[Any]) -> None:
    """All tokens of a group of files, some at a time."""
    starts = places["token"]
    for first in range(0, len(tokens), _CHUNK):
        low, high = np.searchsorted(starts, (first, first + _CHUNK))
        writer.append(
            tokens[first : first + _CHUNK], starts[low:high] - first, places["hash"][low:high]
        )
