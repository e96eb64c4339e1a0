"""A gang in the world: when it joined, restored, how many steps it made, what it kept.

Nothing is played out while all goes well: a run knows its pace and when it began; a step number is
computed when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from msgspec import Struct

from phalanx.cluster.jobs.job import Expected
from phalanx.cluster.protocol.events import Progress
from phalanx.simulate.world.pace import GangPace

FLUSHES_KEPT = 4  # checkpoints that may be on their way to storage when the speed changes

Phase = Literal["joining", "joined", "restoring", "running", "stopped", "draining"]


class Brownouts:
    """Times at which remote storage gives nothing."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start_ns: int, end_ns: int) -> None:
        """Starts come in order."""
        self._starts.append(start_ns)
        self._ends.append(end_ns)

    @property
    def last_ns(self) -> int:
        """When the last one ended, or will."""
        return self._ends[-1] if self._ends else 0

    def end_ns(self, start_ns: int, length_ns: int) -> int:
        """When work on storage that begins then is done."""
        done = start_ns + length_ns
        index = max(0, bisect_right(self._starts, start_ns) - 1)
        for start, end in zip(self._starts[index:], self._ends[index:], strict=True):
            if start >= done:
                break
            done += max(0, end - max(start, start_ns))
        return done


class GangRun(Struct, kw_only=True):
    """One generation of a gang."""

    job: int
    generation: int
    nodes: tuple[int, ...]
    expected: Expected
    phase: Phase = "joining"
    full_ns: int  # a step of this many replicas at full speed
    formed_ns: int = 0
    token: int = 0  # rises whenever what was scheduled for it no longer holds
    base: int = 0  # step it began with, or changed its speed after
    base_ns: int = 0  # and when, had it always been as fast as now
    moved_ns: int = 0  # how much later than in truth; the next report has it among the losses
    memory: int = 0  # newest step in memory when it began or changed its speed
    flushing: tuple[tuple[int, int], ...] = ()  # checkpoints of then: step, when it was written
    stopped_ns: int = -1  # since when it makes no steps; -1: it makes them
    factor_ppm: int = 0  # how much slower than expected its steps are
    reported: int = 0  # last step that the core was told of
    stalls_reported: int = 0  # step up to which stalls were told
    clean: int = 1 << 62  # last step before numbers went wrong
    corrupted: dict[int, int] = {}  # node with wrong numbers: step at which that is seen
    shares: tuple[int, ...] = ()  # micro-batches by replica, where they are not even
    last: int = 0  # step after which it leaves, if it was asked to

    def pace(self) -> GangPace:
        """How fast it goes now."""
        expected = self.expected
        return GangPace(
            step_ns=self.full_ns + self.full_ns * self.factor_ppm // 1_000_000,
            memory_steps=expected.snapshot_steps,
            memory_ns=expected.snapshot_ns,
            checkpoint_steps=expected.checkpoint_steps,
            checkpoint_ns=expected.checkpoint_ns,
        )

    def elapsed_ns(self, now_ns: int) -> int:
        """Time that it made steps in."""
        until = now_ns if self.stopped_ns < 0 else min(now_ns, self.stopped_ns)
        return max(0, until - self.base_ns)

    def step(self, now_ns: int) -> int:
        """The last step that is complete."""
        if self.phase not in ("running", "stopped", "draining"):
            return self.base
        found = self.pace().step_at(self.base, self.elapsed_ns(now_ns))
        return min(found, self.expected.steps or found, self.last or found)

    def done_ns(self, step: int) -> int:
        """When a step is complete, if nothing happens."""
        return self.base_ns + self.pace().time_ns(self.base, step)

    def durable(
        self,
        now_ns: int,
        flush_ns: int,
        brownouts: Brownouts,
        before: int,
        most: int | None = None,
    ) -> int:
        """The newest checkpoint on remote storage, up to a step; ``before``: the last known."""
        every = self.expected.checkpoint_steps
        if not every:
            return before
        until = now_ns if self.stopped_ns < 0 else min(now_ns, self.stopped_ns)
        here = self.step(now_ns)
        step = (here if most is None else min(here, most)) // every * every
        while step > max(self.base, before):
            if brownouts.end_ns(self._written_ns(step), flush_ns) <= until:
                return step
            step -= every
        for step, written_ns in reversed(self.flushing):
            late = most is not None and step > most
            if step > before and not late and brownouts.end_ns(written_ns, flush_ns) <= until:
                return step
        return before

    def _written_ns(self, step: int) -> int:
        """When a checkpoint behind a step begins to be flushed."""
        return self.done_ns(step) + self.expected.checkpoint_ns

    def committed(self, now_ns: int, replicate_ns: int) -> int:
        """The newest step in memory."""
        found = self.pace().committed(self.base, self.elapsed_ns(now_ns), replicate_ns)
        return found if found > self.base else self.memory

    def rebase(self, now_ns: int, factor_ppm: int, replicate_ns: int) -> None:
        """Goes on at another speed from now on; what is done of a step is done."""
        step, pace = self.step(now_ns), self.pace()
        begun_ns = self.done_ns(step)
        if step > self.base:  # the next step begins behind the stall of this one
            begun_ns += pace.stalls_ns(step - 1, step)
        self.memory = self.committed(now_ns, replicate_ns)
        every = self.expected.checkpoint_steps
        if every:
            newest = step // every * every
            mine = [s for s in (newest - every, newest) if s > self.base]
            written = tuple((s, self._written_ns(s)) for s in mine)
            self.flushing = (*self.flushing, *written)[-FLUSHES_KEPT:]
        self.factor_ppm = factor_ppm
        # The part of a step that is done took longer or shorter than it would from now on.
        passed_ns = max(0, now_ns - begun_ns)
        moved_ns = passed_ns - passed_ns * self.pace().step_ns // pace.step_ns
        self.base, self.base_ns = step, begun_ns + moved_ns
        self.moved_ns += moved_ns

    def report(self, now_ns: int, committed: int, durable: int) -> Progress | None:
        """What the gang says about itself; None when it has nothing new to say."""
        step = self.step(now_ns)
        if step <= self.reported:
            return None
        pace = self.pace()
        stalls = pace.stalls_ns(self.stalls_reported, step - 1)
        slower = (pace.step_ns - self.full_ns) * (step - max(self.reported, self.base))
        slower = max(0, slower + self.moved_ns)
        self.reported, self.moved_ns = step, 0
        self.stalls_reported = max(self.stalls_reported, step - 1)
        return Progress(
            job=self.job,
            generation=self.generation,
            step=step,
            committed=min(committed, step),
            durable=durable,
            at_ns=self.done_ns(step),
            checkpoint_ns=stalls,
            straggler_ns=slower,
        )
