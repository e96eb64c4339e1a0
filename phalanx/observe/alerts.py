"""Alert rules and their evaluation, as a pure function of what the server stores.

A rule that becomes true is told once, and again only after it was untrue meanwhile. What happened
at a moment (a finding) is told once for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from phalanx.cluster.ledger.buckets import Buckets
from phalanx.observe.tracker.findings import SUGGESTIONS, RunFinding

MOST_TARGETS = 8
KEPT_FIRED = 200
COMPUTING = ("productive", "exposed_communication", "bubble")
RuleKind = Literal["finding", "goodput_below", "node_flapping", "budget_above"]
FINDINGS = tuple(sorted(SUGGESTIONS))


class AlertRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An alert rule. ``threshold``: a fraction, or a count for node_flapping."""

    kind: RuleKind
    finding: Annotated[str, Meta(pattern=r"^[a-z_]{0,40}$")] = ""  # which, of kind "finding"
    threshold: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    minutes: Annotated[float, Meta(ge=1, le=100_000)] = 60.0  # that it looks back
    job: Annotated[int, Meta(ge=0, le=1 << 53)] = 0  # 0: every one that its team sees
    targets: Annotated[
        tuple[Annotated[str, Meta(max_length=1000)], ...], Meta(max_length=MOST_TARGETS)
    ] = ()  # https://…, slack:https://…, mail:ann@example.org


class KeptRule(Struct, frozen=True, kw_only=True):
    """A stored rule with its name and owner. ``team`` "": covers every team's jobs."""

    name: str
    rule: AlertRule
    by: str = ""
    team: str = ""
    silent_until: float = 0.0  # seconds since 1970
    set_at: float = 0.0  # findings before it are old news to this rule


class JobFacts(Struct, frozen=True, kw_only=True):
    """The facts about a live job that rules use."""

    job: int
    name: str
    team: str
    used_gpu_seconds: float = 0.0
    budget_gpu_seconds: float = 0.0  # 0: none
    goodput: dict[float, float] = {}  # by minutes looked back


class AlertFacts(Struct, frozen=True, kw_only=True):
    """Everything that rules are evaluated on, at one moment."""

    now: float
    findings: tuple[RunFinding, ...] = ()
    teams: dict[int, str] = {}  # of jobs that findings name
    jobs: tuple[JobFacts, ...] = ()


class FiredAlert(Struct, frozen=True, kw_only=True):
    """An alert to send. ``subject`` identifies it for as long as its condition holds."""

    rule: str
    subject: str
    time: float
    text: str
    job: int = 0
    node: str = ""
    team: str = ""
    silenced: bool = False  # it was not sent


class AlertState(Struct, frozen=True, kw_only=True):
    """Active alerts by rule and subject with their start, and the last alerts sent."""

    open: dict[str, float] = {}
    fired: tuple[FiredAlert, ...] = ()  # newest last


def judge(
    state: AlertState, rules: Sequence[KeptRule], facts: AlertFacts
) -> tuple[AlertState, list[FiredAlert]]:
    """Evaluate all rules: the next state, and the new alerts."""
    new_alerts, still = list[FiredAlert](), dict[str, float]()
    for kept in rules:
        for alert in found_by(kept, facts):
            key = f"{kept.name}\n{alert.subject}"
            known = state.open.get(key)
            still[key] = facts.now if known is None else known
            if known is None and not (kept.rule.kind == "finding" and alert.time < kept.set_at):
                silenced = facts.now < kept.silent_until
                new_alerts.append(structs.replace(alert, silenced=silenced))
    fired = (*state.fired, *new_alerts)[-KEPT_FIRED:]
    return AlertState(open=still, fired=fired), new_alerts


def found_by(kept: KeptRule, facts: AlertFacts) -> Iterable[FiredAlert]:
    """Alerts of a rule whose condition holds now."""
    rule, since = kept.rule, facts.now - 60 * kept.rule.minutes
    recent = [
        each
        for each in facts.findings
        if each.time >= since and _concerns(kept, each.job, facts.teams.get(each.job, ""))
    ]
    match rule.kind:
        case "finding":
            for each in recent:
                if each.kind == rule.finding:
                    text = f"{_of(each.job)}{each.sentence or each.kind.replace('_', ' ')}"
                    subject = f"{each.job} {each.node} {each.time:.3f}"
                    yield _alert(kept, subject, text, each.time, job=each.job, node=each.node)
        case "node_flapping":
            lost = Counter(each.node for each in recent if each.kind == "node_lost" and each.node)
            for node, times in lost.items():
                if times >= max(1, rule.threshold):
                    text = f"node {node} was lost {times} times in {_span(rule.minutes)}"
                    yield _alert(kept, node, text, facts.now, node=node)
        case "goodput_below" | "budget_above":
            for job in facts.jobs:
                text = _job_text(rule, job) if _concerns(kept, job.job, job.team) else ""
                if text:
                    yield _alert(kept, str(job.job), _of(job.job) + text, facts.now, job=job.job)


def _job_text(rule: AlertRule, job: JobFacts) -> str:
    if rule.kind == "goodput_below":
        share = job.goodput.get(rule.minutes)
        if share is None or share >= rule.threshold:
            return ""
        return f"its goodput was {share:.1%} in the last {_span(rule.minutes)}"
    if not job.budget_gpu_seconds:
        return ""
    share = job.used_gpu_seconds / job.budget_gpu_seconds
    used, most = job.used_gpu_seconds / 3600, job.budget_gpu_seconds / 3600
    text = f"{share:.0%} of its budget is used: {used:,.3g} of {most:,.3g} GPU-hours"
    return text if share >= rule.threshold else ""


def goodput_between(sums: Sequence[tuple[int, Buckets]]) -> float | None:
    """Goodput of a job between two sums of its ledger; None if it had no GPUs."""
    if len(sums) < 2:
        return None
    (_, first), (_, last) = sums[0], sums[-1]
    gained = {name: value - first.get(name, 0) for name, value in last.items()}
    total = sum(gained.values())
    return sum(gained.get(name, 0) for name in COMPUTING) / total if total > 0 else None


def in_words(rule: AlertRule) -> str:
    """A rule as a sentence."""
    of = f"job {rule.job}" if rule.job else "any job"
    match rule.kind:
        case "finding":
            node = rule.finding in ("node_lost", "device_error", "throttling", "ecc_growth")
            what = rule.finding.replace("_", " ")
            return f"when {what} is found{'' if node and not rule.job else f' in {of}'}"
        case "node_flapping":
            return f"when a node is lost {rule.threshold:g} times within {_span(rule.minutes)}"
        case "goodput_below":
            last = _span(rule.minutes)
            return f"when the goodput of {of} is below {rule.threshold:.0%} over {last}"
        case "budget_above":
            return f"when {of} has used {rule.threshold:.0%} of its budget"


def _alert(
    kept: KeptRule, subject: str, text: str, time: float, *, job: int = 0, node: str = ""
) -> FiredAlert:
    return FiredAlert(
        rule=kept.name, subject=subject, time=time, text=text, job=job, node=node, team=kept.team
    )


def _concerns(kept: KeptRule, job: int, team: str) -> bool:
    if kept.rule.job and job != kept.rule.job:
        return False
    return not job or not kept.team or team == kept.team


def _of(job: int) -> str:
    return f"job {job}: " if job else ""


def _span(minutes: float) -> str:
    return f"{minutes / 60:g} hours" if minutes >= 120 else f"{minutes:g} minutes"
