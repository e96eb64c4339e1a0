"""What outlives processes: the controllers' log, and remote storage of checkpoints."""

from __future__ import annotations

from phalanx.cluster.core import Core
from phalanx.cluster.protocol.events import Event

SNAPSHOT_EVENTS = 150


class DeposedError(Exception):
    """Another controller has taken over the log."""


class LogStore:
    """Events and snapshots. Only the controller of the newest epoch may append."""

    def __init__(self, core: Core) -> None:
        self.epoch = 1
        self.events: list[Event] = []  # since the snapshot
        self.snapshot = core.snapshot()

    def take_over(self) -> int:
        """A new controller's epoch; all others are deposed from here on."""
        self.epoch += 1
        return self.epoch

    def append(self, epoch: int, event: Event) -> None:
        """Stores an event before anything is done about it."""
        if epoch != self.epoch:
            raise DeposedError
        self.events.append(event)

    def keep(self, epoch: int, core: Core) -> None:
        """Replaces the log up to now by a snapshot, now and then."""
        if epoch == self.epoch and len(self.events) >= SNAPSHOT_EVENTS:
            self.snapshot, self.events = core.snapshot(), []

    def rebuild(self) -> Core:
        """The core as the log says."""
        core = Core.restore(self.snapshot)
        for event in self.events:
            core.handle(event)
        return core


class SimulatedStorage:
    """Durable checkpoints: a manifest is made once, and a lower generation loses."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[int, int]] = {}  # job: step: branch it is on
        self.fences: dict[int, int] = {}  # job: generation below which nothing is accepted
        self.rotten: dict[tuple[int, int], None] = {}
        self.down = False

    def fence(self, job: int, generation: int) -> None:
        """A generation has begun: older ones can commit no more."""
        self.fences[job] = max(self.fences.get(job, 0), generation)

    def commit(self, job: int, generation: int, step: int, branch: int) -> bool:
        """Whether the checkpoint was accepted."""
        if self.down or generation < self.fences.get(job, 0):
            return False
        known = self.steps.setdefault(job, {})
        known[step] = branch
        return True

    def cut_after(self, job: int, step: int) -> None:
        """Checkpoints behind a step are of a discarded branch."""
        known = self.steps.get(job, {})
        for later in [each for each in known if each > step]:
            del known[later]

    def branch(self, job: int, step: int) -> int | None:
        """The branch of a checkpoint that can be read; None: there is none."""
        if self.down or (job, step) in self.rotten:
            return None
        return self.steps.get(job, {}).get(step)
