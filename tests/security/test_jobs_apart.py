"""Jobs of two users on one node: neither speaks for the other, nor learns what the agent knows."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from phalanx.checkpoint.keeper.frames import framed
from phalanx.cluster.protocol.messages import THIS_NODE, WorkerExited
from phalanx.control.agent.config import read_agent_config
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.jobs.start import Processes
from phalanx.control.agent.jobs.worker_events import WorkerEvents
from phalanx.control.agent.safe_files import Owner
from phalanx.control.agent.spawn.job_environment import passed_on
from phalanx.control.wire.worker_messages import Present
from phalanx.control.wire.zygote_messages import Child
from tests.commands import run_phalanx
from tests.control.servers import ServerProcess
from tests.security.agents import RootAgent, as_user, wait_for

TAKE_OVER = """
import os, socket, sys
sys.path.insert(0, {path!r})
from phalanx.cluster.protocol.messages import THIS_NODE, WorkerExited
from phalanx.control.wire.worker_messages import Present
from phalanx.checkpoint.keeper.frames import framed
link = socket.socket(socket.AF_UNIX)
link.connect({socket!r})
link.sendall(framed(Present(job={job}, index=0, pid={pid}, generation=1, rank=0, running=True)))
left = WorkerExited(
    node=THIS_NODE, job={job}, generation=1, rank=0, step=0, cause="user_error", detail="mine"
)
link.sendall(framed(left))
link.settimeout(10)
while link.recv(4096): pass
"""

LONG_JOB = """
name = "long"
runs = "{folder}"
[model]
preset = "tiny"
[data]
sequence = 64
[schedule]
kind = "constant"
warmup_steps = 2
[train]
steps = 100000
global_batch = 2
micro_batch = 2
device = "cpu"
"""


def test_a_connection_speaks_only_for_the_job_whose_socket_it_came_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = spoken(tmp_path, job=2, root_of=lambda local_job, pid: pid)
    assert said == []
    assert "speaks for job 2" in caplog.text


def test_a_process_that_is_not_the_job_s_own_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.control.agent.jobs.worker_events.KNOWN_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING):
        assert spoken(tmp_path, job=1, root_of=lambda local_job, pid: 0) == []
    assert "is not one of the job's" in caplog.text


def test_the_kernel_says_who_speaks_and_not_the_message(tmp_path: Path) -> None:
    local_job = LocalJob(1, tmp_path / "job", tmp_path / "sockets")
    local_job.folder.mkdir()
    spoken(tmp_path, job=1, root_of=lambda local_job, pid: pid, local_job=local_job, pid=1)
    assert local_job.processes[0].pid == os.getpid()  # of init it said it was


def spoken(
    folder: Path, *, job: int, root_of: Any, local_job: LocalJob | None = None, pid: int = 0
) -> list[Any]:
    """What an agent takes from a process that says it is a worker of ``job``, at job 1's socket."""
    said: list[Any] = []
    if local_job is None:
        local_job = LocalJob(1, folder / "job", folder / "sockets")
        local_job.folder.mkdir()

    async def scenario() -> None:
        await WorkerEvents(said.append, root_of, lambda *_: None).listen(local_job, "")
        reader, writer = await asyncio.open_unix_connection(str(local_job.agent_socket))
        present = Present(job=job, index=0, pid=pid, generation=1, rank=0)
        left = WorkerExited(
            node=THIS_NODE, job=job, generation=1, rank=0, step=0, cause="user_error", detail=""
        )
        writer.write(framed(present) + framed(left))
        writer.write_eof()
        await reader.read()
        writer.close()
        local_job.close()

    asyncio.run(scenario())
    return said


def test_whoever_descends_from_a_worker_speaks_for_it(tmp_path: Path) -> None:
    local_job = LocalJob(1, tmp_path, tmp_path)
    zygote: Any = type("Z", (), {"children": {"job1/worker0": Child(key="", pid=os.getpid())}})
    processes = Processes.__new__(Processes)
    processes._zygote = zygote
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert processes.root_of(local_job, child.pid) == os.getpid()
            assert processes.root_of(LocalJob(2, tmp_path, tmp_path), child.pid) == 0
            assert processes.root_of(local_job, os.getppid()) == 0
        finally:
            child.kill()


