"""Random jobs on random meshes train as a plain loop does, and resume to the bit.

A cell is a model, a recipe, a mesh that trains it, saves on the way and resumes, and another one
that continues from there. Losses, norms, weights, averages, validation and the scores of texts are
compared with `random_jobs.plain_training`, which is fp64 and has no line of the trainer's.
A cell is a function of its seed: `draw_cell(SEED)` makes the one of a failure again.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.parallel.random_jobs.compare import try_cell
from tests.parallel.random_jobs.draw import Cell, axes_of, draw_cell
from tests.shared_ranks import SharedRanks

FEW = (7002, 7004)  # seeds of the ordinary suite, on two ranks: cheap, and unlike each other
MANY = range(7000, 7300)  # of the soak, of which some have no mesh that their rules accept


def in_words(cell: Cell) -> str:
    meshes = f"{axes_of(cell.first)}, then {axes_of(cell.then)} from step {cell.saved}"
    return f"seed {cell.seed} ({', '.join(cell.features)}): {meshes}"


def try_all(seeds: Iterable[int], most_ranks: int, shared_ranks: SharedRanks) -> None:
    wrong, count = {}, 0
    for seed in seeds:
        if (cell := draw_cell(seed, most_ranks)) is not None:
            count += 1
            if problems := try_cell(cell, shared_ranks):
                wrong[in_words(cell)] = problems
    text = "\n".join("\n  ".join((cell, *problems)) for cell, problems in wrong.items())
    assert count and not wrong, f"{len(wrong)} of {count} cells\n{text}"


def test_random_jobs_on_two_ranks_train_as_a_plain_loop_does(shared_ranks: SharedRanks) -> None:
    try_all(FEW, 2, shared_ranks)


@pytest.mark.soak
def test_many_random_jobs_train_as_a_plain_loop_does(shared_ranks: SharedRanks) -> None:
    try_all(MANY, 8, shared_ranks)
