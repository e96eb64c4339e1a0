"""A corpus in an object store gives the samples that it gives on disk, through a bounded cache."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from phalanx.config import Data, Store
from phalanx.data import DataError, SampleReader
from phalanx.data.remote import shards as remote
from phalanx.data.remote.parts import PartCache, evict_parts
from phalanx.data.remote.parts import _open_cache as open_cache
from tests.data.corpora import write_corpus

TOKENS = 60_000
PART = 4096  # bytes: the corpus is 30 parts in 8 files
PARALLEL = 2


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.data.remote.shards.PART_BYTES", PART)
    monkeypatch.setattr("phalanx.data.corpus.writer.BLOCK_BYTES", 1024)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", TOKENS, documents=40, file_bytes=16_384)
    return tmp_path / "corpus"


def settings(path: str, cache: Path, cache_bytes: float = 1e9, **more: object) -> Data:
    blocks = {"shuffle": "blocked", "block_tokens": 3000, "window_blocks": 4}
    store = Store(
        cache=str(cache), cache_gb=cache_bytes / 1e9, retry_seconds=0.2, parallel_reads=PARALLEL
    )
    return Data(source="shards", path=path, sequence=30, store=store, **{**blocks, **more})  # type: ignore[arg-type]


def readers(corpus: Path, **more: object) -> tuple[SampleReader, SampleReader]:
    """The corpus on disk, and through a store."""
    cache = corpus.parent / "cache"
    return (
        SampleReader(settings(str(corpus), cache, **more), 1000),
        SampleReader(settings(f"file://{corpus}", cache, **more), 1000),
    )


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_a_store_gives_the_same_samples_as_the_disk(corpus: Path, fraction: float) -> None:
    local, distant = readers(corpus, validation_fraction=fraction)
    assert distant.draws.fingerprint(0) == local.draws.fingerprint(0)
    assert np.array_equal(distant.batch(0, 4000), local.batch(0, 4000))  # two epochs
    assert np.array_equal(distant.batch(10**9, 64), local.batch(10**9, 64))


def test_the_cache_stays_below_its_limit_and_changes_nothing(corpus: Path) -> None:
    local, distant = readers(corpus, cache_bytes=12 * PART)
    for first in range(0, 4000, 80):
        assert np.array_equal(distant.batch(first, 80), local.batch(first, 80))
        # Besides the limit: what is counted only with the next one, and what is being written.
        assert cached_bytes(corpus.parent / "cache") <= (12 + 1 + PARALLEL) * PART


def cached_bytes(cache: Path) -> int:
    total = 0
    for path in cache.glob("*/*.part"):
        with suppress(FileNotFoundError):  # removed a moment ago: parts are fetched ahead
            total += path.stat().st_size
    return total


def read_epoch(corpus: Path, cache: Path) -> int:
    remote.PART_BYTES = PART  # in a process of its own
    reader = SampleReader(settings(f"file://{corpus}", cache), 1000)
    return int(reader.batch(0, 2000).sum())


def test_processes_of_a_node_share_what_one_of_them_fetched(corpus: Path) -> None:
    cache = corpus.parent / "cache"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        first = pool.apply(read_epoch, (corpus, cache))
    for path in corpus.glob("shard-*.bin"):
        path.unlink()  # whatever is read now comes from the cache
    assert read_epoch(corpus, cache) == first


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5000] ^= 0x01  # still a token of the vocabulary: only a checksum can tell
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:6000])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage, r"file://.*/shard-00002\.bin: block 4 .*is damaged: checksum"),
        (truncate, r"file://.*/shard-00002\.bin: is truncated: 6000 bytes"),
        (Path.unlink, r"file://.*/shard-00002\.bin: is part of the corpus but missing"),
    ],
)
def test_a_damaged_object_is_named(
    corpus: Path, harm: Callable[[Path], None], message: str
) -> None:
    harm(corpus / "shard-00002.bin")
    distant = distant_only(corpus)
    with pytest.raises(DataError, match=message):
        distant.batch(0, 2000)


def distant_only(corpus: Path, **more: object) -> SampleReader:
    return SampleReader(settings(f"file://{corpus}", corpus.parent / "cache", **more), 1000)


def test_damaged_samples_carry_no_weight_where_that_is_configured(corpus: Path) -> None:
    whole = SampleReader(settings(str(corpus), corpus), 1000).batch(0, 1999)
    damage(corpus / "shard-00002.bin")
    distant = distant_only(corpus, on_damage="weightless")
    local = SampleReader(settings(str(corpus), corpus, on_damage="weightless"), 1000)
    found = []
    for reader in (distant, local):
        windows = np.empty_like(whole)
        damaged = reader.read(range(1999), windows)
        sound = np.delete(np.arange(1999), damaged)
        assert np.array_equal(windows[sound], whole[sound])
        assert (windows[damaged] == 0).all()
        found.append(damaged)
        shares = [len(reader.read(range(a, a + 7), windows[:7])) for a in range(0, 1995, 7)]
        assert sum(shares) == sum(row < 1995 for row in damaged)  # whatever the ranks' shares
    assert found[0] == found[1]
    assert 17 <= len(found[0]) <= 19  # the samples that touch one block of 512 tokens


def test_a_part_that_was_damaged_on_its_way_is_fetched_again(corpus: Path) -> None:
    local, distant = readers(corpus)
    distant.batch(0, 1999)
    parts = sorted(corpus.parent.glob("cache/*/shard-00003*.part"))
    damage_part = bytearray(parts[0].read_bytes())
    damage_part[100] ^= 0x01
    parts[0].write_bytes(damage_part)
    open_cache.cache_clear()  # as in a new process
    assert np.array_equal(distant_only(corpus).batch(0, 1999), local.batch(0, 1999))
    assert parts[0].read_bytes() != damage_part


def test_a_replaced_corpus_is_not_read_from_the_old_cache(corpus: Path) -> None:
    local, distant = readers(corpus)
    before = distant.batch(0, 1999)
    for path in corpus.iterdir():
        path.unlink()
    write_corpus(corpus, TOKENS, documents=39, file_bytes=16_384)
    local, distant = readers(corpus)
    assert np.array_equal(distant.batch(0, 1999), local.batch(0, 1999))
    assert not np.array_equal(distant.batch(0, 1999), before)


def test_a_folder_without_manifest_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json"):
        SampleReader(settings(f"file://{tmp_path}", tmp_path / "cache"), 1000)


def test_the_parts_used_longest_ago_make_room(tmp_path: Path) -> None:
    folder = tmp_path / "corpus-x"
    folder.mkdir()
    for number in range(10):
        path = folder / f"shard.{number}.part"
        path.write_bytes(bytes(100))
        os.utime(path, (number, number))
    assert evict_parts(tmp_path, 1000) == 1000
    assert evict_parts(tmp_path, 500) <= 500
    assert {path.name for path in folder.iterdir()} == {f"shard.{n}.part" for n in range(6, 10)}


class WatchedStore:
    """Records what is fetched, and lets nothing through before it is told to."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.gate = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def submit(self, work):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def read(self, name: str, first: int, length: int) -> memoryview:
        self.order.append(first)
        await asyncio.to_thread(self.gate.wait)
        return memoryview(bytes(length))


