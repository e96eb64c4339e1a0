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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from phalanx.checkpoint.format.folder import RESERVED_FILE, team_folder, used_bytes
from phalanx.checkpoint.format.manifest import CheckpointError
from phalanx.checkpoint.format.tier import FolderTier, Tier, entries, open_tier, read_scores
from phalanx.checkpoint.retention import RetentionPolicy, decide

if TYPE_CHECKING:
    from phalanx.checkpoint.write.commit import SaveOrder

REFUSAL_FILE = "over-quota.json"  # beside the checkpoints, while the newest save was refused
LOCK_FILE = ".quota.lock"  # in the team's folder
QUOTA_FIX = "remove other checkpoints (phalanx ckpt prune) or raise checkpoint.quota_gb"
VERDICT_SECONDS = 30.0  # for the first rank to think again about a standing refusal

log = logging.getLogger(__name__)


class QuotaRefusal(msgspec.Struct, frozen=True):
    """A save that found no room."""

    generation: int
    step: int
    problem: str


def admit(order: SaveOrder) -> None:
    """Make room for a checkpoint, or refuse it with CheckpointError: nothing is written then.

    Older checkpoints of the same run go if that helps; never the newest good one, nor pinned ones.
    """
    path = Path(order.path)
    folder, team = path.parent, team_folder(path.parent)
    tier = FolderTier(folder)
    if order.policy.quota_bytes and order.sidecar.rank == 0:
        with _locked(team):
            budget = QuotaUsage(tier, order.policy, used_bytes(folder, but=path), str(team))
            _free_space(order, budget)
            path.mkdir(parents=True, exist_ok=True)
            (path / RESERVED_FILE).write_text(str(order.total_bytes))
    elif order.policy.quota_bytes:
        _heed_verdict(order, tier)


def admit_copy(tier: Tier, order: SaveOrder) -> None:
    """The same for a copy in the archive, whose quota covers all that is below its address."""
    target = order.archive
    assert target is not None
    if target.policy.quota_bytes and order.sidecar.rank == 0:
        root = open_tier(target.root or target.url)
        used = root.bytes_below() - sum(tier.files(Path(order.path).name).values())
        _free_space(order, QuotaUsage(tier, target.policy, used, root.where))
    elif target.policy.quota_bytes:
        _heed_verdict(order, tier)


def refusal_of(order: SaveOrder) -> str:
    """Why the first rank refused this very save; empty where it did not, or not yet."""
    tier = FolderTier(Path(order.path).parent)
    found = _read_refusal(tier) if order.policy.quota_bytes else None
    this = (order.draft.generation, order.draft.step)
    return found.problem if found and (found.generation, found.step) == this else ""


class QuotaUsage(NamedTuple):
    """A quota and what of it is taken."""

    tier: Tier
    policy: RetentionPolicy
    used_bytes: int  # this run's own checkpoints included
    where: str  # what it covers


def _free_space(order: SaveOrder, budget: QuotaUsage) -> None:
    tier, draft = budget.tier, order.draft
    found = entries(tier, read_scores(Path(order.path).parent), sized=True)
    other_bytes = max(0, budget.used_bytes - sum(entry.bytes for entry in found))
    decision = decide(found, budget.policy, other_bytes=other_bytes + order.total_bytes)
    if decision.excess_bytes:
        problem = (
            f"{order.total_bytes / 1e9:.3g} GB more would be "
            f"{decision.excess_bytes / 1e9:.3g} GB above the quota of "
            f"{budget.policy.quota_bytes / 1e9:.3g} GB of {budget.where}, and no more of this run "
            "may be removed"
        )
        refusal = QuotaRefusal(draft.generation, draft.step, problem)
        tier.write(REFUSAL_FILE, msgspec.json.encode(refusal))
        raise over_quota(order, problem)
    for name, reason in decision.removed.items():
        log.warning("removing %s/%s: %s", tier.where, name, reason)
        tier.delete(name)
    tier.drop(REFUSAL_FILE)


def over_quota(order: SaveOrder, problem: str) -> CheckpointError:
    return CheckpointError(order.path, problem, QUOTA_FIX)


def _heed_verdict(order: SaveOrder, tier: Tier) -> None:
    """Raise what the first rank says; without a refusal it has said nothing against it."""
    this, deadline = (order.draft.generation, order.draft.step), time.monotonic() + VERDICT_SECONDS
    while found := _read_refusal(tier):
        if (found.generation, found.step) >= this:
            raise over_quota(order, found.problem)
        if time.monotonic() > deadline:
            problem = "the quota was exceeded before, and the first rank does not say otherwise"
            raise over_quota(order, problem)
        time.sleep(0.1)


def _read_refusal(tier: Tier) -> QuotaRefusal | None:
    try:
        return msgspec.json.decode(tier.read(REFUSAL_FILE), type=QuotaRefusal)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
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
