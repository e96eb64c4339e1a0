"""Everybody has joined: what the nodes of a gang keep between them of the last generation."""

from __future__ import annotations

from phalanx.cluster.protocol.events import GangJoined, Progress
from phalanx.cluster.protocol.messages import Joined


def joined(
    job: int,
    generation: int,
    kept_nodes: tuple[int, ...],
    kept_shift: int,
    kept_backup: int,
    answers: list[Joined],
) -> list[Progress | GangJoined]:
    """The newest step of which every slot of the last generation has a copy here.

    ``kept_nodes``: by slot of the last generation that ran; ``kept_shift``: to the slot's buddy;
    ``kept_backup``: the buddy that is no slot.
    """
    step = _common_step(kept_nodes, kept_shift, kept_backup, {a.node: a for a in answers})
    empty = tuple(a.node for a in answers if not _holds(a, step))
    events: list[Progress | GangJoined] = []
    reached = [(a.reached, a.reached_ns) for a in answers if a.reached_ns]
    if reached:
        last = min(at for at, _ in reached)
        # The step that all had completed, when the last of them had.
        ended = max(ns for at, ns in reached if at == last)
        events.append(
            Progress(
                job=job,
                generation=generation,
                step=last,
                committed=max(0, step),
                durable=0,
                at_ns=ended,
            )
        )
    events.append(
        GangJoined(
            job=job,
            generation=generation,
            step=step,
            empty=empty,
            durable=max(a.durable for a in answers),
            newest=min((a.kept.committed for a in answers if a.kept.own), default=step),
        )
    )
    return events


def _common_step(
    kept_nodes: tuple[int, ...], shift: int, backup: int, answers: dict[int, Joined]
) -> int:
    """The newest step that each slot's own node or its buddy holds; -1: there is none.

    A slot of which neither is in the gang any more does not count: whether what it kept can still
    be had is the core's to know.
    """
    common: set[int] | None = None
    slots = len(kept_nodes)
    for slot, node in enumerate(kept_nodes):
        own = answers.get(node)
        buddy = kept_nodes[(slot + shift) % slots] if shift else backup
        other = answers.get(buddy)
        if own is None and other is None:
            continue
        copies = {*(own.kept.own if own else ()), *(other.kept.ward if other else ())}
        common = copies if common is None else common & copies
    return max(common, default=-1) if common else -1


def _holds(answer: Joined, step: int) -> bool:
    """Whether a node keeps anything of a step; of none: anything at all."""
    kept = answer.kept
    return step in (*kept.own, *kept.ward) if step >= 0 else bool(kept.own)
