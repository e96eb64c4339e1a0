"""Verifying names every bad block; staging gives a proved, complete copy or none."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.data import DataError, ShardStream, open_stream, verify
from phalanx.data.corpus import writer
from phalanx.data.remote import staging
from phalanx.data.remote.staging import stage
from tests.data.corpora import write_corpus
from tests.data.corpus.test_foreign import DOCUMENTS, write_datatrove, write_megatron


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of three or four blocks, and a tokenizer that the manifest does not know."""
    monkeypatch.setattr(writer, "BLOCK_BYTES", 100)
    write_corpus(tmp_path / "corpus", 500, file_bytes=400)
    (tmp_path / "corpus" / "tokenizer.json").write_text("{}")
    return tmp_path / "corpus"


def test_verify_counts_what_it_read(corpus: Path) -> None:
    done = verify(corpus)
    assert (done.files, done.blocks, done.tokens, done.checksums) == (3, 10, 500, True)


def test_verify_names_every_bad_block_at_once(corpus: Path) -> None:
    flip(corpus / "shard-00000.bin", 250)
    flip(corpus / "shard-00002.bin", 5)
    flip(corpus / "shard-00001.idx", 70)
    with pytest.raises(DataError) as error:
        verify(corpus)
    found = [
        (Path(problem.value).name, problem.rule.split(":")[0]) for problem in error.value.problems
    ]
    assert [name for name, _ in found] == ["shard-00000.bin", "shard-00001.idx", "shard-00002.bin"]
    assert found[0][1].startswith("block 2 ") and found[2][1].startswith("block 0 ")


def test_verify_refuses_a_tokenizer_that_did_not_make_the_tokens(tmp_path: Path) -> None:
    with writer.ShardWriter(tmp_path, 100, 0, tokenizer="a" * 64) as shards:
        shards.write([1, 2, 3])
        shards.finish()
    verify(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: is tokenizer 44136fa.*says that aaaa"):
        verify(tmp_path)


def test_verify_looks_at_the_tokens_of_formats_without_checksums(tmp_path: Path) -> None:
    write_megatron(tmp_path / "text", DOCUMENTS)
    done = verify(tmp_path / "text", vocab=15)
    assert done.tokens == 14 and not done.checksums
    with pytest.raises(DataError, match="outside the vocabulary of 10"):
        verify(tmp_path / "text", vocab=10)


def test_a_staged_corpus_is_the_same_and_staging_it_again_copies_nothing(
    corpus: Path, tmp_path: Path
) -> None:
    target = tmp_path / "local" / "corpus"
    size = sum(path.stat().st_size for path in corpus.iterdir())
    done = stage(corpus, target)
    assert (done.copied_bytes, done.kept_bytes) == (size, 0)
    assert {path.name: path.read_bytes() for path in corpus.iterdir()} == {
        path.name: path.read_bytes() for path in target.iterdir()
    }
    assert verify(target).tokens == 500
    assert stage(corpus, target).copied_bytes == 0


def test_damage_in_the_source_is_found_on_the_way_and_nothing_appears(
    corpus: Path, tmp_path: Path
) -> None:
    flip(corpus / "shard-00001.bin", 150)
    with pytest.raises(DataError, match=r"shard-00001\.bin: block 1 is damaged"):
        stage(corpus, tmp_path / "local")
    assert not (tmp_path / "local").exists()
    flip(corpus / "shard-00001.bin", 150)
    done = stage(corpus, tmp_path / "local")
    assert done.kept_bytes == 800 // 2 + (corpus / "shard-00000.idx").stat().st_size
    verify(tmp_path / "local")


def test_a_damaged_leftover_is_copied_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done >= 900:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(corpus, tmp_path / "local", progress=interrupt)
    left = tmp_path / ".local.staging"
    assert not (tmp_path / "local").exists() and (left / "shard-00000.bin").exists()
    flip(left / "shard-00000.bin", 3)
    stage(corpus, tmp_path / "local")
    assert verify(tmp_path / "local").tokens == 500
    assert not left.exists()


def test_a_target_that_holds_something_else_is_replaced_only_on_request(
    corpus: Path, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "local", 300)
    with pytest.raises(DataError, match=r"something else.*--force"):
        stage(corpus, tmp_path / "local")
    assert ShardStream(tmp_path / "local").tokens == 300
    stage(corpus, tmp_path / "local", replace=True)
    assert ShardStream(tmp_path / "local").tokens == 500


def test_callers_for_one_target_take_turns_and_one_copies(corpus: Path, tmp_path: Path) -> None:
    copied: list[int] = []
    callers = [
        threading.Thread(target=lambda: copied.append(stage(corpus, tmp_path / "x").copied_bytes))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(bool(count) for count in copied) == [False, False, False, True]


def test_the_rate_limit_asks_for_the_sleep_that_keeps_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    # Its own clock, not the process's: threads of other tests may be asleep on that one.
    monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    done = stage(corpus, tmp_path / "local", bytes_per_second=50.0)
    assert done.copied_bytes > 0
    assert now - 100.0 == pytest.approx(done.copied_bytes / 50.0)


def test_a_disk_that_is_too_small_is_refused_before_copying(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 700})
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"has 700 bytes free, and the corpus needs 1,"):
        stage(corpus, tmp_path / "local")
    assert not (tmp_path / "local").exists()


def test_corpora_of_other_programs_are_staged_too(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    write_megatron(tmp_path / "there" / "text", DOCUMENTS)
    stage(tmp_path / "there" / "text", tmp_path / "megatron")
    (tmp_path / "ds" / "deep").mkdir(parents=True)
    write_datatrove(tmp_path / "ds" / "deep" / "a.ds", DOCUMENTS)
    stage(tmp_path / "ds", tmp_path / "datatrove")
    for path in (tmp_path / "megatron" / "text", tmp_path / "megatron", tmp_path / "datatrove"):
        assert open_stream(path).tokens == 14
