"""A team's quota: what its checkpoints take, and whether one more may be written.

The first rank decides before it writes and leaves its refusal in the folder, where the others
find it; no rank waits for another while there is room.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from phalanx.checkpoint.manifest import CheckpointError, read_manifest
from phalanx.checkpoint.retention import decide
from phalanx.checkpoint.tier import FolderTier, entries, read_scores

if TYPE_CHECKING:
    from phalanx.checkpoint.commit import Order

REFUSAL_FILE = "over-quota.json"  # beside the checkpoints, while the newest save was refused
RESERVED_FILE = "reserved"  # in a checkpoint that is being written: how large it will be
RESERVED_SECONDS = 3600.0  # after that its writer is taken for dead
LOCK_FILE = ".quota.lock"  # in the team's folder
VERDICT_SECONDS = 30.0  # for the first rank to think again about a standing refusal

log = logging.getLogger(__name__)


class Refusal(msgspec.Struct, frozen=True):
    """A save that found no room."""

    generation: int
    step: int
    problem: str


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


def admit(order: Order) -> None:
    """Make room for a checkpoint, or refuse it with CheckpointError: nothing is written then.

    Older checkpoints of the same run go if that helps; never the newest good one, nor pinned ones.
    """
    if not order.policy.quota_bytes:
        return
    problem = _decide(order) if order.sidecar.rank == 0 else _await_verdict(order)
    if problem:
        fix = "remove other checkpoints (phalanx ckpt prune) or raise checkpoint.quota_gb"
        raise CheckpointError(order.path, problem, fix)


def refusal_of(order: Order) -> str:
    """Why the first rank refused this very save; empty where it did not, or not yet."""
    found = _read_refusal(Path(order.path).parent) if order.policy.quota_bytes else None
    this = (order.draft.generation, order.draft.step)
    return found.problem if found and (found.generation, found.step) == this else ""


def _decide(order: Order) -> str:
    path, draft = Path(order.path), order.draft
    folder, team = path.parent, team_folder(path.parent)
    tier = FolderTier(folder)
    with _locked(team):
        found = entries(tier, read_scores(folder), sized=True)
        other_bytes = used_bytes(folder, but=path) - sum(entry.bytes for entry in found)
        coming = max(0, other_bytes) + order.total_bytes
        decision = decide(found, order.policy, other_bytes=coming)
        if decision.excess_bytes:
            problem = (
                f"{order.total_bytes / 1e9:.3g} GB more would be "
                f"{decision.excess_bytes / 1e9:.3g} GB above the quota of "
                f"{order.policy.quota_bytes / 1e9:.3g} GB of {team}, and no more of this run "
                "may be removed"
            )
            refusal = Refusal(draft.generation, draft.step, problem)
            tier.write(REFUSAL_FILE, msgspec.json.encode(refusal))
            return problem
        for name, reason in decision.removed.items():
            log.warning("removing %s: %s", folder / name, reason)
            tier.delete(name)
        path.mkdir(parents=True, exist_ok=True)
        (path / RESERVED_FILE).write_text(str(order.total_bytes))
        tier.drop(REFUSAL_FILE)
    return ""


def _await_verdict(order: Order) -> str:
    """What the first rank says; it has said nothing against it where there is no refusal."""
    this, deadline = (order.draft.generation, order.draft.step), time.monotonic() + VERDICT_SECONDS
    while found := _read_refusal(Path(order.path).parent):
        if (found.generation, found.step) >= this:
            return found.problem
        if time.monotonic() > deadline:
            return "the quota was exceeded before, and the first rank does not say otherwise"
        time.sleep(0.1)
    return ""


def _read_refusal(folder: Path) -> Refusal | None:
    try:
        return msgspec.json.decode((folder / REFUSAL_FILE).read_bytes(), type=Refusal)
    except (OSError, msgspec.MsgspecError):
        return None


@contextmanager
def _locked(team: Path) -> Iterator[None]:
    """One run of a team decides at a time."""
    descriptor = os.open(team / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
