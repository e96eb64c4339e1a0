"""``phalanx data``: make token shards, prove them, look into them, put them where they are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.data import chat
from phalanx.cli.data.corpus_tables import print_inspected, print_tokenized, show_progress
from phalanx.cli.data.maintain import Corpus, checksum, cores, in_words, split, stage, verify
from phalanx.cli.data.pack import pack
from phalanx.cli.data.prepare import prepare, rules, trace
from phalanx.cli.job_file import load
from phalanx.cli.options import JobFile, Json, Set, WorldSize
from phalanx.cli.output import print_json
from phalanx.cli.progress import working
from phalanx.config import batch_ramp, check, resolve, stage_at
from phalanx.data.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from phalanx.data.order.cursor import Cursor

app = typer.Typer(no_args_is_help=True, help="Make, inspect and verify token shards.")
for command in (prepare, rules, trace, pack, verify, checksum, stage, split):
    app.command()(command)
chat.add_to(app)

Inputs = Annotated[
    list[Path] | None,
    typer.Argument(help="Text, JSONL, Parquet or WebDataset files, or folders of them."),
]
Suffix = Annotated[
    list[str] | None, typer.Option(help="File suffix taken from folders (repeatable).")
]
TextKey = Annotated[str, typer.Option(help="Key or column that holds a document's text.")]


@app.command()
def tokenize(
    out: Annotated[Path, typer.Option(help="Folder that receives the shards.")],
    inputs: Inputs = None,
    suffix: Suffix = None,
    text_key: TextKey = "text",
    stdlib: Annotated[
        bool, typer.Option(help="Use the sources of Python's standard library as text.")
    ] = False,
    vocab_size: Annotated[
        int, typer.Option(help="Train a byte-level BPE tokenizer of this size.")
    ] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this Hugging Face tokenizer.json instead.")
    ] = None,
    end_of_document: Annotated[
        str, typer.Option(help="Token that ends a document (default: the usual names).")
    ] = "",
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that encode; 0: one for each core.")
    ] = 0,
    shard_mb: Annotated[
        int, typer.Option(min=1, help="Size of a shard, in MiB; 128 to 1024 reads well.")
    ] = 256,
    most_unreadable: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the records that may be left out as unreadable."),
    ] = 0.05,
    force: Annotated[
        bool, typer.Option(help="Replace the corpus in OUT, or an unfinished run.")
    ] = False,
    json: Json = False,
) -> None:
    """Turn text into token shards; run it again to continue after an interruption."""
    from phalanx.data.tokenize import run as work  # the tokenizers library loads only where needed

    with in_words(json):
        if bool(vocab_size) == bool(tokenizer):
            rule = "give either --vocab-size (train one) or --tokenizer (use one)"
            raise DataError("tokenizer", tokenizer or "", rule, "try --vocab-size 4096")
        files = _text_files(inputs, suffix, stdlib)
        options = work.TokenizeOptions(
            end_token=end_of_document,
            text_key=text_key,
            file_bytes=shard_mb << 20,
            workers=workers or cores(),
            replace=force,
            most_unreadable=most_unreadable,
            inputs=tuple(map(str, inputs)) if inputs else ("Python's standard library",),
        )
        encoder = _encoder(files, vocab_size, tokenizer, text_key)
        total = sum(path.stat().st_size for path in files)
        with show_progress("tokenise", total, quiet=json) as report:
            done = work.tokenize_files(files, encoder, out, options, report)
    print_tokenized(out, files, done, json)


@app.command()
def train_tokenizer(
    out: Annotated[Path, typer.Option(help="File to write, usually tokenizer.json.")],
    vocab_size: Annotated[int, typer.Option(help="Entries of the vocabulary.")],
    inputs: Inputs = None,
    suffix: Suffix = None,
    text_key: TextKey = "text",
    stdlib: Annotated[
        bool, typer.Option(help="Use the sources of Python's standard library as text.")
    ] = False,
    train_mb: Annotated[
        int, typer.Option(min=1, help="Text to learn from, in MiB, spread over the files.")
    ] = 16,
    json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer."""
    with in_words(json):
        from phalanx.data.durable_files import write_atomically
        from phalanx.data.tokenize import vocabulary

        files = _text_files(inputs, suffix, stdlib)
        with working("train tokenizer", json):
            trained = vocabulary.train_tokenizer(files, vocab_size, train_mb << 20, text_key)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, trained.to_str(pretty=False).encode())
    size = trained.get_vocab_size()
    if json:
        print_json({"out": str(out), "vocab": size, "files": len(files)})
    else:
        print(f"{out}: vocabulary {size:,}, trained on text of {len(files):,} files")


