"""Reading from a real S3 server: slow, killed and started again, or with wrong keys."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.config import Data, Store
from phalanx.data import DataError, SampleReader, read_manifest
from phalanx.data.errors import ObjectStoreError
from phalanx.data.prepare.engine import LocalEngine
from phalanx.data.prepare.output.trace import CorpusTrace
from phalanx.data.prepare.read.inputs import find_inputs
from phalanx.data.prepare.run import prepare
from phalanx.data.remote.staging import stage
from phalanx.data.remote.store import open_store
from tests.data.corpora import write_corpus
from tests.data.prepare.raw import recipe, write_raw
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
        patch.setattr("phalanx.data.corpus.writer.BLOCK_BYTES", PART)
        write_corpus(folder, 2_000_000, documents=100, file_bytes=1 << 20)
    return folder


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.data.remote.shards.PART_BYTES", PART)
    monkeypatch.setattr("phalanx.data.remote.origins.PART_BYTES", PART)
    monkeypatch.setattr("phalanx.data.remote.store._LONGEST_WAIT_SECONDS", 0.5)


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


def test_the_few_slow_answers_are_asked_for_twice_and_lose_nothing(
    server: S3Server, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.upload(corpus, "slow")
    proxy = DelayProxy(server.port, delay_seconds=5, every=20)
    use(proxy.port, monkeypatch)
    local, distant = reader(str(corpus), tmp_path), reader(url, tmp_path / "cache")
    for first in range(0, 15_500, 500):  # an epoch
        assert np.array_equal(distant.batch(first, 500), local.batch(first, 500))
    proxy.close()
    assert open_store(url, settings(tmp_path / "cache")).hedges > 0


def test_wrong_keys_are_refused_at_once(
    server: S3Server, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.upload(corpus, "secret")
    use(server.port, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ObjectStoreError, match="access is refused"):
        reader(url, tmp_path)


def test_a_corpus_is_staged_from_a_store_and_goes_on_after_an_interruption(
    server: S3Server, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target = server.upload(corpus, "staged"), tmp_path / "local"
    use(server.port, monkeypatch)
    whole = sum(path.stat().st_size for path in corpus.iterdir())

    def interrupt(done: int, total: int) -> None:
        assert total == whole
        if done > 2_500_000:  # within the third shard
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(url, target, progress=interrupt, store=settings(tmp_path / "cache"))
    assert not target.exists()
    done = stage(url, target, store=settings(tmp_path / "cache"))
    assert done.kept_bytes > 2_000_000 and done.copied_bytes + done.kept_bytes == whole
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in corpus.iterdir()
    }
    assert stage(url, target, store=settings(tmp_path / "cache")).copied_bytes == 0


def test_staging_keeps_to_its_rate_and_refuses_a_damaged_object(
    server: S3Server, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(corpus, broken)
    shard = broken / "shard-00001.bin"
    content = bytearray(shard.read_bytes())
    content[3 * PART + 5] ^= 1
    shard.write_bytes(content)
    url = server.upload(broken, "broken")
    use(server.port, monkeypatch)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"s3://.*shard-00001\.bin: block 3 is damaged"):
        stage(url, tmp_path / "local", bytes_per_second=2e6, store=settings(tmp_path / "cache"))
    assert time.monotonic() - began > 1.0  # two shards of a megabyte
    assert not (tmp_path / "local").exists()


def test_a_corpus_in_a_store_can_be_looked_into_by_its_url(
    server: S3Server, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.upload(corpus, "shown")
    use(server.port, monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the cache is by default
    monkeypatch.setattr("tempfile.tempdir", None)
    runner = CliRunner()
    for command in (["verify", url], ["inspect", url], ["stage", url, str(tmp_path / "local")]):
        done = runner.invoke(app, ["data", *command])
        assert done.exit_code == 0, done.output
    assert "2,000,000 tokens" in runner.invoke(app, ["data", "inspect", url]).output
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused = runner.invoke(app, ["data", "verify", f"{url}/elsewhere"])
    assert refused.exit_code == 1 and "access is refused" in refused.output


def test_a_corpus_is_prepared_from_objects_as_from_files(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_raw(tmp_path / "raw")
    url = server.upload(tmp_path / "raw", "raw")
    use(server.port, monkeypatch)
    stored = recipe(tmp_path, overrides=[f'read.inputs=["{url}/*.jsonl", "{url}/c.txt"]'])
    prepare(stored, tmp_path, LocalEngine(1))
    on_disk = recipe(tmp_path, overrides=[f"out={tmp_path / 'alone'}"])
    prepare(on_disk, tmp_path, LocalEngine(1))
    same = [read_manifest(tmp_path / name).fingerprint for name in ("out", "alone")]
    assert same[0] == same[1]
    traced = CorpusTrace(tmp_path / "out").document(0)
    assert traced.file == f"{url}/a.jsonl" and traced.content
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ObjectStoreError):
        find_inputs("read.inputs", [url])
