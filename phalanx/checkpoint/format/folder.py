"""The folder of a run's checkpoints: what is in it, who may write, what is removed.

``step-00000010`` holds the files of one checkpoint, with ``.g2`` behind it from the second gang
on. It counts from the moment that it has a manifest.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from phalanx.checkpoint.format.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    LostPlaceError,
    read_manifest,
)
from phalanx.checkpoint.format.tier import (
    BAD_FILE,
    DOOMED,
    FolderTier,
    Tier,
    entries,
    open_tier,
    read_scores,
)
from phalanx.checkpoint.retention import RetentionPolicy, decide
from phalanx.data.durable_files import sync_folder

LOCK_FILE = "writer.lock"
RESERVED_FILE = "reserved"  # in a checkpoint that is being written: how large it will be
RESERVED_SECONDS = 3600.0  # after that its writer is taken for dead

log = logging.getLogger(__name__)


class StepFolder(NamedTuple):
    """A step's folder, complete or not."""

    step: int
    generation: int
    path: Path

    @property
    def complete(self) -> bool:
        return (self.path / MANIFEST_FILE).is_file()


class Fence(NamedTuple):
    """A gang that formed: what older gangs saved beyond its first step does not count."""

    generation: int
    from_step: int


def checkpoint_path(folder: Path, step: int, generation: int) -> Path:
    """Where a gang's checkpoint of a step belongs."""
    return folder / (f"step-{step:08d}" + (f".g{generation}" if generation else ""))


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints that may be trusted so far as is known, oldest step first."""
    fences = read_fences(folder)
    by_step: dict[int, StepFolder] = {}
    for seen in sorted(scan(folder)):
        outdated = any(f.generation > seen.generation and f.from_step < seen.step for f in fences)
        if seen.complete and not outdated and not (seen.path / BAD_FILE).exists():
            by_step[seen.step] = seen  # of two gangs the later one, which sorts behind
    return [by_step[step].path for step in sorted(by_step)]


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, if there is one."""
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def older_than(path: Path) -> Path | None:
    """The next older checkpoint beside one."""
    steps = {found.path: found.step for found in scan(path.parent)}
    beside = [p for p in list_checkpoints(path.parent) if steps[p] < steps.get(path, 0)]
    return beside[-1] if beside else None


def scan(folder: Path) -> Iterator[StepFolder]:
    """Every step's folder, complete or not."""
    for path in folder.glob("step-*"):
        if (found := _found(path)) is not None:
            yield found


def _found(path: Path) -> StepFolder | None:
    match = re.fullmatch(r"step-(\d+)(?:\.g(\d+))?", path.name)
    return StepFolder(int(match[1]), int(match[2] or 0), path) if match else None


def read_fences(folder: Path) -> list[Fence]:
    """Gangs that formed over this folder."""
    names = (path.name for path in folder.glob("generation-*"))
    matches = (re.fullmatch(r"generation-(\d+)\.from-(\d+)", name) for name in names)
    return sorted(Fence(int(match[1]), int(match[2])) for match in matches if match)


def raise_fence(folder: Path, generation: int, from_step: int) -> None:
    """From now on lower generations lose here; refused where a higher one has been."""
    refuse_outdated(folder, generation)
    if generation > 0:
        (folder / f"generation-{generation:08d}.from-{from_step:08d}").touch()
        sync_folder(folder)


def refuse_outdated(folder: Path, generation: int) -> None:
    """Raise if a gang of a higher generation has formed."""
    newest = max((fence.generation for fence in read_fences(folder)), default=0)
    if newest > generation:
        problem = f"generation {generation} lost its place to generation {newest}"
        raise LostPlaceError(folder, problem, "leave: another gang has taken over this run")


def mark_bad(path: Path | str, problems: list[str]) -> None:
    """Remember that a checkpoint failed its proof."""
    log.error("checkpoint %s is bad: %s", path, "; ".join(problems))
    root, _, name = str(path).rpartition("/")
    try:
        open_tier(root).write(f"{name}/{BAD_FILE}", msgspec.json.encode({"problems": problems}))
    except OSError as error:  # a read-only copy is still worth falling back from
        log.warning("cannot mark %s as bad: %s", path, error)


def read_bad(tier: Tier, name: str) -> list[str]:
    """Why a checkpoint was found bad; empty if it was not."""
    try:
        content = tier.read(f"{name}/{BAD_FILE}")
        return msgspec.json.decode(content, type=dict[str, list[str]])["problems"]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, KeyError) as error:
        return [f"{BAD_FILE} cannot be read: {error}"]


