"""What a server has while it leads, and what it tells pages and webhooks meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from phalanx.cluster.core import Core
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import Event
from phalanx.control.server.agent_link.connections import Hub
from phalanx.control.server.controller import Controller
from phalanx.control.server.history.alert_watch import AlertWatch
from phalanx.control.server.history.run_history import RunHistory
from phalanx.control.server.http.live import Entry, LivePush
from phalanx.control.server.http.views import team_of
from phalanx.control.server.mail import MailRelay
from phalanx.control.server.security.auth import Tokens
from phalanx.control.server.security.joining import Joining
from phalanx.control.server.webhooks import Webhooks, post_there
from phalanx.observe.store.journal import Journal

RECENT_EVENTS = 2_000
PUSH_SECONDS = 0.5  # between two pushes of a job's newest step to pages


class Leading:
    """What a server has while it leads."""

    def __init__(
        self,
        controller: Controller,
        hub: Hub,
        tokens: Tokens,
        joining: Joining,
        journal: Journal,
        webhooks: Webhooks,
        mail: MailRelay | None = None,
    ) -> None:
        self.controller, self.hub, self.tokens, self.joining = controller, hub, tokens, joining
        self._webhooks, self._mail = webhooks, mail
        self.alerts = AlertWatch(controller.core, journal, webhooks, mail)
        self.run_history = RunHistory(controller.core, journal, self._tell, controller.alarms)
        controller.alarms.told = self.run_history.add
        hub.gangs.metrics.run_history = self.run_history
        controller.listeners.append(self.run_history.heard)
        self.recent: deque[tuple[Event, Sequence[Command]]] = deque(maxlen=RECENT_EVENTS)
        self.readers: list[asyncio.Queue[Entry]] = []
        self.changed = asyncio.Event()
        controller.listeners.append(self._note)

    @property
    def core(self) -> Core:
        """The core, to be read."""
        return self.controller.core

    async def push_steps(self) -> None:
        """Tells pages of the newest step of every job, a few times a second."""
        last_steps: dict[int, object] = {}
        while True:
            await asyncio.sleep(PUSH_SECONDS)
            recorder = self.hub.gangs.metrics.recorder
            for job, row in list(recorder.latest.items()) if recorder is not None else ():
                if self.readers and last_steps.get(job) != row["step"]:
                    last_steps[job] = row["step"]
                    self.push(LivePush("step", team_of(self.core, job), {"job": job, **row}))

    def _tell(self, kind: str, job: int, body: dict[str, Any]) -> None:
        self.push(LivePush(kind, team_of(self.core, job) if job else "", body))
        self._webhooks.tell(kind, body)
        about = self.core.view.jobs.get(job)
        if kind != "job" or about is None:
            return
        if about.spec.webhook:
            self._webhooks.tell_job(about.spec.webhook, kind, body, post_there)
        if about.spec.mail and self._mail is not None:
            self._webhooks.tell_job(about.spec.mail, kind, body, self._mail.send)

    def push(self, pushed: LivePush) -> None:
        """Something for pages that is not in the log."""
        for reader in self.readers:
            with suppress(asyncio.QueueFull):
                reader.put_nowait(pushed)

    def _note(self, event: Event, commands: Sequence[Command]) -> None:
        self.recent.append((event, commands))
        self.changed.set()
        for reader in self.readers:
            with suppress(asyncio.QueueFull):
                reader.put_nowait((event, commands))
