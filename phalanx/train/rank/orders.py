"""What a rank is told, and whom it tells: an agent, or nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # agents, which order formations, do without torch
    import torch

    from phalanx.config import Job
    from phalanx.train.optim.fingerprint import ReplicaDivergence
    from phalanx.train.rank.stop import StopFlag
    from phalanx.train.report.records import StepWaits
    from phalanx.train.report.run_folder import RunFolder
    from phalanx.train.resume.interval import FleetRate
    from phalanx.train.resume.ordered import RestorePoint


BACKUP_KEY = "backup-keeper"  # at a generation's store: where the keeper of a spare listens


class Formation(NamedTuple):
    """A place in a generation of the gang."""

    generation: int
    rank: int
    world_size: int
    local_rank: int
    host: str = ""  # of the store where the ranks of a generation meet
    port: int = 0
    prefix: str = ""  # of this generation's keys there
    buddy_shift: int = 0  # our snapshots are kept so many nodes further in rank order; 0: nowhere
    backed_up: bool = False  # a spare's keeper holds them: it says where, at the store
    replicas: int = 0  # length of the data axis; 0: as the job says
    micro_batches: tuple[int, ...] = ()  # by replica; (): equal
    # Somebody decides what follows a failure, and every step is safe at once for that. If nobody
    # does, the job was made explicit by whoever started the ranks, and the rank ends with its run.
    supervised: bool = True
    waited_seconds: float = 0.0  # of a person, until now


class GenerationOver(BaseException):
    """The generation was aborted, or a newer one has formed."""


class StepOrders(Protocol):
    """What the loop hears and tells while it makes steps."""

    stop: StopFlag

    def stepped(self, step: int, durable: int, seconds: StepWaits) -> None:
        """A step is complete. ``durable``: the newest checkpoint that is."""

    def busy(self, what: str, step: int) -> None:
        """No step comes for a while after this one: a validation or a checkpoint is under way."""

    def shares(self) -> tuple[int, ...]:
        """Micro-batches by replica that somebody wants; (): as they are."""

    def failure_rate(self) -> FleetRate | None:
        """How often the fleet fails; None: nobody said."""


class WriteLease(Protocol):
    """Whoever shares out the storage's time among jobs."""

    def ask_lease(self) -> None:
        """The gang wants to write a durable checkpoint; said again until there is an answer."""

    def may_write(self) -> int | None:
        """Bytes a second that this rank may write now (0: any); None: it has no leave."""

    def used_lease(self) -> None:
        """The checkpoint is being written: the next one needs leave of its own."""


class Orders(StepOrders, Protocol):
    """Where a rank's orders come from and where its facts go, through its life."""

    keeps_process: bool  # once a generation is over; False: a new process takes this one's place

    def formation(self) -> Formation | None:
        """The next place to take; waits for one. None: leave."""

    def meet(
        self, formation: Formation, job: Job, device: torch.device, folder: RunFolder | None
    ) -> RunFolder:
        """Form the process group; returns the run's folder, which all ranks share."""

    def restore_point(self) -> RestorePoint:
        """What to restore; waits until everybody has joined. Raises ``GenerationOver``."""

    def restored(
        self,
        point: RestorePoint,
        refused: str = "",
        skipped: tuple[int, int] = (0, 0),
        there: tuple[int, ...] | None = None,
    ) -> None:
        """The step is loaded and sealed again, or why it could not be.

        ``skipped``: samples of the batch that was to be left out; ``there``: with ``refused``, the
        durable checkpoints up to that step.
        """

    def go(self) -> None:
        """Waits until everybody is ready. Raises ``GenerationOver``."""

    def write_lease(self) -> WriteLease | None:
        """What to ask before a durable checkpoint is written; None: nobody else writes."""

    def diverged(self, finding: ReplicaDivergence) -> None:
        """Replicas disagree: this rank waits for what is decided about it."""

    def over(self) -> bool:
        """Whether the generation is over: what fails then is no failure."""

    def left(self, lost_peer: str = "") -> None:
        """This rank is out of the group. ``lost_peer``: it noticed by itself, and how."""
