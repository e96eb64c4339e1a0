"""Who may ask for what of a job: the table in docs/concepts/security.md, as code."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from msgspec import structs

from phalanx import config
from phalanx.cluster.jobs.job import ClusterJob, JobSpec
from phalanx.cluster.jobs.user_limits import limited, refused_to_users
from phalanx.cluster.plan_record import PlanRecord
from phalanx.cluster.reasons import reason
from phalanx.control.server.http.endpoints import ApiError, Call, wrong_team
from phalanx.control.server.http.planned_job import (
    costs_above,
    planned,
    site_of,
    unplanned,
)
from phalanx.control.server.http.submission import spec_of
from phalanx.control.server.http.work_check import WorkError, checked_work, refuse_elastic
from phalanx.control.server.mail import bad_mail
from phalanx.control.server.webhooks import bad_address
from phalanx.control.wire import api_types as t
from phalanx.control.wire.payload import Payload

logger = logging.getLogger("phalanx.server")


async def rightful(call: Call, asked: t.JobRequest, work: Payload) -> tuple[JobSpec, list[str]]:
    """A submission in the name of whoever sent it, as far as they may go, and what was changed."""
    owned = _owned(call, _with_budget(call, _sized(asked)))
    notes = []
    if owned.team != asked.team:
        notes.append(f"it counts as team {owned.team}'s, as the token says")
    _sees_awaited(call, owned)
    _can_be_told(call, owned)
    try:
        job = await call.server.read(checked_work, work)
        refuse_elastic(job, owned.gang)
    except WorkError as error:
        raise ApiError(409, t.RefusalCode.BAD_WORK, str(error)) from None
    spec = await _planned(call, spec_of(owned, work, job), job)
    if call.operator:
        return spec, notes
    users = call.leading.core.view.policy.users
    why = refused_to_users(users, spec)
    if why is not None:
        raise ApiError(403, why.code, str(why))
    spec, cut = limited(users, spec)
    return spec, [*notes, *map(str, cut)]


def _can_be_told(call: Call, asked: t.JobRequest) -> None:
    """What is to be told of a job's end can be told."""
    if asked.webhook and (wrong := bad_address(asked.webhook)):
        raise ApiError(409, "bad_webhook", wrong)
    if asked.mail and (wrong := bad_mail(asked.mail)):
        raise ApiError(409, "bad_mail", wrong)
    if asked.mail and not call.server.options.mail_relay:
        text = "this server sends no mail (`phalanx up --mail-relay`): give a webhook"
        raise ApiError(409, "no_mail", text)


async def _planned(call: Call, spec: JobSpec, job: config.Job | None) -> JobSpec:
    """The submission with its plan. The planner is asked, but nothing it does refuses a job."""
    if job is None:
        return structs.replace(spec, plan=PlanRecord())
    try:
        site = site_of(call.leading.core, spec, job, call.server.options.state)
        return await call.server.read(planned, spec, job, site)
    except Exception as error:
        logger.exception("job %s could not be planned", spec.name)
        return unplanned(spec, job, f"the planner failed ({type(error).__name__}: {error})")


def refuse_unconfirmed(call: Call, specs: Sequence[JobSpec], *, confirmed: bool) -> None:
    """Jobs that are planned above what the policy lets pass are asked for twice."""
    above = costs_above(call.leading.core.view.policy.price, specs)
    if above and not confirmed:
        raise ApiError(
            409, t.RefusalCode.NEEDS_CONFIRMATION, f"{above}: confirm it to submit it all the same"
        )


def budget_seconds(call: Call, asked: t.Budget) -> int:
    """A budget as GPU time."""
    if (asked.gpu_hours is None) == (asked.dollars is None):
        raise ApiError(409, "bad_budget", "give gpu_hours or dollars: one of both")
    if asked.dollars is not None:
        return _affordable(call, int(asked.dollars * 1_000_000))
    return int((asked.gpu_hours or 0) * 3600)


def _affordable(call: Call, micro_dollars: int) -> int:
    """GPU-seconds that a sum pays for."""
    price = call.leading.core.view.policy.price.micro_dollars_per_gpu_hour
    seconds = micro_dollars * 3600 // price if price else 0
    if seconds < 1:
        told = f"a GPU-hour costs ${price / 1e6:g} here (policy: price.micro_dollars_per_gpu_hour)"
        text = f"${micro_dollars / 1e6:g} is no budget: {told}; give GPU-hours, or more"
        raise ApiError(409, "bad_budget", text)
    return seconds


def _with_budget(call: Call, asked: t.JobRequest) -> t.JobRequest:
    """The submission with its budget as GPU time: of two, the smaller one."""
    if not asked.budget_micro_dollars:
        return asked
    paid = _affordable(call, asked.budget_micro_dollars)
    seconds = min(paid, asked.budget_gpu_seconds or paid)
    return structs.replace(asked, budget_gpu_seconds=seconds, budget_micro_dollars=0)


def may_change_budget(call: Call, job: ClusterJob, gpu_seconds: int, *, forced: bool) -> None:
    """Users may give their jobs less to use; more, or leave to go above it, operators give."""
    if call.operator:
        return
    if forced:
        raise ApiError(403, "operators_force", str(reason("operators_force")))
    known = job.budget_gpu_seconds
    if known and not 0 < gpu_seconds <= known:
        text = f"only an operator gives job {job.id} more than its {known // 3600} GPU-hours"
        raise ApiError(403, "operators_only", text)


def _owned(call: Call, asked: t.JobRequest) -> t.JobRequest:
    """The submission with the user and the team of the token, or those an operator names."""
    token = call.token
    if call.operator:
        return structs.replace(asked, user=asked.user or token.name)
    team = token.team or "default"
    if asked.team not in (team, "default"):
        raise wrong_team(asked.team, team)
    if asked.user not in ("", token.name):
        raise ApiError(403, "wrong_user", f"this token is {token.name}'s, not {asked.user}'s")
    return structs.replace(asked, user=token.name, team=team)


def _sees_awaited(call: Call, asked: t.JobRequest) -> None:
    """Nobody learns by waiting for it how another team's job ends."""
    jobs = call.leading.core.view.jobs
    for each in asked.after:
        known = jobs.get(each.job)
        if known is not None and not call.sees(known.spec.team):
            why = reason("unknown_dependency", job=each.job)
            raise ApiError(409, why.code, str(why))


def _sized(asked: t.JobRequest) -> t.JobRequest:
    """The same, if every number can be stored and added up."""
    text = msgspec.json.encode(asked)
    if _largest(msgspec.json.decode(text)) > t.MOST << 8:
        raise ApiError(400, "bad_request", f"numbers must not be above {t.MOST << 8}")
    return asked


def _largest(value: object) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return max(map(_largest, value), default=0)
    return abs(value) if isinstance(value, int) else 0
