"""The command line against a real server, and without one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from phalanx.control.agent.identity import AlreadyRunsError, lock_state
from phalanx.control.agent.socket_paths import make_runtime_folder, runtime_folder
from phalanx.testing.chaos.verdict import orphans
from phalanx.testing.fork_server import fork_zygote
from tests.commands import run_phalanx
from tests.control.servers import WORK, PlayedAgent, ServerProcess
from tests.ports import free_port

JOB = """
name = "first"
[model]
preset = "tiny"
[data]
source = "synthetic"
[train]
steps = 7
[parallel]
data = 2
"""


def phalanx(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PHALANX_")}
    return run_phalanx(*arguments, environment={**kept, **environment})


def here(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return phalanx(*arguments, "--state", str(server.state))


def test_without_a_server_one_is_told_how_to_start_it(tmp_path: Path) -> None:
    none = phalanx("ps", "--state", str(tmp_path))
    assert none.returncode == 3 and "start one with `phalanx up`" in none.stderr
    dead = phalanx("ps", PHALANX_SERVER=f"http://127.0.0.1:{free_port()}", PHALANX_TOKEN="x")
    assert dead.returncode == 3
    assert "no server answers" in dead.stderr and "`phalanx up`" in dead.stderr
    said = json.loads(phalanx("ps", "--state", str(tmp_path), "--json").stdout)
    assert said["error"]["code"] == "unreachable"


def test_a_wrong_token_is_named_as_such(server: ServerProcess) -> None:
    wrong = phalanx("ps", PHALANX_SERVER=server.url, PHALANX_TOKEN="phx_user_wrong")
    assert wrong.returncode == 1 and "not known here" in wrong.stderr
    reader = server.token("read", "reader")
    refused = phalanx("drain", "n1", PHALANX_SERVER=server.url, PHALANX_TOKEN=reader)
    assert refused.returncode == 1 and "needs the role admin" in refused.stderr


def test_a_dry_run_shows_what_would_be_submitted_and_submits_nothing(
    server: ServerProcess, tmp_path: Path
) -> None:
    before = json.loads(here(server, "ps", "--all", "--json").stdout)
    touched = tmp_path / "it-ran"
    program = here(server, "submit", "--dry-run", "--", "touch", str(touched))
    assert program.returncode == 0, program.stderr
    assert "nothing was submitted" in program.stdout and f"touch {touched}" in program.stdout
    (tmp_path / "job.toml").write_text(JOB)
    trained = here(server, "submit", "--dry-run", "--json", str(tmp_path / "job.toml"))
    shown = json.loads(trained.stdout)
    assert shown["submitted"] is False
    assert shown["submission"]["spec"]["name"] == "first"
    assert "steps = 7" in shown["submission"]["work"]["toml"]
    assert json.loads(here(server, "ps", "--all", "--json").stdout) == before
    assert not touched.exists()


def test_a_dry_run_needs_no_server_unless_one_is_named(tmp_path: Path) -> None:
    alone = phalanx("submit", "--dry-run", "--state", str(tmp_path), "--", "sleep", "9")
    assert alone.returncode == 0 and "no server answers here" in alone.stdout
    named = f"http://127.0.0.1:{free_port()}"
    wrong = phalanx("submit", "--dry-run", "--server", named, "--", "true", PHALANX_TOKEN="x")
    assert wrong.returncode == 3 and "no server answers" in wrong.stderr


def test_a_token_comes_from_a_file_and_goes_into_one(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    made = here(
        server, "token", "create", "eve", "--role", "user", "--team", "red", "--out", str(out)
    )
    assert made.returncode == 0 and out.stat().st_mode & 0o077 == 0
    assert out.read_text().strip() not in made.stdout
    listed = phalanx("ps", PHALANX_SERVER=server.url, PHALANX_TOKEN_FILE=str(out))
    assert listed.returncode == 0 and "no jobs" in listed.stdout


def test_a_token_that_cannot_be_written_is_none(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "nosuch" / "mine"
    made = here(server, "token", "create", "mallory", "--role", "user", "--out", str(out))
    assert made.returncode == 1 and made.stderr.startswith("error: no token is made")
    lines = here(server, "token", "list").stdout.splitlines()
    assert [line.split()[-1] for line in lines if "mallory" in line] == ["revoked"]


@pytest.mark.parametrize("minutes", ["1e300", "inf", "nan"])
def test_a_time_limit_that_is_none_is_refused(server: ServerProcess, minutes: str) -> None:
    refused = here(server, "submit", "--minutes", minutes, "--", "true")
    assert refused.returncode == 2 and "Invalid value for '--minutes'" in refused.stderr


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    join, free = ("agent", "--join", "http://127.0.0.1:1"), ("--state", str(tmp_path / "s"))
    for words, code, text in (
        ((*join, *free, "--site", "nonsense"), 2, "one of slurm, kubernetes, mpi, auto"),
        ((*join, *free, "--site", "nonsense", "--no-standby"), 2, "one of slurm"),
        ((*join, *free, "--name", "42"), 2, "would be taken for a job"),
        ((*join, *free, "--name", "42", "--no-standby"), 2, "would be taken for a job"),
        ((*join, *free, "--address", "not an address"), 2, "a host's name or its IP address"),
        (("up", *free, "--url", "notaurl"), 2, "http://10.0.0.1:7070"),
        (("up", *free, "--port", "0", "--host", "256.1.1.1"), 1, "choose another --host"),
        (("up", "--port", "0", "--state", "/proc/nosuch"), 1, "no state can be kept in"),
    ):
        refused = phalanx(*words)
        assert refused.returncode == code and text in refused.stderr, (words, refused.stderr)


def test_a_job_that_cannot_run_is_refused_before_it_is_sent(
    server: ServerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("steps = 7", "stepz = 7"))
    refused = here(server, "submit", str(path))
    assert refused.returncode == 2 and "stepz" in refused.stderr
    path.write_text(JOB)
    no_room = here(server, "submit", str(path))
    assert no_room.returncode == 1 and no_room.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "command", [["nodes"], ["ps"], ["quota"], ["events"], ["top"], ["token", "list"]]
)
def test_reports_are_json_when_asked(server: ServerProcess, command: list[str]) -> None:
    done = here(server, *command, "--json")
    assert done.returncode == 0 and isinstance(json.loads(done.stdout), dict)


def test_a_quota_is_set_and_listed(server: ServerProcess) -> None:
    done = here(server, "quota", "green", "--gpus", "16", "--ceiling", "64")
    assert done.returncode == 0
    assert "green" in done.stdout and "16" in done.stdout and "64" in done.stdout
    assert "give a team and --gpus" in here(server, "quota", "green").stderr


def test_a_folder_or_a_text_is_no_program(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: first\n")
    for wrong in (tmp_path, tmp_path / "job.yaml"):
        refused = here(server, "submit", str(wrong))
        assert refused.returncode == 2 and "neither a job file" in refused.stderr


def test_without_nodes_one_is_told_how_to_start_one(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    with ServerProcess(tmp_path / "state") as empty:
        refused = here(empty, "submit", str(tmp_path / "job.toml"))
    assert refused.returncode == 1 and "no node has joined yet" in refused.stderr


def test_events_of_a_job_that_never_was_are_not_just_none(server: ServerProcess) -> None:
    nothing = here(server, "events", "--job", "4711")
    assert nothing.returncode == 1 and "there is no job 4711" in nothing.stderr


def test_two_agents_do_not_share_a_state_folder(tmp_path: Path) -> None:
    first = lock_state(tmp_path, patience_seconds=0.0)
    with pytest.raises(AlreadyRunsError, match=f"process {os.getpid()}"):
        lock_state(tmp_path, patience_seconds=0.0)
    where = ("--join", f"http://127.0.0.1:{free_port()}", "--state", str(tmp_path), "--gpus", "1")
    for more in ((), ("--no-standby",)):
        second = phalanx("agent", *where, *more, PHALANX_TOKEN="x")
        assert second.returncode == 1 and "an agent already runs" in second.stderr
    os.close(first)  # as a killed one does
    os.close(lock_state(tmp_path, patience_seconds=0.0))


def test_an_agent_that_is_refused_leaves_nothing_behind(
    server: ServerProcess, tmp_path: Path
) -> None:
    where = ("--join", server.url, "--state", str(tmp_path / "agent"), "--gpus", "1")
    refused = phalanx("agent", *where, PHALANX_TOKEN="phx_join_wrong")
    assert refused.returncode == 1 and "not known here" in refused.stderr
    assert orphans(tmp_path) == []
    assert not runtime_folder(tmp_path / "agent").exists()


def test_a_job_may_be_submitted_while_the_servers_own_nodes_start(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    with ServerProcess(tmp_path / "state", "--nodes", "2") as own:
        accepted = here(own, "submit", str(tmp_path / "job.toml"))
        assert accepted.returncode == 0, accepted.stderr
        assert "2 GPUs" in accepted.stdout
        assert re.search(r"nodes: +2 joined", own.output())
        own.stop()
        assert orphans(tmp_path) == []
        for folder in (tmp_path / "state" / "local" / "nodes").iterdir():
            assert not runtime_folder(folder).exists()


def wait_until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + 90
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def agents(folder: Path) -> list[int]:
    """The agents of nodes below a folder."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "--as-agent" in (line := process.info["cmdline"] or []) and str(folder) in str(line)
    ]


