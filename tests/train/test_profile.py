"""Exposed communication is what no compute ran beside."""

from __future__ import annotations

import pytest

from phalanx.train.profile import Kernel, communication


@pytest.mark.parametrize(
    ("kernels", "talking", "exposed"),
    [
        ([(0, 4, False)], 0, 0),
        ([(0, 4, False), (4, 6, True)], 2, 2),  # after all compute
        ([(0, 4, False), (1, 3, True)], 2, 0),  # hidden
        ([(0, 4, False), (3, 6, True)], 3, 2),  # partly
        ([(0, 4, False), (3, 6, True), (5, 8, False)], 3, 1),
        ([(0, 2, True), (1, 3, True)], 3, 3),  # two collectives at once count once
        ([(5, 6, True), (0, 1, False), (5, 6, False)], 1, 0),  # in any order
    ],
)
def test_only_uncovered_communication_is_exposed(
    kernels: list[tuple[float, float, bool]], talking: float, exposed: float
) -> None:
    found = communication([Kernel(*kernel) for kernel in kernels], steps=2)
    assert found.seconds_per_step == pytest.approx(talking / 2)
    assert found.exposed_seconds_per_step == pytest.approx(exposed / 2)
