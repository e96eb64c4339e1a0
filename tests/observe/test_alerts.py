"""Rules of alerts as a table: what is known, what is told."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.control.server.history.alert_watch import message_for
from phalanx.observe.alerts import (
    AlertFacts,
    AlertRule,
    AlertState,
    FiredAlert,
    JobFacts,
    KeptRule,
    goodput_between,
    in_words,
    judge,
)
from phalanx.observe.tracker.findings import RunFinding

NOW = 1_000_000.0
SPIKE = RunFinding(time=NOW - 30, kind="loss_spike", job=7, sentence="the loss of step 9 is high")
LOST = tuple(RunFinding(time=NOW - 60 * i, kind="node_lost", node="n1") for i in range(4))
JOB = JobFacts(
    job=7,
    name="a",
    team="red",
    used_gpu_seconds=8 * 3600,
    budget_gpu_seconds=10 * 3600,
    goodput={60.0: 0.5},
)
RULES = {
    "spikes": AlertRule(kind="finding", finding="loss_spike"),
    "flaps": AlertRule(kind="node_flapping", threshold=3),
    "slow": AlertRule(kind="goodput_below", threshold=0.9),
    "money": AlertRule(kind="budget_above", threshold=0.8),
}
WORDS = {
    "spikes": "when loss spike is found in any job",
    "flaps": "when a node is lost 3 times within 60 minutes",
    "slow": "when the goodput of any job is below 90% over 60 minutes",
    "money": "when any job has used 80% of its budget",
}
TOLD = {
    "spikes": "job 7: the loss of step 9 is high",
    "flaps": "node n1 was lost 4 times in 60 minutes",
    "slow": "job 7: its goodput was 50.0% in the last 60 minutes",
    "money": "job 7: 80% of its budget is used: 8 of 10 GPU-hours",
}


def facts(**more: object) -> AlertFacts:
    known = AlertFacts(now=NOW, findings=(SPIKE, *LOST), teams={7: "red"}, jobs=(JOB,))
    return structs.replace(known, **more)


def told(rule: AlertRule, known: AlertFacts, team: str = "", set_at: float = 0.0) -> list[str]:
    kept = KeptRule(name="r", rule=rule, team=team, set_at=set_at)
    return [each.text for each in judge(AlertState(), [kept], known)[1]]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_what_it_watches_and_tells_what_it_sees(name: str) -> None:
    assert in_words(RULES[name]) == WORDS[name]
    assert told(RULES[name], facts()) == [TOLD[name]]


@pytest.mark.parametrize(
    ("name", "untrue"),
    [
        ("spikes", {"findings": (structs.replace(SPIKE, kind="hang"),)}),
        ("spikes", {"findings": (structs.replace(SPIKE, time=NOW - 3700),)}),
        ("flaps", {"findings": LOST[:2]}),
        ("slow", {"jobs": (structs.replace(JOB, goodput={60.0: 0.95}),)}),
        ("slow", {"jobs": (structs.replace(JOB, goodput={}),)}),
        ("money", {"jobs": (structs.replace(JOB, used_gpu_seconds=7.9 * 3600),)}),
        ("money", {"jobs": (structs.replace(JOB, budget_gpu_seconds=0),)}),
    ],
)
def test_what_is_not_so_is_not_told(name: str, untrue: dict[str, object]) -> None:
    assert told(RULES[name], facts(**untrue)) == []


def test_a_rule_is_told_once_and_again_after_it_was_untrue() -> None:
    kept, state = [KeptRule(name="money", rule=RULES["money"])], AlertState()
    less = facts(jobs=(structs.replace(JOB, used_gpu_seconds=1.0),))
    counts = []
    for known in (facts(), facts(), less, facts(), facts()):
        state, alerts = judge(state, kept, known)
        counts.append(len(alerts))
    assert counts == [1, 0, 0, 1, 0] and len(state.fired) == 2


def test_findings_of_before_a_rule_are_old_news() -> None:
    assert told(RULES["spikes"], facts(), set_at=SPIKE.time + 1) == []
    assert told(RULES["spikes"], facts(), set_at=SPIKE.time) == [TOLD["spikes"]]


def test_a_rule_sees_its_own_teams_jobs_and_one_job_where_it_names_it() -> None:
    assert told(RULES["money"], facts(), team="blue") == []
    assert told(RULES["spikes"], facts(), team="blue") == []
    assert told(RULES["flaps"], facts(), team="blue") == [TOLD["flaps"]]  # nodes are everybody's
    assert told(structs.replace(RULES["money"], job=8), facts()) == []
    assert told(structs.replace(RULES["money"], job=7), facts(), team="red") == [TOLD["money"]]


def test_a_silenced_rule_is_listed_and_not_sent() -> None:
    kept = KeptRule(name="money", rule=RULES["money"], silent_until=NOW + 1)
    state, alerts = judge(AlertState(), [kept], facts())
    assert [each.silenced for each in alerts] == [True] and state.fired == tuple(alerts)


def test_goodput_is_of_what_was_gained_between_two_moments() -> None:
    first = {"productive": 100, "restart": 50}
    last = {"productive": 160, "bubble": 20, "restart": 70}
    assert goodput_between([(0, first), (1, last)]) == pytest.approx(0.8)
    assert goodput_between([(0, first)]) is None and goodput_between([(0, first)] * 2) is None


def test_receivers_get_the_form_that_they_read() -> None:
    alert = FiredAlert(rule="r", subject="7", time=1.0, text="<a> & b", job=7)
    assert message_for("slack:https://x", alert) == b'{"text":"r: &lt;a&gt; &amp; b"}'
    assert b'"subject":"alert r: <a> & b"' in message_for("mail:ann@example.org", alert)
    assert b'"kind":"alert"' in message_for("https://x", alert)
