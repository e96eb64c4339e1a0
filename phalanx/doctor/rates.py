"""How much storage gives, against what a job needs: rates, small files, object stores."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from phalanx.cluster.causes import Cause
from phalanx.config.errors import first_line
from phalanx.doctor.finding import Finding, Measured, plain
from phalanx.doctor.storage import FULL_BYTES, round_trip

METADATA_FILES = 500
MOST_LISTED, LIST_SECONDS = 20_000, 1.0
SMALL_BYTES, MANY_FILES = 1 << 20, 1000
STORE_BYTES = 32 << 20


class StorageNeeds(Struct, frozen=True, kw_only=True):
    """What a job needs of storage; 0: it was not said."""

    read_mb_per_second: float = 0.0
    write_mb_per_second: float = 0.0
    files_per_second: float = 0.0


def check_rates(folder: Path, needs: StorageNeeds) -> Finding:
    """Reads, writes and metadata, each graded against the need that was named."""
    measured, _ = round_trip(folder, FULL_BYTES)
    measured["files_per_second"] = _metadata_rate(folder)
    return judge_rates(measured, needs)


def judge_rates(measured: Measured, needs: StorageNeeds) -> Finding:
    """The verdict: a rate below its need makes the job wait."""
    wanted = {name: getattr(needs, name) for name in StorageNeeds.__struct_fields__}
    short = [name for name, need in wanted.items() if need and float(measured[name]) < need]
    named = [f"{name} {plain(float(need))}" for name, need in wanted.items() if need]
    return Finding(
        check="rates",
        verdict="warn" if short else "pass",
        measured=measured,
        expected=", ".join(named) or "(no need was named: --need read=MB/s)",
        suggestion=f"too little of {', '.join(short)}: see storage.* and what else uses it"
        if short
        else "",
    )


def _metadata_rate(folder: Path) -> float:
    """Files a second that are made, looked at and removed."""
    names = [folder / f".doctor-{os.getpid()}-{number}" for number in range(METADATA_FILES)]
    began = time.perf_counter()
    try:
        for name in names:
            name.touch()
            name.stat()
    finally:
        for name in names:
            name.unlink(missing_ok=True)
    return METADATA_FILES / (time.perf_counter() - began)


def _sizes(folder: Path, deadline: float) -> Iterator[int]:
    for root, _, names in os.walk(folder):
        for name in names:
            if time.monotonic() > deadline:
                return
            yield (Path(root) / name).lstat().st_size


def check_files(folder: Path) -> Finding:
    """Whether data lies in many small files; a first part of it is looked at."""
    deadline = time.monotonic() + LIST_SECONDS
    sizes = list(itertools.islice(_sizes(folder, deadline), MOST_LISTED))
    return judge_files(str(folder), len(sizes), sum(sizes))


def judge_files(folder: str, files: int, total: int) -> Finding:
    """Many small files cost a request each."""
    mean = total / max(1, files)
    many = files >= MANY_FILES and mean < SMALL_BYTES
    return Finding(
        check=f"files {folder}",
        verdict="skip" if not files else "warn" if many else "pass",
        measured={"files": files, "mean_mib": mean / 2**20},
        expected=f"files of {SMALL_BYTES >> 20} MiB or more where there are {MANY_FILES}"
        if files
        else "(no file there)",
        suggestion="pack them: `phalanx data tokenize` makes shards of tokens" if many else "",
    )


def check_store(url: str) -> Finding:
    """Whether an object store answers, and how fast it gives its first large object."""
    from phalanx.data.remote.store import connect

    name = f"store {url}"
    began = time.perf_counter()
    try:
        client = connect(url)
        listed = next(iter(client.list(chunk_size=50)), [])
        answered = time.perf_counter() - began
        largest = max(listed, key=lambda each: int(each["size"]), default=None)
        measured: Measured = {"objects_seen": len(listed), "answer_seconds": answered}
        if largest is not None and largest["size"]:
            length = min(STORE_BYTES, int(largest["size"]))
            began = time.perf_counter()
            client.get_range(largest["path"], start=0, length=length)
            measured["mb_per_second"] = length / (time.perf_counter() - began) / 1e6
    except Exception as error:  # the client raises kinds of its own
        return Finding(
            check=name,
            verdict="fail",
            measured={"problem": first_line(error)[:300]},
            expected="the store lists its objects",
            suggestion="see its address, credentials, and the way there (proxy, firewall)",
            cause=Cause.DEPENDENCY,
        )
    return Finding(check=name, verdict="pass", measured=measured, expected="the store answers")
