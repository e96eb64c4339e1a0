"""Who is blamed when something fails under a real job, and what is saved before one is given up."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.checkpoint import latest, stored_tensors
from phalanx.control.backends.local import LocalNode, open_files
from phalanx.testing.chaos.verdict import belonging, orphans
from phalanx.testing.local_cluster import Commits, TrialCluster
from phalanx.testing.local_processes import worker_pids
from tests.control.jobs import assert_same, losses, undisturbed, write_job
from tests.control.server.test_replay import reach
from tests.forked_programs import python

END_SECONDS = 180
ENDLESS = 10**6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TrialCluster]:
    """A cluster of four nodes with the policy as it is shipped."""
    with TrialCluster(tmp_path, nodes=4) as cluster:
        yield cluster
    assert orphans(tmp_path) == []


def keeper_of(node: LocalNode, job: int) -> int:
    """The process that keeps a job's snapshots on a node."""
    log = node.state / "jobs" / str(job) / "keeper.log"
    return next(pid for pid in belonging(node.state) if log in open_files(pid))


def recovered(cluster: TrialCluster, commits: Commits, job: int, generation: int) -> None:
    """Until a later generation has committed steps of its own."""
    cluster.wait(
        lambda: commits.first_after(generation) or cluster.job(job)["state"] == "failed",
        "recovery",
        120,
    )
    assert cluster.job(job)["state"] != "failed", cluster.get(f"/v1/jobs/{job}/why")


@pytest.mark.soak
def test_a_keeper_killed_six_times_costs_no_retry(cluster: TrialCluster, tmp_path: Path) -> None:
    steps = 150
    expected = undisturbed(tmp_path, steps)
    job = cluster.submit(str(write_job(tmp_path, "disturbed", steps)), "--retries", "0")
    commits = cluster.commits(job, world_size=4)
    for number in range(6):
        newest = commits.newest()
        reach(cluster, commits, (newest.step if newest else 0) + 4)
        generation = cluster.job(job)["generation"]
        os.kill(keeper_of(cluster.node_of(number % 4, job), job), signal.SIGKILL)
        recovered(cluster, commits, job, generation)
    assert cluster.job(job)["retries_used"] == 0
    causes = {event["cause"] for event in cluster.events("WorkerExited", job)}
    assert causes <= {"keeper_lost", "lost_peer"}
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    assert_same(tmp_path / "runs" / "disturbed" / f"job-{job}", expected)


def test_a_job_that_is_given_up_writes_what_memory_holds(
    cluster: TrialCluster, tmp_path: Path
) -> None:
    job = cluster.submit(str(write_job(tmp_path, "bad", ENDLESS)), "--retries", "0")
    commits = cluster.commits(job, world_size=4)
    reach(cluster, commits, 5)
    for pid in worker_pids(cluster.node_of(1, job), job).values():
        os.kill(pid, signal.SIGSEGV)  # as a library does: nobody outside sends that
    assert cluster.wait_ended(job, END_SECONDS) == "failed"
    newest = commits.newest()
    assert newest is not None
    shown = cluster.job(job)
    assert shown["durable"] >= newest.step - 1 and "0 retries" in shown["why"]["text"]
    saved = (
        tmp_path / "runs" / "bad" / f"job-{job}" / "checkpoints" / f"step-{shown['durable']:08d}"
    )
    assert list(saved.parent.glob(f"step-*{shown['durable']}*/manifest.json"))


@pytest.mark.soak
def test_a_run_folder_that_is_away_for_a_while_fails_no_job(
    cluster: TrialCluster, tmp_path: Path
) -> None:
    steps = 120
    expected = undisturbed(tmp_path, steps)
    job = cluster.submit(str(write_job(tmp_path, "disturbed", steps)), "--retries", "0")
    commits = cluster.commits(job, world_size=4)
    reach(cluster, commits, 5)
    folder = tmp_path / "runs" / "disturbed"
    folder.rename(tmp_path / "away")
    cluster.signal_worker(0, job, signal.SIGKILL)
    cluster.wait(lambda: cluster.job(job)["why"]["code"] == "storage_wait", "it to wait", 60)
    assert "bring the folder back" in cluster.job(job)["why"]["text"]
    cluster.wait(lambda: "attempt 2" in cluster.job(job)["why"]["text"], "the second try", 60)
    (tmp_path / "away").rename(folder)
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    assert losses(folder / f"job-{job}") == losses(expected)


PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
import phalanx
dist.init_process_group("gloo")
worker, state = phalanx.worker(), {"w": torch.zeros(1000)}
step = worker.restore(state)
print("starts at", step, state["w"][0].item(), flush=True)
while not worker.stopping:
    if step == 10:
        time.sleep(600)  # longer than any hang limit here
    state["w"] += 1
    step += 1
    worker.snapshot(step, state)
    worker.stepped(step)
"""
IMPATIENT = """
[timeouts]
least_hang_ns = 3_000_000_000
least_program_hang_ns = 3_000_000_000
first_step_ns = 8_000_000_000
[recovery]
back_off_ns = 500_000_000
"""  # on a busy machine a program may take seconds until its first step


def test_a_program_that_pauses_too_long_goes_on_from_memory_and_is_saved_in_the_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "pauses.py").write_text(PROGRAM)
    with TrialCluster(tmp_path, nodes=1, policy=IMPATIENT) as cluster:
        job = cluster.submit("--world-size", "1", "--", python(), "pauses.py")
        assert cluster.wait_ended(job, END_SECONDS) == "failed"
        shown = cluster.job(job)
        assert "hang" in shown["why"]["text"] and shown["durable"] in (9, 10)
        (log,) = cluster.local.nodes[0].state.glob(f"jobs/{job}/worker-0.log")
        starts = [line.split() for line in log.read_text().splitlines() if "starts" in line]
    assert starts[0][2] == "0" and len(starts) >= 3
    for line in starts[1:]:  # the last one, too
        assert int(line[2]) >= 9 and float(line[3]) == int(line[2])
    (folder,) = tmp_path.glob(f"phalanx-job-{job}-*")  # of this server's job of that number
    saved = latest(folder / "checkpoints")
    assert saved is not None and stored_tensors(saved).keys() == {"w"}


# Rank 0 ends with an error as soon as the other one is gone, as a rank in a collective does. The
# second start has no peer to lose: it ends.
PEERS = """
import os, socket, time
from pathlib import Path

if os.environ["PHALANX_GENERATION"] != "1":
    raise SystemExit
place = Path("port")
if os.environ["RANK"] == "0":
    with socket.create_server(("127.0.0.1", 0)) as server:
        Path("written").write_text(str(server.getsockname()[1]))
        Path("written").rename(place)
        peer, _ = server.accept()
        Path("met").touch()
        raise ConnectionError("closed by peer" + peer.recv(1).decode())
while not place.exists():
    time.sleep(0.02)
with socket.create_connection(("127.0.0.1", int(place.read_text()))):
    time.sleep(600)
"""
# The same with our client: after its third step it makes none that is handed over.
CLIENTS = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
import phalanx

dist.init_process_group("gloo")
worker, state = phalanx.worker(), {"w": torch.zeros(10)}
step = worker.restore(state)
first = os.environ["PHALANX_GENERATION"] == "1"
while step < 3:
    step += 1
    worker.snapshot(step, state)
    worker.stepped(step)
while first:
    Path("met").touch()
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""
SHORT_LEASE = """
[timeouts]
heartbeat_ns = 2_000_000_000
missed_heartbeats = 2
reconnect_ns = 1_000_000_000
"""  # a program starts elsewhere five seconds after its node's last word


@pytest.mark.parametrize("program", [PEERS, pytest.param(CLIENTS, marks=pytest.mark.soak)])
def test_a_program_whose_second_node_is_lost_is_not_blamed_for_the_error_of_the_first(
    tmp_path: Path, program: str
) -> None:
    (tmp_path / "peers.py").write_text(program)
    with TrialCluster(tmp_path, nodes=3, gpus_per_node=1, policy=SHORT_LEASE) as cluster:
        ranks = ("--world-size", "2", "--slot-gpus", "1", "--retries", "0")
        job = cluster.submit(*ranks, "--", sys.executable, "peers.py")
        cluster.wait((tmp_path / "met").exists, "its ranks to meet", 60)
        cluster.kill_node(cluster.node_of(1, job))
        assert cluster.wait_ended(job, END_SECONDS) == "done", cluster.job(job)["why"]
        assert (cluster.job(job)["generation"], cluster.job(job)["retries_used"]) == (2, 0)
        causes = {event["cause"] for event in cluster.events("WorkerExited", job)}
        assert causes <= {"user_error"}
