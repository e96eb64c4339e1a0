"""Tokenizers: training one, loading one, and the token that ends documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.data.errors import DataError
from phalanx.data.tokenize.inputs import read_pieces
from phalanx.data.tokenize.records import RecordReader, Unreadable

END_OF_DOCUMENT = "<|endoftext|>"
TRAIN_BYTES = 16 << 20  # text that a new tokenizer is trained on

_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "<eos>", "</s>", "<|eos|>")


def train_tokenizer(
    files: list[Path], vocab_size: int, train_bytes: int = TRAIN_BYTES, text_key: str = "text"
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
    tokenizer.train_from_iterator(_subsample(files, train_bytes, text_key), trainer=trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a Hugging Face ``tokenizer.json``.

    Lengths that it cuts texts to, or fills them up to, are those of a model's input: left out.
    """
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        rule, fix = "does not exist", "correct the path, or train one with --vocab-size"
        raise DataError("tokenizer", path, rule, fix) from None
    except Exception as error:  # the library raises bare Exception
        rule = f"is no tokenizer.json of Hugging Face tokenizers ({error})"
        raise DataError("tokenizer", path, rule, "train one with --vocab-size") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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


def _subsample(files: list[Path], most_bytes: int, text_key: str) -> Iterator[str]:
    """Text of files evenly spread over the list, the same share of each, up to ``most_bytes``."""
    total = sum(path.stat().st_size for path in files)
    stride = min(len(files), max(1, -(-total // most_bytes)))
    chosen = files[::stride]
    # A large file among few gives only its share; small ones are read whole.
    share = max(most_bytes // len(chosen), total // len(files))
    records, ignored = RecordReader(text_key), list[Unreadable]()
    given = 0
    for path in [*chosen, *(file for at, file in enumerate(files) if at % stride)]:
        of_file = 0
        pieces = (piece for _, _, piece in read_pieces([path], text_key))
        for part in records.parts(pieces, ignored):
            yield part.text
            of_file += len(part.text)
            if of_file >= share:
                break
        given += of_file
        if given >= most_bytes:
            return
