"""Traffic of each axis: what is sent, and whether NVLink carries it."""

from __future__ import annotations

import pytest

from phalanx.config import PRESETS, resolve_model
from phalanx.hardware import cluster
from phalanx.plan.cost.traffic import AxisTraffic, traffic
from phalanx.plan.workload import Mapping, Software, Workload

ON = cluster("h100-1k")
LLAMA = Workload(model=resolve_model(PRESETS["llama3-8b"]), sequence=8192, global_batch=512)
MOE = Workload(model=resolve_model(PRESETS["mixtral-8x7b"]), sequence=4096, global_batch=512)


def by_axis(workload: Workload, mapping: Mapping) -> dict[str, AxisTraffic]:
    return {row.axis: row for row in traffic(workload, mapping, ON)}


def test_an_axis_of_one_sends_nothing() -> None:
    assert traffic(LLAMA, Mapping(), ON) == ()


def test_ddp_sends_every_gradient_twice_over_the_ring() -> None:
    rows = by_axis(LLAMA, Mapping(data=1024, zero=0))
    sent = 2 * 1023 / 1024 * Software().reduce_bytes * 8_030_261_248
    assert rows["data"].sent_bytes == pytest.approx(sent)
    assert not rows["data"].inside_domain


def test_zero_3_gathers_for_every_micro_batch() -> None:
    one = by_axis(LLAMA, Mapping(data=256, zero=3, micro_batch=2))["data"].sent_bytes
    two = by_axis(LLAMA, Mapping(data=256, zero=3, micro_batch=1))["data"].sent_bytes
    assert two == pytest.approx(2 * one)


def test_tensor_stays_in_the_domain_and_the_axes_around_it_leave() -> None:
    mapping = Mapping(tensor=8, context=2, data=16, pipeline=4, zero=1)
    rows = by_axis(LLAMA, mapping)
    assert list(rows) == ["tensor", "context", "data", "pipeline"]
    assert [row.inside_domain for row in rows.values()] == [True, False, False, False]
    assert [row.span for row in rows.values()] == [8, 16, 256, 1024]


def test_neighbouring_stages_inside_a_domain_use_nvlink() -> None:
    assert by_axis(LLAMA, Mapping(tensor=2, pipeline=4, zero=0))["pipeline"].inside_domain


def test_experts_send_their_tokens_there_and_back() -> None:
    rows = by_axis(MOE, Mapping(data=8, expert=8, zero=1))
    tokens = MOE.tokens / 8
    sent = 4 * 32 * 2 * tokens * 2 * 4096 * 7 / 8
    assert rows["expert"].sent_bytes == pytest.approx(sent)


def test_line_rate_is_the_slower_link_where_the_axis_leaves() -> None:
    inside = AxisTraffic("tensor", 8, 8, 450e9, True)
    outside = AxisTraffic("data", 8, 64, 450e9, False)
    assert inside.line_seconds(ON) == pytest.approx(1.0)
    assert outside.line_seconds(ON) == pytest.approx(9.0)
