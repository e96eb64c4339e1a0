"""What trials set: grids, draws, Sobol's points; the same each time."""

from __future__ import annotations

from typing import Any

from phalanx.plan.sweeps.description import sweep_from_table
from phalanx.plan.sweeps.sobol import MOST_DIMENSIONS, sobol_points
from phalanx.plan.sweeps.space import grid_size, trial_settings


def sweep(method: dict[str, Any], **parameters: dict[str, Any]) -> Any:
    named = {key.replace("__", "."): value for key, value in parameters.items()}
    table = {"name": "s", "job": "j.toml", "parameters": named, "method": method}
    return sweep_from_table(table)


LR = {"log_range": [1e-4, 1e-2], "points": 3}
LAYERS = {"range": [1, 4]}


def test_a_grid_has_every_combination_and_tables_set_several_settings_together() -> None:
    sizes = {"values": [{"model.dim": 32, "model.heads": 2}, {"model.dim": 64, "model.heads": 4}]}
    found = sweep({"kind": "grid"}, optimizer__learning_rate=LR, size=sizes)
    assert grid_size(found.parameters) == 6
    assert trial_settings(found)[:2] == [
        {"optimizer.learning_rate": 1e-4, "model.dim": 32, "model.heads": 2},
        {"optimizer.learning_rate": 1e-4, "model.dim": 64, "model.heads": 4},
    ]
    rates = {each["optimizer.learning_rate"] for each in trial_settings(found)}
    assert rates == {1e-4, 1e-3, 1e-2}


def test_draws_follow_from_the_seed_and_stay_within_their_ends() -> None:
    for kind in ("random", "sobol"):
        one, again, other = (
            trial_settings(
                sweep({"kind": kind, "trials": 64, "seed": seed}, lr=LR, model__layers=LAYERS)
            )
            for seed in (1, 1, 2)
        )
        assert one == again != other
        assert {each["model.layers"] for each in one} == {1, 2, 3, 4}
        assert all(1e-4 <= each["lr"] <= 1e-2 for each in one)  # type: ignore[operator]
    few = sweep({"kind": "random", "trials": 8, "seed": 1}, lr=LR, model__layers=LAYERS)
    many = sweep({"kind": "random", "trials": 64, "seed": 1}, lr=LR, model__layers=LAYERS)
    assert trial_settings(few) == trial_settings(many)[:8], "more trials keep those that there were"


def test_sobol_points_are_those_of_joe_and_kuo() -> None:
    import torch

    engine = torch.quasirandom.SobolEngine(MOST_DIMENSIONS, scramble=False)
    wanted = engine.draw(128, dtype=torch.float64)
    found = torch.tensor(list(sobol_points(MOST_DIMENSIONS, 128, None)), dtype=torch.float64)
    assert torch.equal(found, wanted)
    halves = [0] * 16
    for point in sobol_points(1, 64, seed=5):
        halves[int(point[0] * 16)] += 1
    assert halves == [4] * 16, "every sixteenth has as many"
