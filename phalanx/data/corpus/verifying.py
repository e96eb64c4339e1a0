"""Reading every byte of a corpus to prove it, naming each bad block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from phalanx.config.errors import ConfigProblem
from phalanx.data.corpus.manifest import TOKENIZER_NAME
from phalanx.data.corpus.opening import ANY_VOCAB, open_whole
from phalanx.data.corpus.shards import ShardStream
from phalanx.data.errors import DataError


class Verified(msgspec.Struct, frozen=True):
    """What was read and found good."""

    files: int
    blocks: int
    tokens: int
    checksums: bool  # False: there are none, and only the values of tokens were compared


def verify(
    path: str | Path,
    vocab: int = ANY_VOCAB,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Verified:
    """Check every block of a corpus; all that is wrong is raised at once."""
    stream = open_whole(path, vocab)
    problems: list[ConfigProblem] = []
    blocks = 0
    if isinstance(stream, ShardStream):
        with _collected(problems):
            check_tokenizer(stream)
    starts = stream.file_starts
    for number in range(len(starts) - 1):
        tokens = starts[number + 1] - starts[number]
        with _collected(problems):
            stream.check_index(number)  # without its index, no block of a shard can be judged
            for block in range(-(-tokens // stream.block_tokens)):
                with _collected(problems):
                    stream.check_block(number, block)
                progress(min(stream.block_tokens, tokens - block * stream.block_tokens))
                blocks += 1
    if problems:
        raise DataError.of(problems)
    return Verified(len(starts) - 1, blocks, stream.tokens, stream.checksums)


def check_tokenizer(stream: ShardStream) -> None:
    """Refuse a corpus whose ``tokenizer.json`` is not the one that made its tokens."""
    path = stream.home / TOKENIZER_NAME
    if not path.exists() or not stream.tokenizer:
        return
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if actual != stream.tokenizer:
        rule = (
            f"is tokenizer {actual[:16]}, but the manifest says that {stream.tokenizer[:16]} made "
            "the tokens"
        )
        raise DataError("data.path", path, rule, "restore the tokenizer.json of this corpus")


@contextmanager
def _collected(problems: list[ConfigProblem]) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        problems.extend(error.problems)
