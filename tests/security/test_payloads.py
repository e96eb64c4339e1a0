"""What a job runs is built by the server from checked work, and as whom comes from the token."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.cluster.fabric.verdict import FabricCheckWork, encode_work
from phalanx.cluster.jobs.job import GangShape, JobSpec
from phalanx.config import job_from_table, resolve
from phalanx.control.server.http.work_check import WorkError, checked_work, refuse_elastic
from phalanx.control.wire.api_types import JobRequest
from phalanx.control.wire.payload import Payload, PayloadError, Script, decode_payload
from phalanx.doctor.fabric.report import FabricRequest
from tests.control.servers import WORK, ServerProcess
from tests.security.agents import RootAgent, wait_for

ENDED = ("done", "failed", "cancelled")


class Site:
    """A server and two root agents that switch users, attacked with the token of a user."""

    def __init__(self, folder: Path, server: ServerProcess, agents: list[RootAgent], user: str):
        self.folder, self.server, self.agents, self.user = folder, server, agents, user
        self.token = server.token("user", user)

    def submit(self, body: dict[str, Any], path: str = "/v1/jobs", token: str = "") -> Any:
        return self.server.call("POST", path, body, token or self.token)

    def job(self, number: int) -> Any:
        return self.server.call("GET", f"/v1/jobs/{number}")[1]["job"]

    def ended(self, number: int) -> Any:
        assert wait_for(lambda: self.job(number)["state"] in ENDED), self.job(number)
        return self.job(number)

    def unharmed(self) -> bool:
        nodes = self.server.call("GET", "/v1/nodes")[1]["nodes"]
        sound = all(node["connected"] and node["state"] == "healthy" for node in nodes)
        return sound and all(agent.alive() for agent in self.agents)


@pytest.fixture(scope="module")
def site(users: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Agents wait until there is work for them: their processes are the nodes'."""
    folder = tmp_path_factory.mktemp("site")
    for path in (folder, *folder.parents[:2]):
        path.chmod(path.stat().st_mode | 0o011)
    with ServerProcess(folder / "server") as server:
        agents = [RootAgent(server, folder, name, zygote_ready=True) for name in ("one", "two")]
        try:
            nodes = lambda: server.call("GET", "/v1/nodes")[1]["nodes"]  # noqa: E731
            assert wait_for(lambda: len(nodes()) == 2), agents[0].log()
            yield Site(folder, server, agents, users[0])
        finally:
            for agent in agents:
                agent.end()


def hand_made(argv: list[str], user: str) -> str:
    return json.dumps({"kind": "Script", "user": user, "argv": argv})


@pytest.mark.parametrize("user", ["", "root"])
def test_no_hand_made_payload_gets_past_the_door(site: Site, user: str) -> None:
    proof = site.folder / "taken"
    payload = hand_made(["/bin/sh", "-c", f"id -un > {proof}"], user)
    for spec in ({"name": "j", "payload": payload}, {"name": "j", "reports_steps": True}):
        for body, path in (
            ({"spec": spec, "work": WORK}, "/v1/jobs"),
            ({"steps": [{"name": "s", "spec": spec, "work": WORK}]}, "/v1/workflows"),
        ):
            for token in (site.token, site.server.admin()):
                status, said = site.submit(body, path, token)
                assert status == 400, said
                assert "unknown field" in said["error"]["message"]
    assert not proof.exists()


def test_no_work_names_the_user_that_it_runs_as(site: Site, users: tuple[str, str]) -> None:
    for user in ("", "root", users[1]):
        status, said = site.submit({"spec": {"name": "j"}, "work": {**WORK, "user": user}})
        assert status == 400 and "user" in said["error"]["message"], said
    status, said = site.submit({"spec": {"name": "j", "user": users[1]}, "work": WORK})
    assert (status, said["error"]["code"]) == (403, "wrong_user")


def test_a_job_runs_as_the_user_of_the_token(site: Site) -> None:
    work = {"kind": "Script", "argv": ["/bin/sh", "-c", "id -u; id -un; id -G"], "folder": "/"}
    status, said = site.submit({"spec": {"name": "honest"}, "work": work})
    assert status == 201, said
    number = said["jobs"][0]
    assert site.ended(number)["state"] == "done"
    log = site.server.call("GET", f"/v1/jobs/{number}/logs")[1]
    assert site.user in log and "root" not in log and "\n0\n" not in f"\n{log}"


def test_an_operator_cannot_have_jobs_run_as_a_user_of_the_system(site: Site) -> None:
    status, said = site.submit(
        {"spec": {"name": "as-daemon", "user": "daemon"}, "work": WORK}, token=site.server.admin()
    )
    assert status == 201, said
    job = site.ended(said["jobs"][0])
    assert job["state"] == "failed" and "runs no jobs as daemon" in job["why"]["text"]
    assert site.unharmed()


