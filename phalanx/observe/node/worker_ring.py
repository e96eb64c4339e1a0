"""Records on their way from a worker to its agent, through the node's ring."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import msgspec
from msgspec import structs

from phalanx.observe.node.node_messages import RunRecord
from phalanx.observe.node.node_records import GIB, TimedRecord
from phalanx.observe.node.ring import RingReader, RingWriter
from phalanx.train.report.records import Record, SendTimes, StepRecord

MOST_STEP_SECONDS = 86_400.0

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TimedRecord).decode


def ring_path(folder: Path, index: int) -> Path:
    """The ring of a job's worker on this node."""
    return folder / f"steps-{index}"


class RingSink:
    """A sink of the training loop: its records go into the ring, and it never waits.

    Where no ring can be made the run goes on without: nobody is shown its steps from here.
    """

    def __init__(self, path: Path) -> None:
        self._ring: RingWriter | None = None
        try:
            self._ring = RingWriter(path)
        except OSError as error:
            log.warning("the server is not told of this rank's steps: %s: %s", path, error)
        self._waiting: list[Record] = []
        self.refused = 0  # that no message can hold

    def write(self, record: Record) -> None:
        self._waiting.append(record)

    def flush(self) -> None:
        """Steps of one flush ended one after the other: the last of them just now."""
        waiting, self._waiting = self._waiting, []
        times_ns, at_ns = [], time.time_ns()
        for record in reversed(waiting):
            times_ns.append(at_ns)
            if isinstance(record, StepRecord) and 0 <= record.step_seconds <= MOST_STEP_SECONDS:
                at_ns -= int(record.step_seconds * 1e9)
        for record, time_ns in zip(waiting, reversed(times_ns), strict=True):
            try:
                self._append(TimedRecord(time_ns, record))
            except (OverflowError, TypeError, ValueError):  # of a user's program: it goes on
                self.refused += 1

    def describe(self, record: RunRecord) -> None:
        """Say where the run comes from."""
        self._append(TimedRecord(time.time_ns(), record))

    def _append(self, record: TimedRecord) -> None:
        if self._ring is not None:
            self._ring.append(_encode(record))

    def close(self) -> None:
        self.flush()  # a generation is over; the ring stays for the next one


class RingRecords:
    """The agent's end: only records that make sense come out of it."""

    def __init__(self, path: Path) -> None:
        self._ring = RingReader(path)
        self.lost_bytes = 0
        self.refused = 0

    def read(self, generation: int, now_ns: int) -> list[TimedRecord]:
        """New records of a generation."""
        unread = self._ring.read()
        self.lost_bytes += unread.lost_bytes
        records: list[TimedRecord] = []
        for body in unread.bodies:
            try:
                time_ns, record = _decode(body)
            except (msgspec.MsgspecError, OverflowError):
                self.refused += 1
                continue
            if record.generation != generation:
                continue  # of a gang that is over
            clean = sensible(record)
            if clean is None:
                self.refused += 1
            else:
                records.append(TimedRecord(min(time_ns, now_ns), clean))
        return records

    def history(self) -> list[TimedRecord]:
        """Every record of a step that the ring still holds, of any generation."""
        said: list[TimedRecord] = []
        for body in self._ring.history():
            try:
                records = _decode(body)
            except (msgspec.MsgspecError, OverflowError):
                continue
            clean = sensible(records.record)
            if isinstance(clean, StepRecord):
                said.append(TimedRecord(records.time_ns, clean))
        return said

    def close(self) -> None:
        """Read no more."""
        self._ring.close()


def sensible(record: Record | RunRecord) -> Record | RunRecord | None:
    """The record with what is no finite number left out; None where it cannot be meant."""
    if not 0 <= record.step < 1 << 53:
        return None
    if not isinstance(record, StepRecord):
        return record
    parts = structs.asdict(record.parts)
    times = [record.step_seconds, *(value for value in parts.values() if value is not None)]
    if not all(0 <= seconds <= MOST_STEP_SECONDS for seconds in times):  # NaN too
        return None
    return structs.replace(
        record,
        sends=record.sends if record.sends is None or _meant(record.sends) else None,
        loss=finite(record.loss),
        grad_norm=finite(record.grad_norm),
        learning_rate=finite(record.learning_rate) or 0.0,
        tokens_per_second=finite(record.tokens_per_second) or 0.0,
        mfu=finite(record.mfu),
        hfu=finite(record.hfu),
        eta_seconds=finite(record.eta_seconds),
        non_finite=record.non_finite
        or any(value is not None and not math.isfinite(value) for value in _values(record)),
    )


def _meant(sends: SendTimes) -> bool:
    """Whether a GiB would arrive within a day."""
    seconds, size = sends.seconds, sends.bytes
    return 0 < size < 1 << 53 and 0 <= seconds <= MOST_STEP_SECONDS * size / GIB


def _values(record: StepRecord) -> tuple[float | None, float | None]:
    return record.loss, record.grad_norm


def finite(value: float | None) -> float | None:
    """The value, or None where it is not a finite number."""
    return value if value is not None and math.isfinite(value) else None
