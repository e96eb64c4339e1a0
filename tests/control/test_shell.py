"""A shell in a job's environment on its node: a real terminal, for the job's own team alone."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.control.host.users import own_name
from phalanx.testing.local_cluster import TrialCluster
from tests.commands import run_phalanx

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialCluster]:
    with TrialCluster(tmp_path_factory.mktemp("stage"), nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(cluster: TrialCluster) -> int:
    number = cluster.submit("--world-size", "2", "--team", "red", "--", *SLEEP)
    cluster.wait(lambda: cluster.job(number)["state"] == "running", "the job")
    return number


def shell(
    cluster: TrialCluster, *arguments: str, token: Path | None = None, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "shell", "--state", str(cluster.state), *arguments]
    environment = dict(os.environ)
    if token is not None:
        environment["PHALANX_TOKEN_FILE"] = str(token)
    return subprocess.run(
        command, input=typed, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def audited(cluster: TrialCluster, action: str = "shell") -> list[dict[str, object]]:
    lines = (cluster.state / "audit.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["action"].startswith(action)]


def make_token(cluster: TrialCluster, name: str, role: str, team: str) -> Path:
    path = cluster.root / f"{name}.token"
    words = ("--role", role, "--team", team, "--out", str(path), "--state", str(cluster.state))
    assert run_phalanx("token", "create", name, *words).returncode == 0
    return path


def test_the_audit_log_says_which_job_was_made(cluster: TrialCluster, job: int) -> None:
    assert [entry.get("detail") for entry in audited(cluster, "POST /v1/jobs")] == [f"job {job}"]


def test_a_program_runs_in_the_jobs_environment_on_the_node_that_is_named(
    cluster: TrialCluster, job: int
) -> None:
    name = cluster.job(job)["nodes"][1]
    script = "echo $PHALANX_JOB on $PHALANX_NODE; tty; pwd; exit 7"
    done = shell(cluster, str(job), "--node", name, "--", "sh", "-c", script)
    assert done.returncode == 7, done.stderr
    assert f"{job} on {name}" in done.stdout
    assert "/dev/pts/" in done.stdout
    opened = [entry for entry in audited(cluster) if entry["status"] == 101]
    assert name in str(opened[-1]["detail"]) and opened[-1]["name"]


def test_a_terminal_is_typed_into_and_closes_with_the_shell(
    cluster: TrialCluster, job: int
) -> None:
    pid, master = pty.fork()
    if pid == 0:
        command = [
            sys.executable,
            "-m",
            "phalanx",
            "shell",
            "--state",
            str(cluster.state),
            str(job),
        ]
        os.environ["SHELL"] = "/bin/sh"
        os.execv(sys.executable, command)
    said, deadline, typed = b"", time.monotonic() + 120, False
    while time.monotonic() < deadline:
        try:
            said += os.read(master, 65_536)
        except OSError:  # it is over
            break
        if not typed and (b"$" in said or b"#" in said):
            os.write(master, b"echo $((6 * 7)); stty size; exit\n")
            typed = True
    _, status = os.waitpid(pid, 0)
    assert b"42" in said and os.waitstatus_to_exitcode(status) == 0


def test_more_output_than_anybody_reads_at_once_arrives_whole(
    cluster: TrialCluster, job: int
) -> None:
    done = shell(cluster, str(job), "--", "seq", "1", "200000")
    assert done.returncode == 0
    assert done.stdout.split()[-1] == "200000" and len(done.stdout.split()) == 200_000


def test_other_teams_and_readers_get_no_shell(cluster: TrialCluster, job: int) -> None:
    for name, role, team in (("eve", "user", "blue"), ("bob", "read", "red")):
        done = shell(cluster, str(job), "--", "id", token=make_token(cluster, name, role, team))
        assert done.returncode == 1 and "uid=" not in done.stdout
    refused = [entry for entry in audited(cluster) if entry["status"] in (403, 404)]
    assert {entry["name"] for entry in refused} == {"eve", "bob"}
    mate = shell(cluster, str(job), "--", "id", token=make_token(cluster, "ann", "user", "red"))
    assert mate.returncode == 1 and "not ann's" in mate.stderr  # a team shares no accounts
    own = make_token(cluster, own_name(), "user", "red")
    assert "uid=" in shell(cluster, str(job), "--", "id", token=own).stdout


def test_what_cannot_be_opened_is_said(cluster: TrialCluster, job: int) -> None:
    assert "there is no job 99" in shell(cluster, "99").stderr
    assert "is not on nowhere" in shell(cluster, str(job), "--node", "nowhere").stderr
    missing = shell(cluster, str(job), "--", "/no/such/program")
    assert missing.returncode == 1 and "No such file" in missing.stderr


def test_no_shell_outlives_whoever_opened_it(cluster: TrialCluster, job: int) -> None:
    command = [sys.executable, "-m", "phalanx", "shell", "--state", str(cluster.state), str(job)]
    seconds = str(1_000_000 + os.getpid())  # of no other program
    process = subprocess.Popen(
        [*command, "--", "sleep", seconds], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    running = lambda: subprocess.run(  # noqa: E731
        ["pgrep", "-f", f"^sleep {seconds}"], capture_output=True, check=False
    ).stdout.split()
    cluster.wait(running, "the program to start")
    process.kill()
    process.wait()
    cluster.wait(lambda: not running(), "the program to end")