def check_figures(where: tuple[str, ...], job: int) -> None:
    """Of a program that ran and told of no step nobody says how many, or how well it ran."""
    (line,) = [
        words
        for text in phalanx("ps", *where, "--all").stdout.splitlines()
        if (words := text.split())[:1] == [str(job)]
    ]
    assert line[5] == "-" and line[6] not in ("0", "0s", "-")
    assert "none was reported" in phalanx("show", *where, str(job)).stdout
    spent = phalanx("ledger", *where, str(job)).stdout
    assert "unreported" in spent and "goodput and ETTR are unknown" in spent


def test_whoever_waits_for_a_job_is_told_how_it_ended(tmp_path: Path) -> None:
    given, work = tmp_path / "given.env", tmp_path / "work"
    given.write_text("FROM_FILE=file\n")
    work.mkdir()
    say = 'echo "$FROM_FILE $FROM_OPTION" > said; exit $CODE'
    options = ("--wait", "--retries", "0", "--workdir", str(work), "--env-file", str(given))
    where = ("--state", str(tmp_path / "state"))
    sockets = make_runtime_folder(tmp_path / "state" / "local")
    fork_zygote(sockets / "parent.sock", tmp_path / "parent.log")
    with ServerProcess(tmp_path / "state", "--nodes", "1") as own:
        for code in (0, 3):
            variables = ("--env", "FROM_OPTION=option", "--env", f"CODE={code}")
            done = phalanx("submit", *where, *options, *variables, "--", "sh", "-c", say)
            assert done.returncode == (1 if code else 0), done.stderr
            assert f"exit code {code}" in done.stderr or not code
            assert (work / "said").read_text() == "file option\n"
        raises = ("python3", "-c", "raise ValueError('no such batch')")
        failed = phalanx("submit", *where, "--wait", "--retries", "0", "--", *raises)
        assert failed.returncode == 1 and "ValueError: no such batch" in failed.stderr
        minds = (
            "trap 'sleep 0.2; echo tidied up > said; exit 0' TERM; echo up > said; sleep 60 & wait"
        )
        late = phalanx(
            *("submit", *where, "--wait", "--timeout", "2", "--workdir", str(work), "--json"),
            *("--", "sh", "-c", minds),
        )
        assert late.returncode == 124 and "goes on" in late.stderr
        wait_until(lambda: (work / "said").read_text() == "up\n")
        asked = phalanx("cancel", *where, "4")
        assert "SIGTERM" in asked.stdout
        wait_until(lambda: (work / "said").read_text() == "tidied up\n")
        check_figures(where, 4)
        (agent,) = agents(tmp_path)
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: agents(tmp_path) not in ([], [agent]))
        last = phalanx("submit", *where, "--json", "--wait", "--", "true")
        assert json.loads(last.stdout)["state"] == "done"
        own.stop()  # its nodes with it, which would outlive one that is killed for a while
    assert orphans(tmp_path) == []


