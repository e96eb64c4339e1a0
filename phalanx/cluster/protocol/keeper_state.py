"""What a node's keeper holds of a job, as its agent knows it. It outlives workers and agents.

A snapshot belongs to the generation that made it. What a generation restored takes its place only
when that generation is told to go; what belongs to a branch that was given up counts for nothing.
"""

from __future__ import annotations

from msgspec import Struct


class KeeperState(Struct, kw_only=True):
    """Committed steps of the node's own slot, and of the slot that it is the buddy of.

    Of the own slot three count: while one rank's snapshot of a step is under way, others may have
    committed that step and the next, and if it is lost with its keeper, only the one before is
    left that all have. Until then nobody has overwritten it.
    """

    committed: int = -1  # -1: nothing
    previous: int = -1
    oldest: int = -1
    ward: int = -1
    ward_previous: int = -1
    kept_generation: int = 0  # that made these
    reached: int = 0  # highest step completed here in that generation
    reached_ns: int = 0
    durable: int = 0
    sealed_generation: int = 0  # of what was restored, and waits for "go"
    sealed_step: int = 0

    def restored(self, generation: int, step: int) -> None:
        """The node's ranks have restored a step, and sealed it here and at their buddy."""
        self.sealed_generation, self.sealed_step = generation, step

    def go(self, generation: int) -> None:
        """A generation runs: what it restored is the truth, everything older is not."""
        if generation != self.sealed_generation or generation <= self.kept_generation:
            return
        step = self.sealed_step
        self.kept_generation = generation
        self.committed, self.previous, self.oldest = step, -1, -1
        self.ward, self.ward_previous = step, -1
        self.reached, self.reached_ns = step, 0
        self.durable = min(self.durable, step)  # later ones are of a branch that is given up

    def fence(self, generation: int) -> None:
        """This generation is the last that ran, whatever the node has heard of it."""
        self.go(generation)
        if self.kept_generation < generation:
            self.committed = self.previous = self.oldest = self.ward = self.ward_previous = -1
            self.reached = self.reached_ns = 0

    def seal(self, step: int) -> None:
        """The node's ranks have all committed a step."""
        if step > self.committed:
            self.oldest, self.previous, self.committed = self.previous, self.committed, step

    def seal_ward(self, step: int) -> None:
        """The buddy's snapshot is here."""
        if step > self.ward:
            self.ward_previous, self.ward = self.ward, step

    def reach(self, step: int, at_ns: int) -> bool:
        """The node's ranks have completed a step. True when it is a new one."""
        if step <= self.reached:
            return False
        self.reached, self.reached_ns = step, at_ns
        return True
