"""A node's own troubles, through a real agent to the core's decision and back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.wire.api_types import Done
from phalanx.testing.local_cluster import TrialCluster, urlsplit_port
from phalanx.testing.local_processes import store_pid, worker_pids
from tests.commands import run_phalanx
from tests.control.servers import ServerProcess
from tests.security.agents import RootAgent, wait_for

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
NOBODYS = {"kind": "Script", "argv": ["true"], "folder": "/"}
# A node is missed after nine seconds of silence, not twenty-one.
POLICY = """
[health]
breaker_least_nodes = 100
strikes = 100
lemon_score = 1000000
[timeouts]
heartbeat_ns = 2_000_000_000
"""
DRAM = "2,1,1,-;EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#1_DIMM#0\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialCluster]:
    """Three nodes of two places each; each has a kernel log, a notice and hooks of its own."""
    root = tmp_path_factory.mktemp("stage")
    for number in range(3):
        folder = root / "local" / "nodes" / f"node-{number}"
        folder.mkdir(parents=True)
        (folder / "kmsg").write_text("")
        hook = folder / "hook"
        hook.write_text(
            f'#!/bin/sh\necho "$PHALANX_HOOK $PHALANX_RANKS $PHALANX_JOB" >> {folder}/hooks\n'
        )
        hook.chmod(0o755)
        (folder / "agent.toml").write_text(
            textwrap.dedent(f"""
            [faults]
            kernel_log = "{folder}/kmsg"
            notice_file = "{folder}/notice"
            poll_seconds = 0.2
            [hooks]
            prolog = ["{hook}"]
            epilog = ["{hook}"]
            [binding]
            policy = "cores"
            """)
        )
    with TrialCluster(root, nodes=3, gpus_per_node=2, policy=POLICY) as cluster:
        yield cluster


def state_of(cluster: TrialCluster, name: str) -> str:
    return str(cluster.get(f"/v1/nodes/{name}")["node"]["state"])


def events(cluster: TrialCluster, kind: str, job: int = 0) -> list[dict[str, Any]]:
    path = f"/v1/events?limit=500{f'&job={job}' if job else ''}"
    return [event for event in cluster.get(path)["events"] if event["kind"] == kind]


def running(cluster: TrialCluster, job: int) -> bool:
    return bool(cluster.job(job)["state"] == "running" and cluster.job(job)["nodes"])


def submit(cluster: TrialCluster, *argv: str) -> int:
    job = cluster.submit("--world-size", "2", "--slot-gpus", "2", "--", *argv)
    cluster.wait(lambda: cluster.job(job)["state"] != "pending", "the job to be placed", 120)
    return job


def cancel(cluster: TrialCluster, job: int) -> None:
    cluster.command("cancel", str(job))
    cluster.wait_ended(job, 120)


def test_a_memory_error_moves_the_job_and_the_node_is_examined(cluster: TrialCluster) -> None:
    job = submit(cluster, *SLEEP)
    cluster.wait(lambda: running(cluster, job), "the job to run", 120)
    node = cluster.node(cluster.job(job)["nodes"][0])
    with (node.state / "kmsg").open("a") as log:
        log.write(DRAM)
    cluster.wait(lambda: cluster.job(job)["nodes"] not in ([], [node.name]), "the job to move", 120)
    told = [event["body"] for event in events(cluster, "DeviceError")]
    (error,) = [body for body in told if body["cause"] == "dram"]
    assert "EDAC" in error["detail"]
    cluster.wait(
        lambda: state_of(cluster, node.name) == "healthy", "the node to pass its check", 120
    )
    assert [event for event in events(cluster, "CheckResult") if event["body"]["passed"]]
    cancel(cluster, job)


def test_the_port_of_a_server_that_may_be_killed_is_given_to_nobody_else(
    cluster: TrialCluster,
) -> None:
    """Whatever else starts while it is dead could get one of those that the kernel gives."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert not int(given[0]) <= urlsplit_port(cluster.url) <= int(given[1])


