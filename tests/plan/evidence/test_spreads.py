"""Spreads measured on runs: intervals hold 80 % of the errors that they were made for."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from phalanx.plan.cost.uncertainty import Z80
from phalanx.plan.evidence.fit import LeftOut, prior_constants, unnamed
from phalanx.plan.evidence.published import PublishedRun, parse_runs
from phalanx.plan.evidence.replay import Replay
from phalanx.plan.evidence.spreads import seen_in, with_spreads
from tests.plan.evidence.test_published import ROW

STACKS = ("torchtitan", "llm-foundry", "nanotron")


@pytest.fixture(scope="module")
def made() -> tuple[list[PublishedRun], LeftOut]:
    """Runs of three stacks, each at a pace of its own, with noise; traits cost as much again."""
    draw = np.random.default_rng(0)
    runs = parse_runs([ROW | {"stack": stack} for stack in STACKS for _ in range(40)])[0]
    seconds, _ = Replay(runs).price(prior_constants())
    pace = np.repeat([0.05, 0.0, -0.08], 40)
    noise = draw.normal(0.0, 0.03, len(runs))
    runs = [
        structs.replace(run, seconds=float(s * np.exp(p + e)))
        for run, s, p, e in zip(runs, seconds, pace, noise, strict=True)
    ]
    named = -(pace + noise)
    return runs, LeftOut(named, 2.0 * named)


def test_intervals_hold_what_they_promise(made: tuple[list[PublishedRun], LeftOut]) -> None:
    runs, left_out = made
    constants = with_spreads(prior_constants(), runs, left_out)
    new = [structs.replace(run, software=structs.replace(run.software, name="x")) for run in runs]
    _, widths = Replay(new).price(constants)
    assert 0.75 <= np.mean(np.abs(left_out.named) <= Z80 * widths) <= 0.88
    # Unnamed software may be plain, which none of these runs was: wider than they alone ask for.
    _, widths = Replay([unnamed(run) for run in runs]).price(constants)
    assert np.mean(np.abs(left_out.unnamed) <= Z80 * widths) >= 0.75


def test_a_stack_with_runs_is_predicted_at_its_own_pace_and_narrower(
    made: tuple[list[PublishedRun], LeftOut],
) -> None:
    runs, left_out = made
    constants = with_spreads(prior_constants(), runs, left_out)
    assert constants.pace["torchtitan:dense"] > 1.02 > 0.96 > constants.pace["nanotron:dense"]
    seconds, widths = Replay(runs).price(constants)
    errors = np.log(seconds / np.array([run.seconds for run in runs]))
    assert 0.7 <= np.mean(np.abs(errors) <= Z80 * widths) <= 0.9
    _, stranger = Replay([unnamed(run) for run in runs]).price(constants)
    assert stranger.mean() > 1.5 * widths.mean()


def test_features_are_counted_in_runs() -> None:
    pipe = {"pp": "4", "dp": "16", "vpp": "2"}
    seen = seen_in(parse_runs([ROW, ROW | pipe, ROW | {"offload": "optimizer"}])[0])
    assert seen == {"dense:hopper:bfloat16": 3, "interleaved": 1, "optimizer": 1}
