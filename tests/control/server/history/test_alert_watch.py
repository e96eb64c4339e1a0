"""Alerts are sent once, also while nothing can be stored."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import msgspec
import pytest

from phalanx.control.server.history.alert_watch import RULES, AlertWatch
from phalanx.control.server.webhooks import Sender, Webhooks
from phalanx.observe.alerts import AlertRule, KeptRule
from phalanx.observe.store.journal import Journal
from phalanx.observe.tracker.findings import RunFinding
from tests.cluster.drive import Drive

NOW = 1_000_000.0
TARGET = "https://example.org/alerts"


class SentWebhooks(Webhooks):
    """Remembers what would be sent."""

    def __init__(self) -> None:
        super().__init__(())
        self.sent: list[str] = []

    def send_soon(self, address: str, data: bytes, send: Sender) -> None:
        self.sent.append(address)


def test_an_alert_is_sent_once_while_the_disk_is_full_and_stored_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, webhooks = Journal(tmp_path / "runs.sqlite"), SentWebhooks()
    rule = AlertRule(kind="finding", finding="node_lost", targets=(TARGET,))
    journal.keep(RULES, "lost", msgspec.json.encode(KeptRule(name="lost", rule=rule)))
    journal.add_finding(RunFinding(time=NOW - 5, kind="node_lost", node="n1"))
    watch = AlertWatch(Drive(nodes=1).core, journal, webhooks, None)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "keep", full)
        for later in (0, 5, 10):
            with pytest.raises(sqlite3.OperationalError):
                asyncio.run(watch.look(NOW + later))
    assert webhooks.sent == [TARGET]
    assert asyncio.run(watch.look(NOW + 15)) == []
    restarted = AlertWatch(Drive(nodes=1).core, journal, webhooks, None)
    assert asyncio.run(restarted.look(NOW + 20)) == []
    assert webhooks.sent == [TARGET]
