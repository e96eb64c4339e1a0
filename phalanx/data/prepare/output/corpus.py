"""The last phases: a tokenizer, the tokens of every file, and the corpus that they make."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer

from phalanx.data.corpus.manifest import CorpusManifest, CorpusOrigin, token_type
from phalanx.data.durable_files import write_atomically
from phalanx.data.prepare.counts import (
    EMPTY,
    SHOWN_CHARACTERS,
    UNREADABLE,
    DroppedExample,
    FilterCounts,
)
from phalanx.data.prepare.dedup.clusters import in_range
from phalanx.data.prepare.duplicates import Removed
from phalanx.data.prepare.filter_files import DOCUMENTS_NAME, KeptDocument, read_kept
from phalanx.data.prepare.output.pack import pack
from phalanx.data.prepare.output.places import SourceFile
from phalanx.data.prepare.output.tokenize_files import read_totals
from phalanx.data.prepare.recipe import VERSION, PrepareRecipe, digest
from phalanx.data.prepare.work import (
    TOKENIZERS_FOLDER,
    FilterFiles,
    GroupLayout,
    TokenizeFiles,
    WorkFolder,
    WorkUnit,
)
from phalanx.data.tokenize.vocabulary import end_of_document, load_tokenizer, train_tokenizer


class CorpusOutput:
    """What is made of filtered files."""

    def __init__(
        self,
        recipe: PrepareRecipe,
        out: Path,
        work: WorkFolder,
        layout: tuple[GroupLayout, ...],
        sources: Sequence[SourceFile],
    ) -> None:
        self._recipe, self._out, self._work = recipe, out, work
        self._layout, self._sources = layout, sources
        self._starts = [0, *accumulate(group.documents for group in layout)]
        self._files = [0, *accumulate(group.files for group in layout)]
        out.mkdir(parents=True, exist_ok=True)
        text, self._name = self._tokenizer()
        self._text = text.encode()
        tokenizer: Tokenizer = Tokenizer.from_str(text)
        self._vocab = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
        self._end = end_of_document(tokenizer, recipe.tokenize.end_of_document)

    def tokenize(
        self, removed: Removed, run: Callable[[str, Sequence[WorkUnit]], None]
    ) -> list[Path]:
        """Encode all files on the engine; the folders of the results, in the order of groups."""
        units = [self._unit(number, removed) for number in range(len(self._layout))]
        run("tokenize", units)
        return [self._work.of(unit) for unit in units]

    def pack(self, tokenized: Sequence[Path], counts: FilterCounts) -> tuple[CorpusManifest, int]:
        """The corpus, and how many documents had no tokens."""
        totals = [read_totals(folder) for folder in tokenized]
        origin = CorpusOrigin(
            self._recipe.read.inputs,
            len(self._sources),
            sum(each.text_bytes for each in totals),
            counts.dropped.get(EMPTY, 0),
            counts.dropped.get(UNREADABLE, 0),
        )
        file_bytes = self._recipe.tokenize.shard_mb << 20
        shape = (self._text, self._vocab, self._end, file_bytes)
        groups = [
            (folder, each.files) for folder, each in zip(tokenized, self._layout, strict=True)
        ]
        manifest = pack(self._out, groups, self._sources, *shape, origin)
        return manifest, sum(each.empty for each in totals)

    def duplicate(self, number: int, stays: int) -> DroppedExample:
        """A document that was left out for another one, as an example."""
        (path, document), (other_path, other) = self._document(number), self._document(stays)
        name = f" ({other.id})" if other.id else ""
        reason = f"says what {other_path}:{other.record}{name} says"
        text = document.text[:SHOWN_CHARACTERS]
        return DroppedExample(path, document.record, document.id, reason, text)

    def _document(self, number: int) -> tuple[str, KeptDocument]:
        """A document by its number, and the path of its file."""
        group = bisect_right(self._starts, number) - 1
        kept = read_kept(self._work.result(FilterFiles.folder, self._layout[group].key))
        document = next(islice(kept, number - self._starts[group], None))
        return self._sources[self._files[group] + document.file].path, document

    def _unit(self, number: int, removed: Removed) -> TokenizeFiles:
        first, past = self._starts[number], self._starts[number + 1]
        copied = in_range(removed.numbers, first, past).tobytes()
        dtype = token_type(self._vocab)
        filtered = self._layout[number].key
        content = (hashlib.sha256(self._text).hexdigest(), hashlib.sha256(copied).hexdigest())
        key = digest((VERSION, tokenizers.__version__, filtered, *content, self._end, dtype))
        return TokenizeFiles(key, filtered, removed.key, first, self._name, self._end, dtype)

    def _tokenizer(self) -> tuple[str, str]:
        """The text of the tokenizer, and the name under which workers find it.

        A new one is trained on what passed the filters, evenly from all files.
        """
        settings, folder = self._recipe.tokenize, self._work.path / TOKENIZERS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if settings.tokenizer:
            text = load_tokenizer(Path(settings.tokenizer)).to_str(pretty=False)
            name = f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
        else:
            key = (VERSION, tokenizers.__version__, self._layout, settings.vocab_size)
            name = f"{digest(key)}.json"
            if (folder / name).exists():
                return (folder / name).read_text(encoding="utf-8"), name
            filtered = [
                self._work.result(FilterFiles.folder, group.key) / DOCUMENTS_NAME
                for group in self._layout
                if group.documents
            ]
            text = train_tokenizer(filtered, settings.vocab_size).to_str(pretty=False)
        write_atomically(folder / name, text.encode())
        return text, name
