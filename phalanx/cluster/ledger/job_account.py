"""The GPU time of one job, as the ledger keeps it."""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.causes import FormationCause
from phalanx.cluster.ledger.buckets import Buckets
from phalanx.cluster.ledger.usage import UsageOwner


class Open(Struct):
    """Time before a failure that nobody has explained yet."""

    from_ns: int
    to_ns: int
    gpus: int
    cause: str


class Account(Struct, kw_only=True, omit_defaults=True):
    """One job's time. ``allocated_ns`` is summed apart from the buckets, to check them."""

    team: str
    user: str = ""
    project: str = ""
    gpus: int = 0  # of its workers
    spare_gpus: int = 0
    settled_ns: int = 0
    spare_ns: int = 0  # spares are settled apart: they change while the job runs
    running: bool = False  # settled by progress only
    unreported: bool = False  # what runs has never reported a step
    printed: int = 0  # the generation whose printed steps are settled; 0: none are
    bucket: str = "restart"  # of the time that passes while it is not running
    cause: str = FormationCause.START.value
    step: int = 0  # last one that was settled in this generation
    reached: int = 0  # last step that is kept
    kept_steps: int = 0  # whose time is in the buckets of training
    lost_steps: int = 0  # committed ones that were lost
    open: Open | None = None
    allocated_gpu_ns: int = 0
    changed_ns: int = 0  # of gpus + spare_gpus, for allocated_gpu_ns
    buckets: Buckets = {}
    by_cause: dict[str, Buckets] = {}  # of the lost ones

    @property
    def owner(self) -> UsageOwner:
        """Whose time it is."""
        return UsageOwner(self.team, self.user, self.project)
