"""Which checkpoints of a tier may go: a decision with its reasons, as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier keeps: the union of what each rule keeps, within the quota."""

    last: int = 0  # newest ones; 0: all
    every: int = 0  # also those whose step is a multiple of this; 0: no such rule
    best: int = 0  # also so many with the lowest validation loss
    quota_bytes: int = 0  # of the tier's root, which runs of a team may share; 0: no limit


class RetentionEntry(NamedTuple):
    """A complete checkpoint as retention sees it."""

    name: str
    step: int
    bytes: int = 0
    score: float | None = None  # validation loss at its step
    pinned: bool = False
    bad: bool = False  # failed its proof


class RetentionDecision(NamedTuple):
    """What goes and why, and by how much the rest is still above the quota."""

    removed: dict[str, str]  # reason by name
    excess_bytes: int


def decide(
    entries: Sequence[RetentionEntry],
    policy: RetentionPolicy,
    newest: str = "",
    other_bytes: int = 0,
) -> RetentionDecision:
    """Never removes the newest good one, ``newest`` (just written), or a pinned one.

    ``other_bytes`` under the same quota belong to somebody else.
    """
    ordered = sorted(entries, key=lambda entry: (entry.step, entry.name))
    good = [entry for entry in ordered if not entry.bad]
    safe = {entry.name for entry in ordered if entry.pinned} | {newest}
    if good:
        safe.add(good[-1].name)
    kept = safe | {entry.name for entry in _wanted(good, policy)}
    removed: dict[str, str] = {}
    for entry in ordered:
        if entry.name in kept:
            continue
        if not entry.bad:
            removed[entry.name] = f"not among {_in_words(policy)}"
        elif good and good[-1].step > entry.step:
            removed[entry.name] = "bad, and a newer one is good"
    total = other_bytes + sum(e.bytes for e in ordered if e.name not in removed)
    for entry in ordered:
        if policy.quota_bytes == 0 or total <= policy.quota_bytes:
            break
        if entry.name not in safe and entry.name not in removed:
            removed[entry.name] = f"the quota is {policy.quota_bytes / 1e9:.1f} GB"
            total -= entry.bytes
    excess = total - policy.quota_bytes if policy.quota_bytes else 0
    return RetentionDecision(removed, max(0, excess))


def _wanted(good: list[RetentionEntry], policy: RetentionPolicy) -> list[RetentionEntry]:
    if policy.last == 0:
        return good
    wanted = good[-policy.last :]
    if policy.every:
        wanted += [entry for entry in good if entry.step % policy.every == 0]
    scored = [entry for entry in good if entry.score is not None]
    return wanted + sorted(scored, key=lambda entry: (entry.score, -entry.step))[: policy.best]


def _in_words(policy: RetentionPolicy) -> str:
    clauses = [f"the last {policy.last}"]
    if policy.every:
        clauses.append(f"every {policy.every}th step")
    if policy.best:
        clauses.append(f"the best {policy.best}")
    return ", ".join(clauses)
