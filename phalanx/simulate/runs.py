"""A gang in the world: when it joined, restored, how many steps it made, what it kept.

Nothing is played out while all goes well: a run knows its pace and when it began; a step number is
computed when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from msgspec import Struct

from phalanx.cluster.events import Progress
from phalanx.cluster.job import Expected
from phalanx.simulate.pace import Pace

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

    def end_ns(self, start_ns: int, length_ns: int) -> int:
        """When work on storage that begins then is done."""
        done = start_ns + length_ns
        index = max(0, bisect_right(self._starts, start_ns) - 1)
        for start, end in zip(self._starts[index:], self._ends[index:], strict=True):
            if start >= done:
                break
            done += max(0, end - max(start, start_ns))
        return done


class Run(Struct, kw_only=True):
    """One generation of a gang."""

    job: int
    generation: int
    nodes: tuple[int, ...]
    expected: Expected
    phase: Phase = "joining"
    token: int = 0  # rises whenever what was scheduled for it no longer holds
    base: int = 0  # step it began with
    base_ns: int = 0  # and when
    stopped_ns: int = -1  # since when it makes no steps; -1: it makes them
    factor_ppm: int = 0  # how much slower than expected its steps are
    reported: int = 0  # last step that the core was told of
    stalls_reported: int = 0  # step up to which stalls were told
    clean: int = 1 << 62  # last step before numbers went wrong

    def pace(self) -> Pace:
        """How fast it goes now."""
        expected = self.expected
        return Pace(
            step_ns=expected.step_ns + expected.step_ns * self.factor_ppm // 1_000_000,
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
        return min(found, self.expected.steps or found)

    def done_ns(self, step: int) -> int:
        """When a step is complete, if nothing happens."""
        return self.base_ns + self.pace().time_ns(self.base, step)

    def durable(self, now_ns: int, flush_ns: int, brownouts: Brownouts, before: int) -> int:
        """The newest checkpoint on remote storage; ``before``: of earlier generations."""
        every = self.expected.checkpoint_steps
        if not every:
            return before
        until = now_ns if self.stopped_ns < 0 else min(now_ns, self.stopped_ns)
        step = self.step(now_ns) // every * every
        while step > max(self.base, before):
            written = self.done_ns(step) + self.expected.checkpoint_ns
            if brownouts.end_ns(written, flush_ns) <= until:
                return step
            step -= every
        return before

    def committed(self, now_ns: int, replicate_ns: int) -> int:
        """The newest step in memory."""
        return self.pace().committed(self.base, self.elapsed_ns(now_ns), replicate_ns)

    def rebase(self, now_ns: int, factor_ppm: int) -> None:
        """Goes on at another speed from the last complete step on."""
        step = self.step(now_ns)
        # The stall behind the step is over or still to come: the new span begins behind it.
        done = self.done_ns(step) + (
            self.pace().stalls_ns(step - 1, step) if step > self.base else 0
        )
        self.base, self.base_ns, self.factor_ppm = step, done, factor_ppm

    def report(self, now_ns: int, committed: int, durable: int) -> Progress | None:
        """What the gang says about itself; None when it has nothing new to say."""
        step = self.step(now_ns)
        if step <= self.reported:
            return None
        pace = self.pace()
        stalls = pace.stalls_ns(self.stalls_reported, step - 1)
        slower = (pace.step_ns - self.expected.step_ns) * (step - max(self.reported, self.base))
        self.reported = step
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