@app.command()
def inspect(
    path: Corpus,
    samples: Annotated[int, typer.Option(help="How many documents to show.")] = 1,
    tokens: Annotated[int, typer.Option(help="Most tokens of a document to show.")] = 64,
    check: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare checksums.")
    ] = False,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Show what a corpus holds, or (for a JOB.toml) the blend that it trains on."""
    from phalanx.cli.data.corpus_tables import inspect_blend, inspect_corpus

    with in_words(json):
        if path.endswith(".toml"):
            inspect_blend(Path(path), overrides or [], json)
            return
        with working("verify" if check else "inspect", json):
            report = inspect_corpus(path, samples, tokens, check)
    print_inspected(report, json)


@app.command()
def order(
    path: JobFile,
    step: Annotated[int, typer.Option(min=1, help="Step, as numbered in the records.")],
    micro_batch: Annotated[
        int | None, typer.Option(min=0, help="Only this micro-batch of each rank.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only what this rank reads.")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Checkpoint whose list of skipped ranges the run continued with."),
    ] = None,
    text: Annotated[int, typer.Option(min=0, help="Show so many tokens of each sample.")] = 0,
    overrides: Set = None,
    world_size: WorldSize = None,
    json: Json = False,
) -> None:
    """Show what a step reads: source, sample, epoch, file and block of each slot."""
    from phalanx.cli.data.corpus_tables import print_readings
    from phalanx.data.reader import SampleReader
    from phalanx.data.readings import step_cursor, step_readings

    with in_words(json):
        job, ranks = load(path, overrides, world_size)
        check(job, ranks)
        job = resolve(job, ranks)
        if rank is not None and rank >= ranks:
            raise DataError("rank", rank, f"the job has {ranks} ranks", f"use 0 to {ranks - 1}")
        ramp = batch_ramp(job)
        cursor = step_cursor(step, ramp, _cursor_of(checkpoint))
        job = stage_at(job, cursor.seen)
        reader = SampleReader(job.data, job.model.vocab)
        sizes = (job.train.micro_batch, job.parallel.data)
        # Ranks of one replica differ in the innermost axes (context, tensor) and in the stage.
        inner = job.parallel.context * job.parallel.tensor
        readings = [
            reading
            for reading in step_readings(reader, cursor, ramp, *sizes)
            if rank is None or reading.replica == rank // inner % job.parallel.data
            if micro_batch is None or reading.micro_batch == micro_batch
        ]
        print_readings(job.data, reader, readings, text, json)


def _cursor_of(checkpoint: Path | None) -> Cursor | None:
    if checkpoint is None:
        return None
    from phalanx.checkpoint import CheckpointError, read_manifest

    try:
        return read_manifest(checkpoint).cursor
    except CheckpointError as error:
        raise DataError("checkpoint", checkpoint, str(error), "name a step folder") from None


def _text_files(inputs: list[Path] | None, suffix: list[str] | None, stdlib: bool) -> list[Path]:
    from phalanx.data.tokenize import inputs as reading
    from phalanx.data.tokenize.run import stdlib_corpus

    if stdlib == bool(inputs):
        rule = "give either text files and folders, or --stdlib"
        raise DataError("input", " ".join(map(str, inputs or [])), rule, "name some text")
    return reading.find_files(inputs, suffix or reading.SUFFIXES) if inputs else stdlib_corpus()


def _encoder(
    files: list[Path], vocab_size: int, tokenizer: Path | None, text_key: str
) -> Tokenizer:
    from phalanx.data.tokenize import vocabulary

    if tokenizer:
        return vocabulary.load_tokenizer(tokenizer)
    return vocabulary.train_tokenizer(files, vocab_size, text_key=text_key)
