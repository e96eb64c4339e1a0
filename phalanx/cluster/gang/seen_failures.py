"""What interrupted gangs, and how often nodes fail by it.

A rate is that of nodes with eight GPUs, per million days. It is the mean of a gamma distribution: a
prior counts as one failure seen, and what interrupted gangs while they ran is added to it. The
prior of a kind of nodes is the policy's rate; that of an age what was seen of the kind's other
ages; that of a group within an age what was seen of the others of this age. So nothing that was
seen counts twice, and a group of which little was seen fails as often as the others.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.context import HealthState, KindFailures
from phalanx.cluster.gang.risk_groups import AGE_OF, AGES, FAILED, GROUPS
from phalanx.cluster.policy import DAY_NS, HealthPolicy
from phalanx.cluster.units import MILLION, SECOND_NS

NODE_GPUS = 8
NODE_DAY_GPU_SECONDS = NODE_GPUS * DAY_NS // SECOND_NS


class GroupFailures(Struct, frozen=True, kw_only=True):
    """What interrupted gangs on nodes of one kind and age, or group within it."""

    group: str
    gpu_seconds: int
    failures: int
    prior: int  # the rate of others that are near to it

    @property
    def per_million_node_days(self) -> int:
        """The rate that follows from the others' and from what was seen of this one."""
        return rate_of(self.failures, self.gpu_seconds, self.prior)


class SeenFailures(Struct, frozen=True, kw_only=True):
    """What interrupted gangs on nodes of one kind, within the window."""

    kind: str
    gpu_seconds: int  # that gangs ran
    causes: dict[str, int]
    prior: int  # the policy's rate
    grouped: dict[str, tuple[int, int]] = {}  # by group: GPU seconds and failures

    @property
    def failures(self) -> int:
        """All of them."""
        return sum(self.causes.values())

    @property
    def node_days(self) -> int:
        """As nodes of eight GPUs."""
        return self.gpu_seconds // NODE_DAY_GPU_SECONDS

    @property
    def per_million_node_days(self) -> int:
        """The rate that follows from the prior and from what was seen."""
        return rate_of(self.failures, self.gpu_seconds, self.prior)

    @property
    def ages(self) -> tuple[GroupFailures, ...]:
        """The same by the age of the node that failed, where gangs ran on such."""
        found = (self._age(age) for age in AGES)
        return tuple(each for each in found if each.gpu_seconds or each.failures)

    @property
    def failed_before(self) -> tuple[GroupFailures, ...]:
        """Those of nodes that had failed before, by age."""
        groups = self.groups
        often = [age + often for age in AGES for often in FAILED[1:]]
        return tuple(groups[group] for group in often if any(self.grouped.get(group, ())))

    @property
    def groups(self) -> dict[str, GroupFailures]:
        """All groups, also those that nothing was seen of."""
        return {group: self.group(group) for group in GROUPS}

    def group(self, name: str) -> GroupFailures:
        """One of them."""
        whole = self._age(AGE_OF[name])
        seconds, failures = self.grouped.get(name, (0, 0))
        rest = whole.failures - failures, whole.gpu_seconds - seconds
        return GroupFailures(
            group=name,
            gpu_seconds=seconds,
            failures=failures,
            prior=rate_of(*rest, whole.prior),
        )

    def _age(self, age: str) -> GroupFailures:
        parts = [self.grouped.get(age + often, (0, 0)) for often in FAILED]
        seconds, failures = sum(each for each, _ in parts), sum(each for _, each in parts)
        # What runs now is of some age, and is counted there a little later.
        rest = self.failures - failures, max(0, self.gpu_seconds - seconds)
        return GroupFailures(
            group=age, gpu_seconds=seconds, failures=failures, prior=rate_of(*rest, self.prior)
        )


def rate_of(failures: int, gpu_seconds: int, prior: int) -> int:
    """Failures per million node-days: the prior counts as one that was seen."""
    before = MILLION * NODE_DAY_GPU_SECONDS // prior  # in which one failure is expected
    return max(1, (1 + failures) * MILLION * NODE_DAY_GPU_SECONDS // (before + gpu_seconds))


def seen(health: HealthState, policy: HealthPolicy, now_ns: int) -> list[SeenFailures]:
    """What is known of every kind of node now, gangs that run included."""
    return [seen_of(kind, health, policy, now_ns) for kind in sorted(health.failures)]


def seen_of(node_kind: str, health: HealthState, policy: HealthPolicy, now_ns: int) -> SeenFailures:
    """What is known of one kind."""
    recorded = health.failures.get(node_kind, KindFailures())
    since = (now_ns - policy.failure_window_ns) // DAY_NS
    causes: dict[str, int] = {}
    seconds: dict[str, int] = {}
    failures: dict[str, int] = {}
    gpu_seconds = (now_ns * recorded.running_gpus - recorded.running_gpu_ns) // SECOND_NS
    for day in recorded.days:
        if day.day >= since:
            gpu_seconds += day.gpu_seconds
            _add_up(causes, day.causes)
            _add_up(seconds, day.aged_gpu_seconds)
            _add_up(failures, day.aged_failures)
    return SeenFailures(
        kind=node_kind,
        gpu_seconds=gpu_seconds,
        causes=dict(sorted(causes.items())),
        prior=max(1, policy.failures_per_million_node_days),
        grouped={
            group: (seconds.get(group, 0), failures.get(group, 0))
            for group in GROUPS
            if seconds.get(group) or failures.get(group)
        },
    )


def _add_up(sums: dict[str, int], more: dict[str, int]) -> None:
    """Every start of a gang goes through all days: ten times as fast as a ``Counter``."""
    for name, count in more.items():
        sums[name] = sums.get(name, 0) + count
