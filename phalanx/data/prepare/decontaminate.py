"""Documents that contain a part of an evaluation set: found by common word n-grams.

As for GPT-3 (Brown et al. 2020, appendix C): 13 words in a row, letters and digits in lower case.
An example that is shorter is looked for whole, if it has at least 8 words.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np

from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError
from phalanx.data.prepare.read.file_formats import SourceDocument, read_documents
from phalanx.data.prepare.read.inputs import find_inputs, open_input
from phalanx.data.prepare.words import Hashes, TextView, ngram_hashes
from phalanx.data.tokenize.inputs import (
    JSON_ERRORS,
    LINE_SUFFIXES,
    UNPACK_ERRORS,
    open_unpacked,
)


class EvaluationNgrams:
    """The n-grams of evaluation sets, by their number of words."""

    def __init__(self, by_size: dict[int, Hashes]) -> None:
        self._by_size = by_size  # sorted hashes

    def found_in(self, view: TextView) -> str | None:
        """The first words that a text shares with an evaluation set."""
        for size, wanted in self._by_size.items():
            hashes = ngram_hashes(view.word_hashes, size)
            at = np.searchsorted(wanted, hashes)
            at[at == len(wanted)] = 0
            matches = np.flatnonzero(wanted[at] == hashes)
            if len(matches):
                first = int(matches[0])
                return f"has “{' '.join(view.words[first : first + size])}” of an evaluation set"
        return None

    def digest(self) -> str:
        """Identity of all of them."""
        content = hashlib.sha256()
        for size, hashes in self._by_size.items():
            content.update(f"{size} {len(hashes)} ".encode() + hashes.tobytes())
        return content.hexdigest()[:24]

    def save(self, path: Path) -> None:
        """Write them to a file that ``load`` reads, which is whole or not there."""
        arrays: dict[str, Any] = {str(size): each for size, each in self._by_size.items()}
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_atomically(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> EvaluationNgrams:
        """What ``save`` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            return cls({int(size): arrays[size] for size in arrays.files})


def gather_ngrams(
    patterns: Sequence[str], text_key: str, size: int, least: int
) -> EvaluationNgrams:
    """N-grams of all examples in these files."""
    hashes: dict[int, list[Hashes]] = {}
    for path, _, _ in find_inputs("decontaminate.against", patterns):
        count = 0
        for text in _examples(path, text_key):
            count += 1
            view = TextView(text)
            own_size = min(size, len(view.words))
            if own_size >= least:
                hashes.setdefault(own_size, []).append(ngram_hashes(view.word_hashes, own_size))
        if not count:
            rule, fix = "holds no example", "correct the file, or take it out of the list"
            raise DataError("decontaminate.against", path, rule, fix)
    return EvaluationNgrams(
        {size: np.unique(np.concatenate(hashes[size])) for size in sorted(hashes)}
    )


def _examples(path: str, text_key: str) -> Iterator[str]:
    """Texts of an evaluation set; without a key, every string of every JSON line by itself."""
    name = path.removesuffix(".gz").removesuffix(".zst")
    if text_key or not name.endswith(LINE_SUFFIXES):
        for document in read_documents(path, text_key, ""):
            if not isinstance(document, SourceDocument):
                rule = f"record {document.record} cannot be read: it {document.reason}"
                fix = (
                    "correct the file, or decontaminate.text_key (empty: all strings of an example)"
                )
                raise DataError("decontaminate.against", path, rule, fix)
            yield document.text
        return
    number = 0
    with open_input(path) as raw:
        try:
            for line in open_unpacked(raw, PurePosixPath(path)):
                number += 1
                if line.strip():
                    yield from _strings(msgspec.json.decode(line))
        except (*JSON_ERRORS, *UNPACK_ERRORS) as error:  # half a set would let the other half in
            rule = f"line {number} cannot be read ({error})"
            raise DataError("decontaminate.against", path, rule, "correct the file") from None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
