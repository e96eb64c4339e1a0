"""Saves that training hardly notices: a copy into the keeper's memory, the rest asynchronous."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.format.manifest import CheckpointError, KeeperLostError
from phalanx.checkpoint.keeper.client import KeeperClient
from phalanx.checkpoint.keeper.messages import SaveOutcome
from phalanx.checkpoint.write.commit import SaveOrder
from phalanx.checkpoint.write.device_waits import DeviceWaits
from phalanx.checkpoint.write.snapshot import ShardSnapshot

ARCHIVE_SECONDS = 600.0  # that a run waits at its end for copies; the keeper goes on after
COMMIT_SECONDS = 60.0  # for the manifest, once every rank's shard is known to be durable
OVERLAP_BYTES = 32 << 20  # less is copied on the spot: a thread would cost more
MARK_BYTES = 128 << 20  # copied by a device between two words to the keeper, at the least
MOST_MARKS = 16  # in a device's copy; recording hundreds of events holds training up

log = logging.getLogger(__name__)


class Background:
    """One rank's asynchronous saves. Nothing here talks to another rank.

    With ``overlap`` a copy may still run when ``save`` returns: ``before_update`` is called before
    the tensors change.
    """

    def __init__(
        self,
        folder: Path,
        kept: KeeperClient,
        snapshot: ShardSnapshot,
        device: torch.device,
        *,
        overlap: bool = False,
    ) -> None:
        self._folder, self._kept, self._snapshot = folder, kept, snapshot
        self._overlap = overlap
        self._buffers: dict[int, list[Tensor]] = {}  # of the pieces, by its number
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._events: list[torch.cuda.Event] = []  # of a copy's marks; making them is slow
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._copying: Future[None] | None = None
        self.waited_seconds = 0.0  # for the last copy, before an update
        self._untold_seconds = 0.0  # of such waiting
        self._device_waits = DeviceWaits() if device.type == "cuda" else None
        self.lost = False  # the keeper is gone
        self._failed: SaveOutcome | None = None  # of the newest save
        self._late = False  # said

    def save(self, tensors: dict[str, Tensor], order: SaveOrder, *, patient: bool = True) -> None:
        """Copy the state and hand it over; waits only where all memory is still being written.

        A prompt snapshot that is not to be written is left out then; so is, unless ``patient``,
        any where the keeper does not answer within the snapshot deadline.
        """
        with self._keeper_needed():
            self._finish_copy(wait=True)
            numbered_buffer = self._memory_for(order, patient)
            if numbered_buffer is None:
                return
            number, buffer = numbered_buffer
            self._failed = None
            self._kept.hand_over(number, order)
            if number not in self._buffers:
                self._buffers[number] = self._snapshot.buffers(buffer)
            if self._stream is None:
                self._copy_from_host(number, tensors)
            else:
                self._copy_from_device(number, tensors, self._stream)
            self._finish_copy(wait=False)
            if self._kept.behind:
                self._finish_copy(wait=True)
                self._kept.catch_up()

    def _copy_from_host(self, number: int, tensors: dict[str, Tensor]) -> None:
        """The keeper seals and writes while we copy: it is told how far we are."""
        report_filled = partial(self._kept.filled, number)

        def copy() -> None:
            self._snapshot.copy_into(self._buffers[number], tensors, report_filled)
            report_filled(self._snapshot.bytes)

        if self._overlap and self._snapshot.bytes >= OVERLAP_BYTES:
            self._copying = self._copier.submit(copy)
        else:
            copy()

    def _copy_from_device(
        self, number: int, tensors: dict[str, Tensor], stream: torch.cuda.Stream
    ) -> None:
        """The device copies behind the step; a thread tells the keeper how far it is."""
        marks: list[tuple[int, torch.cuda.Event]] = []
        apart = max(MARK_BYTES, -(-self._snapshot.bytes // MOST_MARKS))

        def mark(count: int) -> None:
            if count == self._snapshot.bytes or count >= apart * (len(marks) + 1):
                marks.append((count, self._record(len(marks))))

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._snapshot.copy_into(self._buffers[number], tensors, mark)
            mark(self._snapshot.bytes)
        self._copied = marks[-1][1]
        if not self._overlap:
            self._copied.wait()

        def follow() -> None:
            for count, event in marks:
                event.synchronize()
                self._kept.filled(number, count)

        self._copying = self._copier.submit(follow)

    def _record(self, number: int) -> torch.cuda.Event:
        """This mark's event, in the current stream; no earlier copy runs that could need it."""
        if number == len(self._events):
            # Whoever waits for a blocking one lets go of its core.
            self._events.append(torch.cuda.Event(blocking=True))
        self._events[number].record()
        return self._events[number]

    def _memory_for(self, order: SaveOrder, patient: bool) -> tuple[int, Tensor] | None:
        if not order.prompt:
            return self._kept.buffer()
        for_disk = order.write or order.local is not None
        number = self._kept.prompt_buffer(for_disk=for_disk, patient=patient)
        if number is None and self._kept.late:
            seconds, step = self._kept.deadline_seconds, order.draft.step
            problem = f"a keeper has not answered for the snapshot deadline of {seconds:.0f} s"
            self._kept.give_up(order, problem)
            if not self._late:
                log.warning("step %d has no snapshot: %s; training goes on", step, problem)
            self._late = True
        elif self._late and number is not None:
            self._late = False
            log.warning("keepers answer again: step %d has a snapshot", order.draft.step)
        return number

    def forget(self, step: int) -> None:
        """This save is tried again elsewhere."""
        self._kept.forget(step)

    @property
    def late(self) -> bool:
        """Whether a keeper has not answered within the snapshot deadline, and is not gone."""
        return not self.lost and self._kept.late

    @property
    def flush_seconds(self) -> float:
        return self._kept.flush_seconds

    def before_update(self) -> None:
        """The state is about to change: copies that are not done come first.

        On CUDA the device waits for them, not we.
        """
        if self._copied is not None and self._device_waits is not None:
            self._device_waits.wait(self._copied)
        elif self._copying is not None:
            began = time.perf_counter()
            with suppress(KeeperLostError), self._keeper_needed():  # the next poll tells
                self._finish_copy(wait=True)
            self.waited_seconds = time.perf_counter() - began
            self._untold_seconds += self.waited_seconds

    def take_waited(self) -> float:
        """Seconds that updates waited for copies, as far as known and not taken before."""
        if self._device_waits is not None:
            for seconds in self._device_waits.passed():
                self.waited_seconds = seconds
                self._untold_seconds += seconds
        taken, self._untold_seconds = self._untold_seconds, 0.0
        return taken

    def poll(self, timeout_seconds: float = 0.0) -> list[SaveOutcome]:
        """What became of saves since the last call; failures are logged here, loudly."""
        try:
            with self._keeper_needed():
                self._finish_copy(wait=False)
                outcomes = self._kept.outcomes(timeout_seconds)
        except KeeperLostError as error:
            self.lost = True
            outcomes = self._kept.lost("; ".join(error.problems))
        for outcome in outcomes:
            if outcome.problem:
                log.error("checkpoint %s is not saved: %s", outcome.path, outcome.problem)
                self._failed = outcome
        for trouble in self._kept.troubles:
            log.error("%s", trouble)
        self._kept.troubles.clear()
        return outcomes

    def wait_durable(self) -> None:
        """Until this rank's shards are on disk or have failed."""
        with self._keeper_needed():
            self._finish_copy(wait=True)
            self._kept.wait_durable()

    def wait_acknowledged(self) -> None:
        """Until the last prompt snapshot is sealed, here and at the buddy."""
        with self._keeper_needed():
            self._finish_copy(wait=True)
            self._kept.wait_acknowledged()

    def failure(self) -> CheckpointError | None:
        """Why the newest save failed, if it did."""
        if self._failed is None:
            return None
        failed = self._failed
        kind = KeeperLostError if self.lost else CheckpointError
        return kind(Path(failed.path), failed.problem, failed.fix, failed.errno)

    @property
    def failed_path(self) -> str:
        """Of the newest save, if it failed."""
        return "" if self._failed is None else self._failed.path

    def wait_complete(self, leaving: Callable[[], bool]) -> list[SaveOutcome]:
        """Until the manifest is there, which nothing can hinder once every shard is durable.

        Copies are waited for too, for a while and unless somebody is ``leaving``.
        """
        outcomes: list[SaveOutcome] = []
        deadline = time.monotonic() + COMMIT_SECONDS
        while self._kept.waiting:
            outcomes += self.poll(timeout_seconds=1.0)
            if time.monotonic() > deadline:
                problem = f"no manifest {COMMIT_SECONDS:.0f} s after the last shard was written"
                raise CheckpointError(self._folder, problem)
        deadline = time.monotonic() + ARCHIVE_SECONDS
        while self._kept.archiving and time.monotonic() < deadline and not leaving():
            outcomes += self.poll(timeout_seconds=1.0)
        outcomes += self.poll()
        for step in self._kept.archiving:
            self._kept.unarchived[step] = "the keeper still copies it"
        return outcomes

    @property
    def unarchived(self) -> dict[int, str]:
        """Steps of which this rank's part is not in the archive, and why."""
        return self._kept.unarchived

    def close(self) -> None:
        """Leave the keeper to its work."""
        with suppress(EOFError, OSError):  # it is gone already
            self._finish_copy(wait=True)
        self._copier.shutdown()
        self._buffers.clear()
        self._kept.close()

    def abandon(self) -> None:
        """Leave, as if this process were killed."""
        # A device that hangs never ends its copy.
        self._copier.shutdown(wait=self._stream is None)
        self._buffers.clear()
        self._kept.abandon()

    def _finish_copy(self, wait: bool) -> None:
        """Take note that the copy is done and the keeper told."""
        if self._copying is None or not (wait or self._copying.done()):
            return
        copying, self._copying, self._copied = self._copying, None, None
        copying.result()

    @contextmanager
    def _keeper_needed(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            problem = "the keeper process of this node is gone, and what it had not written"
            raise KeeperLostError(self._folder, problem, "see why it was killed") from error
