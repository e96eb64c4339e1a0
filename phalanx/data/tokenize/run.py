"""From text to token shards: streaming, on all cores, and going on where a killed run stopped.

The shards depend on the texts, their order and the tokenizer alone: neither the number of
workers nor an interruption changes a byte.
"""

from __future__ import annotations

import errno
import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import tokenizers
from tokenizers import Tokenizer

from phalanx.data.corpus.manifest import (
    FORMAT_VERSION,
    TOKENIZER_NAME,
    CorpusManifest,
    CorpusOrigin,
    ShardFile,
    token_type,
)
from phalanx.data.corpus.writer import FILE_BYTES, ShardWriter
from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError
from phalanx.data.file_times import settled_stats
from phalanx.data.folder_lock import alone_in
from phalanx.data.tokenize import inputs
from phalanx.data.tokenize.encode import Encoded, EncodeSettings, PieceRun, encode_in_order
from phalanx.data.tokenize.inputs import InputPiece, read_pieces
from phalanx.data.tokenize.journal import Counts, JournalEntry, TokenizeJournal
from phalanx.data.tokenize.records import Unreadable
from phalanx.data.tokenize.vocabulary import end_of_document

UNREADABLE_NAME = "unreadable.jsonl"
FEW_UNREADABLE = 10  # records, of which a small corpus may lose up to half without a refusal
MOST_NAMED = 1000  # unreadable records that are listed; all are counted

_RUN_BYTES = 1 << 18  # of text, handed to a worker at once: small, so that all end together


class TokenizeOptions(msgspec.Struct, frozen=True):
    """How to tokenise; none but the first three changes what the shards hold."""

    end_token: str = ""
    text_key: str = "text"
    file_bytes: int = FILE_BYTES
    workers: int = 1
    replace: bool = False
    inputs: tuple[str, ...] = ()  # as the user named them, kept in the manifest
    most_unreadable: float = 0.05  # share of the records; with more, the corpus is not completed


class Tokenized(msgspec.Struct, frozen=True):
    """Outcome of ``tokenize_files``."""

    manifest: CorpusManifest
    resumed_shards: int  # finished by an earlier run that was killed
    unreadable: tuple[Unreadable, ...]  # the first of them, each naming its file by number


class TokenizeProgress(msgspec.Struct, frozen=True):
    """What was done since the report before."""

    input_bytes: int
    tokens: int
    resumed: bool = False  # by an earlier run


