"""What a corpus holds, and what a job draws from each of its sources."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data, Store
from phalanx.data.corpus.manifest import TOKENIZER_NAME
from phalanx.data.corpus.source import open_sources, without_idle_sources
from phalanx.data.corpus.stream import FileStream, TokenStream
from phalanx.data.order.curriculum import curriculum

MOST_FILES = 64  # whose documents are measured; of more, an even choice


class LengthBin(msgspec.Struct, frozen=True):
    """Documents of ``least`` up to ``2 * least - 1`` tokens."""

    least: int
    documents: int
    tokens: int


class Lengths(msgspec.Struct, frozen=True):
    """Lengths of documents in tokens, their end token included."""

    measured: int  # documents; fewer than all where the corpus has many files
    median: int
    mean: float
    longest: int
    bins: tuple[LengthBin, ...]


def measure_lengths(stream: FileStream) -> Lengths:
    """Measure documents that start and end in the same file; all, or of an even choice of files."""
    edges = stream.file_starts
    files = len(edges) - 1
    chosen = (
        range(files) if files <= MOST_FILES else np.linspace(0, files - 1, MOST_FILES, dtype=int)
    )
    parts = []
    for number in chosen:
        inside = np.asarray(stream.file_documents(int(number))[:], np.int64)
        if int(number) == files - 1:
            inside = np.append(inside, edges[files] - edges[files - 1])
        parts.append(np.diff(inside))
    lengths = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if len(lengths) == 0:
        return Lengths(0, 0, 0.0, 0, ())
    powers = np.frexp(np.maximum(lengths, 1))[1] - 1  # floor of the binary logarithm, exactly
    counts = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths)
    bins = tuple(
        LengthBin(1 << power, int(counts[power]), int(tokens[power]))
        for power in range(int(powers.min()), len(counts))
    )
    middle, mean = int(np.median(lengths)), float(np.mean(lengths))
    return Lengths(len(lengths), middle, round(mean, 1), int(lengths.max()), bins)


def sample_texts(
    stream: TokenStream, samples: int, length: int, tokenizer: Path | None = None
) -> list[str]:
    """The beginning of evenly spread documents, decoded; token numbers without a tokenizer.

    Where only some tokens count as labels, these stand in brackets.
    """
    windows = []
    for number in range(samples if stream.tokens else 0):
        wanted = number * stream.tokens // samples
        begins = stream.document_starts(wanted, min(stream.tokens - wanted, 1 << 20))
        first = int(begins[0]) if len(begins) else wanted
        count = min(length, stream.tokens - first)
        following = stream.document_starts(first + 1, count - 1)
        count = int(following[0]) - first if len(following) else count
        tokens = np.empty(count, np.int64)
        stream.read_tokens(first, count, tokens)
        windows.append(_label_runs(stream, first, tokens))
    if tokenizer is None:
        return [_bracketed(window, lambda tokens: " ".join(map(str, tokens))) for window in windows]
    from phalanx.data.tokenize.vocabulary import (
        load_tokenizer,  # the library loads only where needed
    )

    encoder = load_tokenizer(tokenizer)
    decode = functools.partial(encoder.decode, skip_special_tokens=False)
    return [_bracketed(window, decode) for window in windows]


def _label_runs(
    stream: TokenStream, first: int, tokens: NDArray[np.int64]
) -> list[tuple[bool, list[int]]]:
    """Tokens in runs of labels and of others; a corpus that says nothing about it has one run."""
    if not stream.masked:
        return [(False, tokens.tolist())]
    counts = np.empty(len(tokens), np.uint8)
    stream.read_mask(first, len(tokens), counts)
    edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(tokens)]
    return [(bool(counts[low]), tokens[low:high].tolist()) for low, high in pairwise(edges)]


def _bracketed(runs: list[tuple[bool, list[int]]], decode: Callable[[list[int]], str]) -> str:
    texts = [(label, decode(tokens)) for label, tokens in runs]
    return "".join(f"⟦{text}⟧" if label else text for label, text in texts)


def tokenizer_of(path: str | Path, store: Store | None = None) -> Path | None:
    """The tokenizer.json in a corpus' folder, if there is one; fetched where it is not here."""
    if "://" in str(path):
        from phalanx.data.remote.shards import open_remote  # its event loop loads only where needed

        return open_remote(str(path), store or Store()).fetch(TOKENIZER_NAME)
    found = Path(path) / TOKENIZER_NAME
    return found if found.exists() else None


class SourceShare(msgspec.Struct, frozen=True):
    """One source of a blend."""

    name: str
    path: str
    tokens: int  # of its training side, in whole samples
    shares: tuple[float, ...]  # of the samples of each stage
    drawn_tokens: int  # by the whole run
    epochs: float  # the run makes over it


class BlendSurvey(msgspec.Struct, frozen=True):
    """What a run draws from each source."""

    stages: tuple[int, ...]  # tokens of the run after which each begins
    tokens: int  # of the whole run
    sources: tuple[SourceShare, ...]


def survey_blend(data: Data, vocab: int, samples: int) -> BlendSurvey:
    """What a run of ``samples`` samples draws from the sources of a job."""
    opened = open_sources(data, vocab)
    used = without_idle_sources(data)
    plan = curriculum(used)
    firsts = [first for first in plan.firsts if first < samples]
    drawn = np.array([plan.counts(edge) for edge in [*firsts, samples]])
    shares = np.diff(drawn, axis=0) / np.diff([*firsts, samples])[:, None]
    sources = tuple(
        SourceShare(
            name=name,
            path=used.blend[name].path if used.blend else data.path,
            tokens=source.samples * data.sequence,
            shares=tuple(shares[:, at].tolist()),
            drawn_tokens=int(drawn[-1, at]) * data.sequence,
            epochs=float(drawn[-1, at]) / source.samples,
        )
        for at, (name, source) in enumerate(opened.items())
    )
    stages = tuple(first * data.sequence for first in firsts)
    return BlendSurvey(stages, samples * data.sequence, sources)
