"""How jobs belong together: dependencies on each other, arrays, and trials of a sweep."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

# afternotok: at least one of the jobs (a job, or all of an array) failed or was cancelled.
After = Literal["afterok", "afterany", "afternotok"]


class Dependency(Struct, frozen=True, forbid_unknown_fields=True):
    """This job waits for others. singleton: for every job of the same name and user.

    The members of an array that is a singleton run one after another.
    """

    kind: After | Literal["singleton"]
    job: int = 0


class Array(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Many jobs from one submission, at most ``width`` at a time (0: any number).

    Each finds its own index: ``first``, ``first + step``, …
    """

    count: int
    width: int = 0
    first: int = 0
    step: int = 1

    def index(self, member: int) -> int:
        """What a member finds as its index; members count from 0."""
        return self.first + member * self.step


class SweepTrial(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which trial of a sweep a job is, up to which rung, and what it is judged by.

    All that is known of a sweep is in its jobs: whoever drives it can be lost at any time.
    """

    sweep: str
    number: int
    rung: int = 0
    steps: int  # of the run that the rung goes up to
    settings: dict[str, str] = {}  # that it differs by, as a job file says them
    metric: str = "loss"
    better: Literal["lower", "higher"] = "lower"
