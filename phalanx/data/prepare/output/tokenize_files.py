"""The documents of filtered files that are left, encoded; and where each of them came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.data.prepare.filter_files import KeptDocument, read_kept
from phalanx.data.prepare.output.places import IDS_NAME, PLACE, PLACES_NAME
from phalanx.data.tokenize.encode import (
    Encoded,
    Encoder,
    EncodeSettings,
    tokenizer_threads_off,
)
from phalanx.data.tokenize.inputs import InputPiece, cut_text

TOKENS_NAME = "tokens.bin"
TOTALS_NAME = "totals.json"

_BATCH = 64  # documents encoded at once


class TokenizedTotals(msgspec.Struct, frozen=True):
    """What a group of files became."""

    documents: int
    tokens: int
    text_bytes: int
    duplicates: int  # left out
    empty: int  # had no tokens


def tokenize_files(
    filtered: Path, duplicates: NDArray[np.int64], settings: EncodeSettings, out: Path
) -> None:
    """Encode a group of files without its duplicates, given by their numbers within it."""
    encoder = Encoder(settings)
    left_out = set(duplicates.tolist())
    documents = (
        document for number, document in enumerate(read_kept(filtered)) if number not in left_out
    )
    places: list[tuple[int, int, int, int, int, int]] = []
    tokens = text_bytes = empty = id_end = 0
    with (
        tokenizer_threads_off(),
        (out / TOKENS_NAME).open("wb") as file,
        (out / IDS_NAME).open("wb") as ids,
    ):
        for batch, encoded in _encoded(documents, encoder):
            empty += encoded.empty
            text_bytes += encoded.text_bytes
            rows = zip(batch, encoded.starts.tolist(), encoded.hashes.tolist(), strict=True)
            for document, start, number in rows:
                name = document.id.encode("utf-8", "replace")
                ids.write(name)
                id_end += len(name)
                where = (document.file, document.record, document.offset)
                place = (tokens + start, *where, id_end, number)
                places.append(place)
            file.write(encoded.tokens.tobytes())
            tokens += len(encoded.tokens)
    np.save(out / PLACES_NAME, np.array(places, PLACE))
    totals = TokenizedTotals(len(places), tokens, text_bytes, len(left_out), empty)
    (out / TOTALS_NAME).write_bytes(msgspec.json.encode(totals))


def read_totals(folder: Path) -> TokenizedTotals:
    """Counts of tokenised files."""
    return msgspec.json.decode((folder / TOTALS_NAME).read_bytes(), type=TokenizedTotals)


def _encoded(
    documents: Iterator[KeptDocument], encoder: Encoder
) -> Iterator[tuple[list[KeptDocument], Encoded]]:
    """Batches of documents with their tokens; those without any are not among them."""
    while batch := list(islice(documents, _BATCH)):
        encoded = encoder(_pieces(batch))
        if not encoded.empty:
            yield batch, encoded
            continue
        for document in batch:  # one has no tokens: which?
            alone = encoder(_pieces([document]))
            yield [document][: len(alone.starts)], alone


def _pieces(documents: Iterable[KeptDocument]) -> list[InputPiece]:
    pieces = []
    for document in documents:
        parts = cut_text(document.text)
        pieces += [
            InputPiece("text", part, 0, 0, 0, first=at == 0, last=at == len(parts) - 1)
            for at, part in enumerate(parts)
        ]
    return pieces
