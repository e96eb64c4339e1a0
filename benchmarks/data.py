"""How fast samples are read, beside other loaders, and what opening 15 trillion tokens costs.

    python -m benchmarks.data

A corpus of 200 million tokens, samples of 4096, shuffled, batches of 8: tokens and labels as int64
tensors. All
loaders take turns, each in a process that stands still otherwise, so that they meet the same load
of the machine and none of each other's threads; files are in the page cache and have been read
through once. Packages that are not installed are named and left out. Exits with 1 when a bar
is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from proof.report import report

TOKENS, SEQUENCE, BATCH, VOCAB = 200_000_000, 4096, 8, 50_000
FOLDER = Path("runs/bench-data")

# What our rate over each one's is called.
FIGURES = {
    "memmap": "of_memmap",
    "grain elastic": "of_grain",
    "StatefulDataLoader": "of_stateful_data_loader",
    "litdata": "of_litdata",
    "MosaicML streaming": "of_mosaic",
}
ANSWER = "answer "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each loader in a round")
    parser.add_argument("--loader", help=argparse.SUPPRESS)
    parser.add_argument("--open", dest="open_folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loader:
        run_loader(options.loader)
        return 0
    if options.open_folder:
        print(json.dumps(open_huge(Path(options.open_folder))))
        return 0
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    rates = measure(options.rounds, options.seconds)
    figures = print_speed(rates) | measure_opening()
    print(f"\nload average after: {os.getloadavg()[0]:.1f}")
    return report("loader", figures)


class Rate(NamedTuple):
    """Million tokens a second of the clock, and of CPU time: what others on the cores leave."""

    clock: float
    cpu: float


def measure(rounds: int, seconds: float) -> dict[str, list[Rate]]:
    """What each loader reached in each round."""
    from benchmarks.data_peers import PEERS

    write_corpus(FOLDER / "phalanx")
    rates: dict[str, list[Rate]] = {}
    loaders = {name: Loader(name) for name in ("phalanx", "phalanx, thread ahead", *PEERS)}
    for name, loader in loaders.items():
        problem = loader.wait()
        if problem:
            print(f"skipped: {name} ({problem})")
        else:
            rates[name] = []
    for _ in range(rounds):
        for name, found in rates.items():
            found.append(loaders[name].turn(seconds))
    for loader in loaders.values():
        loader.end()
    return rates


class Loader:
    """A loader in a process of its own, which stands still unless it is its turn."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.data", "--loader", name]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def wait(self) -> str:
        """Why the loader cannot run, or "" when it is ready."""
        answer = self._answer()
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def turn(self, seconds: float) -> Rate:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        rate = Rate(*json.loads(self._answer()))
        self._process.send_signal(signal.SIGSTOP)
        return rate

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):  # some loaders print
                return line.removeprefix(ANSWER).strip()
        return "it ended by itself"