def test_gangs_still_form_when_every_store_was_killed(cluster: TrialCluster) -> None:
    for node in cluster.local.nodes:
        store = store_pid(node)
        assert store is not None
        os.kill(store, signal.SIGKILL)
    job = submit(cluster, "true")
    assert cluster.wait_ended(job, 60) == "done"


def test_a_worker_that_the_kernel_killed_for_memory_is_told_apart(cluster: TrialCluster) -> None:
    job = submit(cluster, *SLEEP)
    cluster.wait(lambda: running(cluster, job), "the job to run", 120)
    node = cluster.node(cluster.job(job)["nodes"][0])
    cluster.wait(lambda: len(worker_pids(node, job)) == 2, "its processes", 120)
    pid = worker_pids(node, job)[1]
    with (node.state / "kmsg").open("a") as log:
        log.write(f"3,2,2,-;Out of memory: Killed process {pid} (python) total-vm:1kB\n")
    os.kill(pid, signal.SIGKILL)
    cluster.wait(lambda: events(cluster, "WorkerExited", job), "the worker to be missed", 120)
    assert events(cluster, "WorkerExited", job)[0]["body"]["cause"] == "host_out_of_memory"
    cancel(cluster, job)


def test_workers_are_bound_and_hooks_run_once_around_a_job(cluster: TrialCluster) -> None:
    show = "import os; print('cores', sorted(os.sched_getaffinity(0)), flush=True)"
    job = submit(cluster, sys.executable, "-c", show)
    assert cluster.wait_ended(job, 120) == "done"
    folders = [node.state for node in cluster.local.nodes]
    (ran,) = [folder for folder in folders if (folder / "jobs" / str(job)).exists()]
    logs = [ran / "jobs" / str(job) / f"worker-{index}.log" for index in range(2)]
    cores = [eval(log.read_text().split("cores", 1)[1]) for log in logs]
    every = sorted(os.sched_getaffinity(0))
    half = len(every) // 2
    assert cores == ([every[:half], every[half : 2 * half]] if half else [every, every])
    assert f"job {job}: rank 0 (worker 0)" in (ran / "agent.log").read_text()
    told = lambda: [  # noqa: E731
        line for line in (ran / "hooks").read_text().splitlines() if line.endswith(f" {job}")
    ]
    cluster.wait(lambda: len(told()) == 2, "the epilog", 120)
    assert told() == [f"prolog 0,1 {job}", f"epilog 0,1 {job}"]


def test_logs_of_a_job_that_ended_are_still_those_of_their_ranks(cluster: TrialCluster) -> None:
    job = submit(cluster, sys.executable, "-c", "import os; print('I am', os.environ['RANK'])")
    assert cluster.wait_ended(job, 120) == "done"

    def read(rank: int) -> str:
        return b"".join(cluster.client.stream(f"/v1/jobs/{job}/logs", rank=rank)).decode()

    # Its processes are forgotten when the epilog has run: from there on only the note is left.
    (ran,) = [n.state for n in cluster.local.nodes if (n.state / "jobs" / str(job)).exists()]
    cluster.wait(lambda: f"epilog 0,1 {job}" in (ran / "hooks").read_text(), "the epilog", 120)
    assert [read(rank) for rank in (0, 1)] == ["I am 0\n", "I am 1\n"]
    assert read(-1) == "[0] I am 0\n[1] I am 1\n"
    (ran / "jobs" / f"{job}.ranks").unlink()
    assert "which log here is rank 1's" in read(1) and "I am" not in read(1)


