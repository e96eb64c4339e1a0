"""What one node says of the steps of its ranks: an agent makes it, the server takes it apart.

Small gangs are told rank by rank. In large ones a node gives its middle and its worst rank (so a
straggler keeps its number); every rank's own records stay in its ring for whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from phalanx.observe.node.node_messages import NodeRecords, RunRecord
from phalanx.train.report.records import RareRecord, Record, StepRecord

MEASURES = (
    "step",
    "compute",
    "host",
    "launch",
    "send",
)  # matrices of their own; the parts follow them
STEP, COMPUTE, HOST, LAUNCH, SEND = range(len(MEASURES))
PARTS = ("data", "forward", "backward", "optimizer", "snapshot", "exposed_communication")
DETAIL_WORLD = 1024  # gangs up to this size are told rank by rank
MOST_STEPS = 512  # in one message; of more, the newest
GIB = 1 << 30

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class TimedRecord(NamedTuple):
    """A record and when it was true."""

    time_ns: int
    record: Record | RunRecord


def compute_seconds(record: StepRecord) -> float:
    """What the rank itself took: the step without data, snapshots and waiting for peers."""
    return _number(record.parts.own)


def send_seconds(record: StepRecord) -> float:
    """What a GiB of the rank's own sends takes."""
    sends = record.sends
    return sends.seconds * GIB / sends.bytes if sends is not None else float("nan")


def part_seconds(record: StepRecord) -> list[float]:
    """The parts in the order of ``PARTS``; waiting for peers counts as communication."""
    parts = record.parts
    waited = _number(parts.peer_wait)
    return [parts.data, parts.forward, parts.backward, parts.optimizer, parts.snapshot, waited]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


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
    other = [each for each in first if isinstance(each, RareRecord)]
    run = next((each for each in reversed(first) if isinstance(each, RunRecord)), None)
    if not (numbers or other or run or lost_bytes or refused):
        return None
    rows = {step: row for row, step in enumerate(numbers)}
    values, memory = _matrices(by_rank, ranks, rows)
    worst: tuple[int, ...] = ()
    worst_sender: tuple[int, ...] = ()
    if summary and len(ranks):
        worst, worst_sender = (_longest(values[kind], ranks) for kind in (COMPUTE, SEND))
        values = _summary(values)
    return NodeRecords(
        node=node,
        job=job,
        generation=generation,
        ranks=ranks,
        steps=tuple(numbers),
        times_ns=tuple(steps[step] for step in numbers),
        step_seconds=values[STEP].astype("<f4").tobytes(),
        compute_seconds=values[COMPUTE].astype("<f4").tobytes(),
        parts=np.ascontiguousarray(values[len(MEASURES) :].swapaxes(0, 1)).astype("<f4").tobytes(),
        host_seconds=_if_known(values[HOST]),
        launch_seconds=_if_known(values[LAUNCH]),
        send_seconds=_if_known(values[SEND]),
        memory_bytes=tuple(memory),
        summary=summary,
        worst=worst,
        worst_sender=worst_sender,
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
    shape = (len(MEASURES) + len(PARTS), len(rows), len(ranks))
    values: Floats = np.full(shape, np.nan, np.float32)
    memory = [0] * len(rows)
    for column, rank in enumerate(ranks):
        for _, record in by_rank[rank]:
            if isinstance(record, StepRecord) and record.step in rows:
                row = rows[record.step]
                values[STEP, row, column] = record.step_seconds
                values[COMPUTE, row, column] = compute_seconds(record)
                values[HOST, row, column] = _number(record.parts.host)
                values[LAUNCH, row, column] = _number(record.parts.launch)
                values[SEND, row, column] = send_seconds(record)
                values[len(MEASURES) :, row, column] = part_seconds(record)
                memory[row] = max(memory[row], record.peak_memory_bytes)
    return values, memory


def _longest(seconds: Floats, ranks: Sequence[int]) -> tuple[int, ...]:
    """Who took longest, by step."""
    order = np.nan_to_num(seconds, nan=-1.0).argmax(axis=1) if len(seconds) else ()
    return tuple(ranks[int(column)] for column in order)


def _if_known(seconds: Floats) -> bytes:
    return b"" if np.isnan(seconds).all() else seconds.astype("<f4").tobytes()


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
    host_seconds: Floats
    launch_seconds: Floats
    send_seconds: Floats


def unpack(message: NodeRecords) -> Unpacked:
    """The matrices; ValueError where their sizes do not fit what the message says of itself."""
    rows, ranks = len(message.steps), len(message.ranks)
    columns = 2 if message.summary else ranks
    worst = (message.worst, message.worst_sender if message.send_seconds else message.worst)
    told = {len(message.times_ns), *(len(each) for each in worst if message.summary)}
    if told != {rows} or rows > MOST_STEPS:
        raise ValueError("steps and times differ in number")
    step = np.frombuffer(message.step_seconds, "<f4").reshape(rows, columns)
    compute = np.frombuffer(message.compute_seconds, "<f4").reshape(rows, columns)
    parts = np.frombuffer(message.parts, "<f4").reshape(rows, len(PARTS), columns)
    host, launch, send = (
        np.frombuffer(each, "<f4").reshape(rows, columns)
        if each
        else np.full((rows, columns), np.nan, np.float32)
        for each in (message.host_seconds, message.launch_seconds, message.send_seconds)
    )
    if not message.summary:
        return Unpacked(step, compute, parts, host, launch, send)
    names = np.asarray(message.ranks)[None, :]
    own, sender = (np.asarray(each)[:, None] == names for each in worst)
    return Unpacked(
        np.where(own, step[:, 1:], step[:, :1]),
        np.where(own, compute[:, 1:], compute[:, :1]),
        np.where(own[:, None, :], parts[:, :, 1:], parts[:, :, :1]),
        np.where(own, host[:, 1:], host[:, :1]),
        np.where(own, launch[:, 1:], launch[:, :1]),
        np.where(sender, send[:, 1:], send[:, :1]),
    )
