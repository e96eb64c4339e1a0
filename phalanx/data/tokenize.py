"""From text files to token shards, streaming: memory does not grow with the corpus."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.data.errors import DataError
from phalanx.data.manifest import TOKENIZER_NAME, CorpusManifest
from phalanx.data.writer import FILE_BYTES, ShardWriter, write_atomically

END_OF_DOCUMENT = "<|endoftext|>"
TRAIN_BYTES = 16 << 20  # text that a new tokenizer is trained on
SUFFIXES = (".txt", ".md", ".rst", ".py")

_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "<eos>", "</s>", "<|eos|>")
_PIECE_CHARACTERS = 1 << 20  # a longer file is encoded in pieces, cut at line ends where it has any
_BATCH_CHARACTERS = 4 << 20  # handed to the encoder's threads at once


class Tokenized(msgspec.Struct, frozen=True):
    """Outcome of ``tokenize_files``."""

    manifest: CorpusManifest
    text_bytes: int
    unreadable: tuple[str, ...]  # files that are not UTF-8, left out from where they fail


def find_files(inputs: Iterable[Path], suffixes: Iterable[str] = SUFFIXES) -> list[Path]:
    """Files named by ``inputs`` and those with a fitting suffix below its folders, sorted."""
    wanted = tuple(suffixes)
    found: set[Path] = set()
    for path in inputs:
        if path.is_dir():
            found.update(file for file in path.rglob("*") if file.suffix in wanted)
        elif path.is_file():
            found.add(path)
        else:
            raise DataError("input", path, "is neither a file nor a folder", "correct the path")
    files = sorted(file for file in found if file.is_file())
    if not files:
        shown = " ".join(str(path) for path in inputs)
        rule = f"no file with suffix {', '.join(wanted)} was found"
        raise DataError("input", shown, rule, "name files, or other suffixes with --suffix")
    return files


def stdlib_corpus() -> list[Path]:
    """Sources of Python's standard library without its tests: 5-10 MB of text, found everywhere."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Tests and generated tables would be most of the bytes and little of the language.
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    left_out |= {"encodings", "pydoc_data"}
    sources = root.rglob("*.py")
    return sorted(path for path in sources if left_out.isdisjoint(path.relative_to(root).parts))


def train_tokenizer(
    files: list[Path], vocab_size: int, train_bytes: int = TRAIN_BYTES
) -> Tokenizer:
    """Byte-level BPE over an even subsample of ``files``; the end of document is token 0."""
    least = 257  # every byte and the end of document
    if vocab_size < least:
        rule = f"a byte-level vocabulary has at least {least} entries"
        raise DataError("vocab-size", vocab_size, rule, f"use {least} or more; 4096 is usual")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_subsample(files, train_bytes), trainer=trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a Hugging Face ``tokenizer.json``."""
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        rule, fix = "does not exist", "correct the path, or train one with --vocab-size"
        raise DataError("tokenizer", path, rule, fix) from None
    except Exception as error:  # the library raises bare Exception
        rule = f"is no tokenizer.json of Hugging Face tokenizers ({error})"
        raise DataError("tokenizer", path, rule, "train one with --vocab-size") from None


def end_of_document(tokenizer: Tokenizer, name: str = "") -> int:
    """Id of the token that ends documents: ``name``, or the first of the usual ones."""
    for candidate in (name,) if name else _END_NAMES:
        number = tokenizer.token_to_id(candidate)
        if number is not None:
            return int(number)
    rule = f"the tokenizer has no such token (looked for {name or ', '.join(_END_NAMES)})"
    raise DataError(
        "end-of-document", name or "(usual names)", rule, "name one with --end-of-document"
    )


def tokenize_files(
    files: list[Path],
    tokenizer: Tokenizer,
    out: Path,
    end_token: str = "",
    file_bytes: int = FILE_BYTES,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda text_bytes, tokens: None,
) -> Tokenized:
    """Write ``files``, in their order and one document each, as token shards into ``out``.

    ``progress`` receives the bytes of text and the tokens of each batch.
    """
    end = end_of_document(tokenizer, end_token)
    text = tokenizer.to_str(pretty=False).encode()
    vocab = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
    # A document that spells out "<|endoftext|>" must not end there.
    tokenizer.encode_special_tokens = True
    unreadable: list[str] = []
    text_bytes = 0
    with ShardWriter(
        out, vocab, end, hashlib.sha256(text).hexdigest(), file_bytes, replace
    ) as writer:
        write_atomically(out / TOKENIZER_NAME, text)
        for batch in _batches(files, unreadable):
            encoded = tokenizer.encode_batch_fast(
                [piece for piece, _ in batch], add_special_tokens=False
            )
            for (_, ends_document), encoding in zip(batch, encoded, strict=True):
                writer.write(encoding.ids)
                if ends_document:
                    writer.end_document()
            batch_bytes = sum(len(piece.encode()) for piece, _ in batch)
            text_bytes += batch_bytes
            progress(batch_bytes, sum(len(encoding) for encoding in encoded))
        manifest = writer.finish()
    return Tokenized(manifest, text_bytes, tuple(unreadable))


def _batches(files: list[Path], unreadable: list[str]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of text with "ends its document", gathered to the size the encoder works well on."""
    batch: list[tuple[str, bool]] = []
    characters = 0
    for path in files:
        for piece, last in _pieces(path, unreadable):
            batch.append((piece, last))
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _pieces(path: Path, unreadable: list[str]) -> Iterator[tuple[str, bool]]:
    """Text of a file in pieces, the last one marked; an empty file has none."""
    held = ""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while piece := file.read(_PIECE_CHARACTERS):
                if held:
                    yield held, False
                held = piece + file.readline(_PIECE_CHARACTERS)
    except UnicodeDecodeError:
        unreadable.append(str(path))
    if held:
        yield held, True


def _subsample(files: list[Path], most_bytes: int) -> Iterator[str]:
    """Whole files, evenly spread over the list, until ``most_bytes`` of text are given."""
    total = sum(path.stat().st_size for path in files)
    stride = max(1, -(-total // most_bytes))
    ignored: list[str] = []
    given = 0
    for path in [*files[::stride], *(f for at, f in enumerate(files) if at % stride)]:
        for piece, _ in _pieces(path, ignored):
            yield piece
            given += len(piece)
        if given >= most_bytes:
            return
