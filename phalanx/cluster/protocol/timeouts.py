"""Every deadline, derived in one place from what is measured or expected.

An order that cannot work (a node declared dead before its heartbeat could come, a lease that ends
before anybody noticed) is refused.

How long a running gang may be without a step, or without activity (``hang_limits``), is said with
the setting that it follows from. Our own trainer reports every step, so its steps are measured and
a missing one is noticed soon. A program of a user's own may report steps, and then also evaluates
and saves between them; or it never reports, and is judged by what its processes do alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, get_args

from msgspec import Struct

from phalanx.cluster.jobs.job import Expected, JobSpec
from phalanx.cluster.policy import TimeoutPolicy
from phalanx.cluster.units import MILLION
from phalanx.config import ConfigError
from phalanx.config.errors import ConfigProblem, problem


class Timeouts(Struct, frozen=True, kw_only=True):
    """Deadlines of one job, in nanoseconds."""

    heartbeat_ns: int  # between two of a node
    silent_ns: int  # without one, a node counts as silent
    hang_ns: int  # without a step, a gang counts as hung
    abort_ns: int  # survivors have left the collective
    join_ns: int  # all slots of a new generation have answered
    rejoin_ns: int  # the same where every node has workers, or a process that stands by for one
    restore_ns: int  # all ranks have loaded
    drain_ns: int  # a gang has stopped with its state safe
    lease_ns: int  # workers and keeper outlive their agent or controller this long
    program_lease_ns: int  # the same of programs, which nothing else keeps from writing


@lru_cache(maxsize=4096)  # a job asks at each of its phases
def derive(policy: TimeoutPolicy, expected: Expected, step_ns: int = 0) -> Timeouts:
    """The deadlines of a job with these times; ConfigError when their order cannot work.

    ``step_ns``: as measured; 0: as expected.
    """
    step_ns = step_ns or expected.step_ns

    def slack(usual_ns: int) -> int:
        return _slack(policy, usual_ns)

    silent = policy.heartbeat_ns * policy.missed_heartbeats + policy.round_trip_ns
    hang = max(policy.least_hang_ns, policy.hang_steps * step_ns + stall_ns(policy, expected))
    abort = slack(0) + policy.round_trip_ns
    join = abort + slack(expected.join_ns(cold=True))
    slowest = max(expected.restore_peer_ns, expected.restore_disk_ns, expected.restore_remote_ns)
    restore = slack(slowest + expected.form_ns)
    timeouts = Timeouts(
        heartbeat_ns=policy.heartbeat_ns,
        silent_ns=silent,
        hang_ns=hang,
        abort_ns=abort,
        join_ns=join,
        rejoin_ns=abort + slack(expected.join_ns(cold=False)),
        restore_ns=restore,
        drain_ns=slack(step_ns + expected.checkpoint_ns + expected.flush_ns),
        lease_ns=silent + join + policy.lease_margin_ns,
        program_lease_ns=silent - policy.round_trip_ns,
    )
    problems = order_problems(timeouts, policy)
    if problems:
        raise ConfigError.of(problems)
    return timeouts


def stall_ns(policy: TimeoutPolicy, expected: Expected) -> int:
    """How long a snapshot or a checkpoint may hold up a step."""
    return _slack(policy, max(expected.snapshot_ns, expected.checkpoint_ns))


def _slack(policy: TimeoutPolicy, usual_ns: int) -> int:
    return usual_ns * policy.slack_ppm // MILLION + 2 * policy.round_trip_ns


def order_problems(timeouts: Timeouts, policy: TimeoutPolicy) -> list[ConfigProblem]:
    """What is wrong with the order of deadlines."""
    problems = []
    if policy.missed_heartbeats < 2:
        rule = "one lost message would kill a node"
        key = "timeouts.missed_heartbeats"
        problems.append(problem(key, policy.missed_heartbeats, rule, "set at least 2"))
    if policy.heartbeat_ns < 2 * policy.round_trip_ns:
        rule = "must be at least two round trips, or a late heartbeat looks like a missing one"
        fix = f"set at least {2 * policy.round_trip_ns}"
        problems.append(problem("timeouts.heartbeat_ns", policy.heartbeat_ns, rule, fix))
    if policy.slack_ppm < MILLION:
        rule = "a phase must be given the time it is expected to take"
        problems.append(
            problem("timeouts.slack_ppm", policy.slack_ppm, rule, "set 1000000 or more")
        )
    if policy.hang_steps < 2:
        rule = "a step that is merely slow would count as a hang"
        problems.append(problem("timeouts.hang_steps", policy.hang_steps, rule, "set at least 2"))
    if timeouts.lease_ns <= timeouts.silent_ns + timeouts.abort_ns:
        rule = "the lease must outlive the discovery of a silent agent and the abort that follows"
        fix = f"set lease_margin_ns above {timeouts.abort_ns}"
        problems.append(problem("timeouts.lease_margin_ns", policy.lease_margin_ns, rule, fix))
    return problems


LimitKind = Literal["first_step", "step", "phase", "idle"]


class Limit(Struct, frozen=True):
    """One limit; ``setting``: the key of the policy or of the job that it follows from."""

    kind: LimitKind
    ns: int  # 0: nothing is judged by it
    setting: str


class HangLimits(Struct, frozen=True):
    """All limits of one running gang."""

    first_step: Limit
    step: Limit
    phase: Limit  # a validation, a checkpoint: what is no step, and said so
    idle: Limit


def hang_limits(
    policy: TimeoutPolicy,
    spec: JobSpec,
    usual_step_ns: int = 0,
    usual_first_ns: int = 0,
    step_ns: int = 0,
) -> HangLimits:
    """The limits of a job. ``usual``: as measured in it so far; ``step_ns``: lately; 0: unknown."""
    step = _step(policy, spec, step_ns or usual_step_ns)
    first = _first_step(policy, spec, step, usual_first_ns)
    allowed = _first_step(policy, spec, step, 0)
    phase = Limit("phase", max(allowed.ns, step.ns), allowed.setting)
    return HangLimits(first, step, phase, _idle(policy, spec))


def fixed_limits(ns: int) -> Callable[[int], HangLimits]:
    """The same for every step, however long steps are."""
    limits = HangLimits(*(Limit(kind, ns, "fixed") for kind in get_args(LimitKind)))
    return lambda step_ns: limits


def _step(policy: TimeoutPolicy, spec: JobSpec, step_ns: int) -> Limit:
    if spec.timeouts.hang_ns:
        return Limit("step", spec.timeouts.hang_ns, "the job's hang_ns")
    derived = derive(policy, spec.expected, step_ns).hang_ns
    if not spec.reports_steps and policy.least_program_hang_ns >= derived:
        return Limit("step", policy.least_program_hang_ns, "timeouts.least_program_hang_ns")
    least = policy.least_hang_ns >= derived
    return Limit("step", derived, "timeouts.least_hang_ns" if least else "timeouts.hang_steps")


def _first_step(policy: TimeoutPolicy, spec: JobSpec, step: Limit, usual_ns: int) -> Limit:
    """The first step of a generation.

    Our trainer restores before it goes, so one that was measured tells how long others may take. A
    program loads its state, and may read its data again up to there, before its first step: what
    that took the first time, when there was nothing to load, says nothing.
    """
    if spec.timeouts.first_step_ns:
        return Limit("first_step", spec.timeouts.first_step_ns, "the job's first_step_ns")
    allowed = Limit("first_step", policy.first_step_ns, "timeouts.first_step_ns")
    if step.ns > allowed.ns:
        allowed = Limit("first_step", step.ns, step.setting)
    if not usual_ns or not spec.reports_steps:
        return allowed
    derived = max(step.ns, policy.hang_steps * usual_ns + stall_ns(policy, spec.expected))
    return Limit("first_step", derived, "timeouts.hang_steps") if derived < allowed.ns else allowed


def _idle(policy: TimeoutPolicy, spec: JobSpec) -> Limit:
    if spec.timeouts.idle_ns:
        return Limit("idle", spec.timeouts.idle_ns, "the job's idle_ns")
    return Limit("idle", policy.idle_ns, "timeouts.idle_ns")
