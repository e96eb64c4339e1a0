"""Whether a gang waits for a check of the nodes that it is about to get."""

from __future__ import annotations

from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.state import View

LEAST_NODES = 3  # of two nobody can be told apart


def waits_until_ns(view: View, job: ClusterJob, placement: Placement) -> int:
    """Until when a gang that could start here waits for a check of its nodes; 0: it starts.

    It waits once, however many checks are made meanwhile, and not where none can be made: on
    parts of nodes, on nodes of several kinds, or so soon after a check that came to nothing.
    """
    policy, state, now = view.policy.fabric_checks, view.fabric_checks, view.now_ns
    fleet, nodes = view.fleet, placement.nodes
    if not policy.before_nodes or len(nodes) < max(policy.before_nodes, LEAST_NODES):
        return 0
    until_ns = state.waits.get(job.id, now + policy.limit_ns)
    if now >= until_ns or now < state.not_before_ns:
        return 0
    kinds = {(fleet.nodes[node].kind, fleet.nodes[node].gpus) for node in nodes}
    if len(kinds) > 1 or any(fleet.held[node] for node in nodes):
        return 0
    measured, oldest_ns = state.measured_ns, now - policy.fresh_ns
    if all(node in measured and measured[node] > oldest_ns for node in nodes):
        return 0
    return until_ns
