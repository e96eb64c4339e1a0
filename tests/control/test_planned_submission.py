"""A submission is planned by the server, and asked about where it is planned to cost much."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx.cluster.plan_record import PlanRecord
from phalanx.config import job_from_table, resolve
from phalanx.control.server.http import job_rights
from phalanx.control.server.http.submission import RequestedWork, spec_of, submission
from tests.cluster.drive import Drive
from tests.commands import run_phalanx
from tests.control.servers import PlayedAgent, ServerProcess

JOB = """
name = "dear"
[model]
preset = "llama3-8b"
[data]
source = "synthetic"
[parallel]
data = 4
[train]
steps = 1000
global_batch = 64
device = "cuda"
"""
POLICY = "[price]\nask_above_dollars = 5\n"


def submit(server: ServerProcess, *options: str, terminal: str = "") -> tuple[int, str]:
    """The command's exit code and what it says; ``terminal``: what a person types there."""
    words = ("submit", *options, "--state", str(server.state))
    if not terminal:
        return said_by(*words)
    command = [sys.executable, "-m", "phalanx", *words]
    parent, child = pty.openpty()
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child)
    os.close(child)
    os.write(parent, terminal.encode())
    said = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # the other end is closed: Linux says so by an error
            break
        if not part:
            break
        said += part
    os.close(parent)
    return process.wait(120), said.decode()


def what_if(server: ServerProcess, *options: str) -> tuple[int, str]:
    return said_by("what-if", *options, "--state", str(server.state))


def said_by(*words: str) -> tuple[int, str]:
    done = run_phalanx(*words, seconds=120)
    return done.returncode, done.stdout + done.stderr


def test_a_dear_job_is_planned_asked_about_and_then_taken(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "job.toml").write_text(JOB)
    path = str(tmp_path / "job.toml")

    async def scenario(server: ServerProcess) -> None:
        join = (server.state / "join.token").read_text().strip()
        agents = [PlayedAgent([server.url], join, f"n{i}", kind="h100") for i in (1, 2)]
        tasks = [asyncio.create_task(agent.run()) for agent in agents]
        async with asyncio.timeout(90):
            await asyncio.gather(*(agent.connected.wait() for agent in agents))
        answers = [
            await asyncio.to_thread(submit, server, path, **given)
            for given in ({}, {"terminal": "n\n"}, {"terminal": "y\n"})
        ]
        answers.append(await asyncio.to_thread(submit, server, path, "--yes", "--json"))
        answers.append(await asyncio.to_thread(what_if, server, "1", "--gpus", "2"))
        answers.append(await asyncio.to_thread(what_if, server, "1", "--set", "parallel.tensor=3"))
        for task in tasks:
            task.cancel()
        check(server, answers)

    with ServerProcess(tmp_path / "state", "--policy", str(tmp_path / "policy.toml")) as running:
        asyncio.run(scenario(running))


def check(server: ServerProcess, answers: list[tuple[int, str]]) -> None:
    alone, declined, accepted, unasked, fewer, impossible = answers
    assert alone[0] == 1 and "above price.ask_above_dollars = 5" in alone[1]
    assert "nobody is here to ask: give --yes" in alone[1]
    assert declined[0] == 1 and "nothing was submitted" in declined[1]
    assert accepted[0] == 0 and "planned: " in accepted[1] and "dollars (" in accepted[1]
    assert "data 4, ZeRO 3" in accepted[1] and "on h100" in accepted[1]
    (plan,) = json.loads(unasked[1])["plans"]
    assert plan["device"] == "h100" and plan["micro_dollars"]["mid"] > 5e6
    jobs = server.call("GET", "/v1/jobs?state=all")[1]["jobs"]
    assert [job["id"] for job in jobs] == [1, 2]
    detail = server.call("GET", "/v1/jobs/1")[1]
    assert detail["plan"]["step_ns"]["mid"] > 0
    assert set(detail["origins"].values()) <= {"job", "planned", "measured"}
    assert fewer[0] == 0 and "data 2, ZeRO 3" in fewer[1] and "hours left" in fewer[1]
    assert impossible[0] == 1 and "parallel.tensor" in impossible[1]
    traffic = detail["spec"]["gang"]["traffic"]
    assert [axis["axis"] for axis in traffic] == ["data"], "placement knows what is sent"


def test_a_planner_that_fails_refuses_no_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Call:
        """As much of a request as planning looks at."""

        class leading:  # noqa: N801
            core = Drive().core

        class server:  # noqa: N801
            class options:  # noqa: N801
                state = tmp_path

            @staticmethod
            async def read(function: Any, *given: Any) -> Any:
                return function(*given)

    def breaks(*given: Any) -> Any:
        raise ZeroDivisionError("by zero")

    table = {"name": "x", "model": {"preset": "tiny"}, "parallel": {"data": 2}}
    job = resolve(job_from_table({**table, "train": {"steps": 9, "device": "cpu"}}), 2)
    made = submission(RequestedWork(job=job, ranks=2), 1)
    spec = spec_of(made.spec, made.work, job)
    call: Any = Call()
    fine = asyncio.run(job_rights._planned(call, spec, job))
    assert fine.plan is not None and fine.plan.problem == ""
    monkeypatch.setattr(job_rights, "planned", breaks)
    found = asyncio.run(job_rights._planned(call, spec, job))
    assert found.plan is not None and "ZeroDivisionError: by zero" in found.plan.problem
    assert found.expected.steps == 9
    program = asyncio.run(job_rights._planned(call, spec, None))
    assert program == structs.replace(spec, plan=PlanRecord())
