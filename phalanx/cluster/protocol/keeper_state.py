"""What a node's keeper holds of a job, as its agent knows it. It outlives workers and agents.

A snapshot belongs to the generation that made it. What a generation restored takes its place only
when that generation is told to go; what belongs to a branch that was given up counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class KeptSteps(Struct, frozen=True, gc=False, omit_defaults=True):
    """Committed steps in a node's memory, newest first: of its own ranks, and of the slot that it
    is the buddy of.

    Of the own ones three count: while one rank's snapshot of a step is under way, others may have
    committed that step and the next, and if it is lost with its keeper, only the one before is
    left that all have. Until then nobody has overwritten it.
    """

    own: tuple[int, ...] = ()  # that all ranks of the node have committed
    ward: tuple[int, ...] = ()

    @classmethod
    def newest(cls, own: Iterable[int], ward: Iterable[int]) -> KeptSteps:
        """Those that count; -1 stands for none."""
        return cls(_newest(own, 3), _newest(ward, 2))

    @property
    def committed(self) -> int:
        """The newest of the own ranks; -1: nothing is kept."""
        return self.own[0] if self.own else -1


def _newest(steps: Iterable[int], count: int) -> tuple[int, ...]:
    return tuple(sorted({*steps} - {-1}, reverse=True)[:count])


class KeeperState(Struct, kw_only=True):
    """The steps that are kept, and how far the generation came that made them."""

    steps: KeptSteps = KeptSteps()
    kept_generation: int = 0  # that made these
    reached: int = 0  # highest step completed here in that generation
    reached_ns: int = 0
    durable: int = 0
    sealed_generation: int = 0  # of what was restored, and waits for "go"
    sealed: KeptSteps = KeptSteps()
    begun: tuple[int, int] = (0, -1)  # a generation and the step it was told to restore, on a spare

    @property
    def committed(self) -> int:
        """The newest step that the node's ranks have all committed; -1: none."""
        return self.steps.committed

    @property
    def ward(self) -> int:
        """The newest step of the buddy that is here; -1: none."""
        return max(self.steps.ward, default=-1)

    def restored(self, generation: int, step: int) -> None:
        """The node's ranks have restored a step, and sealed it here and at their buddy."""
        self.sealed_generation, self.sealed = generation, KeptSteps((step,), (step,))

    def go(self, generation: int) -> None:
        """A generation runs: what it restored is the truth, everything older is not."""
        if generation != self.sealed_generation or generation <= self.kept_generation:
            return
        step = self.sealed.ward[0]
        self.kept_generation = generation
        self.steps = self.sealed
        self.reached, self.reached_ns = step, 0
        self.durable = min(self.durable, step)  # later ones are of a branch that is given up

    def fence(self, generation: int) -> None:
        """This generation is the last that ran, whatever the node has heard of it."""
        self.go(generation)
        if self.kept_generation < generation:
            self.steps = KeptSteps()
            self.reached = self.reached_ns = 0

    def seal(self, step: int) -> None:
        """The node's ranks have all committed a step."""
        if step > self.committed:
            self.steps = KeptSteps.newest((*self.steps.own, step), self.steps.ward)

    def seal_ward(self, step: int) -> None:
        """The buddy's snapshot is here."""
        if step > self.ward:
            self.steps = KeptSteps.newest(self.steps.own, (*self.steps.ward, step))

    def back_up(self, generation: int, step: int) -> None:
        """A spare holds a step of a gang that has one node.

        It hears of no "go": what it holds of a generation counts when it learns that that one ran.
        One that goes back has restored again: later copies are of the branch it gave up.
        """
        if generation == self.kept_generation:
            self.seal_ward(step)
        elif generation > self.kept_generation:
            known = self.sealed.ward if generation == self.sealed_generation else ()
            before = (each for each in known if each < step)
            self.sealed_generation, self.sealed = generation, KeptSteps.newest((), (*before, step))

    def still_backs_up(self, generation: int, step: int) -> None:
        """A generation is told to go on from a step: a spare's copy of that is of its branch too.

        The order may come after copies that the generation made since, which stay good, unless it
        is told to restore another step: then nobody knows which of them it made before.
        """
        if generation <= self.kept_generation or self.begun == (generation, step):
            return
        again, self.begun = self.begun[0] == generation, (generation, step)
        made = self.sealed.ward if generation == self.sealed_generation and not again else ()
        restored = (step,) if step in self.steps.ward else ()
        self.sealed = KeptSteps.newest((), (*made, *restored))
        self.sealed_generation = generation if self.sealed.ward else 0

    def adopt(self, committed: int, ward: int) -> None:
        """Workers that outlived their agent say what they have all committed.

        What the keeper holds is not forgotten because they know of nothing (-1).
        """
        own = [step for step in self.steps.own if step < committed or committed < 0]
        wards = self.steps.ward or [ward]
        self.steps = KeptSteps.newest([*own, committed], wards)

    def reach(self, step: int, at_ns: int) -> bool:
        """The node's ranks have completed a step. True when it is a new one."""
        if step <= self.reached:
            return False
        self.reached, self.reached_ns = step, at_ns
        return True
