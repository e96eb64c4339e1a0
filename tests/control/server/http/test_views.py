"""What the API shows of the core's state."""

from __future__ import annotations

from phalanx.cluster.gang.seen_failures import NODE_DAY_GPU_SECONDS, SeenFailures
from phalanx.control.server.http.views import failure_rate


def test_a_failure_rate_is_shown_by_age_with_what_is_uncertain() -> None:
    day = NODE_DAY_GPU_SECONDS
    shown = failure_rate(
        SeenFailures(
            kind="h100",
            gpu_seconds=1000 * day,
            causes={"hbm_ecc": 10},
            prior=4000,
            grouped={
                "first day": (20 * day, 6),
                "older": (975 * day, 2),
                "older, failed once": (5 * day, 2),
            },
        ),
        of_nodes=12_000,
    )
    assert shown.nodes_per_1000 == 12.0
    young, old, again = shown.ages
    assert (young.age, young.failures, young.node_days) == ("first day", 6, 20.0)
    assert old.per_1000_node_days < shown.per_1000_node_days < young.per_1000_node_days
    assert again.age == "older, failed once" and again.per_1000_node_days > old.per_1000_node_days
    for each in (young, old, again):
        assert each.low < each.per_1000_node_days < each.high
    assert young.high / young.low > 1.5, "six failures in twenty days prove little"
