"""The second half of the demo: the same job on four nodes and a spare, with kills in the middle."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from phalanx.config import Job, to_toml

if TYPE_CHECKING:
    from phalanx.testing.local_cluster import Commits, TrialCluster

Say = Callable[[str], None]

NODES, SPARES = 4, 1
END_SECONDS = 600.0
KEPT_SECONDS = 1800


class DemoIncident(Struct, kw_only=True):
    """One kill: seconds from it to each sign that it was dealt with."""

    what: str
    step: int  # newest committed one at the kill
    detected: float = 0.0  # the log knows
    restored: float = 0.0  # every rank has its state again
    resumed: float = 0.0  # the next step is committed
    lost_steps: int = 0  # committed steps that were made again
    repeated_steps: int = 0  # others, of which not every rank had told yet


class DemoOutcome(Struct, kw_only=True, tag_field="kind", tag="recovery"):
    """What the disturbed run showed."""

    url: str
    state: str
    incidents: list[DemoIncident]
    ledger: dict[str, float]  # GPU-seconds by bucket
    goodput: float
    ettr: float
    identical: bool
    folder: str
    differences: list[str] = []


def kill_things(job: Job, undisturbed: Path, say: Say, keep: bool = False) -> DemoOutcome:
    """Run the job on a cluster of this machine, kill a worker and a node, compare.

    ``keep``: the cluster and its page stay until somebody has seen enough.
    """
    from phalanx.testing.local_cluster import TrialCluster

    with tempfile.TemporaryDirectory(prefix="phalanx-demo-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        say(f"\n== The same job on {NODES} nodes and a spare, each a set of processes of its own")
        with TrialCluster(root, nodes=NODES, spares=SPARES) as cluster:
            say(f"watch it: {_link(cluster, 'job/1')}\n          (a link that is good once)")
            outcome = _disturb(cluster, job, undisturbed, say)
            if keep:
                say(table(outcome))
                _stay(cluster, say)
            return outcome


def _link(cluster: TrialCluster, view: str) -> str:
    """The address of a view that signs its reader in."""
    return f"{cluster.client.post('/v1/login-links', None, dict)['url']}/{view}"


def _stay(cluster: TrialCluster, say: Say) -> None:
    """Leaves the page up for whoever wants to look, until Ctrl-C or for half an hour."""
    say(f"""
== See it on the page
  the kills, and what was decided    {_link(cluster, "job/1")}
  what they cost                     {_link(cluster, "goodput")}
  the fleet as it was, with a slider {_link(cluster, "events")}
Each link is good once. The page stays for {KEPT_SECONDS // 60} minutes; Ctrl-C ends it.""")
    with suppress(KeyboardInterrupt):
        time.sleep(KEPT_SECONDS)


def _disturb(cluster: TrialCluster, job: Job, undisturbed: Path, say: Say) -> DemoOutcome:
    path = cluster.root / "job.toml"
    runs = Path(job.runs).absolute()
    data = structs.replace(job.data, path=str(Path(job.data.path).absolute()))
    path.write_text(to_toml(structs.replace(job, runs=str(runs), data=data)))
    number = cluster.submit(str(path))
    commits = cluster.commits(number, NODES)
    third = max(2, job.train.steps // 3)
    incidents = []
    for what, step in (("a worker", third), ("a whole node", 2 * third)):
        _follow(cluster, commits, step, job.train.steps, say)
        incidents.append(_kill(cluster, commits, number, what, say))
    _follow(cluster, commits, job.train.steps - 1, job.train.steps, say)
    state = cluster.wait_ended(number, END_SECONDS)
    folder = runs / job.name / f"job-{number}"
    from phalanx.testing.chaos import compare

    differences = compare(folder, undisturbed)
    share = cluster.get("/v1/ledger")["jobs"][str(number)]
    return DemoOutcome(
        url=cluster.url,
        state=state,
        incidents=incidents,
        ledger={name: gpu_ns / 1e9 for name, gpu_ns in share["buckets"].items()},
        goodput=share["goodput_ppm"] / 1e6,
        ettr=share["ettr_ppm"] / 1e6,
        identical=not differences,
        folder=str(folder),
        differences=differences,
    )


def _follow(cluster: TrialCluster, commits: Commits, step: int, steps: int, say: Say) -> None:
    """Wait for a step, and say now and then where the run is."""
    said, deadline = -10, time.monotonic() + END_SECONDS
    while True:
        newest = commits.newest()
        at = newest.step if newest is not None else 0
        if at >= min(said + max(10, steps // 10), step) and at > said:
            say(f"step {at}/{steps} is safe in memory, here and at a neighbour")
            said = at
        if at >= step:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {step} within {END_SECONDS:.0f} s")
        time.sleep(0.05)


def _kill(
    cluster: TrialCluster, commits: Commits, number: int, what: str, say: Say
) -> DemoIncident:
    generation, before = cluster.job(number)["generation"], commits.newest()
    assert before is not None
    node = cluster.node_of(1, number)
    at_ns = time.time_ns()
    if what == "a worker":
        say(f"-- SIGKILL of rank 1, on {node.name}")
        at = cluster.signal_worker(1, number, signal.SIGKILL)
    else:
        say(f"-- SIGKILL of everything on {node.name}: agent, keeper, worker")
        at = cluster.kill_node(node)
    cluster.wait(lambda: commits.first_after(generation), "the run to go on", END_SECONDS)
    after = commits.first_after(generation)
    assert after is not None
    restored_step = after.step - 1
    incident = DemoIncident(
        what=what,
        step=before.step,
        resumed=after.at - at,
        lost_steps=max(0, before.step - restored_step),
        repeated_steps=max(0, cluster.job(number)["step"] - restored_step),
    )
    for event in cluster.get(f"/v1/events?job={number}&limit=200")["events"]:
        seconds = (event["time_ns"] - at_ns) / 1e9
        if seconds > 0 and event["kind"] in ("WorkerExited", "NodeSilent"):
            incident.detected = incident.detected or seconds
        if seconds > 0 and event["kind"] == "GangReady":
            incident.restored = incident.restored or seconds
    say(f"-- it goes on with step {after.step} after {incident.resumed:.1f} s")
    return incident


def table(outcome: DemoOutcome) -> str:
    """The result, for people."""
    lines = [
        "\n== What happened",
        f"{'killed':14}{'at step':>8}{'detected':>10}{'restored':>10}{'next step':>11}"
        f"{'lost steps':>12}",
    ]
    lines += [
        f"{each.what:14}{each.step:>8}{each.detected:>9.2f}s{each.restored:>9.2f}s"
        f"{each.resumed:>10.2f}s{each.lost_steps:>12}"
        for each in outcome.incidents
    ]
    total = sum(outcome.ledger.values())
    lines.append(f"\n== Where {total:.0f} GPU-seconds went (goodput {100 * outcome.goodput:.0f} %)")
    for name, seconds in sorted(outcome.ledger.items(), key=lambda item: -item[1]):
        if seconds >= 0.05:
            lines.append(
                f"{name.replace('_', ' '):26}{seconds:>8.1f}{100 * seconds / total:>7.1f} %"
            )
    verdict = "yes" if outcome.identical else "NO: " + "; ".join(outcome.differences[:3])
    lines.append(f"\nloss curve and final weights identical to an undisturbed run: {verdict}")
    return "\n".join(lines)
