"""Rows of runs, and the settings that tell them apart."""

from __future__ import annotations

import msgspec

from phalanx.observe.tracker.run_table import (
    MOST_SETTINGS,
    DescribedRun,
    Value,
    described,
    differing,
    run_table,
)
from phalanx.observe.tracker.runs import Run


def run(number: int, **config: object) -> tuple[int, DescribedRun]:
    base = {"model": {"preset": "tiny", "dim": 64}, "name": f"r{number}", "data": {"sequence": 32}}
    summary = {"loss": 2.0, "step": 5, "scores": {}, "tokens_per_second": "many"}
    made = Run(id=str(number), name=f"r{number}", config=base | config, summary=summary)
    return number, described(msgspec.json.encode(made))


def test_only_settings_that_differ_stand_in_the_rows() -> None:
    found = run_table([run(1, optimizer={"lr": 1.0}), run(2, optimizer={"lr": 2.0}), run(3)])
    assert found.settings == ("optimizer.lr",)
    assert [row.settings for row in found.rows] == [
        {"optimizer.lr": 1.0},
        {"optimizer.lr": 2.0},
        {},
    ]
    assert found.rows[0].last == {
        "step": 5.0,
        "loss": 2.0,
        "validation_loss": None,
        "tokens_per_second": None,
        "mfu": None,
    }


def test_of_very_many_settings_those_with_few_values_stay() -> None:
    trees: list[dict[str, Value]] = [
        {f"k{i}": n // (i + 1) for i in range(100)} for n in range(200)
    ]
    kept = differing(trees)
    assert len(kept) == MOST_SETTINGS and "k99" in kept and "k0" not in kept


def test_what_differs_stands_before_what_a_program_only_lacks() -> None:
    trees: list[dict[str, Value]] = [
        {"adapter.rank": 16, "data.source": "shards"},
        {"adapter.rank": 16, "data.source": "synthetic"},
        {},
    ]
    assert differing(trees) == ("data.source", "adapter.rank")


def test_work_a_token_is_known_where_the_model_is() -> None:
    rows = run_table([run(1, model={"preset": "tiny"}), run(2, model={"preset": "none"})]).rows
    assert rows[0].flops_per_token > 0 and rows[1].flops_per_token == 0
    assert run_table([run(3, model="x")]).rows[0].flops_per_token == 0
