"""What a node keeps of a job, as its agent knows it."""

from __future__ import annotations

import pytest

from phalanx.cluster.protocol.keeper_state import KeeperState, KeptSteps


@pytest.mark.parametrize(
    ("committed", "own"),
    [
        (-1, (9, 8, 7)),  # workers that know of nothing take nothing away
        (8, (8, 7)),  # what not all of them have committed does not count
        (10, (10, 9, 8)),
    ],
)
def test_workers_that_outlived_their_agent_say_what_counts(
    committed: int, own: tuple[int, ...]
) -> None:
    state = KeeperState(steps=KeptSteps((9, 8, 7), (9,)))
    state.adopt(committed, 5)
    assert state.steps == KeptSteps(own, (9,))


def test_a_keeper_without_a_ward_learns_of_it_from_a_worker() -> None:
    state = KeeperState(steps=KeptSteps((3,)))
    state.adopt(3, 2)
    assert state.steps == KeptSteps((3,), (2,))


def test_what_a_spare_backs_up_counts_when_its_generation_is_known_to_have_run():
    state = KeeperState(steps=KeptSteps((), (8, 7)), kept_generation=1)
    state.back_up(1, 9)
    assert state.steps == KeptSteps((), (9, 8))
    for step in (9, 10, 11):
        state.back_up(2, step)
    assert state.steps == KeptSteps((), (9, 8))  # nobody knows yet whether the second one ran
    state.fence(1)
    assert state.steps == KeptSteps((), (9, 8))
    state.fence(2)
    assert state.steps == KeptSteps((), (11, 10)) and state.committed == -1
    state.back_up(1, 12)  # too late
    assert state.steps == KeptSteps((), (11, 10))


@pytest.mark.parametrize(
    ("restored", "kept"),
    [
        (9, (9,)),  # the copy of what the next generation goes on from stays good
        (8, (8,)),  # and later ones are of a branch that is given up
        (5, ()),  # of this one there is no copy
    ],
)
def test_a_spares_copy_of_what_is_restored_counts_for_the_next_generation(
    restored: int, kept: tuple[int, ...]
) -> None:
    state = KeeperState(steps=KeptSteps((), (9, 8)), kept_generation=1)
    state.still_backs_up(2, 9)  # refused: the order comes again with another step
    state.still_backs_up(2, restored)
    assert state.steps == KeptSteps((), (9, 8))  # until it is known that the second one ran
    state.fence(2)
    assert state.steps == KeptSteps((), kept)


def test_an_order_that_comes_late_to_a_spare_takes_no_copy_away() -> None:
    state = KeeperState(steps=KeptSteps((), (9, 8)), kept_generation=1)
    state.back_up(2, 15)
    state.back_up(2, 16)
    for _ in range(2):  # it may come twice
        state.still_backs_up(2, 14)
    state.fence(2)
    assert state.steps == KeptSteps((), (16, 15))


def test_an_order_to_restore_another_step_takes_copies_away_that_may_be_of_the_first() -> None:
    state = KeeperState()
    state.still_backs_up(1, 20)
    state.back_up(1, 20)
    state.still_backs_up(1, 10)
    assert state.sealed == KeptSteps()
    state.back_up(1, 11)
    state.fence(1)
    assert state.steps == KeptSteps((), (11,))


def test_a_generation_that_goes_back_gives_up_its_later_copies() -> None:
    state = KeeperState()
    for step in (20, 10, 11):
        state.back_up(1, step)
    state.fence(1)
    assert state.steps == KeptSteps((), (11, 10))
