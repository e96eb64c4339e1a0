from __future__ import annotations

from msgspec import structs

from phalanx.cluster.policy import Policy, StoragePolicy
from phalanx.cluster.protocol.commands import Flush, Notify
from phalanx.cluster.protocol.events import Cancel, NodeSilent, Progress, StorageSlow
from phalanx.cluster.protocol.messages import FlushWanted
from tests.cluster.drive import EXPECTED, SECOND, Drive

GIB = 1 << 30


def two_jobs(flushes: int = 1) -> tuple[Drive, list]:
    storage = StoragePolicy(bytes_per_second=GIB, flushes=flushes)
    drive = Drive(policy=Policy(storage=storage))
    expected = structs.replace(EXPECTED, checkpoint_bytes=100 * GIB)
    return drive, [drive.running(expected=expected) for _ in range(2)]


def wants(drive: Drive, job) -> None:
    drive.tell(FlushWanted(job=job.id, generation=job.generation))


def written(drive: Drive, job, step: int, flush_ns: int = 0) -> None:
    """The gang reports its progress, and that a checkpoint of this step is durable."""
    made = job.step + 50
    told = Progress(
        job=job.id,
        generation=job.generation,
        step=made,
        committed=made,
        durable=step,
        at_ns=drive.now_ns + 50 * SECOND,
        flush_ns=flush_ns,
    )
    drive.tell(told, 50 * SECOND)


def granted(drive: Drive) -> list[int]:
    return [order.job for order in drive.bodies(Flush)]


def test_jobs_do_not_flush_at_the_same_time():
    drive, (first, second) = two_jobs()
    wants(drive, first)
    wants(drive, second)
    assert granted(drive) == [first.id]
    written(drive, first, 200)
    assert granted(drive) == [first.id, second.id]
    assert first.durable == 200


def test_those_who_may_write_share_the_bandwidth():
    drive, (first, second) = two_jobs(flushes=2)
    wants(drive, first)
    wants(drive, second)
    assert [order.bytes_per_second for order in drive.bodies(Flush)] == [GIB // 2] * 2


def test_asking_twice_gives_one_turn():
    drive, (first, second) = two_jobs()
    wants(drive, first)
    wants(drive, first)
    wants(drive, second)
    written(drive, first, 150)
    assert granted(drive) == [first.id, second.id]


def test_a_job_that_never_says_that_it_is_done_does_not_block_the_others():
    drive, (first, second) = two_jobs()
    wants(drive, first)
    wants(drive, second)
    (grant,) = drive.bodies(Flush)
    drive.wait(grant.until_ns - drive.now_ns)
    assert granted(drive) == [first.id, second.id]


def test_a_job_that_ends_gives_its_turn_away():
    drive, (first, second) = two_jobs()
    wants(drive, first)
    wants(drive, second)
    drive.tell(Cancel(job=first.id))
    drive.wait(1000 * SECOND)
    assert granted(drive) == [first.id, second.id]


def test_a_gang_that_breaks_gives_its_turn_away_and_asks_anew():
    drive, (first, second) = two_jobs()
    wants(drive, first)
    wants(drive, second)
    drive.tell(NodeSilent(node=first.placement.nodes[0]))
    assert granted(drive) == [first.id, second.id]
    drive.wait(SECOND)
    drive.run(first)
    wants(drive, first)
    written(drive, second, 200)
    assert granted(drive) == [first.id, second.id, first.id]


def test_nobody_writes_while_storage_is_down():
    drive, (first, _) = two_jobs()
    drive.tell(StorageSlow(bytes_per_second=0))
    assert "takes nothing" in str(drive.bodies(Notify)[-1].reason)
    wants(drive, first)
    assert granted(drive) == []
    drive.tell(StorageSlow(bytes_per_second=GIB // 4))
    assert [order.bytes_per_second for order in drive.bodies(Flush)] == [GIB // 4]


def test_leave_that_was_given_while_storage_was_slow_does_not_outlast_that():
    drive, (first, second) = two_jobs()
    drive.tell(StorageSlow(bytes_per_second=1))
    wants(drive, first)
    wants(drive, second)
    (grant,) = drive.bodies(Flush)
    assert grant.until_ns - drive.now_ns <= 86_400 * SECOND
    drive.tell(StorageSlow(bytes_per_second=-1))
    drive.wait(3600 * SECOND)
    assert granted(drive) == [first.id, second.id]


def test_a_checkpoint_that_takes_long_says_that_storage_is_slow_and_the_next_ones_that_it_is_not():
    drive, (first, second) = two_jobs()
    for step in (200, 250):
        written(drive, first, step, flush_ns=100 * SECOND)
    assert not [note for note in drive.bodies(Notify) if note.reason.code == "storage_slow"]
    written(drive, first, 300, flush_ns=1000 * SECOND)
    assert drive.bodies(Notify)[-1].reason.code == "storage_slow"
    assert "took 1000 s to write, and 100 s as a rule" in str(drive.bodies(Notify)[-1].reason)
    wants(drive, second)
    assert drive.bodies(Flush)[-1].bytes_per_second == 100 * GIB // 1000
    written(drive, second, 200, flush_ns=100 * SECOND)  # its first: nothing to compare with
    assert drive.bodies(Notify)[-1].reason.code == "storage_fast"
    wants(drive, first)
    assert drive.bodies(Flush)[-1].bytes_per_second == GIB


def test_a_job_that_was_held_to_the_slow_rate_is_no_proof_that_storage_is_still_slow():
    drive, (first, _) = two_jobs()
    written(drive, first, 200, flush_ns=100 * SECOND)
    written(drive, first, 250, flush_ns=1000 * SECOND)
    wants(drive, first)
    written(drive, first, 300, flush_ns=1000 * SECOND)  # as fast as it was allowed to
    wants(drive, first)
    assert drive.bodies(Flush)[-1].bytes_per_second == GIB


def test_short_checkpoints_prove_nothing_about_storage():
    drive, (first, _) = two_jobs()
    written(drive, first, 200, flush_ns=SECOND // 10)
    written(drive, first, 250, flush_ns=4 * SECOND)
    assert not [note for note in drive.bodies(Notify) if note.reason.code == "storage_slow"]
