"""Intervals: wide where software is unnamed or a feature unmeasured, narrow where runs are."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from phalanx.hardware import cluster
from phalanx.plan import Mapping, predict, shipped
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.uncertainty import UNPROVEN, Z80, unproven_spread
from phalanx.plan.question.request import PlanRequest, understand
from phalanx.plan.workload import Software

WORKLOAD = understand(
    PlanRequest(model="llama3-8b", cluster="h100-64", tokens="1T", batch="1M")
).workload
ON = cluster("h100-64")
SPREADS = {"dense": 0.06, "communication": 0.3, "software:dense": 0.05, "unnamed:dense": 0.07}


def made(**changed: object) -> Constants:
    return structs.replace(shipped(), error=SPREADS, pace={}, runs={}, seen={}, **changed)


def width(constants: Constants, software: Software, mapping: Mapping) -> float:
    found = predict(WORKLOAD, mapping, ON, constants=constants, software=software)
    return math.log(found.step_seconds_high / found.step_seconds) / Z80


def test_naming_the_software_and_seeing_its_runs_narrow_the_interval() -> None:
    mapping = Mapping(data=64, zero=3)
    unnamed = width(made(), Software(name=""), mapping)
    named = width(made(), Software(), mapping)
    few = width(structs.replace(made(), runs={"phalanx:dense": 3}), Software(), mapping)
    many = width(structs.replace(made(), runs={"phalanx:dense": 300}), Software(), mapping)
    assert unnamed > 1.2 * named and named > few > many
    exposed = width(
        structs.replace(made(), error=SPREADS | {"software:dense": 0}), Software(), mapping
    )
    assert many == pytest.approx(exposed, rel=0.01)


def test_what_only_good_software_runs_fast_is_a_gamble_where_nobody_named_it() -> None:
    """Sharded weights are gathered one by one, beside nothing, by software of years ago."""
    unnamed, named = Software(name=""), Software()
    added = {
        mapping: width(made(), unnamed, mapping) ** 2 - width(made(), named, mapping) ** 2
        for mapping in (Mapping(data=64, zero=3), Mapping(tensor=8, data=8, zero=1))
    }
    sharded, split = added.values()
    least = SPREADS["unnamed:dense"] ** 2
    assert sharded > least and split > least
    assert sharded > 2 * split


def test_a_stacks_pace_scales_the_step_and_every_part() -> None:
    mapping = Mapping(data=64, zero=3)
    plain = predict(WORKLOAD, mapping, ON, constants=made())
    slow = structs.replace(made(), pace={"phalanx:dense": 1.1})
    paced = predict(WORKLOAD, mapping, ON, constants=slow)
    assert paced.step_seconds == pytest.approx(1.1 * plain.step_seconds)
    assert sum(paced.parts.values()) == pytest.approx(paced.step_seconds)


def test_a_schedule_that_hardly_a_run_had_is_less_certain() -> None:
    seen = structs.replace(made(), seen={"1f1b": 100, "dualpipe": 1})
    assert unproven_spread("zero-bubble", seen) == UNPROVEN
    assert 0 < unproven_spread("dualpipe", seen) < UNPROVEN
    assert unproven_spread("1f1b", seen) == 0.0 == unproven_spread("zero-bubble", made())
    pipe = Mapping(pipeline=4, data=16, zero=1)
    folded = structs.replace(pipe, schedule="zero-bubble", virtual_stages=2)
    assert width(seen, Software(), folded) > 1.2 * width(made(), Software(), folded)
    assert width(seen, Software(), pipe) == width(made(), Software(), pipe)
