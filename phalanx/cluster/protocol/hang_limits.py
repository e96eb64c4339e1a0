"""How long a running gang may be without a step, or without activity, and which setting says so.

Our own trainer reports every step, so its steps are measured and a missing one is noticed soon. A
program of a user's own may report steps, and then also evaluates and saves between them; or it
never reports, and is judged by what its processes do alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from msgspec import Struct

from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.policy import TimeoutPolicy
from phalanx.cluster.protocol.timeouts import derive, stall_ns

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