def test_a_second_server_on_the_same_state_is_refused(server: ServerProcess) -> None:
    second = phalanx("up", "--state", str(server.state), "--port", "0")
    assert second.returncode == 1 and "a server already runs on" in second.stderr
    assert here(server, "ps").returncode == 0


def test_a_port_in_use_is_named(server: ServerProcess, tmp_path: Path) -> None:
    second = phalanx("up", "--state", str(tmp_path), "--port", str(server.port))
    assert second.returncode == 1 and f"127.0.0.1:{server.port}" in second.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[timeouts]\nheartbeat = 3\n", "heartbeat"),
        ("[timeouts]\nmissed_heartbeats = 1\n", "missed_heartbeats"),
        ("[queue\n", "not TOML"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    done = phalanx("up", "--state", str(tmp_path / "s"), "--port", "0", "--policy", str(path))
    assert done.returncode == 2 and words in done.stderr


def test_tls_keeps_tokens_from_prying_eyes(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    make += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1"]
    if subprocess.run(make, capture_output=True, check=False).returncode:
        pytest.skip("openssl is not installed")
    server = ServerProcess(tmp_path / "s", "--tls-cert", str(cert), "--tls-key", str(key))
    server.start(wait=False)
    try:
        while not (server.state / "server.json").exists():
            assert server.process is not None and server.process.poll() is None, server.output()
            time.sleep(0.05)
        found = phalanx("ps", "--state", str(server.state), PHALANX_CA=str(cert))
        assert found.returncode == 0, found.stderr
        doubted = phalanx("ps", "--state", str(server.state))
        assert doubted.returncode == 3 and "not trusted" in doubted.stderr
        for ca, words in (("nope.pem", "PHALANX_CA = nope.pem: No such file"), (key, "in PEM")):
            wrong = phalanx("ps", "--state", str(server.state), PHALANX_CA=str(ca))
            assert wrong.returncode == 3 and words in wrong.stderr, wrong.stderr
            assert "Traceback" not in wrong.stderr
        plain = phalanx("ps", "--state", str(server.state), "--server", server.url)
        assert "try https://" in plain.stderr
    finally:
        server.kill()


def test_a_certificate_that_cannot_be_shown_is_refused_before_anything_is_said(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.pem").write_text("no certificate\n")
    files = {"no.pem": "no.pem: No such file", "text.pem": "no certificate chain and key in PEM"}
    for name, words in files.items():
        path = str(tmp_path / name)
        options = ["--state", str(tmp_path / "s"), "--tls-cert", path, "--tls-key", path]
        refused = phalanx("up", "--port", "0", *options)
        assert refused.returncode == 1 and words in refused.stderr, refused.stderr
        assert not refused.stdout and not (tmp_path / "s").exists()


def test_a_server_that_is_told_to_stop_leaves_nothing_to_replay(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "s").start()
    for gpus in range(5):
        server.call("PUT", "/v1/quotas/red", {"gpus": gpus})
    process = server.process
    server.stop()
    assert process is not None and process.returncode == 0
    server.start()
    assert re.search(r"epoch 2: event \d+ \(0 replayed\)", server.output())
    assert server.call("GET", "/v1/quotas")[1]["quotas"][0]["gpus"] == 4
    server.kill()


def _blocks(pid: int, number: signal.Signals) -> bool:
    """Whether a process never gets a signal, so long as it does not ask for it."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^SigBlk:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_terminals_signals_end_the_server_in_order_after_a_plan(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Both reach every process of the terminal, that of the planner too."""
    command = [sys.executable, "-m", "phalanx", "up", "--state", str(tmp_path), "--port", "0"]
    with (tmp_path / "out.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    server = ServerProcess(tmp_path)
    server.process = process
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "server.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        server.url = json.loads((tmp_path / "server.json").read_text())["url"]
        question = {"model": "llama3-8b", "gpu": "h100", "gpus": 64, "tokens": "1T"}
        assert server.call("POST", "/v1/plan", question)[0] == 200
        children = psutil.Process(process.pid).children()
        assert len(children) == 2  # the planner's process and Python's tracker of its semaphores
        assert all(_blocks(child.pid, signal.SIGHUP) for child in children)
        os.killpg(process.pid, number)
        assert process.wait(30) == 0, server.output()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in server.output() and "KeyboardInterrupt" not in server.output()


def test_a_job_is_followed_drained_resumed_scaled_and_cancelled(tmp_path: Path) -> None:
    """What a person does with a job that runs, by the commands that a person has."""

    async def scenario(server: ServerProcess) -> None:
        agent = PlayedAgent([server.url], (server.state / "join.token").read_text().strip(), "n1")
        agent.steps_until = 1_000_000
        serving = asyncio.create_task(agent.run())
        await agent.connected.wait()

        async def say(*words: str, fails: int = 0) -> str:
            done = await asyncio.to_thread(here, server, *words)
            assert done.returncode == fails, done.stderr
            return done.stdout + done.stderr

        spec = {"name": "long", "gang": {"replicas": 2, "slot_gpus": 2}}
        body = {"spec": spec, "work": WORK}
        made = await asyncio.to_thread(server.call, "POST", "/v1/jobs", body)
        job = str(made[1]["jobs"][0])

        async def until(state: str) -> None:
            path = f"/v1/jobs/{job}"
            await asyncio.to_thread(server.wait_for, path, lambda it: it["job"]["state"] == state)

        await until("running")
        assert "rank 1 says hello" in await say("logs", job, "--rank", "1")
        assert "long" in await say("ps") and "running" in await say("why", job)
        assert "2 to 2 replicas" in await say("scale", job, "1", fails=1)
        assert "held until it is resumed" in await say("drain", job)
        await until("pending")
        assert "held by a person" in await say("why", job)
        await say("resume", job)
        await until("running")
        assert "cancelled" in await say("cancel", job)
        assert f"job {job} is cancelled" in await say("events", "--job", job, "-f")
        assert "already ended" in await say("drain", job, fails=1)
        serving.cancel()

    with ServerProcess(tmp_path) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 280))


def test_a_server_with_a_folder_of_its_own_says_what_commands_beside_it_need(
    server: ServerProcess,
) -> None:
    wait_until(lambda: "your token" in server.output())
    said = re.search(r"export (PHALANX_STATE)=(\S+)\)", server.output())
    assert said is not None
    assert phalanx("ps", **{said[1]: said[2]}).returncode == 0
