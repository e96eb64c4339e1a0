"""The Plan that other rooms read: complete, and the same after every trip."""

from __future__ import annotations

import msgspec
import pytest

import phalanx.plan
from phalanx.plan import Plan, PlanRequest, plan_of, propose, understand


@pytest.fixture(scope="module")
def plan() -> Plan:
    request = PlanRequest(model="mixtral-8x7b", cluster="h100-64", tokens="1T", expert=8)
    return plan_of(propose(understand(request)))


def test_a_plan_survives_json_and_message_pack(plan: Plan) -> None:
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan


def test_a_plan_carries_traffic_of_every_axis_memory_of_every_stage_and_intervals(
    plan: Plan,
) -> None:
    mapping = plan.mapping
    talking = {axis for axis in ("tensor", "pipeline", "context") if getattr(mapping, axis) > 1}
    assert {"expert", *talking} <= {row.axis for row in plan.traffic}
    assert all(row.sent_bytes > 0 for row in plan.traffic)
    assert len(plan.memory) == mapping.pipeline
    assert mapping.gpus == plan.gpus == 64
    for interval in (plan.step_seconds, plan.tokens_per_second, plan.goodput, plan.days):
        assert 0 < interval.low <= interval.mid <= interval.high
    assert plan.memory_bytes <= plan.memory_limit
    assert sum(plan.parts.values()) == pytest.approx(plan.step_seconds.mid)


def test_everything_that_the_room_exports_is_there() -> None:
    for name in phalanx.plan.__all__:
        assert getattr(phalanx.plan, name) is not None
