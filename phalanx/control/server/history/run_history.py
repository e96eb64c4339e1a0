"""Follows the log for people: runs, findings and the ledger over time."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import msgspec

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.ledger.report import Share, report
from phalanx.cluster.protocol.commands import Command, job_of
from phalanx.cluster.protocol.events import Event, Progress
from phalanx.config import ConfigError, job_from_table
from phalanx.config.toml_text import parse_toml
from phalanx.control.server.alarms import Alarms
from phalanx.control.server.history.incidents import FAILURES, IncidentHistory, node_names
from phalanx.control.server.http.views import names_of
from phalanx.control.trust.secrets import shown_payload
from phalanx.control.wire.payload import PayloadError, TrainingWork, decode_payload
from phalanx.observe.node.node_messages import RunRecord
from phalanx.observe.store.journal import Journal
from phalanx.observe.tracker.findings import RunFinding, from_event
from phalanx.observe.tracker.runs import VALIDATED, Run

logger = logging.getLogger("phalanx.server")

FLUSH_SECONDS = 1.0
LEDGER_SECONDS = 10.0
FINE_LEDGER_NS = 2 * 86_400 * 10**9
COARSE_LEDGER_NS = 600 * 10**9
MOST_PLACEMENTS = 1_000
MOST_FRESH = 50  # jobs of one event whose runs are begun at once
MOST_COPIES = 500  # runs that are written at a time
Heard = Callable[[str, int, dict[str, Any]], None]


class RunHistory:
    """One instance a leadership. ``told`` hears of findings and ended jobs."""

    def __init__(
        self, core: Core, journal: Journal, told: Heard, alarms: Alarms | None = None
    ) -> None:
        self.core, self.journal, self._told = core, journal, told
        self._alarms = alarms or Alarms()
        self.incidents = IncidentHistory(core, self.add)
        self.counts: dict[str, int] = {}  # findings by kind
        self._runs: dict[int, Run] = {}
        self._dirty: dict[int, None] = {}
        self._placed: dict[int, Placement] = {}  # by job: the last one that its run tells of
        self._newest = max(core.view.jobs, default=0)
        self._unseen: deque[int] = deque()  # jobs of a large array that have no run yet
        self._written: dict[str, dict[str, int]] = {}  # by owner: its ledger as it is stored
        self._thin_ns = 0  # when old sums are thinned out next
        self._ended = {n for n, job in core.view.jobs.items() if job.ended}

    # What happens.

    def heard(self, event: Event, commands: Sequence[Command]) -> None:
        """An event was handled."""
        body, jobs = event.body, self.core.view.jobs
        found = from_event(body, event.time_ns, node_names(self.core, body))
        if found is not None:
            self.add(found)
        if isinstance(body, FAILURES):
            self.incidents.failed(event)
        last = next(reversed(jobs), 0)
        numbers = [job_of(each) for each in (body, *(command.body for command in commands))]
        fresh = range(self._newest + 1, last + 1)
        numbers += fresh[:MOST_FRESH]
        self._unseen.extend(fresh[MOST_FRESH:])
        self._newest = max(self._newest, last)
        for number in dict.fromkeys(numbers):
            job = jobs.get(number)
            if job is not None:
                self.incidents.follow(job, event, commands)
                if not isinstance(body, Progress):
                    self._note(job, event.time_ns)

    def add(self, finding: RunFinding) -> None:
        """A finding for people."""
        self.counts[finding.kind] = self.counts.get(finding.kind, 0) + 1
        try:
            self.journal.add_finding(finding)
        except sqlite3.Error as error:
            logger.error("a finding cannot be stored: %s", error)
        self._told("finding", finding.job, msgspec.to_builtins(finding))

    # Runs.

    def run_of(self, job: ClusterJob) -> Run:
        """What is known of a job's run."""
        run = self._runs.get(job.id) or self._kept_run(job.id) or first_look(job)
        self._runs[job.id] = run
        return run

    def summary_of(self, number: int) -> dict[str, Any]:
        """What is in memory of a run's last step and validation."""
        run = self._runs.get(number)
        return dict(run.summary) if run is not None else {}

    def _kept_run(self, number: int) -> Run | None:
        try:
            return self.journal.run(number)
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            logger.error("what was kept of the run of job %d cannot be read: %s", number, error)
            return None

    def describe(self, number: int, record: RunRecord) -> None:
        """Rank 0 said where its run comes from."""
        job = self.core.view.jobs.get(number)
        if job is None:
            return
        try:
            provenance = msgspec.json.decode(record.provenance)
        except msgspec.MsgspecError:
            return
        if isinstance(provenance, dict):
            run = self.run_of(job)
            run.provenance, run.folder = provenance, record.folder
            self._dirty[number] = None

    def saved(self, number: int, step: int, path: str, seconds: float) -> None:
        """A checkpoint of a job is complete."""
        job = self.core.view.jobs.get(number)
        if job is not None:
            run = self.run_of(job)
            entry = {"step": step, "path": path, "seconds": seconds}
            run.checkpoints = [*run.checkpoints[-999:], entry]
            self._dirty[number] = None

    def planned(self, number: int, prediction: dict[str, Any]) -> None:
        """What the planner expects of a job, on the nodes that it was given."""
        job = self.core.view.jobs.get(number)
        if job is not None:
            run = self.run_of(job)
            run.plan = {**run.plan, "prediction": prediction}
            self._dirty[number] = None

    def made(self, number: int, summary: dict[str, Any]) -> None:
        """The newest step of a job."""
        if number in self._runs:
            run = self._runs[number]
            validated = {name: run.summary[name] for name in VALIDATED if name in run.summary}
            run.summary = validated | summary

    def validated(self, number: int, found: dict[str, Any]) -> None:
        """A job was tried on held-out samples, or on tasks: what its summary says of that."""
        job = self.core.view.jobs.get(number)
        if job is not None:
            run = self.run_of(job)
            run.summary = run.summary | found
            self._dirty[number] = None

    def change(self, number: int, run: Run) -> None:
        """Somebody wrote a note or a tag."""
        self._runs[number] = run
        self.journal.put_run(number, run)

    def _note(self, job: ClusterJob, time_ns: int) -> None:
        run = self.run_of(job)
        run.state = job.state
        placement = job.placement
        if placement is not None and self._placed.get(job.id) is not placement:
            self._placed[job.id] = placement
            nodes = list(names_of(self.core.view.fleet, placement.nodes))
            last = run.placements[-1] if run.placements else {}
            if (last.get("nodes"), last.get("generation")) != (nodes, job.generation):
                entry = {
                    "time": time_ns / 1e9,
                    "generation": job.generation,
                    "nodes": nodes,
                    "replicas": placement.replicas,
                }
                run.placements = [*run.placements[1 - MOST_PLACEMENTS :], entry]
        if job.ended and job.id not in self._ended:
            self._ended.add(job.id)
            self._placed.pop(job.id, None)
            self.incidents.forget(job.id)
            run.ended = time_ns / 1e9
            run.exit = {"reason": job.why.code, "message": str(job.why), "evidence": job.evidence}
            body = {"job": job.id, "name": job.spec.name, "state": job.state, "why": str(job.why)}
            self._told("job", job.id, body)
        self._dirty[job.id] = None

    # Keeping.

    async def keep(self) -> None:
        """Write what changed, until cancelled."""
        ledger_due = 0.0
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            self._look_at_unseen()
            dirty = dict(islice(self._dirty.items(), MOST_COPIES))
            self._dirty = dict(islice(self._dirty.items(), MOST_COPIES, None))
            try:
                copies = self._copies(dirty)
                await asyncio.to_thread(self._write, copies)
                if time.monotonic() >= ledger_due:
                    ledger_due = time.monotonic() + LEDGER_SECONDS
                    await asyncio.to_thread(self._write_ledger, *self.ledger_now())
            except (sqlite3.Error, OSError) as error:
                logger.error("runs cannot be stored: %r", error)
                self._dirty = {**dirty, **self._dirty}
            for number in [n for n in self._runs if n in self._ended and n not in self._dirty]:
                del self._runs[number]

    def _look_at_unseen(self) -> None:
        """Runs of a large array are begun some at a time: nobody waits for all of them."""
        for _ in range(min(MOST_COPIES, len(self._unseen))):
            job = self.core.view.jobs.get(self._unseen.popleft())
            if job is not None:
                self._note(job, self.core.view.now_ns)

    def _copies(self, dirty: Iterable[int]) -> list[tuple[int, Run]]:
        """Runs as they are now, to be written by a thread; one that cannot be is left out."""
        copies = []
        for number in dirty:
            try:
                if number in self._runs:
                    body = msgspec.json.encode(self._runs[number])
                    copies.append((number, msgspec.json.decode(body, type=Run)))
            except (ValueError, OverflowError, RecursionError) as error:
                self._alarms.raised("runs", error, f"job {number}")
        return copies

    def _write(self, runs: list[tuple[int, Run]]) -> None:
        for number, run in runs:
            self.journal.put_run(number, run)

    def _write_ledger(self, time_ns: int, owners: dict[str, dict[str, int]]) -> None:
        # What did not change since is not written again: most jobs of a log have long ended.
        changed = {name: sums for name, sums in owners.items() if self._written.get(name) != sums}
        self.journal.note_ledger(time_ns, changed)
        self._written |= changed
        if time_ns >= self._thin_ns:
            self._thin_ns = time_ns + COARSE_LEDGER_NS
            self.journal.thin_ledger(time_ns, FINE_LEDGER_NS, COARSE_LEDGER_NS)

    def ledger_now(self) -> tuple[int, dict[str, dict[str, int]]]:
        """Sums of everybody, by bucket and by cause."""
        ledger = self.core.ledger
        totals = report(ledger, self.core.view.policy.price)
        shares = {"fleet": totals.fleet}
        shares |= {f"team:{team}": share for team, share in totals.teams.items()}
        shares |= {f"job:{job}": share for job, share in totals.jobs.items()}
        owners: dict[str, dict[str, int]] = {}
        for owner, share in shares.items():
            owners[owner] = share.buckets
            owners[f"{owner}#cause"] = by_cause(share)
        teams = {team: share.gpu_ns for team, share in totals.teams.items()}
        teams["(nobody)"] = totals.fleet.gpu_ns - sum(teams.values())
        owners["fleet#team"] = teams
        return ledger.now_ns, owners


def by_cause(share: Share) -> dict[str, int]:
    """The same time by what caused its loss; what was not lost is one entry."""
    found = {cause: sum(lost.values()) for cause, lost in share.by_cause.items()}
    return {"(not lost)": share.gpu_ns - sum(found.values()), **found}


def first_look(job: ClusterJob) -> Run:
    """A run as its submission describes it."""
    spec = job.spec
    return Run(
        id=str(job.id),
        name=spec.name,
        user=spec.user,
        team=spec.team,
        state=job.state,
        created=job.submitted_ns / 1e9,
        config=_config(shown_payload(spec.payload)),
        plan=msgspec.to_builtins(spec.expected),
    )


@lru_cache(maxsize=64)  # all jobs of an array run the same
def _config(payload: str) -> dict[str, Any]:
    try:
        work = decode_payload(payload)
        if not isinstance(work, TrainingWork):
            return {"argv": list(work.argv), "folder": work.folder}
        # As it comes back from a file: runs are compared with each other.
        found = msgspec.json.decode(msgspec.json.encode(job_from_table(parse_toml(work.toml))))
    except (PayloadError, ConfigError, msgspec.MsgspecError, ValueError, OverflowError):
        return {}
    return found if isinstance(found, dict) else {}
