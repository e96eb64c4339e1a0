"""Every token leads back to the record that it came from, for a corpus and for a job's samples."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from phalanx.cli.data.data import app
from phalanx.config import Data
from phalanx.data import DataError, ShardStream, ShardWriter
from phalanx.data.corpus.survey import tokenizer_of
from phalanx.data.prepare.engine import LocalEngine
from phalanx.data.prepare.output.trace import CorpusTrace, trace_sample
from phalanx.data.prepare.read.file_formats import SourceDocument, read_documents
from phalanx.data.prepare.run import prepare
from phalanx.data.reader import SampleReader
from phalanx.data.tokenize.vocabulary import load_tokenizer
from tests.data.prepare.raw import recipe, write_raw


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    write_raw(folder / "raw")
    prepare(
        recipe(folder, overrides=["deduplicate.near=false", "mask=none"]), folder, LocalEngine(1)
    )
    return folder / "out"


def source_text(traced: object) -> str:
    found = next(
        each
        for each in read_documents(traced.file, "text", "id")  # type: ignore[attr-defined]
        if isinstance(each, SourceDocument) and each.record == traced.record  # type: ignore[attr-defined]
    )
    assert found.id == traced.id and found.offset == traced.offset  # type: ignore[attr-defined]
    return found.text


def decoded(corpus: Path, tokens: np.ndarray) -> str:  # type: ignore[type-arg]
    path = tokenizer_of(str(corpus))
    assert path is not None
    return str(load_tokenizer(path).decode(tokens.tolist(), skip_special_tokens=False))


def test_every_document_is_the_record_that_it_names(corpus: Path) -> None:
    trace, stream = CorpusTrace(corpus), ShardStream(corpus)
    starts = [*stream.document_starts(0, stream.tokens).tolist(), stream.tokens]
    assert len(starts) == stream.documents + 1
    for number in range(stream.documents):
        traced = trace.document(number)
        tokens = np.empty(starts[number + 1] - starts[number] - 1, np.int64)
        stream.read_tokens(starts[number], len(tokens), tokens)
        assert traced.token == starts[number]
        assert decoded(corpus, tokens) == source_text(traced)


def test_tokens_lead_to_the_documents_that_they_lie_in(corpus: Path) -> None:
    trace = CorpusTrace(corpus)
    first, second = trace.document(3), trace.document(4)
    assert trace.of_tokens(first.token) == [first]
    assert trace.of_tokens(second.token - 1) == [first]
    assert trace.of_tokens(second.token - 1, 2) == [first, second]
    assert trace.of_shard("shard-00000.bin", second.token) == second
    with pytest.raises(DataError, match="the corpus has"):
        trace.of_tokens(10**9)
    with pytest.raises(DataError, match=r"e\.g\. shard-00000\.bin"):
        trace.of_shard("shard-7.bin", 0)


@pytest.mark.parametrize("held_out", [0.0, 0.3])
def test_samples_of_a_run_lead_to_the_text_that_was_read(corpus: Path, held_out: float) -> None:
    data = Data(source="shards", path=str(corpus), sequence=64, validation_fraction=held_out)
    reader = SampleReader(data, 300)
    for sample in (0, 5, 11):
        window = np.empty((1, 65), np.int64)
        reader.read(range(sample, sample + 1), window)
        read = decoded(corpus, window[0, :64])
        traced = trace_sample(data, 300, sample)
        ends = read.split("<|endoftext|>")
        parts = [part for part in ends if part]
        assert len(traced) >= len(parts) > 0
        for document, part in zip(traced, ends, strict=False):
            assert part in source_text(document)


def test_the_command_shows_file_record_offset_and_id(corpus: Path) -> None:
    shown = CliRunner().invoke(app, ["trace", str(corpus), "--document", "2"])
    assert shown.exit_code == 0
    assert "a.jsonl, record 3, offset" in shown.stdout and "id a-2" in shown.stdout
    as_data = CliRunner().invoke(app, ["trace", str(corpus), "--token", "0", "--json"])
    assert msgspec.json.decode(as_data.stdout)[0]["document"] == 0
    wrong = CliRunner().invoke(app, ["trace", str(corpus), "--sample", "1"])
    assert wrong.exit_code == 2 and "JOB.toml for --sample" in wrong.stderr


def test_a_corpus_without_a_map_says_how_to_get_one(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "plain", vocab=300, end_of_document=0) as writer:
        writer.write([1, 2, 3])
        writer.end_document()
        writer.finish()
    with pytest.raises(DataError, match="has no map back to its sources"):
        CorpusTrace(tmp_path / "plain")