def test_only_named_variables_of_the_agent_reach_a_job(tmp_path: Path) -> None:
    agent = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "PHALANX_TOKEN": "join",
        "PHALANX_TOKEN_FILE": "/root/join.token",
        "AWS_SECRET_ACCESS_KEY": "x",
        "VAULT_TOKEN": "y",
    }
    assert passed_on(agent) == {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
    path = tmp_path / "agent.toml"
    path.write_text('[environment]\npass = ["AWS_*", "PHALANX_*"]\n')
    site = read_agent_config(path).environment.pass_
    assert passed_on(agent, site) == {"AWS_SECRET_ACCESS_KEY": "x"}  # a join token never is


def test_a_job_of_one_user_takes_nothing_of_another_s(
    users: tuple[str, str], open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live agent: environment, log, folder and socket of a job, tried by another user."""
    monkeypatch.setenv("PHALANX_TOKEN", "")
    monkeypatch.delenv("PHALANX_TOKEN")
    monkeypatch.setenv("SITE_PASSWORD", "hunter2")
    with (
        ServerProcess(open_folder / "server") as server,
        RootAgent(server, open_folder, "real", zygote_ready=True) as agent,
    ):
        assert wait_for(lambda: server.call("GET", "/v1/nodes")[1]["nodes"])
        job = submit(server, open_folder, users[0], "env; echo begun; sleep 600")
        folder = agent.state / "jobs" / str(job)
        log = folder / "worker-0.log"
        assert wait_for(lambda: log.exists() and "begun" in log.read_text()), agent.log()
        printed = log.read_text()
        assert "hunter2" not in printed and "PHALANX_TOKEN" not in printed
        assert f"HOME={pwd.getpwnam(users[0]).pw_dir}" in printed
        assert "PHALANX_FOLDER=" in printed
        entry = pwd.getpwnam(users[1])
        told = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
        assert refused(entry, lambda: log.read_bytes())
        assert refused(entry, lambda: list((folder / "work").iterdir()))
        assert refused(entry, lambda: connect(told["PHALANX_AGENT"]))
        assert refused(entry, lambda: connect(told["PHALANX_KEEPER"]))
        # The same user from outside of the job reaches the socket, and is not believed.
        code = TAKE_OVER.format(
            path=str(Path.cwd()), socket=told["PHALANX_AGENT"], job=job, pid=os.getpid()
        )
        subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
        assert wait_for(lambda: "is not one of the job's" in agent.log(), 20), agent.log()
        assert server.call("GET", f"/v1/jobs/{job}")[1]["job"]["state"] == "running"


NOTED_CODE = """
import os
from pathlib import Path

with Path({notes!r}).open("a") as notes:
    notes.write(f"{{os.getuid()}} {{os.geteuid()}} {{__file__}}\\n")
"""


def test_workers_of_another_user_outlive_a_root_agent(
    users: tuple[str, str], open_folder: Path
) -> None:
    """The agent after it knows whose they are: they go on, and nothing is started again.

    Code that came with the job is written and imported by them, as their user, and by nobody else.
    """
    job_file, notes = open_folder / "job.toml", open_folder / "runs" / "notes"
    code = '[code]\nfiles = ["own_noted.py"]\n'
    job_file.write_text(LONG_JOB.format(folder=open_folder / "runs") + code)
    (open_folder / "own_noted.py").write_text(NOTED_CODE.format(notes=str(notes)))
    (open_folder / "runs").mkdir()
    shutil.chown(open_folder / "runs", users[0])
    with ServerProcess(open_folder / "server") as server:
        with RootAgent(server, open_folder, "real", zygote_ready=True) as agent:
            assert wait_for(lambda: server.call("GET", "/v1/nodes")[1]["nodes"])
            job = submit_words(server, open_folder, users[0], str(job_file))
            (open_folder / "own_noted.py").unlink()

            def now() -> Any:
                return server.call("GET", f"/v1/jobs/{job}")[1]["job"]

            assert wait_for(lambda: now()["step"] > 3), (now(), agent.log())
            assert shown_by_stores(users[0]) == [[]]
            agent.process.kill()
            agent.process.wait()
        with RootAgent(server, open_folder, "real") as after:
            reached = now()["step"]
            assert wait_for(lambda: now()["step"] > reached + 20), (now(), after.log())
            assert now()["generation"] == 1
            assert "refused" not in after.log()
        ((uid, euid, file),) = (line.split() for line in notes.read_text().splitlines())
        assert int(uid) == int(euid) == pwd.getpwnam(users[0]).pw_uid
        own = open_folder / "real" / "jobs" / str(job) / "work"
        assert Path(file).is_relative_to(own / "code")
        for path in (own, own / "code", Path(file).parent, Path(file)):
            assert path.stat().st_uid == int(uid), path


def shown_by_stores(user: str) -> list[list[str]]:
    """What the stores where a user's ranks meet show to anybody who comes."""
    uid = pwd.getpwnam(user).pw_uid
    # What ends while all are looked at is left out: to ask it afterwards would be an error.
    known = psutil.process_iter(["uids"])
    ranks = [each for each in known if each.info["uids"] and each.info["uids"].real == uid]
    links = [link for each in ranks for link in each.net_connections("tcp") if link.raddr]
    stores = {(link.raddr.ip, link.raddr.port) for link in links}
    return [TCPStore(*address, is_master=False).list_keys() for address in stores]


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)


def refused(entry: pwd.struct_passwd, act: Callable[[], object]) -> bool:
    """Whether the kernel refuses something to a user."""
    return as_user(Owner(entry.pw_uid, entry.pw_gid), act) == errno.EACCES


def submit(server: ServerProcess, folder: Path, user: str, script: str) -> int:
    """A program of a user; its number."""
    return submit_words(server, folder, user, "--world-size", "1", "--", "/bin/sh", "-c", script)


def submit_words(server: ServerProcess, folder: Path, user: str, *options: str) -> int:
    """A job of a user; its number."""
    token = folder / f"{user}.token"
    create = ("token", "create", user, "--role", "user", "--team", "t", "--out", str(token))
    run_phalanx(*create, "--state", str(server.state)).check_returncode()
    words = ("submit", "--json", "--server", server.url, "--team", "t", *options)
    given = {**os.environ, "PHALANX_TOKEN_FILE": str(token)}
    asked = run_phalanx(*words, environment=given, folder=folder)
    asked.check_returncode()
    return int(json.loads(asked.stdout)["jobs"][0])