def test_a_part_that_is_waited_for_overtakes_those_only_expected(tmp_path: Path) -> None:
    store = WatchedStore()
    cache = PartCache(store, tmp_path / "cache", Store(parallel_reads=1))  # type: ignore[arg-type]
    futures = [cache.request(("shard", first, 8)) for first in range(5)]
    while not store.order:
        time.sleep(0.001)
    urgent = cache.request(("shard", 4, 8), urgent=True)
    assert urgent is futures[4]  # asked for once
    store.gate.set()
    assert len(cache.content(("shard", 3, 8))) == 8
    for future in futures:
        assert future is not None
        future.result(timeout=90)
    assert store.order[0] == 0 and store.order.index(4) < store.order.index(1)


@pytest.mark.parametrize("harm", [truncate, Path.unlink])
def test_a_shard_that_is_missing_on_disk_costs_only_its_samples(
    corpus: Path, harm: Callable[[Path], None]
) -> None:
    harm(corpus / "shard-00002.bin")
    with pytest.raises(DataError, match=r"shard-00002\.bin"):
        SampleReader(settings(str(corpus), corpus), 1000)
    reader = SampleReader(settings(str(corpus), corpus, on_damage="weightless"), 1000)
    windows = np.empty((1999, 31), np.int64)
    assert len(reader.read(range(1999), windows)) == 274  # of 8192 tokens, and both edges
