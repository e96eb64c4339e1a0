"""Which limits a request counts against, and how long it waits."""

from __future__ import annotations

import pytest

from phalanx.control.server.security.request_limits import RateLimit, RequestLimits


def test_a_limit_counts_by_cost_and_can_be_asked() -> None:
    limit = RateLimit(10, 100)
    assert limit.take("a", 0.0, 60) == 0.0
    assert limit.wait("a", 0.0) == 0.0
    assert limit.take("a", 0.0, 60) == pytest.approx(2.0)
    assert limit.take("a", 2.0, 60) == 0.0
    assert limit.take("b", 0.0, 1e9) == 0.0  # a full bucket lets anything in, once
    assert limit.take("b", 0.0, 1) > 0


def limits() -> RequestLimits:
    return RequestLimits(
        tokens=RateLimit(10, 4),
        addresses=RateLimit(1, 1),
        orders=RateLimit(1, 2),
        refusals=RateLimit(1, 1),
        body_bytes=RateLimit(1 << 10, 8 << 10),
        most_body_bytes=1 << 20,
    )


def test_only_what_changes_something_counts_as_an_order() -> None:
    taken = limits()
    orders = [taken.take("a", 0.0, order=True, length=0) for _ in range(3)]
    assert orders == [0.0, 0.0, 1.0]
    assert taken.take("a", 0.0, order=False, length=0) == 0.0
    assert taken.take("a", 0.0, order=False, length=0) == pytest.approx(0.1)
    assert taken.take("b", 0.0, order=True, length=0) == 0.0


def test_whoever_is_refused_too_often_waits_for_everything() -> None:
    taken = limits()
    taken.refusals.take("a", 0.0)
    assert taken.take("a", 0.0, order=False, length=0) == 1.0
    assert taken.take("b", 0.0, order=False, length=0) == 0.0


def test_bytes_of_orders_count_but_those_of_a_body_that_is_not_read() -> None:
    taken = limits()
    assert taken.take("a", 0.0, order=True, length=2 << 20) == 0.0  # it will be refused unread
    assert taken.take("a", 0.0, order=True, length=8 << 10) == 0.0
    assert taken.body_bytes.wait("a", 0.0) > 0.0
