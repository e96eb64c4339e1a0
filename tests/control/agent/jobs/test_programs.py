"""Programs that know nothing of Phalanx, and programs that tell it a little."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import phalanx
from phalanx.checkpoint.write.deadline import LEAST_SECONDS
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.jobs.programs import NodePrograms
from phalanx.control.wire.zygote_messages import Ended
from phalanx.testing.local_cluster import TrialCluster
from phalanx.testing.local_processes import keeper_pid, program_store_pid
from tests.forked_programs import python

PLAIN = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"attempt {again} rank {dist.get_rank()} of {dist.get_world_size()} total {total.item()}")
sys.stdout.flush()
if again == 0 and dist.get_rank() == 1:
    sys.exit(3)
dist.barrier()
"""

TELLING = """
import os, signal
import torch, torch.distributed as dist
import phalanx

dist.init_process_group("gloo")
worker = phalanx.worker()
state = {"x": torch.zeros(1000), f"own.{dist.get_rank()}": torch.zeros(10)}
step = worker.restore(state)
print(f"from step {step} with {state['x'][0].item()}", flush=True)
while step < 12:
    for tensor in state.values():
        tensor += 1
    dist.barrier()
    step += 1
    worker.snapshot(step, state)
    worker.stepped(step)
    if step == 6 and os.environ["PHALANX_GENERATION"] == "1" and dist.get_rank() == 1:
        import time; time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
assert all(bool((t == 12).all()) for t in state.values())
dist.barrier()
"""

# One rank, which is killed twice.
ALONE = """
import os, signal, sys, time
import torch
import phalanx

worker = phalanx.worker()
state = {"x": torch.zeros(1000)}
step = worker.restore(state)
print(f"from step {step} with {state['x'][0].item()}", flush=True)
while step < 12:
    state["x"] += 1
    step += 1
    worker.snapshot(step, state)
    worker.stepped(step)
    if (step, os.environ["PHALANX_GENERATION"]) in ((6, "1"), (9, "2")):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
assert bool((state["x"] == 12).all())
"""

LAUNCHED = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
for step in range(1, 9):
    if dist.get_rank() == 0:
        print(f"step: {step}  loss: {1 / step:.4f}  tps: 1,000", flush=True)
    time.sleep(0.3)
print(f"local rank {os.environ['LOCAL_RANK']} total {total.item()}", flush=True)
dist.destroy_process_group()
"""

SLOW = """
import time
import torch, torch.distributed as dist
import phalanx

dist.init_process_group("gloo")
worker = phalanx.worker()
step, busy = 0, 0.05 if dist.get_rank() == 2 else 0.01
while not worker.stopping and step < 2000:
    until = time.thread_time() + busy
    while time.thread_time() < until:
        pass
    dist.all_reduce(torch.zeros(8))
    step += 1
    worker.stepped(step)
"""


def test_a_programs_slow_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with TrialCluster(tmp_path, nodes=1, gpus_per_node=3) as cluster:
        job = cluster.submit("--world-size", "3", "--", python(), "slow.py")

        def stragglers() -> list[int]:
            found = cluster.get(f"/v1/findings?job={job}")["findings"]
            return [each["rank"] for each in found if each["kind"] == "straggler"]

        cluster.wait(stragglers, "somebody to be named", 120)
        assert set(stragglers()) == {2}


def test_a_plain_program_runs_as_a_gang_and_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "telling.py").write_text(TELLING)
    (tmp_path / "alone.py").write_text(ALONE)
    (tmp_path / "launched.py").write_text(LAUNCHED)
    with TrialCluster(tmp_path, nodes=2) as cluster:
        job = cluster.submit("--world-size", "2", "--", sys.executable, "plain.py")
        assert cluster.wait_ended(job, 120) == "done"
        log = output(cluster, job)
        assert "attempt 0 rank 1 of 2 total 3.0" in log
        assert "attempt 1 rank 0 of 2 total 3.0" in log
        assert "attempt 3" not in log  # on a busy machine its ranks may miss each other once more
        job = cluster.submit("--world-size", "2", "--", python(), "telling.py")
        assert cluster.wait_ended(job, 120) == "done"
        log = output(cluster, job)
        assert "from step 0 with 0.0" in log
        assert "from step 6 with 6.0" in log or "from step 5 with 5.0" in log
        job = cluster.submit("--", python(), "alone.py")
        assert cluster.wait_ended(job, 120) == "done"
        starts = [int(word) for word in re.findall(r"from step (\d+) with", output(cluster, job))]
        assert starts[0] == 0 and starts[1] in (5, 6) and starts[2] in (8, 9)
        run = ("-m", "torch.distributed.run", "launched.py")
        job = cluster.submit("--world-size", "2", "--", sys.executable, *run)
        assert cluster.wait_ended(job, 120) == "done", output(cluster, job)
        log = output(cluster, job)
        assert log.count("local rank 0 total 3.0") == 2 and "attempt" not in log
        ended = cluster.job(job)
        assert ended["printed"] and ended["step"] == 8 and 0.1 < ended["step_seconds"] < 60
        spent = cluster.get(f"/v1/jobs/{job}/ledger")
        assert "productive" in str(spent), spent


GOING_ON = """
import time
import torch, torch.distributed as dist
import phalanx

