"""``GET /metrics`` for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.jobs.measured import reports_steps
from phalanx.cluster.ledger.report import report
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.message_rights import MessageRefusal
from phalanx.control.server.http.endpoints import EVERYBODY, Call, Endpoints
from phalanx.observe.prometheus import Family, JobSample, job_families, render

ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET /metrics", EVERYBODY)
async def prometheus(call: Call) -> AsyncIterator[bytes]:
    """Give metrics in Prometheus's text format."""
    text = render([*_fleet(call), *_server(call), *job_families(_jobs(call))])

    async def once() -> AsyncIterator[bytes]:
        yield text

    return once()


def _jobs(call: Call) -> list[JobSample]:
    core, recorder = call.leading.core, call.leading.hub.gangs.metrics.recorder
    latest = recorder.latest if recorder is not None else {}
    return [
        sample_of(job, latest.get(number, {}))
        for number in core.view.active
        if call.sees((job := core.view.jobs[number]).spec.team)
    ]


def sample_of(job: ClusterJob, row: Mapping[str, float | int | None]) -> JobSample:
    """A running job. Steps that it only prints may be far apart and are left out."""
    return JobSample(
        job=job.id,
        name=job.spec.name,
        team=job.spec.team,
        step=job.step if reports_steps(job) else None,
        generation=job.generation,
        row=row,
    )


def _fleet(call: Call) -> list[Family]:
    core = call.leading.core
    fleet = core.view.fleet
    nodes: Counter[str] = Counter({state.name.lower(): 0 for state in NodeState})
    nodes.update(fleet.state(node).name.lower() for node in range(len(fleet)))
    jobs: Counter[str] = Counter()
    jobs.update(job.state for job in core.view.jobs.values() if call.sees(job.spec.team))
    families = [
        Family("phalanx_nodes", "gauge", "Nodes by state.", _by("state", nodes)),
        Family("phalanx_gpus", "gauge", "GPUs of the fleet.", [({}, float(fleet.total_gpus))]),
        Family("phalanx_jobs", "gauge", "Known jobs by state.", _by("state", jobs)),
    ]
    if not call.token.team:
        share = report(core.ledger, core.view.policy.price).fleet
        seconds = {bucket: gpu_ns / 1e9 for bucket, gpu_ns in share.buckets.items()}
        families.append(
            Family(
                "phalanx_ledger_gpu_seconds_total",
                "counter",
                "GPU time by bucket of the ledger.",
                [({"bucket": bucket}, value) for bucket, value in seconds.items()],
            )
        )
        goodput = Family("phalanx_goodput_ratio", "gauge", "Goodput of the fleet.", [])
        if share.steps_known:
            goodput.samples = [({}, share.goodput_ppm / 1e6)]
        families.append(goodput)
    return families


def _server(call: Call) -> list[Family]:
    leading, server = call.leading, call.server
    steps, hooks = leading.hub.gangs.metrics.steps, server.webhooks
    counters = {
        "phalanx_events_total": ("Events of the log.", leading.core.sequence),
        "phalanx_records_refused_total": ("Step records that made no sense.", steps.refused),
        "phalanx_records_lost_bytes_total": (
            "Bytes of step records that were overwritten before they were read.",
            steps.lost_bytes,
        ),
        "phalanx_connections_dismissed_total": (
            "Connections without a token that had to make room for others.",
            server.gate.dismissed,
        ),
        "phalanx_audit_lines_total": ("Lines of the audit log, ever.", server.audit.head.number),
        "phalanx_audit_lost_total": (
            "Lines of the audit log that could not be written (full disk).",
            server.audit.lost,
        ),
        "phalanx_audit_unshipped_total": (
            "Lines of the audit log that a receiver did not get.",
            sum(each.lost for each in server.audit_receivers),
        ),
        "phalanx_webhooks_sent_total": ("Webhook messages taken.", hooks.sent),
        "phalanx_webhooks_failed_total": (
            "Webhook messages given up or dropped.",
            hooks.failed + hooks.dropped,
        ),
    }
    gauges = {
        "phalanx_agents_connected": ("Agents with a connection.", len(leading.hub.connections)),
        "phalanx_controller_epoch": ("Epoch of this leadership.", leading.controller.epoch),
        "phalanx_store_failing": (
            "1 while nothing can be stored.",
            int(bool(leading.controller.problem)),
        ),
        "phalanx_connections_unknown": ("Connections that showed no token.", len(server.gate)),
        "phalanx_longest_handling_seconds": (
            "The longest that one event took the core, of this leadership.",
            leading.controller.longest_handling_seconds,
        ),
        "phalanx_metric_store_bytes": ("Bytes of metrics kept.", server.metrics.size_bytes()),
    }
    families = [Family(n, "counter", text, [({}, float(v))]) for n, (text, v) in counters.items()]
    families += [Family(n, "gauge", text, [({}, float(v))]) for n, (text, v) in gauges.items()]
    faults = _by("part", leading.controller.alarms.counts)
    text = "Faults of the server's own parts, which were set aside."
    families.append(Family("phalanx_server_faults_total", "counter", text, faults))
    kinds = _by("kind", leading.run_history.counts)
    families.append(Family("phalanx_findings_total", "counter", "Findings by kind.", kinds))
    refused = {why.name.lower(): leading.hub.refusals.counts[why] for why in MessageRefusal}
    text = "Messages of agents that were not theirs to say, by reason."
    whys = _by("reason", refused)
    families.append(Family("phalanx_agent_messages_refused_total", "counter", text, whys))
    return families


def _by(label: str, counts: dict[str, int]) -> list[tuple[dict[str, str], float]]:
    return [({label: name}, float(count)) for name, count in counts.items()]