def test_followed_logs_come_as_they_are_written_and_end_with_the_job(
    cluster: TrialCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    wait = "import os, time\nprint('begun')\nwhile not os.path.exists(%r): time.sleep(0.05)\n"
    job = submit(cluster, sys.executable, "-c", wait % str(gate) + "print('over')")
    pieces = cluster.client.stream(f"/v1/jobs/{job}/logs", rank=1, follow=True)
    text = ""
    while "begun" not in text:  # although Python would keep it back in a file
        text += next(pieces).decode()
    assert "over" not in text
    gate.touch()
    text += b"".join(pieces).decode()
    assert text.endswith("begun\nover\n") and text.count("begun") == 1
    assert cluster.wait_ended(job, 120) == "done"
    words = ("logs", "-f", "--rank", "0", str(job), "--state", str(cluster.state))
    done = run_phalanx(*words, seconds=60)
    assert done.stdout == "begun\nover\n" and f"job {job} is done" in done.stderr


@pytest.mark.parametrize(
    ("program", "folder", "words"),
    [
        ("/no/such/program", "/", "cannot start /no/such/program: No such file or directory"),
        (sys.executable, "/no/folder", "cannot enter the folder /no/folder: No such file"),
    ],
)
def test_what_cannot_be_started_is_named_and_tried_once(
    cluster: TrialCluster, program: str, folder: str, words: str
) -> None:
    wanted = RequestedWork(argv=(program,), ranks=2, folder=folder)
    job = cluster.client.post("/v1/jobs", submission(wanted, 2), Done).jobs[0]
    assert cluster.wait_ended(job, 120) == "failed"
    why = cluster.get(f"/v1/jobs/{job}/why")["why"]
    assert why["code"] == "cannot_run" and words in why["text"]
    assert cluster.job(job)["generation"] == 1


def test_a_job_goes_elsewhere_when_the_prolog_fails(cluster: TrialCluster) -> None:
    job = submit(cluster, *SLEEP)
    cluster.wait(lambda: running(cluster, job), "the job to run", 120)
    first = cluster.job(job)["nodes"][0]  # where the next one will go too
    cancel(cluster, job)
    names = [n.name for n in cluster.local.nodes if state_of(cluster, n.name) == "healthy"]
    good = next(name for name in names if name != first)
    tried = [cluster.node(name) for name in names if name != good]
    hooks = {node.name: (node.state / "hook").read_text() for node in tried}
    for node in tried:
        (node.state / "hook").write_text("#!/bin/sh\necho no scratch; exit 1\n")
    job = submit(cluster, *SLEEP)
    cluster.wait(
        lambda: running(cluster, job) and cluster.job(job)["nodes"] == [good], "the good", 90
    )
    told = [event["body"]["detail"] for event in events(cluster, "DeviceError")]
    assert [text for text in told if "no scratch" in text]
    for node in tried:
        (node.state / "hook").write_text(hooks[node.name])
    cancel(cluster, job)


def test_a_notice_empties_the_node_in_time(cluster: TrialCluster) -> None:
    job = submit(cluster, *SLEEP)
    cluster.wait(lambda: running(cluster, job), "the job to run", 120)
    node = cluster.node(cluster.job(job)["nodes"][0])
    (node.state / "notice").write_text(json.dumps({"deadline_seconds": 30}))
    cluster.wait(lambda: state_of(cluster, node.name) == "draining", "the node to be drained", 120)
    moved = lambda: running(cluster, job) and node.name not in cluster.job(job)["nodes"]  # noqa: E731
    cluster.wait(moved, "the job to move", 120)
    (notice,) = events(cluster, "NodeNotice")
    assert notice["body"]["deadline_ns"] > notice["time_ns"]
    cancel(cluster, job)


@pytest.mark.soak
def test_what_outlived_an_agent_and_is_not_wanted_any_more_ends(cluster: TrialCluster) -> None:
    job = submit(cluster, *SLEEP)
    cluster.wait(lambda: running(cluster, job), "the job to run", 120)
    node = cluster.node(cluster.job(job)["nodes"][0])
    cluster.wait(lambda: len(worker_pids(node, job)) == 2, "its processes", 120)
    cluster.kill_agent(node)
    moved = lambda: running(cluster, job) and node.name not in cluster.job(job)["nodes"]  # noqa: E731
    cluster.wait(moved, "the job to move", 90)
    cluster.restart_node(node)
    cluster.wait(lambda: not worker_pids(node, job), "its old processes to end", 120)
    assert running(cluster, job)
    cancel(cluster, job)


@pytest.fixture
def user() -> Iterator[str]:
    """A real second user."""
    if os.getuid() != 0:
        pytest.skip("only root can run jobs as their users")
    name = "phalanx-test"
    made = subprocess.run(
        ["useradd", "--no-create-home", "--shell", "/bin/sh", name],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode not in (0, 9):  # 9: it is there already
        pytest.skip(f"no user can be made here: {made.stderr}")
    yield name
    subprocess.run(["userdel", name], capture_output=True, check=False)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="phalanx-users-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_job_runs_as_whoever_submitted_it(user: str, open_folder: Path) -> None:
    with (
        ServerProcess(open_folder / "server") as server,
        RootAgent(server, open_folder, "real", zygote_ready=True) as agent,
    ):
        token = open_folder / "token"
        create = ("token", "create", user, "--role", "user", "--team", "t", "--out", str(token))
        assert run_phalanx(*create, "--state", str(server.state)).returncode == 0
        script = (
            f"id -un; cat {agent.state}/agent.token || echo token is safe; "
            "touch $PHALANX_FOLDER/own && echo own folder; kill -0 1 || echo no rights"
        )
        assert wait_for(lambda: server.call("GET", "/v1/nodes")[1]["nodes"]), agent.log()
        submit = ("submit", "--json", "--server", server.url, "--team", "t", "--world-size", "1")
        asked = run_phalanx(
            *(*submit, "--", "/bin/sh", "-c", script),
            environment={**os.environ, "PHALANX_TOKEN_FILE": str(token)},
            folder=open_folder,
        )
        assert asked.returncode == 0, asked.stdout + asked.stderr
        job = json.loads(asked.stdout)["jobs"][0]
        printed = agent.state / "jobs" / str(job) / "worker-0.log"
        said = lambda: printed.exists() and "no rights" in printed.read_text()  # noqa: E731
        assert wait_for(said), agent.log()
        lines = printed.read_text().splitlines()
        assert lines[0] == user
        assert "token is safe" in lines and "own folder" in lines and "no rights" in lines
        missing = run_phalanx(*submit, "--", "id", folder=open_folder)
        assert missing.returncode != 0  # no token, no job
        spec = {"name": "j", "user": "no-such-user"}
        unknown = server.call("POST", "/v1/jobs", {"spec": spec, "work": NOBODYS})[1]
        show = lambda: server.call("GET", f"/v1/jobs/{unknown['jobs'][0]}")[1]["job"]  # noqa: E731
        assert wait_for(lambda: show()["state"] == "failed"), show()
        assert "there is no user 'no-such-user'" in show()["why"]["text"], show()["why"]
        assert show()["generation"] == 1  # the next try would not be different
        (node,) = server.call("GET", "/v1/nodes")[1]["nodes"]
        assert node["state"] == "healthy"  # it is not the node's fault


def test_a_job_whose_start_ends_two_agents_is_quarantined_and_the_third_goes_on(
    cluster: TrialCluster,
) -> None:
    nodes = cluster.local.nodes
    hooks = {node.name: (node.state / "hook").read_text() for node in nodes}
    for node in nodes:
        (node.state / "hook").write_text("#!/bin/sh\nkill -9 $PPID\n")
    job = submit(cluster, "true")
    cluster.wait(lambda: cluster.job(job)["why"]["code"] == "ends_agents", "its quarantine", 120)
    ended = [node for node in nodes if node.agent is None or node.agent.poll() is not None]
    assert len(ended) == 2
    for node in nodes:
        (node.state / "hook").write_text(hooks[node.name])
    for node in ended:
        cluster.local.start_agent(node)
        cluster.wait(lambda node=node: state_of(cluster, node.name) == "healthy", "the node", 120)
    assert cluster.wait_ended(submit(cluster, "true"), 120) == "done"
    assert cluster.job(job)["state"] == "pending"
    cancel(cluster, job)
