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
