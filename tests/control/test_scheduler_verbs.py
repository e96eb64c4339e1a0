"""Dependencies, arrays, times, budgets, reservations and usage: by HTTP and by the command line."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_phalanx
from tests.control.servers import WORK, PlayedAgent, ServerProcess

POLICY = """
[price]
micro_dollars_per_gpu_hour = 2_000_000
ask_above_dollars = 1000

[users]
mail_domains = ["lab.example"]

[queue.partitions.small]
teams = ["red"]
most_time_ns = 3_600_000_000_000
"""
GANG = {"slot_gpus": 1}


class Relay(socketserver.ThreadingTCPServer):
    """A mail server that takes everything, and keeps it."""

    daemon_threads = True

    def __init__(self) -> None:
        self.taken: list[str] = []
        super().__init__(("127.0.0.1", 0), RelayHandler)
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()


class RelayHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Relay)
        self.wfile.write(b"220 relay\r\n")
        lines: list[str] = []
        in_data = False
        for line in map(bytes.decode, self.rfile):
            lines.append(line.rstrip())
            word = line[:4].strip().upper()
            if in_data and lines[-1] != ".":
                continue
            answers = {"DATA": b"354 go on", "QUIT": b"221 bye"}
            self.wfile.write(answers.get(word, b"250 taken") + b"\r\n")
            in_data = word == "DATA"
            if word == "QUIT":
                break
        self.server.taken.append("\n".join(lines))


@pytest.fixture(scope="module")
def relay() -> Relay:
    """Not made where the module is imported: its thread would not outlive a fork."""
    return Relay()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, relay: Relay) -> Iterator[ServerProcess]:
    """A server with two nodes of two GPUs, one of them in a partition with rules."""
    folder: Path = tmp_path_factory.mktemp("verbs")
    (folder / "policy.toml").write_text(POLICY)
    options = ("--policy", str(folder / "policy.toml"), "--mail-relay", f"127.0.0.1:{relay.port}")
    with ServerProcess(folder / "state", *options) as running:
        join = (running.state / "join.token").read_text().strip()

        async def play() -> None:
            agents = [PlayedAgent([running.url], join, "n0")]
            agents.append(PlayedAgent([running.url], join, "n1", partition="small"))
            for agent in agents:
                agent.steps_until = 10**6  # until they are cancelled
            await asyncio.gather(*(agent.run() for agent in agents))

        threading.Thread(target=lambda: asyncio.run(play()), daemon=True).start()
        running.wait_for("/v1/status", lambda status: status["connected"] == 2)
        yield running


@pytest.fixture(scope="module")
def tokens(server: ServerProcess) -> dict[str, str]:
    return {
        "ann": server.token("user", "ann", team="red"),
        "eve": server.token("user", "eve", team="blue"),
    }


def phalanx(
    server: ServerProcess, *words: str, token: str = ""
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PHALANX_")}
    given = {**kept, "PHALANX_SERVER": server.url, "PHALANX_TOKEN": token or server.admin()}
    return run_phalanx(*words, environment=given, seconds=60)


def said(server: ServerProcess, *words: str, token: str = "") -> str:
    done = phalanx(server, *words, token=token)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submitted(server: ServerProcess, *options: str, token: str = "") -> Any:
    words = ("submit", "--world-size", "1", "--json", *options, "--", "true")
    return json.loads(said(server, *words, token=token))


def job(server: ServerProcess, number: int) -> Any:
    return server.call("GET", f"/v1/jobs/{number}")[1]


def test_a_job_is_submitted_held_and_starts_when_it_is_released(server: ServerProcess) -> None:
    (number,) = submitted(server, "--hold", "--project", "vision")["jobs"]
    found = job(server, number)["job"]
    assert (found["state"], found["why"]["text"]) == ("pending", "held by a person")
    assert found["project"] == "vision"
    assert "accepted" in said(server, "release", str(number))
    server.wait_for(f"/v1/jobs/{number}", lambda found: found["job"]["started_ns"])
    refused = phalanx(server, "hold", str(number))
    assert refused.returncode == 1 and "only a pending or draining job" in refused.stderr
    said(server, "cancel", str(number))


def test_what_a_submission_asks_for_reaches_the_core(server: ServerProcess) -> None:
    options = ["--begin", "+2h", "--deadline", "+9h", "--minutes", "60", "--exclusive"]
    options += ["--budget-gpu-hours", "3", "--budget-dollars", "4", "--partition", "small"]
    first = submitted(server, "--hold")["jobs"][0]
    answer = submitted(server, *options, "--team", "red", "--after", f"{first}:fail")
    (number,) = answer["jobs"]
    spec = job(server, number)["spec"]
    assert spec["after"] == [{"kind": "afternotok", "job": first}]
    assert 7.9 * 3600 < (spec["deadline_ns"] - time.time_ns()) / 1e9 < 9.1 * 3600
    assert spec["budget_gpu_seconds"] == 7200  # four dollars are less than three GPU-hours
    assert spec["gang"]["whole_nodes"] and spec["partition"] == "small"
    assert answer["estimate"] == {"gpu_hours": 1.0, "dollars": 2.0, "by_limit": True}
    assert answer["start"]
    told = said(server, "budget", str(number))
    assert told == f"job {number}: 2 GPU-hours; it has used 0 GPU-hours\n"
    said(server, "cancel", str(number), str(first))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--after", "999999"), "depends on job 999999, which does not exist"),
        (("--after", "x"), "e.g. 12, 12:any or 12:fail"),
        (("--array", "9-0"), "ends before it begins; give 0-9"),
        (("--array", "0-99999"), "must be 1 to 10000 (policy: queue.most_array)"),
        (("--begin", "soon"), "is no time; e.g. 08:00"),
        (("--deadline", "2001-01-01"), "is in the past; give a later time"),
        (("--deadline", "+1h", "--minutes", "90"), "it needs 1 h 30 min and has"),
        (("--budget-gpu-hours", "0"), "lets no job run; give more than 0"),
        (("--budget-dollars", "0.0001"), "a GPU-hour costs $2 here"),
        (("--partition", "smal"), 'did you mean "small"?'),
        (("--partition", "small"), "partition small is for red, not for team default"),
        (("--time-min", "5"), "and it has none; give --minutes"),
        (("--mail", "ann"), "an address like ann@example.org"),
        (("--webhook", "ftp://x"), "a webhook is an address like https://host/path"),
    ],
)
def test_what_cannot_be_is_named_at_once_with_the_fix(
    server: ServerProcess, options: tuple[str, ...], problem: str
) -> None:
    done = phalanx(server, "submit", "--world-size", "1", *options, "--", "true")
    assert done.returncode in (1, 2) and problem in " ".join(done.stderr.split()), done.stderr


def test_an_array_of_ten_thousand_is_submitted_at_once_and_is_one_line(
    server: ServerProcess,
) -> None:
    made = submitted(server, "--array", "0-9999%8", "--hold", "--name", "sweep")
    (first,) = made["jobs"]
    lines = [line for line in said(server, "ps").splitlines() if "sweep" in line]
    assert len(lines) == 1 and f"{first}-{first + 9999}" in lines[0]
    assert "sweep[0-9999]" in lines[0] and "10000 pending" in lines[0]
    member = server.call("GET", f"/v1/jobs?state=live&after={first + 41}&limit=1")[1]["jobs"][0]
    assert (member["array"]["job"], member["array"]["index"]) == (first, 42)
    assert "cancelled 10000 jobs of the array" in said(server, "cancel", "--array", str(first + 7))
    assert "sweep" not in said(server, "ps")


def test_an_array_of_a_job_file_would_be_the_same_job_many_times(
    server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text('name = "x"\n[model]\npreset = "tiny"\n')
    done = phalanx(server, "submit", "--array", "0-3", str(tmp_path / "job.toml"))
    assert done.returncode == 2 and "PHALANX_ARRAY_INDEX" in done.stderr


def test_what_may_cost_much_is_asked_about(server: ServerProcess) -> None:
    words = ("--array", "0-99", "--hold", "--minutes", "600")
    done = phalanx(server, "submit", "--world-size", "1", *words, "--", "true")
    assert done.returncode == 1 and "by its time limit it may take up to 2,000" in done.stderr
    assert "give --yes" in done.stderr
    made = submitted(server, *words, "--yes")
    assert made["estimate"]["gpu_hours"] == 1000.0
    said(server, "cancel", "--array", str(made["jobs"][0]))


def test_who_is_to_be_told_of_a_jobs_end_is_told(
    server: ServerProcess, relay: Relay, tokens: dict[str, str]
) -> None:
    options = ("--hold", "--name", "told", "--mail", "ann@lab.example")
    elsewhere = ("submit", "--hold", "--mail", "x@else.example", "--", "true")
    done = phalanx(server, *elsewhere, token=tokens["ann"])
    assert done.returncode == 1 and "mail to addresses at lab.example" in done.stderr
    hooked = ("submit", "--hold", "--webhook", "http://169.254.169.254/x", "--", "true")
    done = phalanx(server, *hooked, token=tokens["ann"])
    assert done.returncode == 1 and "webhooks of nowhere, not of 169.254.169.254" in done.stderr
    (number,) = submitted(server, *options, token=tokens["ann"])["jobs"]
    said(server, "cancel", str(number))
    until = time.monotonic() + 30
    while not any(f"Subject: job {number} (told): cancelled" in each for each in relay.taken):
        assert time.monotonic() < until, relay.taken
        time.sleep(0.05)


def test_users_may_not_do_what_only_operators_may(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    ann, eve = tokens["ann"], tokens["eve"]
    (number,) = submitted(server, "--hold", "--budget-gpu-hours", "2", token=ann)["jobs"]
    for words, problem in (
        (("reserve", "mine", "--for", "1h", "--gpus", "1"), "needs the role admin"),
        (("budget", str(number), "--gpu-hours", "5"), "only an operator gives job"),
        (("budget", str(number), "--none"), "only an operator gives job"),
        (("budget", str(number), "--gpu-hours", "1", "--force"), "only an operator"),
    ):
        done = phalanx(server, *words, token=ann)
        assert done.returncode == 1 and problem in done.stderr, words
    assert "1 GPU-hours" in said(server, "budget", str(number), "--gpu-hours", "1", token=ann)
    for order in ("hold", "release", "requeue", "cancel"):
        assert phalanx(server, order, str(number), token=eve).returncode == 1
        path = f"/v1/arrays/{number}/{order}"
        assert order == "requeue" or server.call("POST", path, token=eve)[0] == 404
    waits = {"spec": {"name": "x", "after": [{"kind": "afternotok", "job": number}]}, "work": WORK}
    assert server.call("POST", "/v1/jobs", waits, token=eve)[0] == 409  # as if it were not there
    said(server, "hold", str(number))
    done = phalanx(server, "release", str(number), token=ann)
    assert done.returncode == 1 and "only an operator can let job" in done.stderr
    assert "5 GPU-hours" in said(server, "budget", str(number), "--dollars", "10")
    said(server, "cancel", str(number))


def test_nodes_are_reserved_and_given_back(server: ServerProcess) -> None:
    shown = said(server, "reserve", "upgrade", "--begin", "+1d", "--for", "4h", "--node", "n0")
    assert "upgrade" in shown and "nobody: maintenance" in shown
    said(
        server,
        "reserve",
        "course",
        "--begin",
        "+2d",
        "--until",
        "+3d",
        "--gpus",
        "2",
        "--team",
        "red",
    )
    listed = json.loads(said(server, "reserve", "--json"))["reservations"]
    assert {each["name"]: each["gpus"] for each in listed} == {"upgrade": 0, "course": 2}
    for words, problem in (
        (("x", "--gpus", "1"), "needs an end"),
        (("x", "--for", "1h"), "give --gpus or --node: one"),
        (("x", "--for", "1h", "--gpus", "99"), "the fleet has 4"),
        (("x", "--for", "1h", "--node", "nine"), "there is no node nine"),
        (("x", "--remove"), 'there is no reservation "x" to remove'),
    ):
        done = phalanx(server, "reserve", *words)
        assert done.returncode in (1, 2) and problem in done.stderr, done.stderr
    said(server, "reserve", "upgrade", "--remove")
    assert "nothing is reserved" in said(server, "reserve", "course", "--remove")


def test_partitions_are_listed_with_their_rules(server: ServerProcess) -> None:
    listed = json.loads(said(server, "partitions", "--json"))["partitions"]
    assert [each["name"] for each in listed] == ["default", "small"]
    assert listed[1]["teams"] == ["red"] and listed[1]["most_seconds"] == 3600
    assert (listed[1]["nodes"], listed[1]["gpus"]) == (1, 2)
    assert "1h00m" in said(server, "partitions")


def test_usage_counts_what_jobs_held_by_team_user_and_project(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    (number,) = submitted(server, "--project", "night", token=tokens["ann"])["jobs"]
    server.wait_for(f"/v1/jobs/{number}", lambda found: found["job"]["state"] == "running")
    time.sleep(0.1)
    said(server, "cancel", str(number))
    rows = list(csv.DictReader(io.StringIO(said(server, "usage", "--by", "project", "--csv"))))
    used = next(row for row in rows if row["project"] == "night")
    ledger = server.call("GET", "/v1/ledger")[1]
    assert int(used["gpu_ns"]) == ledger["jobs"][str(number)]["gpu_ns"] > 0
    by_day = json.loads(said(server, "usage", "--by", "team", "--every", "day", "--json"))["usage"]
    red = [row for row in by_day if row["owner"] == "red"]
    assert sum(int(row["gpu_ns"]) for row in red) == ledger["teams"]["red"]["gpu_ns"]
    assert all(row["start"].startswith("20") for row in red)
    seen = json.loads(said(server, "usage", "--json", token=tokens["eve"]))["usage"]
    assert {row["owner"] for row in seen} <= {"blue"}
    assert "ann" in said(server, "usage", "--by", "user", "--last", "7d")
