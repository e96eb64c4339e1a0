"""Tokenising against the tokenizers library's own batch encode, on the same text and cores.

    python -m benchmarks.tokenizing

The library gets all texts in memory and only encodes them, on 1, 2, … threads. Phalanx reads the
same texts as JSON lines, encodes them on as many worker processes and writes checksummed shards;
its time includes the start of the workers. Both take turns, and the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

BAR = 0.9  # of the library's rate on the same number of cores
VOCAB = 32_000


class Measured(NamedTuple):
    """One pass over the text."""

    wall_seconds: float
    cpu_seconds: float
    tokens: int


def prepare(folder: Path, megabytes: int) -> None:
    """Python's standard library as JSON lines, repeated up to a size, and a tokenizer for it."""
    from phalanx.data.tokenize import stdlib_corpus
    from phalanx.data.vocabulary import train_tokenizer

    files = stdlib_corpus()
    (folder / "tokenizer.json").write_text(train_tokenizer(files, VOCAB).to_str())
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    with (folder / "texts.jsonl").open("w") as out:
        copy = 0
        while out.tell() < megabytes * 1_000_000:
            # Each copy differs, so that no cache of whole documents could help.
            out.writelines(json.dumps({"text": f"{copy} {text}"}) + "\n" for text in texts)
            copy += 1


def library(folder: Path) -> Measured:
    """The library's batch encode; its threads are set by RAYON_NUM_THREADS."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text())
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
    began, cpu = time.perf_counter(), _cpu_seconds()
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    wall, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
    return Measured(wall, cpu, sum(map(len, encoded)))


def phalanx(folder: Path, workers: int) -> Measured:
    """Reading, encoding and writing by ``phalanx data tokenize``'s own function."""
    from phalanx.data.tokenize import TokenizeOptions, tokenize_files
    from phalanx.data.vocabulary import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer.json")
    options = TokenizeOptions(workers=workers, replace=True)
    began, cpu = time.perf_counter(), _cpu_seconds()
    done = tokenize_files([folder / "texts.jsonl"], tokenizer, folder / "out", options)
    wall, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
    return Measured(wall, cpu, done.manifest.tokens - done.manifest.documents)


def _cpu_seconds() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def measure(kind: str, folder: Path, cores: int) -> Measured:
    """A pass in a process of its own, on the first ``cores`` processors."""
    command = [sys.executable, "-m", "benchmarks.tokenizing", "--child", kind]
    command += ["--folder", str(folder), "--cores", str(cores)]
    environment = os.environ | {"RAYON_NUM_THREADS": str(cores), "OMP_NUM_THREADS": "1"}
    if kind == "library":
        environment |= {"TOKENIZERS_PARALLELISM": "true" if cores > 1 else "false"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    return Measured(*json.loads(output))


def compare(folder: Path, cores: int, rounds: int) -> float:
    """Print a row of the table and return the ratio of the rates."""
    passes: dict[str, list[Measured]] = {"library": [], "phalanx": []}
    for _ in range(rounds):
        for kind, found in passes.items():
            found.append(measure(kind, folder, cores))
    best = {kind: min(found, key=lambda one: one.wall_seconds) for kind, found in passes.items()}
    cpu = {kind: min(one.cpu_seconds for one in found) for kind, found in passes.items()}
    ours, theirs = best["phalanx"], best["library"]
    assert ours.tokens == theirs.tokens, "both must make the same tokens"
    ratio = theirs.wall_seconds / ours.wall_seconds
    rates = [one.tokens / one.wall_seconds / 1e6 for one in (theirs, ours)]
    extra = cpu["phalanx"] / cpu["library"] - 1
    print(
        f"{cores:5}  {rates[0]:14.3f}  {rates[1]:14.3f}  {ratio:6.3f}  {extra:+12.1%}", flush=True
    )
    return ratio


def main() -> None:
    """Print the table; exit 1 below the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=0, help="most cores; 0: all there are")
    parser.add_argument("--child", choices=["library", "phalanx"])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.child:
        one = phalanx(options.folder, options.cores) if options.child == "phalanx" else None
        print(json.dumps(one or library(options.folder)))
        return
    cores = options.cores or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="phalanx-tokenizing-") as name:
        prepare(Path(name), options.megabytes)
        print("million tokens a second, best of", options.rounds, "alternating passes")
        print("cores         library         phalanx   ratio     more CPU")
        counts = sorted({1, 2, *(1 << power for power in range(10)), cores})
        ratios = [compare(Path(name), count, options.rounds) for count in counts if count <= cores]
    print(f"least ratio {min(ratios):.3f} (bar {BAR})")
    sys.exit(min(ratios) < BAR)


if __name__ == "__main__":
    main()