def run_loader(name: str) -> None:
    """Make batches for as long as each line of stdin says, and answer with the rates."""
    from benchmarks.data_peers import PEERS

    loader: Iterator[object]
    if name in PEERS:
        tokens = np.asarray(np.memmap(FOLDER / "tokens.bin", "<u2", "r"))
        tokens.sum()  # read through once; a memmap's own slices would be several times slower
        batches_of_peer = PEERS[name](tokens, SEQUENCE, BATCH, FOLDER / name.replace(" ", "-"))
        loader = ((rows[:, :-1], rows[:, 1:]) for rows in batches_of_peer)
    else:
        loader = read_phalanx(FOLDER / "phalanx", prefetch=0 if name == "phalanx" else 4)
        for _ in range(TOKENS // (SEQUENCE * BATCH)):
            next(loader)  # likewise
    try:
        next(loader)
    except ImportError as error:
        print(f"{ANSWER}{error}", flush=True)
        return
    print(ANSWER, flush=True)
    for line in sys.stdin:
        next(loader)
        batches, cpu, began = 0, time.process_time(), time.perf_counter()
        while (spent := time.perf_counter() - began) < float(line):
            for _ in range(8):
                next(loader)
            batches += 8
        read = batches * BATCH * SEQUENCE / 1e6
        print(f"{ANSWER}{json.dumps([read / spent, read / (time.process_time() - cpu)])}")
        sys.stdout.flush()


def write_corpus(folder: Path) -> Path:
    from phalanx.data import ShardWriter

    if (folder / "manifest.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(0)
    with (FOLDER / "tokens.bin").open("wb") as plain, ShardWriter(folder, VOCAB, 0) as writer:
        for _ in range(TOKENS // 1_000_000):
            document = chance.integers(1, VOCAB, 999_999)
            writer.write(document)
            writer.end_document()
            np.append(document, 0).astype("<u2").tofile(plain)
        writer.finish()
    return folder


def read_phalanx(corpus: Path, prefetch: int) -> Iterator[object]:
    import torch

    from phalanx.config import Data
    from phalanx.data import Feed

    data = Data(source="shards", path=str(corpus), sequence=SEQUENCE, prefetch=prefetch)
    feed = Feed(data, VOCAB, BATCH, BATCH, 0, 1)
    cursor = feed.start()
    while True:
        (batch,) = feed.next(cursor).micro_batches
        yield torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
        cursor = feed.advance(cursor)


def print_speed(rates: dict[str, list[Rate]]) -> dict[str, float]:
    ours = rates["phalanx"]
    print(f"{'million tokens':22} {'best/s':>7} {'median/s':>9} {'median/CPU s':>13}", end="")
    print(f" {'phalanx is, by clock':>21} {'by CPU':>8}")
    figures = {
        "million_tokens_per_second": statistics.median(rate.clock for rate in ours),
    }
    for name, found in rates.items():
        clock = statistics.median(rate.clock for rate in found)
        cpu = statistics.median(rate.cpu for rate in found)
        print(f"{name:22} {max(found).clock:7.0f} {clock:9.0f} {cpu:13.0f}", end="")
        if name in FIGURES:
            # Round by round: both met nearly the same load.
            pairs = list(zip(ours, found, strict=True))
            by_clock = statistics.median(a.clock / b.clock for a, b in pairs)
            by_cpu = statistics.median(a.cpu / b.cpu for a, b in pairs)
            print(f" {by_clock:19.2f} x {by_cpu:6.2f} x", end="")
            figures[FIGURES[name]] = by_clock
        print()
    return figures


def measure_opening() -> dict[str, float]:
    """Open a virtual corpus of 15 trillion tokens in fresh processes."""
    folder = FOLDER / "huge"
    write_huge(folder)
    command = [sys.executable, "-m", "benchmarks.data", "--open", str(folder)]
    found = [json.loads(subprocess.check_output(command)) for _ in range(5)]
    seconds = [run["seconds"] for run in found]
    peak = max(run["peak_bytes"] for run in found)
    print(
        f"\n15e12 tokens in 60,000 shards, from opening to the first batch at sample "
        f"{found[0]['sample']:,}:\n  {min(seconds) * 1e3:.0f} ms at best, "
        f"{statistics.median(seconds) * 1e3:.0f} ms median of 5, "
        f"{min(run['cpu_seconds'] for run in found) * 1e3:.0f} ms of CPU time;\n  "
        f"peak memory of the whole process {peak / 1e6:.0f} MB; "
        f"cursor {found[0]['cursor_bytes']} bytes"
    )
    return {
        "open_ms": statistics.median(seconds) * 1e3,
        "open_megabytes": peak / 1e6,
        "cursor_bytes": found[0]["cursor_bytes"],
    }


SHARDS, SHARD_TOKENS = 60_000, 250_000_000


def write_huge(folder: Path) -> None:
    """A manifest of 60,000 shards; the files are made where a batch looks, sparse."""
    import msgspec

    from phalanx.data.corpus.manifest import FORMAT_VERSION, CorpusManifest, CorpusOrigin, ShardFile

    folder.mkdir(parents=True, exist_ok=True)
    files = tuple(ShardFile(f"shard-{n:05d}.bin", SHARD_TOKENS, 10**6, n) for n in range(SHARDS))
    manifest = CorpusManifest(
        version=FORMAT_VERSION,
        dtype="uint32",
        vocab=128_256,
        end_of_document=0,
        tokenizer="",
        source=CorpusOrigin(),
        tokens=SHARDS * SHARD_TOKENS,
        documents=SHARDS * 10**6,
        file_tokens=SHARD_TOKENS,
        block_bytes=1 << 20,
        files=files,
    )
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    reader, first, _ = open_reader(folder)
    _, indices = reader.locate(range(first, first + BATCH))
    for index in indices:
        path = folder / f"shard-{index * SEQUENCE // SHARD_TOKENS:05d}.bin"
        with path.open("ab") as file:
            file.truncate(4 * SHARD_TOKENS)


def open_reader(folder: Path):  # type: ignore[no-untyped-def]
    from phalanx.config import Data
    from phalanx.data import Cursor, SampleReader

    data = Data(source="shards", path=str(folder), sequence=SEQUENCE, seed=7)
    reader = SampleReader(data, 128_256)
    consumed = 2_718_281_828
    return reader, consumed, Cursor(consumed, (), reader.draws.fingerprint(consumed))


def open_huge(folder: Path) -> dict[str, float]:
    import msgspec

    import phalanx.data  # noqa: F401  (imports are not part of what is measured)

    began, cpu = time.perf_counter(), time.process_time()
    reader, first, cursor = open_reader(folder)
    batch = reader.batch(first, BATCH)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    assert batch.shape == (BATCH, SEQUENCE + 1)
    # Not getrusage: what the parent held before it started this process would count too.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    size = len(msgspec.json.encode(cursor))
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak,
        "sample": first,
        "cursor_bytes": size,
    }


if __name__ == "__main__":
    sys.exit(main())
