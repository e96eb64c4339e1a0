"""When the queue must be looked at again although nothing happened."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.cluster.jobs.horizon import leave_ns
from phalanx.cluster.queue import windows
from phalanx.cluster.queue.claims import first_askable_ns
from phalanx.cluster.queue.index import QueueIndex
from phalanx.cluster.queue.promises import firm_after_ns
from phalanx.cluster.queue.window_nodes import WindowNodes
from phalanx.cluster.state import View


def next_wake_ns(index: QueueIndex, view: View) -> int | None:
    """When a window opens, a promise falls due, a job starves or can first be asked to leave."""
    now, policy, waiting = view.now_ns, view.policy.queue, index.waiting
    times = [windows.next_edge_ns(view), *_leaving_times(index.windows, view)]
    if waiting.lanes:
        oldest = (lane.entries[0] for lane in waiting.lanes.values())
        limits_ns = dict.fromkeys((policy.starving_ns, firm_after_ns(view, waiting)))
        since_ns = [at - view.jobs[job].waited_ns for at, job in oldest]
        times += [at + limit_ns for at in since_ns for limit_ns in limits_ns]
        for promise in index.promises.by_job.values():
            times += [promise.start_ns, promise.start_ns + policy.grace_ns]
    if index.state.tried_ns:
        times.append(_askable_ns(view, min(index.state.tried_ns.values())))
    return min((at for at in times if at is not None and at > now), default=None)


def _leaving_times(window_nodes: WindowNodes, view: View) -> Iterator[int]:
    """When each job on the nodes of a window that opens soon must begin to leave."""
    for window in windows.running(view):
        if windows.emptied_from_ns(view, window) <= view.now_ns < window.start_ns:
            members = window_nodes.members(view, window.name)
            there = dict.fromkeys(job for node in members for job in view.fleet.held[node])
            for number in there:
                job = view.jobs[number]
                if job.spec.team not in window.teams:
                    yield window.start_ns - leave_ns(view, job)


def _askable_ns(view: View, tried_ns: int) -> int | None:
    """When somebody can first be asked to leave who could not when a job last tried."""
    soonest = tried_ns + view.policy.queue.replan_ns
    after = tried_ns if soonest > view.now_ns else view.now_ns
    ripe = first_askable_ns(view, after, soonest)
    return None if ripe is None else max(ripe, soonest)
