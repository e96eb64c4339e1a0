"""What a node says of steps, as it travels: without numpy, which idle agents do not load."""

from __future__ import annotations

from msgspec import Struct

from phalanx.train.report.records import RareRecord, StepRecord


class RunRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """Where a run comes from, as rank 0 found it: a JSON object."""

    generation: int
    provenance: str
    folder: str = ""
    step: int = 0


class NodeRecords(Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """Steps of the ranks of one node since the last such message.

    Matrices are little-endian 32-bit floats, row by row: a row a step, a column a rank (or, in
    a ``summary``, the middle of the ranks and the worst of them). NaN: not known.
    """

    node: int
    job: int
    generation: int
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    times_ns: tuple[int, ...]  # when each step was over here, on the server's clock
    step_seconds: bytes
    compute_seconds: bytes  # without waiting for peers, data and snapshots
    parts: bytes  # of each step, part and column
    host_seconds: bytes = b""  # of compute_seconds, at the host's pace; empty: nobody knows
    launch_seconds: bytes = b""  # that hosts took to give devices their work; empty: nobody knows
    send_seconds: bytes = b""  # that a GiB of a rank's own sends takes; empty: nobody knows
    memory_bytes: tuple[int, ...] = ()  # by step: most of any rank
    summary: bool = False
    worst: tuple[int, ...] = ()  # with a summary: rank that computed longest, by step
    worst_sender: tuple[int, ...] = ()  # the same, of the rank whose sends took longest
    head: tuple[StepRecord, ...] = ()  # of rank 0, whole
    other: tuple[RareRecord, ...] = ()  # of rank 0
    run: RunRecord | None = None  # of rank 0
    lost_bytes: int = 0  # that workers wrote and the agent could not read
    refused: int = 0  # records that made no sense
