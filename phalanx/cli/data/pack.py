"""``phalanx data pack``: documents of a corpus as samples of whole ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.data.chat import Force, Out, Sequence, ShardSize
from phalanx.cli.data.corpus_tables import bar
from phalanx.cli.data.maintain import Corpus, Fraction, in_words
from phalanx.cli.options import Json
from phalanx.cli.output import print_json
from phalanx.data.errors import DataError

if TYPE_CHECKING:
    from phalanx.data.pack.documents import PackedDocuments


def pack(
    path: Corpus,
    out: Out,
    sequence: Sequence,
    validation_fraction: Fraction = 0.0,
    vocab: Annotated[
        int, typer.Option(help="Vocabulary size, for a corpus that does not record it.")
    ] = 1 << 32,
    shard_mb: ShardSize = 256,
    force: Force = False,
    json: Json = False,
) -> None:
    """Pack documents into samples by best fit, so that none is cut that fits into one."""
    from phalanx.data.corpus.opening import open_whole
    from phalanx.data.pack.documents import PackOptions, pack_documents

    options = PackOptions(
        sequence=sequence,
        validation_fraction=validation_fraction,
        file_bytes=shard_mb << 20,
        replace=force,
    )
    with in_words(json), bar("pack", quiet=json) as (progress, task):
        if "://" in path:
            rule = "is read in the order of its documents, from local files"
            raise DataError("path", path, rule, "copy it with `phalanx data stage` first")
        stream = open_whole(path, vocab)
        progress.update(task, total=stream.tokens)
        done = pack_documents(stream, out, options, lambda tokens: progress.advance(task, tokens))
    if json:
        print_json({"out": str(out), **_report(done)})
        return
    share = done.padding / done.manifest.tokens
    print(
        f"{out}: {done.documents:,} documents in {done.samples:,} samples of {sequence:,} tokens; "
        f"{done.cut:,} are longer than a sample, {share:.2%} is padding"
    )


def _report(done: PackedDocuments) -> dict[str, object]:
    return {
        "documents": done.documents,
        "cut": done.cut,
        "samples": done.samples,
        "sequence": done.manifest.packed,
        "tokens": done.manifest.tokens,
        "labels": done.labels,
        "padding": done.padding,
        "vocab": done.manifest.vocab,
    }
