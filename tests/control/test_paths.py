"""Every way in which a run is disturbed, and what is left of it: nothing, where nothing must be."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx.testing.chaos.verdict import orphans
from phalanx.testing.local_cluster import Commits, TrialCluster
from phalanx.train import StepRecord, read_records
from tests.control.jobs import (
    FEW_STEPS,
    assert_same,
    first_samples,
    generations,
    losses,
    set_options,
    undisturbed,
    write_job,
)
from tests.control.server.test_replay import reach

END_SECONDS = 180
STEP_SECONDS = 0.35  # while something is to happen to a job of few steps
# Deadlines for a job of small steps, as long as a busy machine may hold all of them up.
PROMPT = """
[spares]
nodes = {spares}
[timeouts]
heartbeat_ns = 2_000_000_000
round_trip_ns = 1_000_000_000
least_hang_ns = 6_000_000_000
lease_margin_ns = 20_000_000_000
[recovery]
grow_after_ns = 500_000_000
"""

Disturbed = Callable[..., tuple[TrialCluster, int, Commits]]


@pytest.fixture
def disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disturbed]:
    """Starts a cluster whose workers obey drills, and a job on it."""
    monkeypatch.setenv("PHALANX_CHAOS", "1")
    stages: list[TrialCluster] = []

    def start(
        *settings: str,
        nodes: int = 4,
        spares: int = 0,
        steps: int = 60,
        paced: bool = False,
        policy: str = "",
        options: tuple[str, ...] = (),
    ) -> tuple[TrialCluster, int, Commits]:
        rules = PROMPT.format(spares=spares) + policy
        cluster = TrialCluster(tmp_path, nodes=nodes, spares=spares, policy=rules)
        stages.append(cluster.__enter__())
        path = write_job(tmp_path, "disturbed", steps)
        job = cluster.submit(str(path), *set_options(settings), *options)
        if paced:
            cluster.pace(job, STEP_SECONDS)
        return cluster, job, cluster.commits(job, nodes)

    yield start
    for cluster in stages:
        cluster.__exit__()
    assert orphans(tmp_path) == []


def folder_of(root: Path, job: int) -> Path:
    return root / "runs" / "disturbed" / f"job-{job}"


def ends_as_if_nothing_happened(
    cluster: TrialCluster, job: int, root: Path, expected: Path
) -> None:
    assert cluster.wait_ended(job, END_SECONDS) == "done", cluster.job(job)
    assert_same(folder_of(root, job), expected)


@contextmanager
def explained(cluster: TrialCluster, job: int) -> Iterator[None]:
    """What the log says of a job that did not do as it should."""
    try:
        yield
    except TimeoutError as error:
        said = cluster.get(f"/v1/events?limit=40&job={job}")["events"]
        raise AssertionError(
            f"{error}\n{cluster.job(job)}\n" + "\n".join(map(str, said))
        ) from error


def test_ranks_that_stand_still_are_found_named_and_replaced(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, FEW_STEPS)
    cluster, job, commits = disturbed(steps=FEW_STEPS, paced=True)
    reach(cluster, commits, 5)

    def hung() -> list[int]:
        found = cluster.get(f"/v1/jobs/{job}/incidents")["findings"]
        incidents = [each["evidence"] for each in found if each["kind"] == "incident"]
        return [each["failed_generation"] for each in incidents]

    stopped, dead = cluster.node_of(1, job), cluster.node_of(2, job)
    cluster.signal_worker(1, job, signal.SIGSTOP)
    with explained(cluster, job):
        cluster.wait(lambda: commits.first_after(1), "recovery from a stopped rank", 120)
    # A failure before the first incident is over would be part of it.
    cluster.wait(lambda: hung() == [1], "the first incident to be over", 120)
    cluster.order_fault(dead, job, "deadlock-0")
    with explained(cluster, job):
        cluster.wait(lambda: commits.first_after(2), "recovery from a deadlock", 120)
    cluster.pace(job, 0.0)
    names = {node["number"]: node["name"] for node in cluster.get("/v1/nodes")["nodes"]}
    named = [[names[n] for n in fact["nodes"]] for fact in cluster.events("NoProgress", job)]
    assert named == [[stopped.name], [dead.name]]
    evidence = dead.state / "jobs" / str(job) / "evidence" / "generation-2"
    assert "drill.py" in (evidence / "rank-2.stacks").read_text()
    assert "all_reduce" in (evidence / "rank-2.flight.json").read_text()
    frozen = stopped.state / "jobs" / str(job) / "evidence" / "generation-1" / "rank-1.process"
    assert "T (stopped)" in frozen.read_text()
    # The same through the server; an incident says which generation hung.
    told = b"".join(cluster.client.stream(f"/v1/jobs/{job}/stacks", generation=2, rank=2)).decode()
    assert told.startswith("generation 2\n\n== rank 2: stacks\n") and "drill.py" in told
    cluster.wait(lambda: hung() == [1, 2], "the second incident to be over", 120)
    ends_as_if_nothing_happened(cluster, job, tmp_path, expected)
    # Both count as failures of the fleet, and the interval between checkpoints follows.
    (rate,) = cluster.get("/v1/failure-rates")["rates"]
    assert rate["failures"] == sum(rate["causes"].values()) == 2
    report = json.loads((folder_of(tmp_path, job) / "exit_info.json").read_text())
    assert "2 in 0 node-days of this fleet" in report["details"]["checkpoint_interval"]


REPLICAS = ("parallel.data=3", "parallel.pipeline=1", "parallel.zero=0", "train.global_batch=12")


def test_a_flipped_bit_is_found_voted_on_and_undone(disturbed: Disturbed, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, FEW_STEPS, *REPLICAS)
    cluster, job, commits = disturbed(*REPLICAS, nodes=3, spares=1, steps=FEW_STEPS, paced=True)
    reach(cluster, commits, 5)
    culprit = cluster.node_of(1, job)
    cluster.order_fault(culprit, job, "flip-0")
    with explained(cluster, job):
        cluster.wait(lambda: commits.first_after(1), "recovery from a wrong bit", 120)
    cluster.pace(job, 0.0)
    (fact,) = cluster.events("Corruption", job)
    assert fact["step"] == fact["clean_step"] + 1
    states = {node["name"]: node["state"] for node in cluster.get("/v1/nodes")["nodes"]}
    assert states[culprit.name] == "quarantined"
    assert culprit.name not in cluster.job(job)["nodes"]
    ends_as_if_nothing_happened(cluster, job, tmp_path, expected)


SHARDED = ("parallel.pipeline=1", "parallel.zero=3", "train.verify_every=1")


def test_a_wrong_gradient_is_recomputed_and_its_node_leaves(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    three = ("parallel.data=3", "train.global_batch=12", *SHARDED)
    expected = undisturbed(tmp_path, FEW_STEPS, *three)
    cluster, job, commits = disturbed(*three, nodes=3, spares=1, steps=FEW_STEPS, paced=True)
    reach(cluster, commits, 5)
    culprit = cluster.node_of(1, job)
    cluster.order_fault(culprit, job, "backward-0")
    with explained(cluster, job):
        cluster.wait(lambda: commits.first_after(1), "recovery from a wrong gradient", 120)
    cluster.pace(job, 0.0)
    (fact,) = cluster.events("Corruption", job)
    assert fact["step"] == fact["clean_step"] + 1
    states = {node["name"]: node["state"] for node in cluster.get("/v1/nodes")["nodes"]}
    assert states[culprit.name] == "quarantined"
    assert culprit.name not in cluster.job(job)["nodes"]
    ends_as_if_nothing_happened(cluster, job, tmp_path, expected)
    folder = folder_of(tmp_path, job)
    records = list(read_records(folder / "metrics" / "steps.jsonl", StepRecord))
    assert all(0 < each.parts.verification < each.step_seconds for each in records)
    report = json.loads((folder / "exit_info.json").read_text())
    assert 0 < report["details"]["verifications"] < FEW_STEPS  # since the last start


PAIR = ("parallel.data=2", "parallel.pipeline=1", "parallel.zero=0")
DISPUTES = {
    "weights": (PAIR, "err-0"),
    "gradients": (("parallel.data=2", *SHARDED), "backward-0"),
}


@pytest.mark.soak
@pytest.mark.parametrize("numbers", DISPUTES)
def test_of_two_ranks_a_third_names_the_one_that_always_errs(
    numbers: str, disturbed: Disturbed, tmp_path: Path
) -> None:
    settings, fault = DISPUTES[numbers]
    expected = undisturbed(tmp_path, 80, *settings)
    cluster, job, commits = disturbed(*settings, nodes=2, spares=2, steps=80)
    reach(cluster, commits, 5)
    culprit, honest = cluster.node_of(0, job), cluster.node_of(1, job)
    cluster.order_fault(culprit, job, fault)
    with explained(cluster, job):
        cluster.wait(
            lambda: culprit.name not in (cluster.job(job)["nodes"] or [culprit.name]),
            "the culprit to be named",
            END_SECONDS,
        )
    made_again = {fact["step"] for fact in cluster.events("Corruption", job)}
    assert len(made_again) == 1 and len(cluster.events("Corruption", job)) == 3
    ends_as_if_nothing_happened(cluster, job, tmp_path, expected)
    states = {node["name"]: node["state"] for node in cluster.get("/v1/nodes")["nodes"]}
    assert states[culprit.name] == "quarantined" != states[honest.name]


@pytest.mark.soak
def test_of_two_replicas_the_one_with_the_flipped_bit_leaves(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, 80, *PAIR)
    cluster, job, commits = disturbed(*PAIR, nodes=2, spares=1, steps=80)
    reach(cluster, commits, 5)
    culprit = cluster.node_of(1, job)
    cluster.order_fault(culprit, job, "flip-0")
    with explained(cluster, job):
        cluster.wait(lambda: commits.first_after(1), "recovery from a wrong bit", 120)
    assert len(cluster.events("Corruption", job)) == 1
    assert culprit.name not in cluster.job(job)["nodes"]
    ends_as_if_nothing_happened(cluster, job, tmp_path, expected)


@pytest.mark.soak
def test_a_job_that_waits_for_its_node_goes_on_from_memory(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, 120)
    cluster, job, commits = disturbed(steps=120)  # no checkpoint before the end
    reach(cluster, commits, 10)
    gone = cluster.node_of(1, job)
    cluster.kill_node(gone)
    with explained(cluster, job):
        cluster.wait(lambda: cluster.job(job)["state"] == "pending", "the job to wait", 120)
        cluster.restart_node(gone)
        cluster.wait(lambda: commits.first_after(1), "the job to go on", END_SECONDS)
    restored = [fact["step"] for fact in cluster.events("GangReady", job)]
    assert restored[-1] >= 10, restored  # committed, and in the memory of the nodes alone
    ends_as_if_nothing_happened(cluster, job, tmp_path, expected)


@pytest.mark.soak
def test_without_a_spare_the_gang_shrinks_and_grows_back(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    # Growing must pay: to the core the job looks as if it had hours to go.
    steady = ("schedule.kind=constant",)
    expected = undisturbed(tmp_path, 200, *steady)
    cluster, job, commits = disturbed(*steady, steps=1_000_000, options=("--least", "1"))
    reach(cluster, commits, 5)
    gone = cluster.node_of(1, job)
    cluster.kill_node(gone)
    with explained(cluster, job):
        cluster.wait(lambda: cluster.job(job)["replicas"] == 1, "a smaller gang", 120)
        half = cluster.commits(job, 2)
        cluster.wait(lambda: half.first_after(1), "steps of one replica", 120)
        shrunk = half.first_after(1)
        assert shrunk is not None
        reach(cluster, half, shrunk.step + 20)
    cluster.restart_node(gone)
    with explained(cluster, job):
        cluster.wait(lambda: cluster.job(job)["replicas"] == 2, "the gang to grow back", 120)
        whole = cluster.commits(job, 4)
        cluster.wait(lambda: whole.first_after(2), "steps of both replicas", 120)
    found, wanted = losses(folder_of(tmp_path, job)), losses(expected)
    samples, right = first_samples(folder_of(tmp_path, job)), first_samples(expected)
    common = sorted(found.keys() & wanted.keys())
    assert len(common) > shrunk.step + 20
    assert {step: samples[step] for step in common} == {step: right[step] for step in common}
    for step in range(shrunk.step, shrunk.step + 20):
        assert found[step] == pytest.approx(wanted[step], rel=1e-4)


def slowness(cluster: TrialCluster, job: int) -> str:
    """Seconds that a rank sleeps before each step: far beyond how much steps vary on busy cores."""
    return str(max(2.0, 10 * cluster.job(job)["step_seconds"]))


@pytest.mark.soak
def test_a_slow_rank_is_found_and_swapped(disturbed: Disturbed, tmp_path: Path) -> None:
    wide = ("parallel.data=4", "parallel.pipeline=1")
    steps = 120  # so many that a swap pays, as slow as the rank becomes
    expected = undisturbed(tmp_path, steps, *wide)
    cluster, job, commits = disturbed(*wide, spares=1, steps=steps)
    reach(cluster, commits, 5)
    slow = cluster.node_of(2, job)
    cluster.order_fault(slow, job, "slow-0", slowness(cluster, job))
    with explained(cluster, job):
        cluster.wait(lambda: commits.first_after(1), "the slow rank to be swapped", END_SECONDS)
    fact = cluster.events("SlowRank", job)[0]
    assert fact["rank"] == 2
    assert slow.name not in cluster.job(job)["nodes"]
    ends_as_if_nothing_happened(cluster, job, tmp_path, expected)


@pytest.mark.soak
def test_a_slow_rank_gets_less_work_where_there_is_no_spare(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    wide = ("parallel.data=4", "parallel.pipeline=1", "parallel.zero=1", "train.global_batch=64")
    wide = (*wide, "schedule.kind=constant")
    expected = undisturbed(tmp_path, 60, *wide)
    cluster, job, commits = disturbed(*wide, steps=1_000_000)
    reach(cluster, commits, 5)
    slow = cluster.node_of(2, job)
    cluster.order_fault(slow, job, "slow-0", slowness(cluster, job))
    with explained(cluster, job):
        cluster.wait(lambda: _shares(cluster, job), "less work for the slow rank", END_SECONDS)
    shares = _shares(cluster, job)
    cluster.order_fault(slow, job, "slow-0", "0")  # what follows need not take long
    assert shares[2] == min(shares) < max(shares) and sum(shares) == 32
    at = commits.newest()
    assert at is not None
    reach(cluster, commits, max(60, at.step + 5))
    found, wanted = losses(folder_of(tmp_path, job)), losses(expected)
    assert first_samples(expected).items() <= first_samples(folder_of(tmp_path, job)).items()
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, rel=1e-4)


def _shares(cluster: TrialCluster, job: int) -> list[int]:
    events = cluster.get(f"/v1/events?limit=1000&job={job}")["events"]
    orders = [order for event in events for order in event["commands"]]
    found = [order for order in orders if order["kind"] == "Rebalance"]
    return list(cluster.job(job)["micro_batches"]) if found else []


def test_after_a_power_failure_the_job_goes_on_from_its_checkpoint(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, FEW_STEPS)
    cluster, job, _ = disturbed("checkpoint.every=10", steps=FEW_STEPS, paced=True)
    with explained(cluster, job):
        cluster.wait(lambda: cluster.job(job)["durable"] >= 10, "a durable checkpoint", 120)
    cluster.pace(job, 0.0)
    cluster.kill_everything()
    cluster.restart_everything()
    with explained(cluster, job):
        ends_as_if_nothing_happened(cluster, job, tmp_path, expected)
    restored = [fact["step"] for fact in cluster.events("GangReady", job)]
    assert restored[0] == 0 and restored[-1] >= 10


@pytest.mark.soak
def test_after_a_power_failure_nodes_read_their_own_disks_first(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    """Its shards in the shared folder are gone, so nothing else can have been read."""
    expected = undisturbed(tmp_path, 80)
    disks = f"checkpoint.local.path={tmp_path}/disks/$PHALANX_NODE"
    settings = ("checkpoint.every=20", "checkpoint.local.every=20", disks)
    cluster, job, _ = disturbed(*settings, steps=80)
    with explained(cluster, job):
        cluster.wait(lambda: cluster.job(job)["durable"] >= 20, "a durable checkpoint", 120)
    cluster.kill_everything()
    for shard in folder_of(tmp_path, job).glob("checkpoints/step-*/rank-*.safetensors"):
        shard.unlink()
    cluster.restart_everything()
    with explained(cluster, job):
        ends_as_if_nothing_happened(cluster, job, tmp_path, expected)
    restored = [fact["step"] for fact in cluster.events("GangReady", job)]
    assert restored[0] == 0 and restored[-1] >= 20


@pytest.mark.soak
def test_numbers_that_are_none_take_the_job_back(disturbed: Disturbed, tmp_path: Path) -> None:
    settings = ("checkpoint.every=5",)
    expected = undisturbed(tmp_path, 60, *settings)
    cluster, job, commits = disturbed(*settings, policy="spike_rollback_steps = 3\n")
    reach(cluster, commits, 12)
    cluster.order_fault(cluster.node_of(1, job), job, "nan-0")
    with explained(cluster, job):
        cluster.wait(lambda: commits.first_after(1), "the way back", 120)
        ends_as_if_nothing_happened(cluster, job, tmp_path, expected)


@pytest.mark.soak
def test_a_batch_behind_a_spike_is_left_out_if_so_configured(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    cluster, job, commits = disturbed(
        "checkpoint.every=5", policy="spike_rollback_steps = 3\nskip_batch = true\n"
    )
    reach(cluster, commits, 12)
    cluster.order_fault(cluster.node_of(1, job), job, "nan-0")
    with explained(cluster, job):
        cluster.wait(lambda: commits.first_after(1), "the way back", 120)
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    (fact,) = cluster.events("LossSpike", job)
    samples = first_samples(folder_of(tmp_path, job))
    left_out = range((fact["step"] - 1) * 8, fact["step"] * 8)
    assert not set(samples.values()) & set(left_out)
    assert samples[60] == 59 * 8 + 8  # one batch further than without
    log = "".join(
        path.read_text() for path in cluster.root.glob("local/nodes/*/jobs/*/worker-*.log")
    )
    assert f"samples {left_out[0]} to {left_out[-1]} are left out" in log


@pytest.mark.soak
def test_corrupt_snapshots_are_refused_and_the_neighbours_used(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, 100)
    cluster, job, commits = disturbed(steps=100)
    reach(cluster, commits, 5)
    node = cluster.node_of(1, job)
    cluster.signal_worker(1, job, signal.SIGSTOP)  # nothing new is handed over meanwhile
    assert cluster.corrupt_snapshots(node)
    cluster.signal_worker(1, job, signal.SIGKILL)
    with explained(cluster, job):
        cluster.wait(lambda: commits.first_after(1), "recovery", 120)
        ends_as_if_nothing_happened(cluster, job, tmp_path, expected)


@pytest.mark.soak
def test_at_its_time_limit_a_job_is_saved_queued_again_and_goes_on(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, 400)
    cluster, job, _ = disturbed(steps=400, options=("--minutes", "0.15", "--requeue"))
    with explained(cluster, job):
        ends_as_if_nothing_happened(cluster, job, tmp_path, expected)
    restored = [fact["step"] for fact in cluster.events("GangReady", job)]
    assert restored == sorted(set(restored)) and len(restored) > 1
    assert restored[1:] == [fact["step"] for fact in cluster.events("GangDrained", job)]


URGENT = """
[queue]
grace_ns = 20_000_000_000
least_run_ns = 0
[queue.qos.normal]
[queue.qos.urgent]
priority = 1000
preempts = true
"""


@pytest.mark.soak
def test_a_preempted_job_is_saved_and_goes_on_later(disturbed: Disturbed, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, 120)
    cluster, job, commits = disturbed(steps=120, policy=URGENT, options=("--preemptible",))
    reach(cluster, commits, 5)
    urgent = cluster.submit(str(write_job(tmp_path, "urgent", 5)), "--qos", "urgent")
    with explained(cluster, urgent):
        assert cluster.wait_ended(urgent, 90) == "done"
    with explained(cluster, job):
        ends_as_if_nothing_happened(cluster, job, tmp_path, expected)
    (drained,) = cluster.events("GangDrained", job)
    assert [fact["step"] for fact in cluster.events("GangReady", job)] == [0, drained["step"]]


@pytest.mark.soak
def test_a_drained_job_is_saved_and_goes_on_when_it_is_let_in(
    disturbed: Disturbed, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, 150)
    cluster, job, commits = disturbed(steps=150)
    reach(cluster, commits, 5)
    cluster.command("drain", str(job))
    with explained(cluster, job):
        cluster.wait(lambda: cluster.job(job)["state"] in ("held", "pending"), "it to leave", 120)
    assert cluster.job(job)["durable"] >= 5
    cluster.command("resume", str(job))
    with explained(cluster, job):
        ends_as_if_nothing_happened(cluster, job, tmp_path, expected)
    made = sorted(set(generations(folder_of(tmp_path, job)).values()))
    assert made == [1, 2]


@pytest.mark.soak
def test_a_program_that_always_fails_at_the_same_place_is_stopped_with_evidence(
    tmp_path: Path,
) -> None:
    (tmp_path / "bad.py").write_text("print('about to fail', flush=True)\nraise SystemExit(7)\n")
    with TrialCluster(tmp_path, nodes=1, policy=PROMPT.format(spares=0)) as cluster:
        job = cluster.submit("--world-size", "1", "--", sys.executable, "bad.py")
        assert cluster.wait_ended(job, 120) == "failed"
        shown: dict[str, Any] = cluster.get(f"/v1/jobs/{job}")
        assert "exit code 7" in shown["evidence"][-1]
        assert len(cluster.events("WorkerExited", job)) == 3


@pytest.mark.soak
def test_jobs_that_share_the_storage_write_one_after_the_other(tmp_path: Path) -> None:
    policy = PROMPT.format(spares=0) + "[storage]\nflushes = 1\nbytes_per_second = 50_000_000\n"
    with TrialCluster(tmp_path, nodes=4, policy=policy) as cluster:
        settings = set_options(("checkpoint.every=10", "parallel.pipeline=1"))
        jobs = [
            cluster.submit(str(write_job(tmp_path, name, 60)), *settings) for name in ("one", "two")
        ]
        for job in jobs:
            with explained(cluster, job):
                assert cluster.wait_ended(job, END_SECONDS) == "done"
        for job in jobs:
            events = cluster.get(f"/v1/events?limit=1000&job={job}")["events"]
            orders = [order for event in events for order in event["commands"]]
            granted = [order for order in orders if order["kind"] == "Flush"]
            assert len(cluster.events("FlushWanted", job)) >= 5 and len(granted) >= 5
            written = list((tmp_path / "runs").glob(f"*/job-{job}/checkpoints/step-*"))
            assert written  # the last ones are kept
