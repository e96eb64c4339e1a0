"""Time of a collective, in the manner of NCCL's own tuner.

    seconds = base + hops * latency + bytes * share / bandwidth, the best algorithm of those
    that the fabric allows

A group of n ranks lies ``inside`` to a domain (NVLink), so it spans n / inside domains. A ring
crosses a domain's border over the NICs of all its members there, so its bandwidth outside is
inside * NIC, and never more than the link inside. Between pods it has what the flows that leave
one at the same time find of the pod's uplinks. Shares of the bytes: all-gather and
reduce-scatter (n-1)/n; all-reduce twice that as a ring or tree, and once with in-switch
reduction. Latencies in seconds by protocol (LL for small, Simple for large messages): base,
per hop on NVLink, per hop on the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.cost.constants import Constants
from phalanx.plan.grid import Floats
from phalanx.plan.machine import Machine

RING_LL = (6.6e-6, 0.6e-6, 2.7e-6)
RING_SIMPLE = (8.4e-6, 3.4e-6, 14e-6)
TREE_LL = (6.8e-6, 0.6e-6, 5e-6)
TREE_SIMPLE = (8.4e-6, 4.0e-6, 14e-6)
LL_SHARE = 0.5  # LL sends a flag with every word
TREE_SHARE = 0.92
PAT_SHARE = 0.75
SWITCH_SECONDS = 25e-6  # in-switch reduction of one domain
SWITCH_SHARE = 0.85


@dataclass(frozen=True)
class CommGroups:
    """Arrays of groups: how many ranks, and how many of them share a domain."""

    size: Floats
    inside: Floats
    share: Floats | float = 1.0  # of the NICs' rate, for a ring

    @property
    def domains(self) -> Floats:
        return self.size / self.inside


def group(size: Floats, stride: Floats, machine: Machine) -> CommGroups:
    """Groups of an axis whose neighbours are ``stride`` ranks apart."""
    fit = np.maximum(1.0, np.floor(machine.domain / stride))
    # A group that fills a domain only in part must still divide evenly over domains.
    inside = np.where(size <= fit, size, np.gcd(size.astype(np.int64), fit.astype(np.int64)))
    share = pod_share(size * stride, stride, machine)
    return CommGroups(size, np.asarray(inside, dtype=np.float64), share)


def pod_share(span: Floats, stride: Floats, machine: Machine) -> Floats:
    """Part of the NICs' rate that a ring over ``span`` GPUs keeps where it leaves a pod.

    It leaves once, however many of its ranks are inside, and with it the rings of the ranks that
    lie between two of its own (``stride``, a domain's at least). A stride of a pod and more:
    everybody leaves at once.
    """
    if not machine.pod:
        return np.ones_like(span)
    uplinks = machine.pod / machine.oversubscription
    flows = np.clip(stride, machine.domain, machine.pod)
    return np.where(machine.pod % span != 0, np.minimum(1.0, uplinks / flows), 1.0)


def bus_bandwidth(ranks: CommGroups, machine: Machine, constants: Constants) -> Floats:
    """Bytes/s that a large ring moves past each rank."""
    link = machine.link_bandwidth * constants.link
    network = machine.network_bandwidth * constants.network * ranks.share
    return np.where(ranks.domains > 1, np.minimum(link, network * ranks.inside), link)


def all_gather_seconds(
    nbytes: Floats,
    ranks: CommGroups,
    machine: Machine,
    constants: Constants,
    *,
    logarithmic: bool = True,
) -> Floats:
    """All-gather to, or reduce-scatter from, ``nbytes`` on every rank; ``logarithmic``: PAT too."""
    n, domains = ranks.size, ranks.domains
    moved = nbytes * (n - 1) / n
    bandwidth = bus_bandwidth(ranks, machine, constants)
    inside_hops, outside_hops = n - domains, domains - 1
    ring = _best_protocol(
        moved, bandwidth, inside_hops, outside_hops, RING_LL, RING_SIMPLE, constants.latency
    )
    if not logarithmic:
        return np.where(n > 1, ring, 0.0)
    # PAT: logarithmic steps between domains, one rank of a domain a group (NCCL 2.23).
    steps = np.ceil(np.log2(np.maximum(domains, 1)))
    pat = _best_protocol(
        moved, bandwidth * PAT_SHARE, inside_hops, steps, RING_LL, RING_SIMPLE, constants.latency
    )
    return np.where(n > 1, np.minimum(ring, pat), 0.0)


def all_reduce_seconds(
    nbytes: Floats,
    ranks: CommGroups,
    machine: Machine,
    constants: Constants,
    *,
    in_network: bool = False,
) -> Floats:
    """Sum of ``nbytes`` over the group, on every rank; ``in_network``: the switches may add."""
    n, domains = ranks.size, ranks.domains
    bandwidth = bus_bandwidth(ranks, machine, constants)
    moved = 2 * nbytes * (n - 1) / n
    ring = _best_protocol(
        moved,
        bandwidth,
        2 * (n - domains),
        2 * (domains - 1),
        RING_LL,
        RING_SIMPLE,
        constants.latency,
    )
    depth = np.ceil(np.log2(np.maximum(domains, 1)))
    tree = _best_protocol(
        moved,
        bandwidth * TREE_SHARE,
        2 * (ranks.inside - 1),
        2 * depth,
        TREE_LL,
        TREE_SIMPLE,
        constants.latency,
    )
    best = np.minimum(ring, tree)
    if machine.in_switch_reduction:
        link = machine.link_bandwidth * SWITCH_SHARE
        best = np.where(domains == 1, np.minimum(best, SWITCH_SECONDS + nbytes / link), best)
    if in_network and machine.in_network_reduction:
        # Each byte goes up once and comes back once, whatever the number of domains.
        network = machine.network_bandwidth * constants.network
        tree = 2 * SWITCH_SECONDS + nbytes / np.minimum(bandwidth, network * ranks.inside)
        inside = np.where(ranks.inside > 1, nbytes / (machine.link_bandwidth * SWITCH_SHARE), 0.0)
        best = np.where(domains > 1, np.minimum(best, tree + inside), best)
    return np.where(n > 1, best, 0.0)


def all_to_all_seconds(
    nbytes: Floats, ranks: CommGroups, machine: Machine, constants: Constants
) -> Floats:
    """Every rank sends ``nbytes``, spread evenly over the group (its own part stays)."""
    n = ranks.size
    inside = nbytes * (ranks.inside - 1) / n
    outside = nbytes * (n - ranks.inside) / n
    network = machine.network_bandwidth * constants.network
    moving = np.maximum(inside / (machine.link_bandwidth * constants.link), outside / network)
    latency = RING_SIMPLE[0] + np.where(ranks.domains > 1, RING_SIMPLE[2], RING_SIMPLE[1])
    return np.where(n > 1, moving + constants.latency * latency, 0.0)


def send_seconds(
    nbytes: Floats, stride: Floats, span: Floats, machine: Machine, constants: Constants
) -> Floats:
    """A rank's message to a neighbour ``stride`` ranks away, in a chain over ``span`` ranks.

    The mean of both directions for the rank that takes longest: where neighbours share a domain and
    the chain leaves it, that rank has one neighbour inside and one outside.
    """
    outside = np.where(stride >= machine.domain, 1.0, np.where(span > machine.domain, 0.5, 0.0))
    share = pod_share(np.full_like(stride, np.inf), stride, machine)
    network = nbytes / (machine.network_bandwidth * constants.network * share)
    link = nbytes / (machine.link_bandwidth * constants.link)
    across = network + constants.latency * RING_SIMPLE[2]
    within = link + constants.latency * RING_SIMPLE[1]
    return outside * across + (1 - outside) * within


def _best_protocol(
    moved: Floats,
    bandwidth: Floats,
    inside_hops: Floats,
    outside_hops: Floats,
    small: tuple[float, float, float],
    large: tuple[float, float, float],
    latency: float,
) -> Floats:
    quick = latency * (small[0] + inside_hops * small[1] + outside_hops * small[2])
    slow = latency * (large[0] + inside_hops * large[1] + outside_hops * large[2])
    return np.minimum(quick + moved / (bandwidth * LL_SHARE), slow + moved / bandwidth)
