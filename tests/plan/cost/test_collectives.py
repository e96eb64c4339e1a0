"""Collectives: the bytes a ring moves, the fabric's tiers, and measured latencies."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.hardware import cluster
from phalanx.plan.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    bus_bandwidth,
    group,
    send_seconds,
)
from phalanx.plan.cost.constants import shipped
from phalanx.plan.machine import machine_of

LARGE = np.array([64e9])


def groups(size: int, stride: int, gpus: int = 1024, name: str = "h100"):  # type: ignore[no-untyped-def]
    machine = machine_of(cluster(f"{name}-{gpus}"), gpus)
    return group(np.array([float(size)]), np.array([float(stride)]), machine), machine


def test_a_ring_all_reduce_moves_twice_the_bytes_of_an_all_gather() -> None:
    ranks, machine = groups(64, 8)
    gathered = all_gather_seconds(LARGE, ranks, machine, shipped())
    reduced = all_reduce_seconds(LARGE, ranks, machine, shipped())
    assert reduced / gathered == pytest.approx(2, rel=0.01)
    assert gathered == pytest.approx(
        LARGE * 63 / 64 / bus_bandwidth(ranks, machine, shipped()), rel=0.01
    )


def test_all_members_of_a_node_carry_a_group_over_its_border() -> None:
    one, machine = groups(16, 8)  # one member in each node
    eight, _ = groups(16, 1)  # two whole nodes
    ratio = bus_bandwidth(eight, machine, shipped()) / bus_bandwidth(one, machine, shipped())
    assert ratio == pytest.approx(
        machine.link_bandwidth * shipped().link / (machine.network_bandwidth * shipped().network),
        rel=1e-6,
    ) or ratio == pytest.approx(8)


def test_small_messages_cost_latency_as_measured_on_two_nodes() -> None:
    # 2 nodes x 4 H100 over InfiniBand: 8 B in 18.2 us, 64 KiB in 29 us, 8 MiB in 191 us.
    machine = machine_of(cluster("h100-8"), 8)
    ranks = group(np.array([8.0]), np.array([1.0]), machine)
    ranks = type(ranks)(ranks.size, np.array([4.0]))
    found = [
        float(all_reduce_seconds(np.array([size]), ranks, machine, shipped())[0]) * 1e6
        for size in (8.0, 65536.0, 8.0 * 2**20)
    ]
    for seconds, measured in zip(found, (18.2, 29.0, 191.0), strict=True):
        assert measured / 2 < seconds < measured * 2


def test_sums_in_the_switches_halve_the_bytes_of_a_large_all_reduce() -> None:
    ranks, machine = groups(64, 8)
    plain = all_reduce_seconds(LARGE, ranks, machine, shipped())
    inside = all_reduce_seconds(LARGE, ranks, machine, shipped(), in_network=True)
    assert plain / inside == pytest.approx(2 * 63 / 64, rel=0.05)


@pytest.mark.parametrize(
    ("size", "stride", "share"),
    [
        (128, 8, 1.0),  # inside a pod of 3,072
        (1024, 8, 1.0),  # eight rings leave a pod whose uplinks carry 3072 / 7 cards
        (12, 1024, 3072 / 7 / 1024),  # a thousand leave at once
        (3, 4096, 1 / 7),  # every hop leaves
    ],
)
def test_rings_between_pods_share_the_uplinks_with_those_that_leave_beside_them(
    size: int, stride: int, share: float
) -> None:
    ranks, machine = groups(size, stride, gpus=12288, name="llama3")
    whole = machine.network_bandwidth * shipped().network
    assert bus_bandwidth(ranks, machine, shipped()) == pytest.approx(whole * share)


def test_stages_in_other_pods_are_sent_to_over_the_uplinks() -> None:
    _, machine = groups(1, 1, gpus=12288, name="llama3")
    near, far = (
        send_seconds(LARGE, np.array([stride]), np.array([12288.0]), machine, shipped())
        for stride in (256.0, 4096.0)
    )
    assert far / near == pytest.approx(7, rel=1e-3)


def test_stages_that_share_a_domain_still_send_out_of_it_where_the_pipeline_is_longer() -> None:
    _, machine = groups(1, 1, gpus=64)
    inside, across, apart = (
        send_seconds(LARGE, np.array([stride]), np.array([span]), machine, shipped())
        for stride, span in ((4.0, 8.0), (4.0, 64.0), (8.0, 64.0))
    )
    assert inside < across < apart
    assert across == pytest.approx((inside + apart) / 2)


def test_a_group_of_one_communicates_nothing() -> None:
    ranks, machine = groups(1, 1)
    for collective in (all_gather_seconds, all_reduce_seconds, all_to_all_seconds):
        assert collective(LARGE, ranks, machine, shipped()) == 0


def test_a_rack_of_72_serves_a_job_of_128_with_64_each() -> None:
    ranks, machine = groups(128, 1, gpus=144, name="gb200")
    assert machine.domain == 72
    assert machine_of(cluster("gb200-128"), 128).domain == 64
    assert ranks.size == 128
