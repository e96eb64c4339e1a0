"""Near-duplicates: how many planted ones are found, how fast beside datatrove, in what memory.

    python -m venv build/datatrove
    build/datatrove/bin/pip install 'datatrove[processing]' spacy orjson
    PHALANX_DATATROVE=build/datatrove/bin/python python -m benchmarks.data_prepare

Quality: documents with a variant of each, whose Jaccard similarity is computed from their sets of
word 5-grams. Those of 0.8 and more must be removed (recall), all others kept (precision: of what
is removed, the share that has an earlier document of 0.8 or more).
Speed: the same JSON lines deduplicated by one process each, in turns: reading, signatures, buckets,
groups. Ours also verifies every pair and writes the kept text for the phases that follow. datatrove
runs in the Python that PHALANX_DATATROVE names, once with spaCy's words, as it is shipped, and once
with ``str.split`` in its place, which flatters it; the ratio is of processor time.
Memory: keys of 10 million documents as filters leave them, a tenth planted, through all phases of
deduplication in one process. Sketches are shorter than real ones: they are read in place, not held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from phalanx.data.prepare.dedup.minhash import choose_banding, shingles
from phalanx.data.prepare.duplicates import Removed, find_duplicates
from phalanx.data.prepare.engine import LocalEngine, run_phase
from phalanx.data.prepare.filter_files import (
    CONTENT_NAME,
    KEYS_NAME,
    SKETCH_ENDS_NAME,
    SKETCHES_NAME,
    filter_files,
    read_counts,
)
from phalanx.data.prepare.recipe import (
    DeduplicateSettings,
    FilterSettings,
    PrepareRecipe,
    ReadSettings,
    TokenizeSettings,
)
from phalanx.data.prepare.words import TextView, mix
from phalanx.data.prepare.work import FilterFiles, GroupLayout, UnitPhase, WorkFolder, WorkUnit
from proof.report import report

JACCARD = 0.8
FILES = 10  # of the test of memory
SKETCHED = 16  # n-grams of a document there

RECIPE = PrepareRecipe(
    out="unused",
    read=ReadSettings(inputs=("unused",)),
    filter=FilterSettings(rules=()),
    tokenize=TokenizeSettings(vocab_size=1),
)

# Run by a Python that has datatrove: stages 1 to 3 of its MinHash, as its example has them.
PEER = """
import json, resource, sys
from pathlib import Path
from loguru import logger
logger.remove()
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature)
from datatrove.pipeline.readers import JsonlReader
folder, words = Path(sys.argv[1]), sys.argv[2]
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
out = folder / f"datatrove-{words}"
sign = MinhashDedupSignature(str(out / "1"), config)
if words == "split":
    class Split:
        def word_tokenize(self, text):
            return text.split()
    sign.word_tokenizer = Split()
sign.get_signature(sign.get_shingles("what is loaded when first used is not measured here"))
began = cpu()
sign.run(JsonlReader(str(folder / "raw"))(), 0, 1)
for bucket in range(14):
    MinhashDedupBuckets(str(out / "1"), str(out / "2"), config=config).run(None, bucket, 14)
MinhashDedupCluster(str(out / "2"), str(out / "3"), config=config).run(None, 0, 1)
removed = (out / "3" / "000000.remove").stat().st_size // 4
print(json.dumps([cpu() - began, removed]))
"""


def plant(documents: int, seed: int = 0) -> tuple[list[str], dict[int, float]]:
    """Originals, each with a variant after it: all texts, and the Jaccard of each variant."""
    rng = random.Random(seed)
    syllables = [first + second for first in "bdfgklmnprstv" for second in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(30_000)]
    weights = np.cumsum(1 / (np.arange(len(words)) + 3)).tolist()  # as languages have them
    texts: list[str] = []
    alike: dict[int, float] = {}
    for _ in range(documents // 2):
        original = rng.choices(words, cum_weights=weights, k=rng.randint(80, 400))
        variant = list(original)
        for _ in range(rng.randint(1, max(1, len(original) // 12))):
            variant[rng.randrange(len(variant))] = rng.choice(words)
        texts.append(" ".join(original))
        alike[len(texts)] = jaccard(texts[-1], " ".join(variant))
        texts.append(" ".join(variant))
    return texts, alike


def jaccard(one: str, other: str) -> float:
    """Of the sets of 5-grams."""
    left, right = (set(shingles(TextView(text), 5).tolist()) for text in (one, other))
    return len(left & right) / len(left | right)


def write_raw(folder: Path, texts: list[str]) -> Path:
    """All texts as one file of JSON lines."""
    path = folder / "raw" / "texts.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.Encoder().encode_lines([{"text": text} for text in texts]))
    return path


def deduplicate(work: WorkFolder, layout: tuple[GroupLayout, ...]) -> Removed:
    """All phases in this process."""

    def run(name: str, units: list[WorkUnit]) -> None:
        phase = UnitPhase(name, RECIPE, "", tuple(units), layout)
        run_phase(LocalEngine(1), work, phase, lambda *_: None)

    return find_duplicates(work, layout, DeduplicateSettings(jaccard=JACCARD), run)


def ours(folder: Path, path: Path) -> tuple[float, Removed]:
    """Processor time of reading, signing and deduplicating a file, and what was removed."""
    began = time.process_time()
    work = WorkFolder(folder)
    with work.commit(work.result(FilterFiles.folder, "raw")) as out:
        filter_files([str(path)], RECIPE, folder, None, out)
    kept = read_counts(work.result(FilterFiles.folder, "raw")).kept
    removed = deduplicate(work, (GroupLayout("raw", 1, kept),))
    return time.process_time() - began, removed


def measure_quality(folder: Path, documents: int) -> dict[str, float]:
    """Recall and precision of planted variants."""
    texts, alike = plant(documents)
    seconds, removed = ours(folder / "quality", write_raw(folder / "quality", texts))
    gone = set(removed.numbers.tolist())
    near = {number for number, similarity in alike.items() if similarity >= JACCARD}
    edge = {number for number in near if alike[number] < JACCARD + 0.05}
    false = sorted(gone - near)
    figures = {
        "recall": len(gone & near) / len(near),
        "edge_recall": len(gone & edge) / len(edge),
        "precision": len(gone & near) / len(gone),
    }
    print(
        f"{documents:,} documents, {len(near):,} of a similarity of {JACCARD} or more"
        f" ({len(edge):,} below {JACCARD + 0.05:g}), {len(alike) - len(near):,} below:"
        f" recall {figures['recall']:.4f} ({figures['edge_recall']:.4f} at the edge), precision"
        f" {figures['precision']:.4f} ({len(false)} wrong), {documents / seconds:,.0f} documents a"
        f" second of processor time"
    )
    return figures


def measure_speed(folder: Path, documents: int, rounds: int, peer: str) -> dict[str, float]:
    """Our processor time beside datatrove's on the same file."""
    texts, _ = plant(documents, seed=1)
    path = write_raw(folder / "speed", texts)
    ratios: dict[str, list[float]] = {"spacy": [], "split": []}
    for turn in range(rounds):
        for words, found in ratios.items():
            seconds, removed = ours(folder / f"speed-{turn}-{words}", path)
            command = [peer, "-c", PEER, str(path.parents[1]), words]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            peer_seconds, peer_removed = json.loads(said.splitlines()[-1])
            found.append(peer_seconds / seconds)
            print(
                f"{words:>5}: phalanx {documents / seconds:,.0f} documents/s,"
                f" {removed.numbers.size:,} removed; datatrove {documents / peer_seconds:,.0f},"
                f" {peer_removed:,} removed; ratio {found[-1]:.2f}"
            )
    return {f"{words}_ratio": median(found) for words, found in ratios.items()}


