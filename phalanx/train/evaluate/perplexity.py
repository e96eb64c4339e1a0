"""Perplexity of a model on a domain's texts: every token is scored exactly once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from phalanx.config import ConfigError
from phalanx.data import DataError, TokenStream, open_stream
from phalanx.data.corpus.manifest import MANIFEST_NAME
from phalanx.data.tokenize.inputs import SUFFIXES, find_files, read_pieces
from phalanx.data.tokenize.records import RecordReader, Unreadable
from phalanx.train.evaluate.rows import rolling
from phalanx.train.evaluate.score import Scorer
from phalanx.train.evaluate.text import TextCodec, needed_codec

DOCUMENTS_AT_ONCE = 256  # that are held in memory
STRETCH_TOKENS = 1 << 22  # in which documents are looked for at once


class Document(NamedTuple):
    """Tokens of a text, without the one that ends it, and its length in bytes; None: unknown."""

    tokens: list[int]
    text_bytes: int | None


class DomainScore(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of a model on a domain."""

    documents: int
    tokens: int
    text_bytes: int | None  # None: no tokenizer says
    nats: float  # by which all tokens surprise it together

    @property
    def numbers(self) -> dict[str, float]:
        """Scores by the names under which they are reported."""
        mean = self.nats / self.tokens
        values = {"perplexity": math.exp(min(mean, 700.0)), "loss": mean, "tokens": self.tokens}
        if self.text_bytes:
            values["bits_per_byte"] = self.nats / math.log(2) / self.text_bytes
        return values


class Domain(NamedTuple):
    """A domain: documents to score."""

    start: int  # the token before the first of each
    documents: Iterator[Document]


def domain_score(domain: Domain, scorer: Scorer, limit: int = 0) -> DomainScore | None:
    """Score the documents, or the first ``limit``; None if they have no tokens."""
    chosen = islice(domain.documents, limit) if limit else domain.documents
    count = tokens = size = 0
    nats, has_bytes = 0.0, True
    while group := list(islice(chosen, DOCUMENTS_AT_ONCE)):
        requests = [
            request
            for each in group
            for request in rolling(each.tokens, domain.start, scorer.sequence)
        ]
        nats -= math.fsum(score.log_probability for score in scorer.score(requests))
        count += len(group)
        tokens += sum(len(each.tokens) for each in group)
        size += sum(each.text_bytes or 0 for each in group)
        has_bytes = has_bytes and all(each.text_bytes is not None for each in group)
    if not tokens:
        return None
    text_bytes = size if has_bytes else None
    return DomainScore(documents=count, tokens=tokens, text_bytes=text_bytes, nats=nats)


def open_domain(name: str, path: str, codec: TextCodec | None, vocab: int) -> Domain:
    """The documents at ``path``, token shards or text, in their order; empty ones are left out."""
    if "://" not in path and not (Path(path).exists() or Path(f"{path}.idx").exists()):
        fix = "give token shards or text files, relative to the working folder"
        raise _refusal(name, path, "there is no such file or folder", fix)
    try:
        if _is_text(path):
            codec = needed_codec(codec, f"perplexity of the text {path}")
            return Domain(codec.end, _texts(find_files([Path(path)]), codec, vocab))
        stream = open_stream(path, vocab)
    except DataError as error:
        (problem,) = error.problems
        raise _refusal(name, path, problem.rule, problem.fix) from None
    if stream.masked:
        rule = "leaves out padding and prompts by a mask of labels, and they would count as text"
        raise _refusal(name, path, rule, "give the corpus, or the text, that it was made of")
    if codec is not None and stream.tokenizer and stream.tokenizer != _identity(codec):
        rule = "was made with another tokenizer than the model's corpus"
        raise _refusal(name, path, rule, "tokenise it with the tokenizer.json of the run's corpus")
    start = stream.end_of_document if codec is None else codec.end
    if start is None:
        rule = "has no end-of-document token, and no tokenizer names one"
        raise _refusal(name, path, rule, "give --tokenizer")
    return Domain(start, _tokenized(stream, codec))


def _is_text(path: str) -> bool:
    home = Path(path)
    if "://" in path or (home / MANIFEST_NAME).exists():
        return False
    if home.is_dir():
        return not any(next(home.rglob(tokens), None) for tokens in ("*.idx", "*.ds"))
    return home.name.endswith(SUFFIXES)


def _texts(files: list[Path], codec: TextCodec, vocab: int) -> Iterator[Document]:
    ignored = list[Unreadable]()
    pieces = (piece for _, _, piece in read_pieces(files, "text"))
    tokens: list[int] = []
    size = 0
    for part in RecordReader("text").parts(pieces, ignored):
        if part.first:
            tokens, size = [], 0
        tokens += codec.encode(part.text)
        size += len(part.text.encode())
        if part.last and tokens:
            _refuse_strangers(tokens, vocab, codec)
            yield Document(tokens, size)


def _tokenized(stream: TokenStream, codec: TextCodec | None) -> Iterator[Document]:
    first, end = 0, stream.end_of_document
    if end is None and codec is not None:
        end = codec.end
    for past in _ends(stream):
        content = np.empty(past - first, np.int64)
        stream.read_tokens(first, past - first, content)
        tokens = content.tolist()
        if tokens and tokens[-1] == end:
            tokens.pop()
        first = past
        if tokens:
            yield Document(tokens, None if codec is None else len(codec.decode(tokens).encode()))


def _ends(stream: TokenStream) -> Iterator[int]:
    """End positions of the documents in a token stream, read in chunks."""
    for first in range(0, stream.tokens, STRETCH_TOKENS):
        starts = stream.document_starts(first, min(STRETCH_TOKENS, stream.tokens - first))
        yield from (start for start in starts.tolist() if start)
    yield stream.tokens


def _identity(codec: TextCodec) -> str:
    """As corpora remember their tokenizer."""
    return hashlib.sha256(codec.tokenizer.to_str(pretty=False).encode()).hexdigest()


def _refuse_strangers(tokens: list[int], vocab: int, codec: TextCodec) -> None:
    if max(tokens) >= vocab:
        rule = f"has token {max(tokens)}, and the model a vocabulary of {vocab}"
        raise ConfigError(
            "tokenizer", str(codec.path), rule, "give the tokenizer that the model was trained with"
        )


def _refusal(name: str, path: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(f"perplexity.{name}", f'"{path}"', rule, fix)