BAD_WORK: list[tuple[dict[str, Any] | None, str]] = [
    (None, "work"),
    ({}, "kind"),
    ({"kind": "Nothing"}, "kind"),
    ({"kind": "Script"}, "argv"),
    ({"kind": "Script", "argv": []}, "names no program"),
    ({"kind": "Script", "argv": [""]}, "names no program"),
    ({"kind": "Script", "argv": ["true", "a\0b"]}, "NUL"),
    ({"kind": "Script", "argv": ["true", "\ud800"]}, ""),
    ({"kind": "Script", "argv": ["x"] * 5000}, ""),
    ({"kind": "Script", "argv": ["x" * 200_000]}, ""),
    ({"kind": "Script", "argv": [1, 2]}, "argv"),
    ({"kind": "Script", "argv": ["true"], "folder": "tmp"}, "absolute"),
    ({"kind": "Script", "argv": ["true"], "folder": "/a\0b"}, "NUL"),
    ({"kind": "Script", "argv": ["true"], "environment": {"A=B": "1"}}, "no name"),
    ({"kind": "Script", "argv": ["true"], "environment": {"": "1"}}, "no name"),
    ({"kind": "Script", "argv": ["true"], "environment": {"A": "a\0"}}, "NUL"),
    ({"kind": "Train", "toml": "", "world_size": 1}, "toml"),
    ({"kind": "Train", "toml": "x = ", "world_size": 1}, "no TOML"),
    ({"kind": "Train", "toml": "x = " + "[" * 3000 + "]" * 3000, "world_size": 1}, "toml"),
    ({"kind": "Train", "toml": 'name = "x"', "world_size": 0}, "world_size"),
    ({"kind": "Train", "toml": "a" * 300_000, "world_size": 1}, ""),
]


@pytest.mark.parametrize(("work", "why"), BAD_WORK)
def test_work_that_cannot_be_started_is_refused_when_it_is_submitted(
    site: Site, work: dict[str, Any] | None, why: str
) -> None:
    body: dict[str, Any] = {"spec": {"name": "bad"}}
    step = {"name": "s", **body}
    if work is not None:
        body["work"] = step["work"] = work
    for sent, path in ((body, "/v1/jobs"), ({"steps": [step]}, "/v1/workflows")):
        status, said = site.submit(sent, path)
        assert status in (400, 409) and why in said["error"]["message"], (status, said)
    assert site.unharmed()


def test_the_submission_has_every_field_of_a_job_but_those_the_server_writes() -> None:
    written = {"expected", "fallbacks", "payload", "plan", "reports_steps"}
    assert set(JobSpec.__struct_fields__) - set(JobRequest.__struct_fields__) == written
    shared = set(JobRequest.__struct_fields__) & set(JobSpec.__struct_fields__)
    assert set(JobRequest.__struct_fields__) - shared == {"budget_micro_dollars"}  # of GPU-hours
    defaults = JobSpec(name="x"), JobRequest(name="x")
    for name in shared:
        assert getattr(defaults[0], name) == getattr(defaults[1], name)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", "\x00", "{" * 5000, '{"kind":"Script"}', '{"kind":[]}'],
)
def test_a_text_that_describes_no_work_is_told_as_such(text: str) -> None:
    with pytest.raises(PayloadError):
        decode_payload(text)


def test_the_payload_of_a_fabric_check_is_a_program_that_no_client_can_ask_for() -> None:
    work = FabricCheckWork(ranks_per_node=8, slower_ppm=200_000, places={"n0": ("l", "p")})
    script = decode_payload(encode_work(work))
    assert isinstance(script, Script)
    python, *options, request = script.argv
    assert (python, options) == (sys.executable, ["-m", "phalanx.doctor.fabric.program"])
    wanted = msgspec.json.decode(request, type=FabricRequest)
    assert (wanted.slower, wanted.collectives, wanted.ranks_per_node) == (0.2, (), 8)
    assert wanted.places == {"n0": ("l", "p")}
    with pytest.raises(msgspec.ValidationError, match="FabricCheck"):
        msgspec.convert(msgspec.to_builtins(work), Payload)


def test_a_user_in_a_payload_of_an_old_log_means_nothing() -> None:
    assert decode_payload(hand_made(["true"], "root")) == Script(argv=("true",))


def test_checked_work_says_what_is_wrong() -> None:
    with pytest.raises(WorkError, match=r"work\.argv: names no program"):
        checked_work(Script(argv=()))


def test_an_elastic_gang_with_virtual_replicas_is_refused() -> None:
    job = resolve(job_from_table({"train": {"virtual_replicas": 4}}), 4)
    refuse_elastic(job, GangShape(replicas=4))
    refuse_elastic(resolve(job_from_table({}), 4), GangShape(replicas=4, least_replicas=2))
    with pytest.raises(WorkError, match="virtual_replicas = 4: an elastic gang"):
        refuse_elastic(job, GangShape(replicas=4, least_replicas=2))
