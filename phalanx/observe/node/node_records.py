"""What one node says of the steps of its ranks: an agent makes it, the server takes it apart.

Small gangs are told rank by rank. In large ones a node gives its middle and its worst rank (so a
straggler keeps its number); every rank's own records stay in its ring for whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from phalanx.observe.node.node_messages import NodeRecords, RunRecord
from phalanx.train.report.records import CheckpointRecord, Record, StepRecord, ValidationRecord

PARTS = ("data", "forward", "backward", "optimizer", "snapshot", "exposed_communication")
DETAIL_WORLD = 1024  # gangs up to this size are told rank by rank
MOST_STEPS = 512  # in one message; of more, the newest

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class TimedRecord(NamedTuple):
    """A record and when it was true."""

    time_ns: int
    record: Record | RunRecord


def compute_seconds(record: StepRecord) -> float:
    """What the rank itself took: the step without data, snapshots and waiting for peers."""
    parts = record.parts
    if parts.own is not None:
        return parts.own
    if parts.exposed_communication is None:
        return float("nan")
    beside = parts.snapshot + parts.verification  # the latter is the same work for all
    waited = parts.data + beside + parts.exposed_communication
    return max(0.0, record.step_seconds - waited)


def part_seconds(record: StepRecord) -> list[float]:
    """The parts in the order of ``PARTS``; waiting for peers counts as communication."""
    parts = record.parts
    waited = parts.peer_wait if parts.peer_wait is not None else parts.exposed_communication
    exposed = float("nan") if waited is None else waited
    return [parts.data, parts.forward, parts.backward, parts.optimizer, parts.snapshot, exposed]


def merge(
    node: int,
    job: int,
    generation: int,
    by_rank: Mapping[int, Sequence[TimedRecord]],
    *,
    summary: bool = False,
    lost_bytes: int = 0,
    refused: int = 0,
) -> NodeRecords | None:
    """One message of what the ranks of a node said; None where there is nothing to say."""
    ranks = tuple(sorted(by_rank))
    steps: dict[int, int] = {}  # step: when the last rank was done with it
    for rank in ranks:
        for time_ns, record in by_rank[rank]:
            if isinstance(record, StepRecord):
                steps[record.step] = max(steps.get(record.step, 0), time_ns)
    numbers = sorted(steps)[-MOST_STEPS:]
    first = [record for _, record in by_rank.get(0, ())]  # rank 0 speaks for the run
    head = [each for each in first if isinstance(each, StepRecord)]
    other = [each for each in first if isinstance(each, ValidationRecord | CheckpointRecord)]
    run = next((each for each in reversed(first) if isinstance(each, RunRecord)), None)
    if not (numbers or other or run or lost_bytes or refused):
        return None
    rows = {step: row for row, step in enumerate(numbers)}
    values, memory = _matrices(by_rank, ranks, rows)
    worst: tuple[int, ...] = ()
    if summary and len(ranks):
        order = np.nan_to_num(values[1], nan=-1.0).argmax(axis=1) if rows else np.zeros(0, int)
        worst = tuple(ranks[int(column)] for column in order)
        values = _summary(values)
    return NodeRecords(
        node=node,
        job=job,
        generation=generation,
        ranks=ranks,
        steps=tuple(numbers),
        times_ns=tuple(steps[step] for step in numbers),
        step_seconds=values[0].astype("<f4").tobytes(),
        compute_seconds=values[1].astype("<f4").tobytes(),
        parts=np.ascontiguousarray(values[2:].swapaxes(0, 1)).astype("<f4").tobytes(),
        memory_bytes=tuple(memory),
        summary=summary,
        worst=worst,
        head=tuple(record for record in head if record.step in rows),
        other=tuple(other),
        run=run,
        lost_bytes=lost_bytes,
        refused=refused,
    )


def _matrices(
    by_rank: Mapping[int, Sequence[TimedRecord]], ranks: Sequence[int], rows: Mapping[int, int]
) -> tuple[Floats, list[int]]:
    """Seconds by kind, step and rank (NaN where nobody told), and each step's most memory."""
    values: Floats = np.full((2 + len(PARTS), len(rows), len(ranks)), np.nan, np.float32)
    memory = [0] * len(rows)
    for column, rank in enumerate(ranks):
        for _, record in by_rank[rank]:
            if isinstance(record, StepRecord) and record.step in rows:
                row = rows[record.step]
                values[0, row, column] = record.step_seconds
                values[1, row, column] = compute_seconds(record)
                values[2:, row, column] = part_seconds(record)
                memory[row] = max(memory[row], record.peak_memory_bytes)
    return values, memory


def _summary(values: Floats) -> Floats:
    """Middle and worst of the ranks."""
    ordered = np.sort(values, axis=2)  # NaN last
    known = (~np.isnan(values)).sum(axis=2)
    middle = np.take_along_axis(ordered, ((np.maximum(known, 1) - 1) // 2)[..., None], 2)
    worst = np.take_along_axis(ordered, np.maximum(known - 1, 0)[..., None], 2)
    return np.concatenate([middle, worst], axis=2)


class Unpacked(NamedTuple):
    """A message's matrices with one column a rank."""

    step_seconds: Floats  # [steps, ranks]
    compute_seconds: Floats
    parts: Floats  # [steps, parts, ranks]


def unpack(message: NodeRecords) -> Unpacked:
    """The matrices; ValueError where their sizes do not fit what the message says of itself."""
    rows, ranks = len(message.steps), len(message.ranks)
    columns = 2 if message.summary else ranks
    sizes = (len(message.times_ns), len(message.worst) if message.summary else rows)
    if sizes != (rows, rows) or rows > MOST_STEPS:
        raise ValueError("steps and times differ in number")
    step = np.frombuffer(message.step_seconds, "<f4").reshape(rows, columns)
    compute = np.frombuffer(message.compute_seconds, "<f4").reshape(rows, columns)
    parts = np.frombuffer(message.parts, "<f4").reshape(rows, len(PARTS), columns)
    if not message.summary:
        return Unpacked(step, compute, parts)
    is_worst = np.asarray(message.worst)[:, None] == np.asarray(message.ranks)[None, :]
    return Unpacked(
        np.where(is_worst, step[:, 1:], step[:, :1]),
        np.where(is_worst, compute[:, 1:], compute[:, :1]),
        np.where(is_worst[:, None, :], parts[:, :, 1:], parts[:, :, :1]),
    )
