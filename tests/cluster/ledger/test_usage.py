"""GPU time by day and owner: exact, also over midnight, and after its job is forgotten."""

from __future__ import annotations

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.ledger.usage import DAY_NS, DAYS_KEPT, Usage, UsageOwner
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.events import Cancel, Tick
from tests.cluster.drive import SECOND, Drive

ONE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)
ANN = UsageOwner("red", "ann", "vision")


def by_owner(core: Core) -> dict[tuple[str, str, str], int]:
    found: dict[tuple[str, str, str], int] = {}
    for row in core.ledger.usage():
        found[row.owner] = found.get(row.owner, 0) + row.gpu_ns
    return found


def test_a_time_over_midnight_is_split_at_midnight():
    usage = Usage()
    usage.add(ANN, DAY_NS - SECOND, 2 * DAY_NS + 3 * SECOND, 8)
    assert [(row.day, row.gpu_ns) for row in usage.rows()] == [
        (0, 8 * SECOND),
        (1, 8 * DAY_NS),
        (2, 24 * SECOND),
    ]


def test_old_days_are_forgotten():
    usage = Usage()
    usage.add(ANN, 0, (DAYS_KEPT + 5) * DAY_NS, 1)
    days = [row.day for row in usage.rows()]
    assert len(days) == DAYS_KEPT and days[-1] == DAYS_KEPT + 4


def test_usage_is_what_jobs_held_by_whoever_they_are_of():
    drive = Drive(policy=Policy(ended_jobs=1))
    first = drive.running(gang=ONE, team="red", user="ann", project="vision")
    second = drive.running(gang=ONE, team="blue", user="bob", spares=1)
    drive.tell(Tick(), 2 * DAY_NS)
    held = {number: drive.core.ledger.used_gpu_ns(number) for number in (first.id, second.id)}
    assert by_owner(drive.core) == {ANN: held[first.id], ("blue", "bob", ""): held[second.id]}
    for job in (first, second):
        drive.tell(Cancel(job=job.id))
    drive.wait(DAY_NS)
    assert first.id not in drive.core.ledger.accounts  # only its team's sums are left
    assert sum(by_owner(drive.core).values()) == sum(held.values())
    again = Core.restore(drive.core.snapshot())
    assert by_owner(again) == by_owner(drive.core)
