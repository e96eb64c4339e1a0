"""The server: leads or stands by on its store, and serves API, agents and page on one port."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from msgspec import Struct

from phalanx import __version__
from phalanx.cluster.policy import Policy
from phalanx.control.host.users import own_name
from phalanx.control.server.agent_link.connections import Hub
from phalanx.control.server.controller import Controller, CoreFailedError
from phalanx.control.server.expectation import Expectations
from phalanx.control.server.helper_process import Helper
from phalanx.control.server.history.fleet_history import FleetHistory
from phalanx.control.server.history.node_facts import NodeFactHistory
from phalanx.control.server.history.trial_values import TrialValues
from phalanx.control.server.leading import Leading
from phalanx.control.server.mail import MailRelay
from phalanx.control.server.maintenance import (
    archive_old,
    collect_garbage,
    keep_audit,
    keep_metrics,
    prune_tokens,
)
from phalanx.control.server.replay import recover
from phalanx.control.server.security.audit import NAME as AUDIT_NAME
from phalanx.control.server.security.audit import Audit, AuditRetention
from phalanx.control.server.security.audit_ship import shipper
from phalanx.control.server.security.auth import JOIN_HOURS, AuthError, Tokens
from phalanx.control.server.security.connection_gate import gate_for
from phalanx.control.server.security.joining import Joining
from phalanx.control.server.security.request_limits import RateLimit, RequestLimits
from phalanx.control.server.store.interface import (
    EventStore,
    Leadership,
    StoreBusyError,
    StoreError,
    StoreLostError,
    StoreUnusableError,
    full_disk_advice,
    open_store,
)
from phalanx.control.server.webhooks import Webhooks
from phalanx.control.trust.certificates import Authority
from phalanx.control.trust.secret_file import make_private, write_secret
from phalanx.control.trust.server_key import load_server_key
from phalanx.observe.store.journal import open_journal
from phalanx.observe.store.metric_store import open_metrics
from phalanx.observe.store.recorder import Recorder

if TYPE_CHECKING:
    from phalanx.control.server.history.gang_spans import GangSpans, Spans

logger = logging.getLogger("phalanx.server")

P = ParamSpec("P")
T = TypeVar("T")

STANDBY_SECONDS = 0.5  # between two tries to lead
RENEW_SECONDS = 1.0
JOIN_POLL_SECONDS = 0.1
LEAST_SECRET = 32  # letters of a token that somebody else chose


class Options(Struct, frozen=True, kw_only=True):
    """How a server is run."""

    state: Path
    host: str = "127.0.0.1"
    port: int = 7070
    store: str = ""  # "": SQLite in the state folder
    url: str = ""  # as others reach it; "": from host and port
    own_nodes: bool = False  # agents are started with it, or are on its machine
    tls_cert: Path | None = None
    tls_key: Path | None = None
    admin_token: Path | None = None  # file with the administrator's, as the site chose it
    own_tls: bool = False  # with a certificate of the cluster's own authority
    policy: Policy | None = None  # None: as it was, or the default
    most_body_bytes: int = 4 << 20
    requests_per_second: float = 100.0  # of one token, in the long run
    request_burst: int = 400
    failures_per_second: float = 5.0  # of one address without a good token
    failure_burst: int = 50
    orders_per_second: float = 50.0  # of one token: requests that change something
    order_burst: int = 400
    refusals_per_second: float = 10.0  # of one token: requests that were refused
    refusal_burst: int = 400
    body_bytes_per_second: float = 1 << 20  # of one token
    body_burst: int = 32 << 20
    webhooks: tuple[str, ...] = ()  # told of findings and ended jobs
    mail_relay: str = ""  # host[:port] that takes mail to people about their jobs; "": none
    mail_from: str = "phalanx@localhost"
    audit_to: tuple[str, ...] = ()  # where audit lines are sent too
    keep_audit_days: float = 400.0
    otlp: str = ""  # collector of OpenTelemetry, over HTTP; "": none
    keep_event_days: float = 30.0  # in the log; older ones go to archive/; 0: for ever
    most_metric_bytes: int = 20 << 30  # beyond it the oldest go, whatever their tier


class Server:
    """One process. ``leading`` is None while another server leads."""

    def __init__(self, options: Options) -> None:
        self.options = options
        with _kept_in(options.state):
            options.state.mkdir(parents=True, exist_ok=True, mode=0o700)
            make_private(options.state)
            self.store: EventStore = open_store(options.store, options.state)
            keeping = AuditRetention(days=options.keep_audit_days)
            self.audit = Audit(options.state / AUDIT_NAME, keeping=keeping)
            self.history = FleetHistory(options.state / "history.sqlite")
            self.node_facts = NodeFactHistory(options.state / "nodes.sqlite")
            self.metrics = open_metrics(options.state / "metrics.sqlite")
            self.journal = open_journal(options.state / "runs.sqlite")
        self.helper = Helper()
        self.expectations = Expectations(self.helper)
        self.trial_values = TrialValues(self.journal, self.metrics)
        self.webhooks = Webhooks(options.webhooks)
        self.audit_receivers = [shipper(where) for where in options.audit_to]
        self.audit.told += [each.take for each in self.audit_receivers]
        self.spans = _spans(options.otlp)
        self.leading: Leading | None = None
        self.leader = ""  # URL of whoever leads instead
        self._obstacle = ""  # why nobody can be asked who leads
        self.settled = asyncio.Event()  # it leads, or it stands by
        self.complete = (
            asyncio.Event()
        )  # nodes that it starts itself have joined, or there are none
        self.complete.set()
        self.url = options.url
        self.authority: Authority | None = None  # where it makes its own certificates
        limited = float(options.requests_per_second > 0)  # 0: nothing is
        self.limits = RequestLimits(
            tokens=RateLimit(options.requests_per_second, options.request_burst),
            addresses=RateLimit(options.failures_per_second, options.failure_burst),
            orders=RateLimit(limited * options.orders_per_second, options.order_burst),
            refusals=RateLimit(limited * options.refusals_per_second, options.refusal_burst),
            body_bytes=RateLimit(limited * options.body_bytes_per_second, options.body_burst),
            most_body_bytes=options.most_body_bytes,
        )
        self.gate = gate_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    async def await_own_nodes(self, nodes: int, seconds: float) -> int:
        """Until so many nodes are connected, or so long; how many are then.

        Nobody counts as silent meanwhile: after a restart they are known before they can speak.
        """
        self.complete.clear()
        began, deadline = time.monotonic(), time.monotonic() + seconds
        connected = 0
        while connected < nodes and time.monotonic() < deadline:
            await asyncio.sleep(JOIN_POLL_SECONDS)
            began, passed = time.monotonic(), time.monotonic() - began
            if self.leading is not None:
                self.leading.hub.machine.forgive(int(passed * 1e9))
                connected = len(self.leading.hub.connections)
        self.complete.set()
        return connected

    @property
    def fingerprint(self) -> str:
        """By which agents and people know this cluster's authority; "": it has none."""
        return self.authority.fingerprint if self.authority is not None else ""

    def leading_or_refuse(self) -> Leading:
        """What leads, or a refusal that names who does."""
        if self.leading is None:
            where = f"; {self.leader} leads" if self.leader else ""
            where = f" and cannot lead: {self._obstacle}" if self._obstacle else where
            raise AuthError(503, "not_leader", f"this server stands by{where}")
        return self.leading

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls something that blocks (the store) without holding up the sockets."""
        return await asyncio.to_thread(call, *args, **kwargs)

    async def lead_forever(self) -> None:
        """Leads whenever it can; stands by otherwise. StoreBusyError where standing by is vain."""
        while True:
            try:
                lead = await asyncio.to_thread(self.store.lead, self.url, __version__)
            except StoreBusyError as error:
                self.leader, self._obstacle = error.leader, ""
                if not self.options.store:
                    raise
                self.settled.set()
            except StoreUnusableError:
                raise
            except StoreError as error:
                if not self._may_wait():
                    raise
                if str(error) != self._obstacle:  # once, however long it lasts
                    logger.warning("cannot lead: %s", error)
                self._obstacle = str(error)
            else:
                self.leader = self._obstacle = ""
                await self._lead_until_deposed(lead)
            await asyncio.sleep(STANDBY_SECONDS)

    def _may_wait(self) -> bool:
        """Whether a store that fails is waited for.

        A database comes back by itself. A full disk at the start is told to whoever starts it,
        and waited for only by a server that agents and people already know.
        """
        return bool(self.options.store) or self.settled.is_set()

    async def _lead_until_deposed(self, lead: Leadership) -> None:
        while True:
            try:
                await self._lead(lead)
            except StoreLostError as error:
                logger.error("this server leads no more: %s", error)
                return
            except CoreFailedError:
                continue  # from the log, with the event set aside
            except StoreUnusableError:
                raise
            except StoreError as error:
                if not self._may_wait():
                    raise
                logger.error("cannot lead: %s", error)
                return

    async def _lead(self, lead: Leadership) -> None:
        policy = self.options.policy
        recovered = await asyncio.to_thread(recover, self.store, policy or Policy())
        if policy is not None:  # before anything is derived from it
            recovered.core.view.policy = policy
        controller = Controller(self.store, recovered, lead.epoch)
        with _kept_in(self.options.state):
            recorder = Recorder(self.metrics, recovered.core.view.policy.price)
        secret = await asyncio.to_thread(self.store.secret, "replicas")
        links = await asyncio.to_thread(self.store.secret, "links")
        key = await asyncio.to_thread(load_server_key, self.store)
        hub = Hub(controller, __version__, recorder, secret, key, links)
        hub.acceptances.facts = self.node_facts
        tokens = await asyncio.to_thread(Tokens, self.store)
        joining = Joining(tokens, recovered.core.view.policy.join, own=self.options.own_nodes)
        await controller.start(policy)
        with _kept_in(self.options.state):
            self._first_tokens(tokens)
        relay = self.options.mail_relay
        mail = MailRelay(relay, self.options.mail_from) if relay else None
        leading = Leading(controller, hub, tokens, joining, self.journal, self.webhooks, mail)
        alarms = controller.alarms
        for each in recovered.aside:
            alarms.say("the log", each)
        gangs = self._gang_spans(controller)
        if gangs is not None:
            controller.listeners.append(gangs.heard)
        # What was loaded stays: the collector need not look through a fleet again and again.
        gc.collect()
        gc.freeze()
        jobs, nodes = len(recovered.core.view.jobs), len(recovered.core.view.fleet)
        text = "leading with epoch %d: event %d (%d replayed), %d nodes, %d jobs"
        logger.info(text, lead.epoch, recovered.core.sequence, recovered.replayed, nodes, jobs)
        tasks = [
            asyncio.create_task(work)
            for work in (
                controller.run(),
                self._renew(controller),
                *(alarms.kept(name, each) for name, each in self._beside(leading).items()),
            )
        ]
        self.leading = leading
        self.settled.set()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.leading = None
            if gangs is not None:
                gangs.close()
            hub.close(self.leader)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await controller.close()

    def _beside(self, leading: Leading) -> dict[str, Callable[[], Awaitable[None]]]:
        """What goes on while a server leads; none of it may end the leadership."""
        options, core = self.options, leading.core
        return {
            "the watch over agents": leading.hub.sweep,
            "the fleet's history": lambda: self.history.follow(core, leading.changed),
            "facts of nodes": self.node_facts.follow,
            "metrics": lambda: keep_metrics(self.metrics, options.most_metric_bytes),
            "the archive": lambda: archive_old(self.store, options.state, options.keep_event_days),
            "newest steps": leading.push_steps,
            "runs": leading.run_history.keep,
            "expectations": lambda: self.expectations.keep(leading),
            "webhooks": self.webhooks.run,
            "alerts": leading.alerts.run,
            "the audit log": lambda: keep_audit(self.audit),
            "garbage": collect_garbage,
            "tokens": lambda: prune_tokens(leading.tokens),
        }

    def _gang_spans(self, controller: Controller) -> GangSpans | None:
        if self.spans is None:
            return None
        from phalanx.control.server.history.gang_spans import GangSpans

        try:
            return GangSpans(controller.core, self.spans)
        except Exception as error:
            controller.alarms.raised("spans", error)
            return None

    async def _renew(self, controller: Controller) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await controller.renew()
            except StoreLostError:
                raise
            except StoreError as error:
                logger.warning("the store does not answer: %s", error)

    def _first_tokens(self, tokens: Tokens) -> None:
        """The administrator's token at the very first start; a join token that is still good."""
        admin, join = self.options.state / "admin.token", self.options.state / "join.token"
        if self.options.admin_token is not None:
            self._adopt_admin(tokens, self.options.admin_token)
        elif not len(tokens):
            # Named after who starts it: where agents are root, jobs run as the token's name.
            tokens.create("admin", own_name(), hand_over=partial(write_secret, admin))
        try:
            tokens.check(join.read_text().strip())
        except (OSError, ValueError, AuthError):
            hand_over = partial(write_secret, join)
            tokens.create("join", "agents", hours=JOIN_HOURS, hand_over=hand_over)

    def _adopt_admin(self, tokens: Tokens, path: Path) -> None:
        """The site gives the administrator's token, and it lies nowhere in the state."""
        secret = path.read_text().strip()
        if len(secret) < LEAST_SECRET:
            raise StoreError(f"{path}: a token has {LEAST_SECRET} letters at least")
        try:
            tokens.check(secret)
        except AuthError:
            tokens.create("admin", own_name(), secret=secret)

    def close(self) -> None:
        """Let go of the store and the audit log."""
        self.store.close()
        self.history.close()
        self.node_facts.close()
        self.helper.close()
        self.audit.close()
        for each in self.audit_receivers:
            each.close()
        with suppress(sqlite3.Error):
            self.metrics.close()
            self.journal.close()
        if self.spans is not None:
            self.spans.close()


@contextmanager
def _kept_in(state: Path) -> Iterator[None]:
    """Files that cannot be written end a start in words."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"no state can be kept in {state}: {why}{full_disk_advice(state)}"
        ) from None


def _spans(url: str) -> Spans | None:
    """Where spans go; OpenTelemetry is imported by those who want it."""
    if not url:
        return None
    from phalanx.control.server.history.gang_spans import otlp

    return otlp(url)
