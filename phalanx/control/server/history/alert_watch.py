"""Evaluates alert rules while the server is leader, and sends alerts to their recipients."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from phalanx.control.server.http.views import team_of
from phalanx.control.server.mail import MailRelay, bad_mail
from phalanx.control.server.webhooks import Webhooks, bad_address, post_there
from phalanx.observe.alerts import (
    AlertFacts,
    AlertState,
    FiredAlert,
    JobFacts,
    KeptRule,
    goodput_between,
    judge,
)
from phalanx.observe.store.journal import Journal
from phalanx.observe.tracker.findings import RunFinding

if TYPE_CHECKING:
    from phalanx.cluster.core import Core

logger = logging.getLogger("phalanx.server")

RULES, STATE = "alert_rule", "alert_state"  # kinds of what the journal keeps
EVERY_SECONDS = 5.0
MOST_FINDINGS = 2000
SLACK, MAIL = "slack:", "mail:"


class AlertWatch:
    """The alert loop of one term of leadership."""

    def __init__(
        self, core: Core, journal: Journal, webhooks: Webhooks, mail: MailRelay | None
    ) -> None:
        self._core, self._journal, self._webhooks, self._mail = core, journal, webhooks, mail
        self.state = self._stored = _state(journal)

    async def run(self) -> None:
        """Evaluate rules periodically until cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            await self.look(time.time())

    async def look(self, now: float) -> list[FiredAlert]:
        """Evaluate the rules once."""
        rules = await asyncio.to_thread(kept_rules, self._journal)
        if not rules and not self.state.open:
            return []
        facts = await self._facts(rules, now)
        self.state, new_alerts = judge(self.state, rules, facts)
        by_name = {kept.name: kept for kept in rules}
        for alert in new_alerts:
            if not alert.silenced:
                for target in by_name[alert.rule].rule.targets:
                    self._send(target, alert)
        if self.state != self._stored:  # last: a full disk keeps no alert back
            state = self.state
            body = msgspec.json.encode(state)
            await asyncio.to_thread(self._journal.keep, STATE, STATE, body)
            self._stored = state
        return new_alerts

    def _send(self, target: str, alert: FiredAlert) -> None:
        data = message_for(target, alert)
        if target.startswith(MAIL):
            if self._mail is not None:
                address = target.removeprefix(MAIL)
                self._webhooks.send_soon(address, data, self._mail.send)
        else:
            self._webhooks.send_soon(target.removeprefix(SLACK), data, post_there)

    def try_now(self, target: str, kept: KeptRule) -> str:
        """Send a test message; return the error or "". Blocks."""
        alert = FiredAlert(
            rule=kept.name, subject="test", time=time.time(), text="this is a test: all is well"
        )
        data = message_for(target, alert)
        if not target.startswith(MAIL):
            return post_there(target.removeprefix(SLACK), data)
        if self._mail is None:
            return NO_MAIL
        return self._mail.send(target.removeprefix(MAIL), data)

    def wrong_target(self, target: str) -> str:
        """Why a recipient is invalid; "" if it is valid."""
        if not target.startswith(MAIL):
            return bad_address(target.removeprefix(SLACK))
        return bad_mail(target.removeprefix(MAIL)) or ("" if self._mail is not None else NO_MAIL)

    async def _facts(self, rules: list[KeptRule], now: float) -> AlertFacts:
        core = self._core
        longest = max((kept.rule.minutes for kept in rules), default=0.0)
        after_ns = int((now - 60 * longest) * 1e9)
        findings: list[RunFinding] = await asyncio.to_thread(
            self._journal.findings, 0, MOST_FINDINGS, after_ns
        )
        spans = {kept.rule.minutes for kept in rules if kept.rule.kind == "goodput_below"}
        jobs = [_job_facts(core, number) for number in core.view.active]
        if spans:
            jobs = await asyncio.to_thread(self._with_goodput, jobs, sorted(spans), now)
        return AlertFacts(
            now=now,
            findings=tuple(findings),
            teams={each.job: team_of(core, each.job) for each in findings if each.job},
            jobs=tuple(jobs),
        )

    def _with_goodput(self, jobs: list[JobFacts], spans: list[float], now: float) -> list[JobFacts]:
        """Add goodput, whose stored sums are read in a thread."""
        made = []
        for job in jobs:
            shares = {}
            for minutes in spans:
                from_ns, to_ns = int((now - 60 * minutes) * 1e9), int(now * 1e9)
                sums = self._journal.ledger(f"job:{job.job}", from_ns, to_ns)
                share = goodput_between(sums)
                if share is not None:
                    shares[minutes] = share
            made.append(structs.replace(job, goodput=shares))
        return made


NO_MAIL = "this server sends no mail (`phalanx up --mail-relay`)"


def _job_facts(core: Core, number: int) -> JobFacts:
    job = core.view.jobs[number]
    used = core.ledger.used_gpu_ns(number) / 1e9 if number in core.ledger.accounts else 0.0
    return JobFacts(
        job=number,
        name=job.spec.name,
        team=job.spec.team,
        used_gpu_seconds=used,
        budget_gpu_seconds=float(job.budget_gpu_seconds),
    )


def kept_rules(journal: Journal) -> list[KeptRule]:
    """Stored rules by name."""
    rules = []
    for name, body in journal.kept(RULES):
        try:
            rules.append(msgspec.json.decode(body, type=KeptRule))
        except msgspec.MsgspecError as error:
            logger.error("the alert %s cannot be read: %s", name, error)
    return rules


def _state(journal: Journal) -> AlertState:
    for _, body in journal.kept(STATE):
        try:
            return msgspec.json.decode(body, type=AlertState)
        except msgspec.MsgspecError as error:
            logger.error("what alerts were told cannot be read: %s", error)
    return AlertState()


def message_for(target: str, alert: FiredAlert) -> bytes:
    """The message for a recipient: Slack's format, a mail's subject and text, or all as JSON."""
    line = f"{alert.rule}: {alert.text}"
    if target.startswith(SLACK):
        return msgspec.json.encode({"text": _slack_text(line)})
    if target.startswith(MAIL):
        return msgspec.json.encode({"subject": f"alert {line}"[:200], "text": line})
    return msgspec.json.encode({"kind": "alert", **structs.asdict(alert)})


def _slack_text(line: str) -> str:
    """Escape & < > for Slack."""
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
