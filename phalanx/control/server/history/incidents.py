"""Gangs that form again: since when, why, and when they had their state and went on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from phalanx.cluster.causes import Cause
from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.protocol.commands import Command, Form, job_of
from phalanx.cluster.protocol.events import (
    Corruption,
    Event,
    GangReady,
    GangStuck,
    NodeSilent,
    NoProgress,
    Progress,
)
from phalanx.cluster.protocol.messages import DeviceError, RestoreFailed, WorkerExited
from phalanx.observe.tracker.findings import RunFinding, suggestion

FORGOTTEN_NS = 60 * 10**9  # a failure this long ago is not why a gang forms again
_ADVICE: dict[type, str] = {
    NodeSilent: "node_lost",
    DeviceError: "device_error",
    NoProgress: Cause.HANG,
    Corruption: Cause.SILENT_CORRUPTION,
    RestoreFailed: "restore_failed",
}
FAILURES = (WorkerExited, NodeSilent, DeviceError, NoProgress, Corruption, GangStuck, RestoreFailed)


class OpenRecovery(Struct):
    """A gang that is being brought up again."""

    finding: RunFinding
    generation: int
    began_ns: int
    restored_ns: int = 0
    reported_ns: int = 0  # a step that the gang's progress was told with, and not its first


class IncidentHistory:
    """One instance a leadership. ``add`` gets each incident as a finding when it is over."""

    def __init__(self, core: Core, add: Callable[[RunFinding], None]) -> None:
        self._core, self._add = core, add
        self._generations = {
            number: job.generation for number, job in core.view.jobs.items() if job.generation
        }
        self._open: dict[int, OpenRecovery] = {}
        self._failures: dict[int, tuple[int, Event]] = {}  # by job: since when, and what

    def follow(self, job: ClusterJob, event: Event, commands: Sequence[Command]) -> None:
        """A gang that forms again: since when, why, and when it had its state and went on."""
        before, body = self._generations.get(job.id, 0), event.body
        if job.generation > before:
            self._generations[job.id] = job.generation
            incident = self._open.get(job.id)
            if incident is not None:
                incident.generation = job.generation
                self._failures.pop(job.id, None)  # it was of this incident, and is of no later one
            elif before:
                self._begin(job, event, before, commands)
        incident = self._open.get(job.id)
        if incident is None:
            return
        if isinstance(body, GangReady) and body.generation == incident.generation:
            incident.restored_ns = event.time_ns
        elif isinstance(body, Progress) and body.generation == incident.generation:
            # Progress names the newest step; the records of the first one are on their way.
            if incident.reported_ns:
                self.went_on(job.id, body.generation, incident.reported_ns)
            elif incident.restored_ns:
                incident.reported_ns = body.at_ns
        elif job.ended:
            self._add(self._open.pop(job.id).finding)

    def failed(self, event: Event) -> None:
        """What a gang may have to form again for; the core may wait to hear more before it does."""
        body, fleet = event.body, self._core.view.fleet
        job, node = getattr(body, "job", 0), getattr(body, "node", -1)
        on_node = fleet.held[node] if isinstance(node, int) and 0 <= node < len(fleet) else ()
        for number in [job] if job else list(on_node):
            newest = self._generations.get(number, 0)
            if getattr(body, "generation", newest) < newest:
                continue  # word of a gang that has formed again since comes late
            began_ns, known = self._failures.get(number, (event.time_ns, event))
            if event.time_ns - began_ns > FORGOTTEN_NS:
                began_ns, known = event.time_ns, event
            # Whoever lost a peer does not know why; another does.
            better = isinstance(known.body, WorkerExited) and known.body.cause == Cause.LOST_PEER
            self._failures[number] = began_ns, event if better else known

    def went_on(self, number: int, generation: int, at_ns: int) -> None:
        """A gang made a step; the first one of a gang that formed again ends its incident."""
        known = self._open.get(number)
        if known is None or known.generation != generation or not known.restored_ns:
            return
        resumed_ns = max(at_ns, known.restored_ns)  # clocks of nodes are only nearly ours
        known.finding.evidence |= {
            "restored_seconds": (known.restored_ns - known.began_ns) / 1e9,
            "resumed_seconds": (resumed_ns - known.began_ns) / 1e9,
            "generation": generation,
        }
        self._add(self._open.pop(number).finding)

    def _begin(
        self, job: ClusterJob, event: Event, before: int, commands: Sequence[Command]
    ) -> None:
        """A gang that had made steps forms again."""
        began_ns, first = self._failures.get(job.id, (event.time_ns, event))
        if event.time_ns - began_ns > FORGOTTEN_NS:
            began_ns, first = event.time_ns, event
        # Progress is told now and then: what says that a gang failed may know of its first steps.
        step = max(job.step, *(getattr(each.body, "step", 0) for each in (first, event)))
        if not step:
            return
        self._failures.pop(job.id, None)
        finding = self._begun(job, step, began_ns, first, commands)
        finding.evidence["failed_generation"] = before
        self._open[job.id] = OpenRecovery(finding, job.generation, began_ns)

    def _begun(
        self, job: ClusterJob, step: int, began_ns: int, first: Event, commands: Sequence[Command]
    ) -> RunFinding:
        body = first.body
        reasons = [c.body.reason for c in commands if job_of(c.body) == job.id]
        formed = [c.body.reason for c in commands if isinstance(c.body, Form)]
        told = next((r.facts["cause"] for r in reasons if "cause" in r.facts), "")
        cause = str(told or getattr(body, "cause", "") or type(body).__name__)
        node = getattr(body, "node", -1)
        names = node_names(self._core, body)
        return RunFinding(
            time=began_ns / 1e9,
            kind="incident",
            job=job.id,
            rank=int(getattr(body, "rank", -1)),
            node=names.get(node, "") if isinstance(node, int) else "",
            evidence={
                "event": type(body).__name__,
                "sequence": first.sequence,
                "cause": cause,
                "root_cause_class": Cause.of(cause).domain,
                "step": step,
                "committed": job.committed,
            },
            sentence=str((formed or reasons)[0])
            if reasons
            else f"the gang forms again after {cause}",
            suggestion=_advice(body, job.id, names),
            picture={"series": ["loss", "step_seconds"], "step": step},
        )

    def forget(self, number: int) -> None:
        """A job has ended."""
        self._failures.pop(number, None)


def node_names(core: Core, body: object) -> dict[int, str]:
    """The name of the node that an event speaks of, by its number."""
    node, fleet = getattr(body, "node", None), core.view.fleet
    if isinstance(node, int) and 0 <= node < len(fleet):
        return {node: fleet.nodes[node].name}
    return {}


def _advice(body: object, job: int, names: dict[int, str]) -> str:
    kind = _ADVICE.get(type(body), "worker_exited")
    return suggestion(kind, job, int(getattr(body, "rank", -1)), next(iter(names.values()), ""))
