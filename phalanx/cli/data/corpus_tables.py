"""How ``phalanx data`` shows what it does and what it found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from phalanx.cli.output import print_json
from phalanx.cli.tables import counted
from phalanx.config import batch_ramp, load_job, resolve
from phalanx.data.corpus.manifest import CorpusManifest
from phalanx.data.corpus.opening import open_whole
from phalanx.data.corpus.shards import ShardStream
from phalanx.data.corpus.survey import (
    Lengths,
    measure_lengths,
    sample_texts,
    survey_blend,
    tokenizer_of,
)
from phalanx.data.readings import Reading

if TYPE_CHECKING:
    from phalanx.config import Data
    from phalanx.data.reader import SampleReader
    from phalanx.data.tokenize.run import Tokenized
    from phalanx.data.tokenize.run import TokenizeProgress as Done

_LINE_SECONDS = 30.0  # between lines of progress where there is no terminal
_NAMED = 10  # unreadable records that are printed


class TokenizeReport(msgspec.Struct):
    """Result of ``tokenize --json``."""

    out: str
    files: int
    shards: int
    resumed_shards: int
    text_bytes: int
    empty: int
    unreadable: int
    unreadable_first: list[str]
    vocab: int
    documents: int
    tokens: int
    bytes_per_token: float


class InspectReport(msgspec.Struct):
    """Result of ``inspect --json``."""

    path: str
    fingerprint: str
    tokens: int
    documents: int
    lengths: Lengths
    manifest: CorpusManifest | None  # of token shards; other formats have none
    checksums: bool  # whether there are any
    verified: bool
    samples: list[str]


@contextmanager
def bar(name: str, quiet: bool, unit: str = "tokens") -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on standard error, silent where nobody looks."""
    amount = DownloadColumn() if unit == "bytes" else TaskProgressColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=_unseen(quiet)) as progress:
        yield progress, progress.add_task(name, total=None)