def remove(path: Path) -> None:
    """Remove a checkpoint so that a crash in the middle leaves nothing that looks complete."""
    FolderTier(path.parent).delete(path.name)


def team_folder(folder: Path) -> Path:
    """What a quota covers: the folder of all runs, three above a run's checkpoints."""
    return folder.parents[2] if len(folder.parents) > 2 else folder


def used_bytes(folder: Path, but: Path | None = None) -> int:
    """Bytes of all checkpoints under the same quota, those that are being written included."""
    found = team_folder(folder).glob(f"*/*/{folder.name}/step-*")
    return sum(_bytes_of(path) for path in found if path != but)


def _bytes_of(path: Path) -> int:
    with suppress(CheckpointError):
        return read_manifest(path).total_bytes
    there = 0
    with suppress(OSError):  # it may go away under our eyes
        there = sum(entry.stat().st_size for entry in os.scandir(path))
        reserved = path / RESERVED_FILE
        if time.time() - reserved.stat().st_mtime < RESERVED_SECONDS:
            there = max(there, int(reserved.read_text()))
    return there


def prune(folder: Path, policy: RetentionPolicy, newest: Path) -> list[Path]:
    """Retire what the policy does not keep, and what never became complete before ``newest``.

    ``newest`` was just committed and is never removed. Returns what is to be cleared away.
    """
    tier = FolderTier(folder)
    saved = entries(tier, read_scores(folder), sized=policy.quota_bytes > 0)
    own = sum(entry.bytes for entry in saved)
    others = used_bytes(folder) - own if policy.quota_bytes else 0
    decision = decide(saved, policy, newest.name, max(0, others))
    doomed = list(decision.removed)
    doomed += _superseded(folder, newest)
    removed = []
    for name in doomed:
        try:
            removed.append(tier.doom(name))
        except OSError as error:  # the save itself has succeeded
            log.warning("cannot remove the old checkpoint %s: %s", folder / name, error)
    if decision.excess_bytes:
        over = f"{decision.excess_bytes / 1e9:.1f} GB above the quota"
        log.error("checkpoints below %s are %s", folder, over)
    return removed


def _superseded(folder: Path, newest: Path) -> list[str]:
    """Folders that never became complete and that nobody will complete any more.

    Earlier steps, and all that an older gang left: this one made those steps again, or goes
    another way.
    """
    own = _found(newest)
    assert own is not None
    return [
        each.path.name
        for each in scan(folder)
        if not each.complete and (each.generation < own.generation or each.step < own.step)
    ]


def clear(doomed: list[Path]) -> None:
    """Give back the space of what was retired."""
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)  # the next start sweeps


def sweep(folder: Path) -> None:
    """Remove what killed saves and removals left behind; only while nobody else writes."""
    for doomed in folder.glob(f"step-*{DOOMED}"):
        shutil.rmtree(doomed)
    for found in list(scan(folder)):
        if not found.complete:
            remove(found.path)


class WriterLock:
    """At most one job writes into a folder; a dead one holds it no longer.

    The keeper of a job that was killed holds it until it has written what it was given: that is
    waited for.
    """

    def __init__(self, folder: Path, patience_seconds: float = 60.0) -> None:
        self._path = folder / LOCK_FILE
        self._descriptor = -1
        deadline = time.monotonic() + patience_seconds
        while not self._try():
            owner = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            if _lives_here(owner) or time.monotonic() > deadline:
                self.release()
                problem = f"another job writes here: {owner or 'unknown'}"
                raise CheckpointError(folder, problem, "give each job a folder of its own")
            time.sleep(0.1)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{socket.gethostname()} process {os.getpid()}".encode(), 0)

    @property
    def descriptor(self) -> int:
        """For a keeper that goes on writing when we are gone."""
        return self._descriptor

    def _try(self) -> bool:
        """Lock the file that has the name now: whoever had it may have taken it away."""
        self.release()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            return False

    def release(self, *, remove: bool = False) -> None:
        """Let another job write; where none will, the file goes too."""
        if self._descriptor >= 0 and remove:
            self._path.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.release()


def _lives_here(owner: str) -> bool:
    """Whether a lock's owner is a process of this machine that runs."""
    match = re.fullmatch(r"(\S+) process (\d+)", owner)
    return bool(match and match[1] == socket.gethostname() and Path(f"/proc/{match[2]}").exists())
