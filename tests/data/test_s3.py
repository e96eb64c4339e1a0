"""Reading from a real S3 server: slow, killed and started again, or with wrong keys."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from phalanx.config import Data, Store
from phalanx.data import SampleReader
from phalanx.data.errors import StoreError
from phalanx.data.store import open_store
from tests.data.corpora import write_corpus
from tests.object_store import DelayProxy, S3Server, credentials

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux")

PART = 1 << 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "shards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.data.writer.BLOCK_BYTES", PART)
        write_corpus(folder, 2_000_000, documents=100, file_bytes=1 << 20)
    return folder


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.data.remote.PART_BYTES", PART)


def settings(cache: Path) -> Store:
    return Store(cache=str(cache), retry_seconds=60, parallel_reads=2)


def reader(path: str, cache: Path) -> SampleReader:
    data = Data(
        source="shards",
        path=path,
        sequence=128,
        shuffle="blocked",
        block_tokens=1 << 16,
        window_blocks=4,
        store=settings(cache),
    )
    return SampleReader(data, 1000)


def use(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in credentials(port).items():
        monkeypatch.setenv(name, value)


def test_a_server_killed_and_started_again_mid_read_loses_nothing(
    server: S3Server, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.upload(corpus, "killed")
    proxy = DelayProxy(server.port, delay_seconds=0.05)
    use(proxy.port, monkeypatch)
    local = reader(str(corpus), tmp_path)
    distant = reader(url, tmp_path / "cache")
    restarted = threading.Thread(target=lambda: (server.kill(), server.start()))
    for first in range(0, 15_500, 500):  # an epoch
        assert np.array_equal(distant.batch(first, 500), local.batch(first, 500))
        if first == 500:
            restarted.start()  # while most of the corpus is still to be fetched
    restarted.join()
    proxy.close()
    cache = next(iter((tmp_path / "cache").iterdir()))
    assert len(list(cache.glob("*.part"))) == 62  # every part of 64 KiB came
    assert (
        open_store(url, settings(tmp_path / "cache")).retries > 0
    )  # some only when asked for again


def test_wrong_keys_are_refused_at_once(
    server: S3Server, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.upload(corpus, "secret")
    use(server.port, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreError, match="access is refused"):
        reader(url, tmp_path)