dist.init_process_group("gloo")
worker = phalanx.worker()
state = {"x": torch.zeros(1000)}
step = worker.restore(state)
while not worker.stopping:
    state["x"] += 1
    time.sleep(0.05)
    stopping = torch.tensor(float(worker.stopping))
    dist.all_reduce(stopping)
    step += 1
    worker.snapshot(step, state)
    worker.stepped(step)
    print("made", step, flush=True)
"""


def test_a_program_goes_on_without_its_keeper_and_without_blame(tmp_path: Path) -> None:
    """A keeper that stands still, a store and a keeper that are killed: one after the other."""
    (tmp_path / "going_on.py").write_text(GOING_ON)
    patient = "[timeouts]\nmissed_heartbeats = 60\n"  # nobody replaces a keeper that stands still
    with TrialCluster(tmp_path, nodes=2, policy=patient) as cluster:
        job = cluster.submit("--world-size", "2", "--", python(), "going_on.py")
        made = lambda: output(cluster, job).count("made")  # noqa: E731
        cluster.wait(lambda: made() >= 20, "steps", 60)
        keeper = keeper_pid(cluster.node_of(1, job), job)
        assert keeper is not None
        os.kill(keeper, signal.SIGSTOP)
        before = made()
        try:
            # Training waits for its snapshot once: for each of twenty it would take longer.
            cluster.wait(
                lambda: made() >= before + 40, "steps without snapshots", 18 * LEAST_SECONDS
            )
        finally:
            os.kill(keeper, signal.SIGCONT)
        store = program_store_pid(cluster.node_of(0, job))
        assert store is not None
        answers = made()
        cluster.wait(lambda: made() >= answers + 20, "steps with snapshots", 60)
        os.kill(store, signal.SIGKILL)
        cluster.wait(lambda: cluster.events("GangReady", job)[1:], "it to go on", 60)
        assert cluster.events("GangReady", job)[-1]["step"] > answers // 2
        before = made()
        cluster.wait(lambda: made() >= before + 20, "steps", 60)
        keeper = keeper_pid(cluster.node_of(1, job), job)
        assert keeper is not None
        os.kill(keeper, signal.SIGKILL)
        cluster.wait(lambda: cluster.events("GangReady", job)[2:], "it to go on again", 60)
        assert cluster.job(job)["retries_used"] == 0
        causes = [event["cause"] for event in cluster.events("WorkerExited", job)]
        followed = "user_error"  # of a program that lost its peer so, if it ends before it is ended
        assert [cause for cause in causes if cause != followed] == ["worker_killed", "keeper_lost"]
        cluster.command("cancel", str(job))


@pytest.mark.parametrize(
    ("key", "rank_ended", "told"),
    [
        ("job1/store3", False, ["worker_killed"]),
        ("job1/store2", False, []),  # of a generation before: it was ended with it
        ("job1/store3", True, []),  # nobody needs it any more
    ],
)
def test_ranks_whose_store_was_killed_start_again_without_blame(
    tmp_path: Path, key: str, rank_ended: bool, told: list[str]
) -> None:
    said: list[Any] = []
    local_job = LocalJob(1, tmp_path, tmp_path / "sockets")
    local_job.generation = 3
    for index in range(2):
        process = local_job.processes[index] = local_job.new_process(index, index)
        process.generation, process.pid = 3, 70 + index
    local_job.processes[0].status = 0 if rank_ended else None
    programs = NodePrograms(cast(Any, None), "", said.append, cast(Any, None), cast(Any, None))
    programs.store_ended(local_job, Ended(key=key, pid=9, status=-9))
    assert [(left.rank, left.generation, left.cause) for left in said] == [
        (0, 3, cause) for cause in told
    ]


QUICK = """
[timeouts]
first_step_ns = 8_000_000_000
least_hang_ns = 2_000_000_000
least_program_hang_ns = 2_000_000_000
idle_ns = 6_000_000_000
"""
LATE = """
import time
import phalanx

worker = phalanx.worker()
time.sleep(12)
for step in range(1, 4):
    worker.stepped(step)
    time.sleep(1)
