"""``phalanx data``: prove corpora, cut them, put them where they are read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.data.corpus_tables import bar
from phalanx.cli.options import Json
from phalanx.cli.output import exit_on_config_error, fail, print_json
from phalanx.cli.tables import counted
from phalanx.data.errors import DataError, ObjectStoreError

Corpus = Annotated[
    str,  # a path would make one slash of the two in s3://
    typer.Argument(help="Folder or URL of token shards, or a Megatron or datatrove corpus."),
]
Fraction = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of the documents held out for validation.")
]


@contextmanager
def in_words(json: bool) -> Iterator[None]:
    """As for every command; a store that cannot be read now is no mistake, but exit code 1."""
    try:
        with exit_on_config_error(json):
            yield
    except ObjectStoreError as error:
        fail(error, 1, {"problems": [str(error)]} if json else None)


def cores() -> int:
    """Processors that this process may use."""
    import os

    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def verify(
    path: Corpus,
    vocab: Annotated[int, typer.Option(help="Vocabulary size, for a corpus without checksums.")] = 1
    << 32,
    json: Json = False,
) -> None:
    """Read every block of a corpus and name those that are damaged."""
    from phalanx.data.corpus import verifying
    from phalanx.data.corpus.opening import open_whole

    with in_words(json), bar("verify", quiet=json) as (progress, task):
        progress.update(task, total=open_whole(path, vocab).tokens)
        done = verifying.verify(path, vocab, lambda tokens: progress.advance(task, tokens))
    if json:
        print_json(done)
        return
    unproved = (
        "tokens are in the vocabulary; its format has no checksums: `phalanx data checksum` records"
    )
    what = "checksums match" if done.checksums else unproved
    print(
        f"{path}: {done.tokens:,} tokens in {counted(done.blocks, 'block')} "
        f"of {counted(done.files, 'file')}; {what}"
    )


def checksum(path: Corpus, json: Json = False) -> None:
    """Record checksums beside a corpus whose format has none, so that damage can be found."""
    from phalanx.data.corpus.foreign import ForeignStream
    from phalanx.data.corpus.opening import open_whole
    from phalanx.data.corpus.sums import forget_sums, record_sums

    with in_words(json), bar("checksum", quiet=json, unit="bytes") as (progress, task):
        forget_sums(path)
        stream = open_whole(path)
        if not isinstance(stream, ForeignStream):
            raise DataError("path", path, "token shards have checksums", "`phalanx data verify`")
        size = sum(file.stat().st_size for file in stream.paths)
        progress.update(task, total=size)
        record = record_sums(stream.home, stream.paths, lambda read: progress.advance(task, read))
    if json:
        print_json({"record": str(record), "files": len(stream.paths), "bytes": size})
    else:
        print(f"{record}: checksums of {size:,} bytes in {len(stream.paths):,} files")


def stage(
    path: Corpus,
    target: Annotated[Path, typer.Argument(help="Folder to make, on node-local disk.")],
    rate_mb: Annotated[
        float, typer.Option(min=0.0, help="Most megabytes (10^6) a second; 0: no limit.")
    ] = 0.0,
    force: Annotated[bool, typer.Option(help="Replace what TARGET holds.")] = False,
    json: Json = False,
) -> None:
    """Copy a corpus to local disk, verified on the way and visible only when complete."""
    from phalanx.data.remote import staging

    with in_words(json), bar("stage", quiet=json, unit="bytes") as (progress, task):
        done = staging.stage(
            path,
            target,
            rate_mb * 1e6,
            force,
            lambda copied, total: progress.update(task, completed=copied, total=total),
        )
    if json:
        print_json(done)
    else:
        kept = f", {done.kept_bytes:,} bytes were there" if done.kept_bytes else ""
        print(f"{done.target}: copied {done.copied_bytes:,} bytes in {done.seconds:.1f} s{kept}")


def split(
    path: Corpus,
    fraction: Fraction,
    json: Json = False,
) -> None:
    """Record once which documents are held out, so that opening a large corpus stays fast."""
    from phalanx.data.corpus import heldout
    from phalanx.data.corpus.opening import open_whole

    with in_words(json), bar("split", quiet=json) as (progress, task):
        if not 0.0 < fraction < 1.0:
            raise DataError("fraction", fraction, "must lie between 0 and 1", "try 0.001")
        stream = open_whole(path)
        progress.update(task, total=stream.tokens)
        held_out = heldout.choose_held_out(
            stream, fraction, lambda tokens: progress.advance(task, tokens)
        )
        record = heldout.record_held_out(stream, fraction, held_out)
    tokens = int(held_out.lengths.sum())
    if json:
        print_json({"record": str(record), "documents": held_out.documents, "tokens": tokens})
        return
    print(
        f"{record}: {held_out.documents:,} of {stream.documents:,} documents held out, "
        f"{tokens:,} of {stream.tokens:,} tokens"
    )
