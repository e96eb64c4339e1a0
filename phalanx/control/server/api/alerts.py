"""Endpoints of alerts: rules, what they told, silences, and a try."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, structs

from phalanx.control.server.history.alert_watch import MAIL, RULES, SLACK, kept_rules
from phalanx.control.server.http.endpoints import EVERYBODY, WRITERS, ApiError, Call, Endpoints
from phalanx.control.wire import api_types as t
from phalanx.observe.alerts import FINDINGS, AlertRule, FiredAlert, KeptRule, in_words

MOST_RULES = 200  # of a team: what one keeps takes nothing from another


class SilenceIn(t.In, frozen=True):
    """0 minutes: it speaks again."""

    minutes: Annotated[float, Meta(ge=0, le=1e6)]


class AlertOut(t.Out, frozen=True):
    """A rule. Who may not change it does not see whom it tells: addresses carry secrets."""

    name: str
    words: str
    rule: AlertRule
    by: str
    team: str
    silent_until: float
    targets: tuple[str, ...]  # as everybody may read them
    since: tuple[float, ...] = ()  # of what it sees now


class AlertsOut(t.Out, frozen=True):
    alerts: list[AlertOut]
    fired: list[FiredAlert]  # newest last
    findings: tuple[str, ...]  # that a rule may be about


class TriedTarget(t.Out, frozen=True):
    target: str
    problem: str  # "": it arrived


class TriedAlert(t.Out, frozen=True):
    tried: list[TriedTarget]


ENDPOINTS = Endpoints()


def _seen(call: Call, team: str) -> bool:
    return call.sees(team) if team else True


def _may_change(call: Call, kept: KeptRule) -> bool:
    return call.operator or (call.token.role == "user" and kept.team == call.token.team)


def shown_target(target: str) -> str:
    """Whom a rule tells, without what only its owner should know."""
    if target.startswith(MAIL):
        return target
    slack = SLACK if target.startswith(SLACK) else ""
    return f"{slack}{urlsplit(target.removeprefix(SLACK)).hostname or '?'}"


def _out(call: Call, kept: KeptRule) -> AlertOut:
    begins = f"{kept.name}\n"
    rule, state = kept.rule, call.leading.alerts.state
    return AlertOut(
        name=kept.name,
        words=in_words(rule),
        rule=rule if _may_change(call, kept) else structs.replace(rule, targets=()),
        by=kept.by,
        team=kept.team,
        silent_until=kept.silent_until,
        targets=tuple(map(shown_target, rule.targets)),
        since=tuple(at for key, at in state.open.items() if key.startswith(begins)),
    )


@ENDPOINTS.add("GET /v1/alerts", EVERYBODY)
async def list_alerts(call: Call) -> AlertsOut:
    """List the alert rules and the last alert of each."""
    rules = await call.server.read(kept_rules, call.server.journal)
    fired = [each for each in call.leading.alerts.state.fired if _seen(call, each.team)]
    own = not call.token.team  # what others' rules tell of another team's jobs stays theirs
    return AlertsOut(
        alerts=[_out(call, kept) for kept in rules if _seen(call, kept.team)],
        fired=[each for each in fired if own or each.team == call.token.team],
        findings=FINDINGS,
    )


async def _kept(call: Call) -> KeptRule:
    """The rule in the path, for who may change it."""
    rules = await call.server.read(kept_rules, call.server.journal)
    rule = next((each for each in rules if each.name == call.path.name), None)
    if rule is None or not _seen(call, rule.team):
        raise ApiError(404, "no_such_alert", f"there is no alert {call.path.name}")
    if not _may_change(call, rule):
        raise ApiError(403, "wrong_team", f"the alert {rule.name} is not your team's")
    return rule


async def _keep(call: Call, kept: KeptRule) -> AlertOut:
    body = msgspec.json.encode(kept)
    await call.server.read(call.server.journal.keep, RULES, kept.name, body)
    return _out(call, kept)


def _check_rule(call: Call, rule: AlertRule) -> None:
    if (rule.kind == "finding") != bool(rule.finding):
        raise ApiError(409, "bad_alert", "rules of kind finding need a finding, and only those")
    if rule.finding and rule.finding not in FINDINGS:
        raise ApiError(409, "bad_alert", f"no finding {rule.finding}: {', '.join(FINDINGS)}")
    if rule.kind in ("goodput_below", "budget_above") and not 0 < rule.threshold <= 1:
        raise ApiError(
            409, "bad_alert", f"threshold = {rule.threshold:g}: must be a fraction, such as 0.8"
        )
    if rule.kind == "node_flapping" and rule.threshold < 1:
        raise ApiError(
            409, "bad_alert", f"threshold = {rule.threshold:g}: must be a count, such as 3"
        )
    users = call.leading.core.view.policy.users
    for target in rule.targets:
        wrong = call.leading.alerts.wrong_target(target)
        if wrong:
            raise ApiError(409, "bad_target", f"{shown_target(target)}: {wrong}")
        if not call.operator:
            host = urlsplit(target.removeprefix(SLACK)).hostname or ""
            mail = target.removeprefix(MAIL).rpartition("@")[2]
            allowed = users.mail_domains if target.startswith(MAIL) else users.webhook_hosts
            if (mail if target.startswith(MAIL) else host) not in allowed:
                text = f"{shown_target(target)}: users tell only {', '.join(allowed) or 'nobody'}"
                raise ApiError(403, "target_closed", f"{text} (policy: users)")


@ENDPOINTS.add("PUT /v1/alerts/{name}", WRITERS, params=t.NamePath, body=AlertRule, audited=True)
async def set_alert(call: Call) -> AlertOut:
    """Set an alert rule: its condition and its recipients."""
    _check_rule(call, call.body)
    rules = await call.server.read(kept_rules, call.server.journal)
    token, name = call.token, call.path.name
    standing = next((each for each in rules if each.name == name), None)
    own = sum(each.team == token.team for each in rules)
    if standing is not None and not _seen(call, standing.team):
        raise ApiError(409, "name_taken", f"another team keeps an alert called {name}")
    if standing is not None:
        standing = await _kept(call)
    elif own >= MOST_RULES:
        raise ApiError(409, "too_many", f"your team keeps {own} alerts: remove one first")
    silent = standing.silent_until if standing is not None else 0.0
    made = KeptRule(
        name=name,
        rule=call.body,
        by=token.name,
        team=token.team,
        silent_until=silent,
        set_at=time.time(),
    )
    return await _keep(call, made)


@ENDPOINTS.add("DELETE /v1/alerts/{name}", WRITERS, params=t.NamePath, audited=True)
async def drop_alert(call: Call) -> AlertsOut:
    """Remove a rule."""
    kept = await _kept(call)
    await call.server.read(call.server.journal.drop, RULES, kept.name)
    return await list_alerts(call)


@ENDPOINTS.add(
    "POST /v1/alerts/{name}/silence", WRITERS, params=t.NamePath, body=SilenceIn, audited=True
)
async def silence_alert(call: Call) -> AlertOut:
    """Silence a rule for a while; its alerts are still listed."""
    kept, minutes = await _kept(call), call.body.minutes
    until = time.time() + 60 * minutes if minutes else 0.0
    return await _keep(call, structs.replace(kept, silent_until=until))


@ENDPOINTS.add("POST /v1/alerts/{name}/test", WRITERS, params=t.NamePath, audited=True)
async def try_alert(call: Call) -> TriedAlert:
    """Send a test message to every recipient of a rule, and report each delivery."""
    kept, watch = await _kept(call), call.leading.alerts
    tried = []
    for target in kept.rule.targets:
        problem = await call.server.read(watch.try_now, target, kept)
        tried.append(TriedTarget(target=shown_target(target), problem=problem))
    return TriedAlert(tried=tried)
