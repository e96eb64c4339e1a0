"""A group of files through the rules: what is kept, with its hashes, and why the rest is not."""

from __future__ import annotations

import gzip
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from phalanx.data.prepare.classifier import ClassifierFailure, Score, load_classifier, score
from phalanx.data.prepare.counts import EMPTY, FilterCounts, add
from phalanx.data.prepare.decontaminate import EvaluationNgrams
from phalanx.data.prepare.dedup.minhash import MinHasher, choose_banding, shingles, sketch
from phalanx.data.prepare.masks import mask
from phalanx.data.prepare.read.file_formats import SourceDocument, UnreadableRecord, read_documents
from phalanx.data.prepare.recipe import DeduplicateSettings, PrepareRecipe
from phalanx.data.prepare.rules.registry import Edited, chosen_rules
from phalanx.data.prepare.words import TextView, content_hash

DOCUMENTS_NAME = "documents.jsonl.gz"
COUNTS_NAME = "counts.json"
CONTENT_NAME = "content.npy"  # [2, documents] halves of the content's hash
KEYS_NAME = "keys.npy"  # [bands, documents]
SKETCHES_NAME = "sketches.u32"
SKETCH_ENDS_NAME = "sketch_ends.npy"  # [documents]


class KeptDocument(msgspec.Struct, frozen=True, gc=False):
    """A document that passed, as its line among the filtered ones."""

    text: str
    id: str
    file: int  # within the group
    record: int
    offset: int


class DocumentFilter:
    """Everything that a recipe does to a single document."""

    def __init__(
        self, recipe: PrepareRecipe, folder: Path, ngrams: EvaluationNgrams | None
    ) -> None:
        self._rules = chosen_rules(recipe.filter.rules, recipe.filter.thresholds)
        self._classifiers: list[tuple[str, Score, float]] = [
            (each.function, load_classifier(each.function, folder), each.least)
            for each in recipe.classifier
        ]
        self._ngrams = ngrams
        self._masks = recipe.mask.what if recipe.mask else ()
        self._examples = recipe.examples

    def __call__(
        self, document: SourceDocument, file: int, counts: FilterCounts
    ) -> TextView | None:
        """What is left of a document; None, and counted, where it is dropped."""

        def drop(rule: str, reason: str) -> None:
            counts.drop(rule, reason, document, file, self._examples)

        view = TextView(document.text)
        if not view.text.strip():
            drop(EMPTY, "has no text")
            return None
        for name, rule in self._rules.items():
            outcome = rule(view)
            if isinstance(outcome, Edited):
                if outcome.text == view.text:
                    continue
                add(counts.edited, name)
                view = TextView(outcome.text)
                outcome = None if view.text.strip() else "nothing is left of it"
            if outcome is not None:
                drop(name, outcome)
                return None
        if not self._judge(view, counts, drop):
            return None
        if self._ngrams is not None and (shared := self._ngrams.found_in(view)):
            drop("decontaminate", shared)
            return None
        text, masked = mask(view.text, self._masks)
        for name, count in masked.items():
            add(counts.masked, name, count)
        return TextView(text) if masked else view

    def _judge(
        self, view: TextView, counts: FilterCounts, drop: Callable[[str, str], None]
    ) -> bool:
        """Whether all classifiers want it; where one fails it is dropped, and counted as such."""
        for name, function, least in self._classifiers:
            add(counts.asked, name)
            try:
                value = score(function, view.text)
            except ClassifierFailure as failure:
                add(counts.failed, name)
                drop(f"{name} failed", str(failure))
                return False
            if value < least:
                drop(name, f"score {value:.3g}")
                return False
        return True


class KeptWriter:
    """Documents that are kept, with what deduplication needs of them."""

    def __init__(self, folder: Path, settings: DeduplicateSettings | None) -> None:
        self._folder, self._settings = folder, settings
        near = settings is not None and settings.near
        self._hasher = (
            MinHasher(choose_banding(settings.jaccard, settings.recall))
            if settings and near
            else None
        )
        self._content, self._keys, self._ends = bytearray(), bytearray(), array("q")
        self._sketched = 0
        self._raw = (folder / DOCUMENTS_NAME).open("wb")
        # No name and no time: equal documents make equal files.
        self._lines: IO[bytes] = gzip.GzipFile("", "wb", 1, self._raw, mtime=0)  # type: ignore[assignment]
        self._sketches = (folder / SKETCHES_NAME).open("wb")
        self._encoder = msgspec.json.Encoder()

    def write(self, document: SourceDocument, view: TextView, file: int = 0) -> None:
        """Append a document of a file of the group."""
        kept = KeptDocument(view.text, document.id, file, document.record, document.offset)
        self._lines.write(self._encoder.encode(kept) + b"\n")
        self._content += content_hash(view.text)
        if self._hasher is not None and self._settings is not None:
            ngrams = shingles(view, self._settings.words)
            self._keys += self._hasher.keys(ngrams).tobytes()
            small = sketch(ngrams)
            self._sketches.write(small.tobytes())
            self._sketched += len(small)
            self._ends.append(self._sketched)

    def close(self) -> None:
        """Complete all files."""
        self._lines.close()
        self._raw.close()
        self._sketches.close()
        content = np.frombuffer(self._content, "<u8").reshape(-1, 2)
        np.save(self._folder / CONTENT_NAME, np.ascontiguousarray(content.T))
        if self._hasher is not None:
            keys = np.frombuffer(self._keys, "<u8").reshape(-1, self._hasher.banding.bands)
            np.save(self._folder / KEYS_NAME, np.ascontiguousarray(keys.T))
            np.save(self._folder / SKETCH_ENDS_NAME, np.frombuffer(self._ends, "<i8"))


def filter_files(
    paths: Sequence[str],
    recipe: PrepareRecipe,
    recipe_folder: Path,
    ngrams: Path | None,
    out: Path,
) -> None:
    """Filter a group of files into the folder ``out``."""
    evaluation = EvaluationNgrams.load(ngrams) if ngrams else None
    wanted = DocumentFilter(recipe, recipe_folder, evaluation)
    counts = FilterCounts()
    writer = KeptWriter(out, recipe.deduplicate)
    for file, path in enumerate(paths):
        for found in read_documents(path, recipe.read.text_key, recipe.read.id_key):
            if isinstance(found, UnreadableRecord):
                counts.unreadable(found, file, recipe.examples)
                continue
            counts.read(found)
            view = wanted(found, file, counts)
            if view is not None:
                counts.keep(view.text)
                writer.write(found, view, file)
    writer.close()
    (out / COUNTS_NAME).write_bytes(msgspec.json.encode(counts))


def read_counts(folder: Path) -> FilterCounts:
    """Counts of filtered files."""
    return msgspec.json.decode((folder / COUNTS_NAME).read_bytes(), type=FilterCounts)


def read_kept(folder: Path) -> Iterator[KeptDocument]:
    """Documents of filtered files, in their order."""
    decoder = msgspec.json.Decoder(KeptDocument)
    with gzip.open(folder / DOCUMENTS_NAME) as lines:
        for line in lines:
            yield decoder.decode(line)