def write_keys(work: WorkFolder, documents: int) -> tuple[GroupLayout, ...]:
    """What filters would leave of so many documents; every tenth resembles the one before it."""
    each = documents // FILES
    bands = choose_banding(JACCARD, DeduplicateSettings().recall).bands
    layout = []
    for file in range(FILES):
        numbers = np.arange(file * each + 1, (file + 1) * each + 1, dtype=np.uint64)
        before = numbers - np.uint64(1)
        similar = np.where(numbers % np.uint64(10) == 1, before, numbers)
        with work.commit(work.result(FilterFiles.folder, f"file{file}")) as out:
            content = mix(np.stack((numbers, numbers + np.uint64(1 << 40))))
            np.save(out / CONTENT_NAME, content)
            seeds = np.arange(bands, dtype=np.uint64)[:, None] << np.uint64(36)
            np.save(out / KEYS_NAME, mix(similar[None] + seeds))
            ngrams = mix(
                np.add.outer(similar, np.arange(SKETCHED, dtype=np.uint64) << np.uint64(36))
            )
            small = (ngrams >> np.uint64(32)).astype(np.uint32)
            np.sort(small, axis=1).tofile(out / SKETCHES_NAME)
            np.save(out / SKETCH_ENDS_NAME, np.arange(1, each + 1) * SKETCHED)
        layout.append(GroupLayout(f"file{file}", 1, each))
    return tuple(layout)


def measure_memory(documents: int) -> dict[str, float]:
    """Peak memory of deduplication, in a process that does nothing else."""
    with tempfile.TemporaryDirectory(
        prefix="phalanx-prepare-", dir=os.environ.get("TMPDIR")
    ) as name:
        work = WorkFolder(Path(name))
        writer = os.fork()
        if writer == 0:
            write_keys(work, documents)
            os._exit(0)
        assert os.waitpid(writer, 0)[1] == 0
        layout = tuple(GroupLayout(f"file{file}", 1, documents // FILES) for file in range(FILES))
        began = time.perf_counter()
        near = deduplicate(work, layout).near
        seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(
        f"{documents:,} documents: {near:,} removed in {seconds:.0f} s, peak memory {peak:.2f} GiB"
    )
    return {"memory_gib": peak, "memory_found": near / (documents // 10)}


def main() -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planted", type=int, default=20_000, help="documents of the first test")
    parser.add_argument("--documents", type=int, default=10_000_000, help="of the test of memory")
    parser.add_argument("--rounds", type=int, default=3, help="beside datatrove")
    parser.add_argument("--only", choices=["quality", "speed", "memory"])
    options = parser.parse_args()
    figures: dict[str, float] = {}
    peer = os.environ.get("PHALANX_DATATROVE", "")
    with tempfile.TemporaryDirectory(prefix="phalanx-prepare-") as name:
        if options.only in (None, "memory"):  # first: its peak is this process's
            figures |= measure_memory(options.documents)
        if options.only in (None, "quality"):
            figures |= measure_quality(Path(name), options.planted)
        if options.only in (None, "speed"):
            if peer:
                figures |= measure_speed(Path(name), options.planted // 2, options.rounds, peer)
            else:
                print("speed: PHALANX_DATATROVE names no Python that has datatrove and spaCy")
    return report("deduplication", figures)


if __name__ == "__main__":
    sys.exit(main())
