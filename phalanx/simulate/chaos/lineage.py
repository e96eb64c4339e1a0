"""The true history of every job: which step was made by which generation, on which branch.

The surviving history of a job is what its newest generation continues. A step of it has one branch
number, which snapshots and checkpoints of that step carry; a restore that mixes branches, or takes
one that was given up, would train samples twice or not at all.
"""

from __future__ import annotations

from collections.abc import Callable

Complain = Callable[[str, str], None]


class Lineage:
    """Histories of all jobs."""

    def __init__(self, complain: Complain) -> None:
        self.generation: dict[int, int] = {}  # newest that has begun
        self.history: dict[int, list[int]] = {}  # job: branch of step i + 1
        # The generation that the core knows to run, and its newest step whose every copy was
        # acknowledged. What a generation did that nobody heard of was never promised to anybody.
        self.heard: dict[int, int] = {}
        self.heard_ns: dict[int, int] = {}  # since when, by the core's clock
        self.committed: dict[int, int] = {}
        self._next_branch = 1
        self._complain = complain

    def begin(self, job: int, generation: int, step: int, branch: int) -> bool:
        """A generation goes on after a step. False: an older one tries to, and is no part of it."""
        if generation < self.generation.get(job, 0):
            return False
        history = self.history.setdefault(job, [])
        if step > len(history):
            self._complain("exactly_once", f"job {job} restored step {step} of {len(history)}")
            history.extend([0] * (step - len(history)))
        elif step and history[step - 1] != branch:
            told = f"job {job} restored step {step} of a branch that was given up"
            self._complain("exactly_once", told)
        self.generation[job] = generation
        del history[step:]
        self.committed[job] = min(self.committed.get(job, 0), step)
        return True

    def step(self, job: int, generation: int, step: int) -> int:
        """A step was made; its branch. One by an older generation is off the history."""
        branch = self._next_branch
        self._next_branch += 1
        if generation == self.generation.get(job, 0):
            history = self.history[job]
            if step != len(history) + 1:
                told = f"job {job} made step {step} after step {len(history)}"
                self._complain("exactly_once", told)
            history.append(branch)
        return branch

    def hear(self, job: int, generation: int, step: int, since_ns: int) -> None:
        """The core was told that a generation runs, from this step on."""
        self.heard[job], self.heard_ns[job] = generation, since_ns
        self.committed[job] = step

    def forget(self, job: int) -> None:
        """A job left its nodes: what they kept in memory is given up, checkpoints stay."""
        self.heard.pop(job, None)
        self.heard_ns.pop(job, None)
        self.committed.pop(job, None)

    def commit(self, job: int, generation: int, step: int) -> None:
        """Every rank has sealed a step, and every buddy has it."""
        if generation == self.heard.get(job, 0):
            self.committed[job] = max(self.committed.get(job, 0), step)

    def durable(self, job: int, generation: int, step: int, branch: int) -> None:
        """Remote storage accepted a checkpoint."""
        if generation < self.generation.get(job, 0):
            told = f"job {job}: generation {generation} after {self.generation[job]}"
            self._complain("two_generations", told)
        history = self.history.get(job, [])
        if step > len(history) or history[step - 1] != branch:
            self._complain("exactly_once", f"job {job}: checkpoint of a step {step} nobody made")

    def finished(self, job: int, steps: int) -> None:
        """The core says that a job is done."""
        history = self.history.get(job, [])
        if len(history) != steps or 0 in history:
            self._complain("exactly_once", f"job {job} ended with {len(history)} of {steps} steps")
