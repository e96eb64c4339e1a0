"""``phalanx data``: make token shards and look into them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.cli.options import Json, print_json, refused_in_words
from phalanx.data import CorpusManifest, DataError, ShardSource, read_manifest, verify
from phalanx.data.manifest import TOKENIZER_NAME

if TYPE_CHECKING:
    from phalanx.data.tokenize import Tokenized

app = typer.Typer(no_args_is_help=True, help="Make token shards and look into them.")


class TokenizeReport(msgspec.Struct):
    """Result of ``tokenize --json``."""

    out: str
    files: int
    text_bytes: int
    unreadable: tuple[str, ...]
    vocab: int
    documents: int
    tokens: int
    bytes_per_token: float


class InspectReport(msgspec.Struct):
    """Result of ``inspect --json``."""

    path: str
    manifest: CorpusManifest
    verified: bool
    samples: list[str]


@app.command()
def tokenize(
    out: Annotated[Path, typer.Option(help="Folder that receives the shards.")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="Text files or folders.")] = None,
    suffix: Annotated[
        list[str] | None, typer.Option(help="File suffix taken from folders (repeatable).")
    ] = None,
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
    force: Annotated[bool, typer.Option(help="Replace the corpus in OUT.")] = False,
    json: Json = False,
) -> None:
    """Turn text files, one document each, into token shards."""
    from phalanx.data import tokenize as work  # the tokenizers library loads only where needed

    with refused_in_words(json):
        if bool(vocab_size) == bool(tokenizer):
            rule = "give either --vocab-size (train one) or --tokenizer (use one)"
            raise DataError("tokenizer", tokenizer or "", rule, "try --vocab-size 4096")
        if stdlib == bool(inputs):
            rule = "give either text files and folders, or --stdlib"
            raise DataError("input", " ".join(map(str, inputs or [])), rule, "name some text")
        suffixes = suffix or work.SUFFIXES
        files = work.find_files(inputs, suffixes) if inputs else work.stdlib_corpus()
        encoder = (
            work.load_tokenizer(tokenizer) if tokenizer else work.train_tokenizer(files, vocab_size)
        )
        total = sum(path.stat().st_size for path in files)
        with _progress(quiet=json) as bar:
            task = bar.add_task("tokenise", total=total)
            done = work.tokenize_files(
                files,
                encoder,
                out,
                end_of_document,
                replace=force,
                progress=lambda text_bytes, tokens: bar.advance(task, text_bytes),
            )
    _print_tokenized(out, len(files), done, json)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of token shards.")],
    samples: Annotated[int, typer.Option(help="How many decoded samples to show.")] = 1,
    tokens: Annotated[int, typer.Option(help="Length of a sample, in tokens.")] = 64,
    check: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare checksums.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what a corpus holds."""
    with refused_in_words(json):
        manifest = verify(path) if check else read_manifest(path)
        texts = _decoded_samples(path, manifest, samples, tokens)
    if json:
        print_json(InspectReport(str(path), manifest, check, texts))
        return
    console = Console(highlight=False, soft_wrap=True)
    size = manifest.tokens * manifest.stored_type.itemsize
    console.print(f"{manifest.tokens:,} tokens in {manifest.documents:,} documents", markup=False)
    console.print(f"{len(manifest.files)} files, {size:,} bytes of {manifest.dtype}", markup=False)
    console.print(
        f"vocabulary {manifest.vocab:,}, end of document {manifest.end_of_document}, "
        f"tokenizer {manifest.tokenizer[:16] or 'unknown'}",
        markup=False,
    )
    if check:
        console.print("every checksum matches")
    for number, text in enumerate(texts):
        console.rule(f"sample {number}")
        console.print(text, markup=False)


def _decoded_samples(path: Path, manifest: CorpusManifest, samples: int, length: int) -> list[str]:
    """Text at evenly spread places; token numbers where the corpus came without a tokenizer."""
    length = min(length, manifest.tokens - 1)
    if samples < 1 or length < 1:
        return []
    source = ShardSource(path, sequence=length, vocab=manifest.vocab)
    chosen = [at * source.samples // samples for at in range(min(samples, source.samples))]
    windows = [source.read(index)[:-1].tolist() for index in chosen]
    if not (path / TOKENIZER_NAME).exists():
        return [" ".join(map(str, window)) for window in windows]
    from phalanx.data.tokenize import load_tokenizer

    encoder = load_tokenizer(path / TOKENIZER_NAME)
    return [encoder.decode(window, skip_special_tokens=False) for window in windows]


def _print_tokenized(out: Path, files: int, done: Tokenized, json: bool) -> None:
    manifest = done.manifest
    report = TokenizeReport(
        out=str(out),
        files=files,
        text_bytes=done.text_bytes,
        unreadable=done.unreadable,
        vocab=manifest.vocab,
        documents=manifest.documents,
        tokens=manifest.tokens,
        bytes_per_token=round(done.text_bytes / max(1, manifest.tokens), 3),
    )
    if json:
        print_json(report)
        return
    print(
        f"{out}: {report.tokens:,} tokens, {report.documents:,} documents, vocabulary "
        f"{report.vocab:,}, {report.bytes_per_token} bytes of text a token"
    )
    for name in report.unreadable:
        print(f"left out, not UTF-8: {name}", file=sys.stderr)


def _progress(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet or not sys.stderr.isatty(),
    )
