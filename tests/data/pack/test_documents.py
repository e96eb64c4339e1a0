"""Documents packed by best fit: every token is a label once, behind its own document alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.config import Data
from phalanx.data import DataError, Feed, ShardWriter
from phalanx.data.corpus.shards import ShardStream
from phalanx.data.pack.documents import PackOptions, pack_documents
from tests.data.corpus.test_foreign import write_megatron

SEQUENCE, VOCAB, END = 32, 1000, 0


def write_corpus(folder: Path, lengths: list[int]) -> list[list[int]]:
    """Documents of so many tokens with their end; no two have the same pair of neighbours."""
    generator = np.random.default_rng(7)
    documents = [[*generator.integers(1, VOCAB, n - 1).tolist(), END] for n in lengths]
    with ShardWriter(folder, VOCAB, END, "there", file_bytes=300) as writer:
        for document in documents:
            writer.write(document[:-1])
            writer.end_document()
        writer.finish()
    return documents


def settings(folder: Path, fraction: float = 0.0) -> Data:
    return Data(
        source="shards",
        path=str(folder),
        sequence=SEQUENCE,
        document_mask=True,
        prefetch=0,
        validation_fraction=fraction,
    )


def labelled(data: Data, split: str = "train") -> Counter[tuple[int, ...]]:
    """What each label of one epoch sees of its document, itself last."""
    seen: Counter[tuple[int, ...]] = Counter()
    with Feed(data, VOCAB, 1, 1, 0, 1, split) as feed:  # type: ignore[arg-type]
        cursor = feed.start()
        for _ in range(feed.samples):
            (batch,) = feed.next(cursor).micro_batches
            cursor = feed.advance(cursor)
            tokens, labels, documents = batch.tokens[0], batch.labels[0], batch.documents
            assert documents is not None
            for at in np.flatnonzero(labels >= 0).tolist():
                first = int(np.flatnonzero(documents[0] == documents[0, at])[0])
                seen[(*tokens[first : at + 1].tolist(), int(labels[at]))] += 1
    return seen


def expected(documents: list[list[int]]) -> Counter[tuple[int, ...]]:
    """Each token behind all of its document, or of its piece where that is longer than a sample."""
    found: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        for at in range(1, len(document)):
            first = (at - 1) // (SEQUENCE - 1) * (SEQUENCE - 1)
            found[tuple(document[first : at + 1])] += 1
    return found


def lengths_of(seed: int) -> list[int]:
    drawn: NDArray[np.float64] = np.random.default_rng(seed).lognormal(2.3, 0.9, 300)
    return [*(np.maximum(drawn, 1).astype(int)).tolist(), 1, 2, 31, 32, 33, 63, 64, 200]


def test_every_token_is_a_label_once_and_sees_its_own_document(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "corpus", lengths_of(1))
    stream = ShardStream(tmp_path / "corpus")
    done = pack_documents(stream, tmp_path / "packed", PackOptions(sequence=SEQUENCE))
    assert labelled(settings(tmp_path / "packed")) == expected(documents)
    assert done.documents == len(documents) and done.labels == sum(map(len, documents)) - len(
        documents
    )
    assert done.cut == sum(len(document) > SEQUENCE for document in documents)
    assert done.padding < 0.05 * done.manifest.tokens


def test_it_follows_from_the_corpus_alone(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", lengths_of(2))
    stream, options = ShardStream(tmp_path / "corpus"), PackOptions(sequence=SEQUENCE)
    one, two = (pack_documents(stream, tmp_path / name, options) for name in ("one", "two"))
    assert one.manifest.fingerprint == two.manifest.fingerprint


def test_held_out_documents_share_no_sample_with_others(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "corpus", lengths_of(3))
    stream = ShardStream(tmp_path / "corpus")
    options = PackOptions(sequence=SEQUENCE, validation_fraction=0.2)
    pack_documents(stream, tmp_path / "packed", options)
    data = settings(tmp_path / "packed", 0.2)
    train, held_out = labelled(data), labelled(data, "validation")
    assert train + held_out == expected(documents)
    assert 0.1 < held_out.total() / expected(documents).total() < 0.3
    one_side = [
        document
        for document in documents
        if any(label in held_out for label in expected([document]))
    ]
    assert expected(one_side) == held_out  # each document is on one side with all of its pieces
    with pytest.raises(DataError, match=r"packed with 0\.2 of its documents apart"):
        labelled(settings(tmp_path / "packed", 0.1))


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [5, 9, 60])
    stream, options = ShardStream(tmp_path / "corpus"), PackOptions(sequence=SEQUENCE)
    pack_documents(stream, tmp_path / "packed", options)
    with pytest.raises(DataError, match="packed already"):
        pack_documents(ShardStream(tmp_path / "packed"), tmp_path / "again", options)
    with pytest.raises(DataError, match="already holds a corpus"):
        pack_documents(stream, tmp_path / "packed", options)
    file = tmp_path / "corpus" / "shard-00000.bin"
    content = bytearray(file.read_bytes())
    content[8] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        pack_documents(ShardStream(tmp_path / "corpus"), tmp_path / "other", options)
    assert not (tmp_path / "other" / "manifest.json").exists()


def test_the_command_packs_a_corpus_of_another_program(tmp_path: Path) -> None:
    write_megatron(tmp_path / "theirs", [[5, 6, 7, 9], [8, 9], [10, 11, 12, 13, 14]])
    command = ["data", "pack", str(tmp_path / "theirs.bin"), "--out", str(tmp_path / "packed")]
    done = CliRunner().invoke(app, [*command, "--sequence", "8", "--vocab", "64", "--json"])
    assert done.exit_code == 0, done.output
    report = msgspec.json.decode(done.stdout)
    assert (report["documents"], report["samples"], report["labels"]) == (3, 2, 8)
    remote = CliRunner().invoke(app, ["data", "pack", "s3://there", *command[3:], "--sequence=8"])
    assert remote.exit_code == 2 and "phalanx data stage" in remote.output
