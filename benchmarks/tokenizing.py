"""Tokenising against the tokenizers library's own batch encode, on the same text and cores.

    python -m benchmarks.tokenizing

The library gets all texts in memory and only encodes them, on 1, 2, … threads. Phalanx reads the
same texts as JSON lines, encodes them on as many worker processes and writes checksummed shards;
its time includes the start of the workers, which is also shown by itself (until the first tokens
were written). Both take turns on the same processors; the ratio is the median of the rounds. On a
machine that others use too, processor time says more than the clock: its ratio stands beside it.
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
from statistics import median
from typing import NamedTuple

from proof.report import report

VOCAB = 32_000


class Measured(NamedTuple):
    """One pass over the text."""

    wall_seconds: float
    cpu_seconds: float
    tokens: int
    start_seconds: float = 0.0  # until the first tokens were there
    parent_seconds: float = 0.0  # processor time of the process that feeds the others


def prepare(folder: Path, megabytes: int) -> None:
    """Python's standard library as JSON lines, repeated up to a size, and a tokenizer for it."""
    from phalanx.data.tokenize.run import stdlib_corpus
    from phalanx.data.tokenize.vocabulary import train_tokenizer

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
    from phalanx.data.tokenize.run import TokenizeOptions, TokenizeProgress, tokenize_files
    from phalanx.data.tokenize.vocabulary import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer.json")
    options = TokenizeOptions(workers=workers, replace=True)
    firsts: list[float] = []

    def note_first(_: TokenizeProgress) -> None:
        if not firsts:
            firsts.append(time.perf_counter())

    began, cpu, parent = time.perf_counter(), _cpu_seconds(), time.process_time()
    done = tokenize_files(
        [folder / "texts.jsonl"],
        tokenizer,
        folder / "out",
        options,
        note_first,
    )
    wall, cpu = time.perf_counter() - began, _cpu_seconds() - cpu
    tokens = done.manifest.tokens - done.manifest.documents
    return Measured(wall, cpu, tokens, firsts[0] - began, time.process_time() - parent)


def _cpu_seconds() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def measure(kind: str, folder: Path, cores: int) -> Measured:
    """A pass in a process of its own, bound to the first ``cores`` processors."""
    command = [sys.executable, "-m", "benchmarks.tokenizing", "--child", kind]
    command += ["--folder", str(folder), "--cores", str(cores)]
    environment = os.environ | {"RAYON_NUM_THREADS": str(cores), "OMP_NUM_THREADS": "1"}
    if kind == "library":
        environment |= {"TOKENIZERS_PARALLELISM": "true" if cores > 1 else "false"}
    processors = sorted(os.sched_getaffinity(0))[:cores]
    output = subprocess.run(
        command,
        env=environment,
        check=True,
        capture_output=True,
        preexec_fn=lambda: os.sched_setaffinity(0, processors),
    ).stdout
    return Measured(*json.loads(output))


def compare(folder: Path, cores: int, rounds: int) -> tuple[float, list[Measured]]:
    """Print a row of the table; returns the ratio of the rates, and our passes."""
    passes: dict[str, list[Measured]] = {"library": [], "phalanx": []}
    for _ in range(rounds):
        for kind, found in passes.items():
            found.append(measure(kind, folder, cores))
    pairs = list(zip(passes["library"], passes["phalanx"], strict=True))
    assert len({one.tokens for pair in pairs for one in pair}) == 1, (
        "both must make the same tokens"
    )
    ratio = median(theirs.wall_seconds / ours.wall_seconds for theirs, ours in pairs)
    cpu_ratio = median(theirs.cpu_seconds / ours.cpu_seconds for theirs, ours in pairs)
    rates = [
        median(one.tokens / one.wall_seconds / 1e6 for one in side) for side in passes.values()
    ]
    start = median(ours.start_seconds for _, ours in pairs)
    shown = " ".join(f"{theirs.wall_seconds / ours.wall_seconds:.2f}" for theirs, ours in pairs)
    print(
        f"{cores:5}  {rates[0]:7.3f}  {rates[1]:7.3f}  {ratio:6.3f}  {cpu_ratio:9.3f}  "
        f"{start:10.2f} s  ({shown})",
        flush=True,
    )
    return ratio, passes["phalanx"]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=0, help="most cores; 0: all there are")
    parser.add_argument("--child", choices=["library", "phalanx"])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.child:
        one = phalanx(options.folder, options.cores) if options.child == "phalanx" else None
        print(json.dumps(one or library(options.folder)))
        return 0
    cores = options.cores or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="phalanx-tokenizing-") as name:
        prepare(Path(name), options.megabytes)
        print(f"million tokens a second, median of {options.rounds} alternating passes")
        print("cores  library  phalanx   ratio  CPU ratio      start-up  (ratio of each round)")
        counts = sorted({1, 2, *(1 << power for power in range(10)), cores})
        found = [compare(Path(name), count, options.rounds) for count in counts if count <= cores]
    if cores > 1:
        ours = found[-1][1]
        feeding = median(one.parent_seconds / one.tokens for one in ours)
        encoding = median(one.cpu_seconds / one.tokens for one in ours) - feeding
        print(f"one process feeds and writes for {encoding / feeding:.0f} that encode")
    figures = {"ratio_1_core": found[0][0]}
    if cores > 1:
        figures["ratio_2_cores"] = found[1][0]
    return report("tokenizing", figures)


if __name__ == "__main__":
    sys.exit(main())