def bars(quiet: bool) -> Progress:
    """Bars on standard error for several things one after the other."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=_unseen(quiet))


@contextmanager
def show_progress(name: str, total: int, quiet: bool) -> Iterator[Callable[[Done], None]]:
    """Bytes done, tokens a second and time left: a bar, or now and then a line of text."""
    began = spoke = time.monotonic()
    read = tokens = resumed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    more = (TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, *more, console=Console(stderr=True), disable=_unseen(quiet)) as view:
        task = view.add_task(name, total=total, rate="")

        def report(done: Done) -> None:
            nonlocal read, tokens, resumed, spoke
            read += done.input_bytes
            if done.resumed:
                resumed = done.input_bytes
            else:
                tokens += done.tokens
            now = time.monotonic()
            rate = tokens / max(now - began, 1e-9)
            view.update(task, completed=read, rate=f"{rate:,.0f} tokens/s")
            if view.disable and not quiet and now - spoke >= _LINE_SECONDS:
                spoke = now
                left = (total - read) * (now - began) / max(1, read - resumed)
                share = f"{100 * read / max(1, total):.1f} %"
                print(f"{name}: {share}, {rate:,.0f} tokens/s, {left:,.0f} s left", file=sys.stderr)

        yield report


def _unseen(quiet: bool) -> bool:
    return quiet or not sys.stderr.isatty()


def print_tokenized(out: Path, files: list[Path], done: Tokenized, json: bool) -> None:
    """Counts of a finished corpus, and what was left out of it."""
    manifest, source = done.manifest, done.manifest.source
    named = [
        f"{files[found.file]}" + (f":{found.line}" if found.line else "") + f": {found.reason}"
        for found in done.unreadable
    ]
    report = TokenizeReport(
        out=str(out),
        files=len(files),
        shards=len(manifest.files),
        resumed_shards=done.resumed_shards,
        text_bytes=source.text_bytes,
        empty=source.empty,
        unreadable=source.unreadable,
        unreadable_first=named,
        vocab=manifest.vocab,
        documents=manifest.documents,
        tokens=manifest.tokens,
        bytes_per_token=round(source.text_bytes / max(1, manifest.tokens), 3),
    )
    if json:
        print_json(report)
        return
    print(
        f"{out}: {report.tokens:,} tokens, {report.documents:,} documents, vocabulary "
        f"{report.vocab:,}, {report.bytes_per_token} bytes of text a token"
    )
    if done.resumed_shards:
        print(f"continued after {done.resumed_shards:,} shards of an earlier run")
    if report.empty:
        print(f"{report.empty:,} documents without text were left out")
    if report.unreadable:
        print(f"{report.unreadable:,} unreadable records were left out:", file=sys.stderr)
        for line in named[:_NAMED]:
            print(f"  {line}", file=sys.stderr)
        if report.unreadable > _NAMED:
            print(f"  … more in {out / 'unreadable.jsonl'}", file=sys.stderr)


def inspect_corpus(path: str, samples: int, tokens: int, check: bool) -> InspectReport:
    """Counts, lengths and some text of a corpus."""
    from phalanx.data.corpus import verifying

    stream = open_whole(path)
    if check:
        verifying.verify(path)
    elif isinstance(stream, ShardStream):
        verifying.check_tokenizer(stream)
    return InspectReport(
        path=path,
        fingerprint=stream.fingerprint,
        tokens=stream.tokens,
        documents=stream.documents,
        lengths=measure_lengths(stream),
        manifest=stream.manifest if isinstance(stream, ShardStream) else None,
        checksums=stream.checksums,
        verified=check,
        samples=sample_texts(stream, samples, tokens, tokenizer_of(path)),
    )


def print_inspected(report: InspectReport, json: bool) -> None:
    """A corpus for the eye."""
    if json:
        print_json(report)
        return
    console = Console(highlight=False, soft_wrap=True)
    lines = [f"{report.tokens:,} tokens in {report.documents:,} documents"]
    if manifest := report.manifest:
        size = manifest.tokens * manifest.stored_type.itemsize
        source = manifest.source
        lines += [
            f"{counted(len(manifest.files), 'file')}, {size:,} bytes of {manifest.dtype}",
            f"vocabulary {manifest.vocab:,}, end of document {manifest.end_of_document}, "
            f"tokenizer {manifest.tokenizer[:16] or 'unknown'}",
            f"made from {source.files:,} files ({' '.join(source.inputs[:4]) or 'unknown'}), "
            f"{source.text_bytes:,} bytes of text; left out: {source.empty:,} empty, "
            f"{source.unreadable:,} unreadable",
        ]
        if manifest.packed:
            what = "pairs of answers" if manifest.pairs else "conversations"
            samples = manifest.tokens // manifest.packed
            lines.append(f"whole {what} in {samples:,} samples of {manifest.packed:,} tokens")
    if report.verified:
        lines.append("every checksum matches" if report.checksums else "every token is readable")
    console.print("\n".join(lines), markup=False)
    _print_lengths(console, report)
    for number, text in enumerate(report.samples):
        console.rule(f"sample {number}")
        console.print(text, markup=False)


def _print_lengths(console: Console, report: InspectReport) -> None:
    lengths = report.lengths
    some = f"; measured: {lengths.measured:,}" if lengths.measured < report.documents else ""
    table = Table(
        title=f"tokens a document: median {lengths.median:,}, mean {lengths.mean:,}, "
        f"longest {lengths.longest:,}{some}",
        title_justify="left",
        box=None,
    )
    for column in ("length", "documents", "share of tokens"):
        table.add_column(column, justify="right")
    table.add_column("")
    most = max((size.documents for size in lengths.bins), default=1)
    total = max(1, sum(size.tokens for size in lengths.bins))
    for size in lengths.bins:
        share = f"{100 * size.tokens / total:.1f} %"
        picture = "█" * -(-40 * size.documents // max(1, most))
        table.add_row(f"{size.least:,}", f"{size.documents:,}", share, picture)
    console.print(table)


def print_readings(
    data: Data, reader: SampleReader, readings: list[Reading], text: int, json: bool
) -> None:
    """What a step reads, as a table, with the beginning of each sample if ``text`` tokens."""
    texts = _beginnings(data, reader, readings, text) if text else []
    if json:
        shown = [msgspec.to_builtins(reading) for reading in readings]
        print_json(
            [row | {"text": beginning} for row, beginning in zip(shown, texts, strict=True)]
            if texts
            else shown
        )
        return
    heads = tuple(name.replace("_", "-") for name in Reading.__struct_fields__)
    rows = [heads, *(tuple(map(str, msgspec.structs.astuple(reading))) for reading in readings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # lines of their own width: a table would cut what a terminal cannot hold
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    console = Console(highlight=False, soft_wrap=True)
    for reading, beginning in zip(readings, texts, strict=bool(texts)):
        console.rule(f"sample {reading.sample}")
        console.print(beginning, markup=False)


def _beginnings(data: Data, reader: SampleReader, readings: list[Reading], text: int) -> list[str]:
    """Decoded where the corpus of the sample came with its tokenizer."""
    from phalanx.data.tokenize.vocabulary import load_tokenizer

    texts = []
    for reading in readings:
        window = np.empty((1, data.sequence + 1), np.int64)
        reader.read(range(reading.sample, reading.sample + 1), window)
        tokens = window[0, :text].tolist()
        home = data.blend[reading.source].path if data.blend else data.path
        tokenizer = tokenizer_of(home, data.store) if home else None
        if tokenizer is None:
            texts.append(" ".join(map(str, tokens)))
        else:
            encoder = load_tokenizer(tokenizer)
            texts.append(encoder.decode(tokens, skip_special_tokens=False))
    return texts


def inspect_blend(path: Path, overrides: list[str], json: bool) -> None:
    """The blend of a job: weights, sizes, and how often each source is seen."""
    job = load_job(path, overrides)
    samples = batch_ramp(job).samples(job.train.steps)
    survey = survey_blend(job.data, resolve(job, 1).model.vocab, samples)
    if json:
        print_json(survey)
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{survey.tokens:,} tokens in {job.train.steps:,} steps", markup=False)
    for at, first in enumerate(survey.stages):
        table = Table(
            title=f"from token {first:,} on" if len(survey.stages) > 1 else None,
            title_justify="left",
            box=None,
        )
        for column in ("source", "tokens", "drawn by the run", "epochs", "share"):
            side: Literal["left", "right"] = "left" if column == "source" else "right"
            table.add_column(column, justify=side, no_wrap=True)  # a cut number is a wrong one
        table.add_column("")
        for source in survey.sources:
            share = source.shares[at]
            counts = (f"{source.tokens:,}", f"{source.drawn_tokens:,}", f"{source.epochs:.3g}")
            picture = "█" * round(30 * share) or ("▏" if share else "")
            table.add_row(source.name, *counts, f"{100 * share:.2f} %", picture)
        console.print(table)
