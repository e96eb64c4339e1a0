"""Steps that are computed must be the steps that would have been played."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.jobs.job import Expected
from phalanx.simulate.world.pace import GangPace
from phalanx.simulate.world.runs import Brownouts, GangRun
from tests.examples import examples

paces = st.builds(
    GangPace,
    step_ns=st.integers(1, 50),
    memory_steps=st.integers(0, 4),
    memory_ns=st.integers(0, 9),
    checkpoint_steps=st.integers(0, 7),
    checkpoint_ns=st.integers(0, 30),
)


def played(pace: GangPace, base: int, elapsed_ns: int) -> tuple[int, int, list[int]]:
    """(last step, newest snapshot, times of steps), by playing every step and stall."""
    now, step, snapshot = 0, base, base
    times = []
    while now + pace.step_ns <= elapsed_ns:
        now += pace.step_ns
        step += 1
        times.append(now)
        if pace.memory_steps and step % pace.memory_steps == 0:
            now += pace.memory_ns
            if now <= elapsed_ns:
                snapshot = step
        if pace.checkpoint_steps and step % pace.checkpoint_steps == 0:
            now += pace.checkpoint_ns
    return step, snapshot, times


@examples(300)
@given(paces, st.integers(0, 100), st.integers(0, 2000))
def test_the_step_at_a_time_is_the_one_that_playing_gives(
    pace: GangPace, base: int, elapsed: int
) -> None:
    step, snapshot, times = played(pace, base, elapsed)
    assert pace.step_at(base, elapsed) == step
    assert [pace.time_ns(base, base + 1 + i) for i in range(len(times))] == times
    assert pace.committed(base, elapsed, 0) == snapshot


@examples(200)
@given(
    paces,
    st.integers(0, 30),
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.integers(0, 500_000),
)
def test_reports_account_for_every_nanosecond_of_steps_and_stalls(
    pace: GangPace, base: int, pauses: list[int], slower_ppm: int
) -> None:
    """Reported steps and stalls sum to the time between reports, at a pace that changes."""
    run = GangRun(
        job=1,
        generation=1,
        nodes=(0,),
        expected=Expected(
            step_ns=pace.step_ns,
            snapshot_steps=pace.memory_steps,
            snapshot_ns=pace.memory_ns,
            checkpoint_steps=pace.checkpoint_steps,
            checkpoint_ns=pace.checkpoint_ns,
        ),
        full_ns=pace.step_ns,
        phase="running",
        base=base,
        reported=base,
        stalls_reported=base,
    )
    now = 0
    settled, step = 0, base
    for number, pause in enumerate(pauses):
        now += pause
        told = run.report(now, 0, 0)
        if told is not None:
            passed = told.at_ns - settled
            made = told.step - step
            explained = made * pace.step_ns + told.checkpoint_ns + told.straggler_ns
            assert passed == explained
            settled, step = told.at_ns, told.step
        run.rebase(now, slower_ppm if number % 2 == 0 else 0, 0)


def test_a_checkpoint_is_durable_only_after_its_flush_and_not_through_a_brownout() -> None:
    expected = Expected(step_ns=10, snapshot_steps=0, checkpoint_steps=5, checkpoint_ns=0)
    run = GangRun(job=1, generation=1, nodes=(0,), expected=expected, full_ns=10, phase="running")
    clear, dark = Brownouts(), Brownouts()
    dark.add(52, 152)
    assert run.durable(54, 5, clear, 0) == 0
    assert run.durable(55, 5, clear, 0) == 5
    assert run.durable(150, 5, dark, 0) == 0
    assert run.durable(155, 5, dark, 0) == 5
    assert run.durable(157, 5, dark, 0) == 15


def test_storage_work_is_stretched_by_every_brownout_it_meets() -> None:
    brownouts = Brownouts()
    brownouts.add(10, 20)
    brownouts.add(40, 45)
    assert brownouts.end_ns(0, 10) == 10
    assert brownouts.end_ns(5, 10) == 25
    assert brownouts.end_ns(15, 10) == 30
    assert brownouts.end_ns(5, 30) == 50