def stdlib_corpus() -> list[Path]:
    """Sources of Python's standard library without its tests: 5-10 MB of text, found everywhere."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Tests and generated tables would be most of the bytes and little of the language.
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    left_out |= {"encodings", "pydoc_data"}
    sources = root.rglob("*.py")
    return sorted(path for path in sources if left_out.isdisjoint(path.relative_to(root).parts))


def tokenize_files(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    out: Path,
    options: TokenizeOptions | None = None,
    progress: Callable[[TokenizeProgress], None] = lambda done: None,
) -> Tokenized:
    """Write the documents of ``files``, in their order, as token shards into ``out``."""
    options = options or TokenizeOptions()
    text = tokenizer.to_str(pretty=False)
    vocab = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
    end = end_of_document(tokenizer, options.end_token)
    settings = EncodeSettings(text, end, options.text_key, token_type(vocab))
    out.mkdir(parents=True, exist_ok=True)
    with _space_errors_in_words(out), alone_in(out):
        identity = _identity(files, settings, options.file_bytes)
        journal = TokenizeJournal(out, identity, options.replace)
        finished = tuple(shard for entry in journal.entries for shard in entry.shards)
        _check_finished(out, finished, np.dtype(settings.dtype).itemsize)
        digest = hashlib.sha256(text.encode()).hexdigest()
        with ShardWriter(
            out, vocab, end, digest, options.file_bytes, options.replace, finished
        ) as writer:
            write_atomically(out / TOKENIZER_NAME, text.encode())
            work = _Work(writer, journal, progress)
            runs = _runs(files, options.text_key, work.file, work.piece)
            for run, encoded in encode_in_order(runs, settings, options.workers):
                work.add(run, encoded)
            if _identity(files, settings, options.file_bytes) != identity:
                journal.remove()  # of which file is not known: all begins again
                rule = "changed while it was read"
                fix = "run again when nothing writes to it"
                raise DataError("input", " ".join(options.inputs) or files[0], rule, fix)
            return work.finish(files, options, len(finished))


class _Work:
    """The part of tokenising that happens in order: writing, counting, remembering."""

    def __init__(
        self,
        writer: ShardWriter,
        journal: TokenizeJournal,
        progress: Callable[[TokenizeProgress], None],
    ) -> None:
        self._writer, self._journal, self._progress = writer, journal, progress
        self._counts = Counts()
        self.file = self.piece = self._skip_tokens = 0
        self._named = [found for entry in journal.entries for found in entry.unreadable]
        self._unrecorded: list[Unreadable] = []  # named since the last entry
        if journal.entries:
            last = journal.entries[-1]
            self._counts = last.counts
            self.file, self.piece, self._skip_tokens = last.file, last.piece, last.skip_tokens
            tokens = sum(shard.tokens for shard in writer.files)
            progress(TokenizeProgress(last.counts.input_bytes, tokens, resumed=True))

    def add(self, run: PieceRun, encoded: Encoded) -> None:
        """Write a run, less what an earlier process wrote of it in finished shards."""
        new = encoded.starts >= self._skip_tokens
        before = len(self._writer.files)
        self._writer.append(
            encoded.tokens[self._skip_tokens :],
            encoded.starts[new] - self._skip_tokens,
            encoded.hashes[new],
        )
        if len(self._writer.files) > before:
            written = len(encoded.tokens) - self._writer.open_tokens
            shards = tuple(self._writer.files[before:])
            unreadable, self._unrecorded = tuple(self._unrecorded), []
            self._journal.append(
                JournalEntry(shards, run.file, run.piece, written, self._counts, unreadable)
            )
        input_bytes = sum(piece.input_bytes for piece in run.pieces)
        self._progress(TokenizeProgress(input_bytes, len(encoded.tokens) - self._skip_tokens))
        self._skip_tokens = 0
        self._count(input_bytes, encoded)

    def finish(
        self, files: Sequence[Path], options: TokenizeOptions, resumed_shards: int
    ) -> Tokenized:
        """Complete the corpus, list what could not be read, forget the journal."""
        listing = self._writer.folder / UNREADABLE_NAME
        listing.unlink(missing_ok=True)
        if self._named:
            lines = [
                {"file": str(files[found.file]), "line": found.line, "reason": found.reason}
                for found in self._named
            ]
            write_atomically(listing, msgspec.json.Encoder().encode_lines(lines))
        counts = self._counts
        if self._named and not self._writer.files and not self._writer.open_tokens:
            self._journal.remove()
            raise _nothing_read(files[self._named[0].file], self._named[0])
        records = self._writer.documents + counts.empty + counts.unreadable
        few = counts.unreadable <= FEW_UNREADABLE and 2 * counts.unreadable <= records
        if counts.unreadable > options.most_unreadable * records and not few:
            where, first = files[self._named[0].file], self._named[0]
            raise _too_many_left_out(where, first, counts.unreadable, records, listing)
        source = CorpusOrigin(
            options.inputs, len(files), counts.text_bytes, counts.empty, counts.unreadable
        )
        manifest = self._writer.finish(source)
        self._journal.remove()
        return Tokenized(manifest, resumed_shards, tuple(self._named))

    def _count(self, input_bytes: int, encoded: Encoded) -> None:
        counts = self._counts
        self._counts = Counts(
            counts.text_bytes + encoded.text_bytes,
            counts.empty + encoded.empty,
            counts.unreadable + len(encoded.unreadable),
            counts.input_bytes + input_bytes,
        )
        named = encoded.unreadable[: MOST_NAMED - len(self._named)]
        self._named += named
        self._unrecorded += named


def _nothing_read(file: Path, first: Unreadable) -> DataError:
    rule = f"no document of the input could be read; here: {first.reason}"
    where = f"{file}:{first.line}" if first.line else file
    return DataError("input", where, rule, "give other files, or the text's field as --text-key")


def _too_many_left_out(
    file: Path, first: Unreadable, count: int, records: int, listing: Path
) -> DataError:
    rule = (
        f"{count:,} of {records:,} records cannot be read and would be left out, more than"
        f" --most-unreadable allows; the first: {first.reason} (all: {listing})"
    )
    where = f"{file}:{first.line}" if first.line else file
    fix = "name the text's field with --text-key (and --force), or allow more"
    return DataError("input", where, rule, fix)


def _runs(
    files: Sequence[Path], text_key: str, first_file: int, first_piece: int
) -> Iterator[PieceRun]:
    """Pieces gathered to the size that a worker takes at once."""
    place, pieces, size = (0, 0), list[InputPiece](), 0
    for file, at, piece in read_pieces(files, text_key, first_file, first_piece):
        if not pieces:
            place = (file, at)
        pieces.append(piece)
        size += len(piece.content)
        if size >= _RUN_BYTES:
            yield PieceRun(*place, pieces)
            pieces, size = [], 0
    if pieces:
        yield PieceRun(*place, pieces)


def _identity(files: Sequence[Path], settings: EncodeSettings, file_bytes: int) -> str:
    """Equal for runs that would write the same shards from the same files."""
    stats = zip(files, settled_stats(files), strict=True)
    seen = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    # Another library may encode otherwise; other pieces would make recorded places mean others.
    code = (FORMAT_VERSION, tokenizers.__version__, inputs.LINES_BYTES, inputs.PIECE_CHARACTERS)
    content = msgspec.json.encode((code, _RUN_BYTES, settings, file_bytes, seen))
    return hashlib.sha256(content).hexdigest()


def _check_finished(out: Path, finished: tuple[ShardFile, ...], width: int) -> None:
    for shard in finished:
        path = out / shard.name
        if not path.exists() or path.stat().st_size != shard.tokens * width:
            rule = "was finished by the run that is to be continued, but is gone or changed"
            raise DataError("out", path, rule, "start afresh with --force")


@contextmanager
def _space_errors_in_words(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        rule = f"no space left ({error.strerror}); finished shards are kept"
        fix = "make room and run the same command again to continue"
        raise DataError("out", out, rule, fix) from None