"""


def test_programs_without_steps_are_left_alone_and_verdicts_say_what_they_follow_from(
    tmp_path: Path,
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    with TrialCluster(tmp_path, nodes=1, gpus_per_node=4, policy=QUICK) as cluster:
        silent = cluster.submit("--", "sleep", "16")
        idle = cluster.submit("--idle-minutes", "0.1", "--retries", "0", "--", "sleep", "1000")
        patient = cluster.submit("--first-step-minutes", "1", "--", python(), "late.py")
        late = cluster.submit("--retries", "0", "--", python(), "late.py")
        assert cluster.wait_ended(late, 60) == "failed"
        (fact,) = cluster.events("NoProgress", late)
        assert (fact["limit"], fact["setting"]) == ("first_step", "timeouts.first_step_ns")
        assert fact["quiet_ns"] >= 8e9 and fact["cpu_ns"] >= 0
        why = cluster.job(late)["why"]["text"]
        assert "8.0 s are allowed by timeouts.first_step_ns" in why and "Phalanx ends" in why
        assert cluster.wait_ended(idle, 90) == "failed"
        why = cluster.job(idle)["why"]["text"]
        assert "no activity" in why and "the job's idle_ns" in why and "bytes of output" in why
        assert cluster.wait_ended(patient, 60) == cluster.wait_ended(silent, 60) == "done"
        assert cluster.job(patient)["step"] == 3
        for job in (silent, patient):
            assert cluster.job(job)["generation"] == 1
        (told,) = cluster.events("NoProgress", silent)  # and nothing was done about it
        assert told["limit"] == "idle"
        found = cluster.get(f"/v1/jobs/{silent}/ledger")
        buckets = {name: int(text) for name, text in found["buckets"].items()}
        assert buckets["unreported"] >= 16e9 and not buckets["checkpoint_stall"]
        assert sum(buckets.values()) == int(found["allocation_gpu_ns"])


def test_a_program_outlives_its_agent_and_is_not_run_again_when_it_has_ended(
    tmp_path: Path,
) -> None:
    patient = "[timeouts]\nreconnect_ns = 40_000_000_000\nmissed_heartbeats = 10\n"
    with TrialCluster(tmp_path, nodes=1, gpus_per_node=2, policy=patient) as cluster:
        short = cluster.submit("--", "sh", "-c", "echo begins; sleep 3; echo ends")
        long = cluster.submit("--", "sh", "-c", "echo begins; sleep 9; echo ends")
        for job in (short, long):
            cluster.wait(lambda job=job: "begins" in output(cluster, job), "its first word", 60)
        node = cluster.local.nodes[0]
        cluster.kill_agent(node)
        cluster.wait(lambda: "ends" in output(cluster, short), "its end", 30)
        cluster.restart_node(node)
        assert cluster.wait_ended(short, 60) == "done" == cluster.wait_ended(long, 60)
        for job in (short, long):
            assert output(cluster, job).split() == ["begins", "ends"]
            assert cluster.job(job)["generation"] == 1


def output(cluster: TrialCluster, job: int) -> str:
    found = cluster.root.glob(f"local/nodes/*/jobs/{job}/worker-*.log")
    return "\n".join(path.read_text() for path in found)


def test_ranks_without_a_group_are_told_that_they_need_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"PHALANX_AGENT": str(tmp_path / "agent"), "PHALANX_JOB": "1", "PHALANX_INDEX": "0"}
    given |= {"PHALANX_RECORDS": "0", "PHALANX_FOLDER": str(tmp_path), "WORLD_SIZE": "2"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    try:
        worker = phalanx.worker()
        with pytest.raises(RuntimeError, match="WORLD_SIZE is 2 and there is no process group"):
            worker.restore({})
        with pytest.raises(RuntimeError, match="init_process_group"):
            worker.snapshot(1, {"w": torch.zeros(1)})
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("given", "rank", "index"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1", "PHALANX_INDEX": "1"}, 5, 1),
        ({"RANK": "5", "LOCAL_RANK": "1", "PHALANX_LAUNCHED": "1"}, 5, 1),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                "PHALANX_LAUNCHED": "1",
            },
            3,
            3,
        ),
        ({"PMI_RANK": "2", "MPI_LOCALRANKID": "2", "PHALANX_LAUNCHED": "1"}, 2, 2),
    ],
    ids=["phalanx", "torchrun", "Open MPI", "MPICH"],
)
def test_a_rank_finds_its_number_whoever_started_it(
    given: dict[str, str], rank: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "PHALANX_AGENT", "PHALANX_INDEX", "PHALANX_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PHALANX_JOB": "1", **given}.items():
        monkeypatch.setenv(name, value)
    present = phalanx.worker()._present()
    assert (present.rank, present.index) == (rank, index)
