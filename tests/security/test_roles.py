"""What only operators may ask for, and what a policy cuts down for users."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.control.servers import WORK, PlayedAgent, ServerProcess

POLICY = """
[users]
most_priority = 50
most_retries = 7

[queue.qos.normal]

[queue.qos.urgent]
priority = 1000
preempts = true
teams = ["red"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("roles")
    policy = folder / "policy.toml"
    policy.write_text(POLICY)
    with ServerProcess(folder / "state", "--policy", str(policy)) as running:
        join = (running.state / "join.token").read_text().strip()
        running.wait_for("/v1/status", lambda status: status["leader"])
        connect_node(running, join)
        yield running


def connect_node(server: ServerProcess, join: str) -> None:
    """A node that is known, so that jobs are taken; nothing has to run on it."""
    import asyncio

    async def scenario() -> None:
        agent = PlayedAgent([server.url], join, "node")
        running = asyncio.create_task(agent.run())
        async with asyncio.timeout(60):
            await agent.connected.wait()
        running.cancel()

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def tokens(server: ServerProcess) -> dict[str, str]:
    return {
        "user": server.token("user", "ann", team="red"),
        "mate": server.token("user", "bob", team="red"),
        "other": server.token("user", "eve", team="blue"),
        "admin": server.admin(),
    }


def submit(server: ServerProcess, token: str, **spec: Any) -> tuple[int, Any]:
    body = {"spec": {"name": "job", "gang": {"slot_gpus": 1}, **spec}, "work": WORK}
    return server.call("POST", "/v1/jobs", body, token)


def stored(server: ServerProcess, number: int) -> Any:
    return server.call("GET", f"/v1/jobs/{number}")[1]["spec"]


def test_priority_and_retries_of_users_are_cut_down_and_the_answer_says_so(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    status, done = submit(server, tokens["user"], priority=10**9, retries=10**6)
    assert status == 201, done
    assert "its priority is 50 instead of 1000000000" in done["message"]
    assert "it has 7 retries instead of 1000000" in done["message"]
    spec = stored(server, done["jobs"][0])
    assert (spec["priority"], spec["retries"]) == (50, 7)
    status, done = submit(server, tokens["user"], priority=-5, retries=2)
    assert done["message"] == "accepted; it counts as team red's, as the token says"
    assert stored(server, done["jobs"][0])["priority"] == -5
    status, done = submit(server, tokens["admin"], priority=10**9, retries=10**6)
    assert stored(server, done["jobs"][0])["priority"] == 10**9


def test_the_steps_of_a_workflow_are_cut_down_alike(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    spec = {"name": "step", "gang": {"slot_gpus": 1}, "priority": 10**9}
    body = {"steps": [{"name": "a", "spec": spec, "work": WORK}]}
    status, done = server.call("POST", "/v1/workflows", body, tokens["user"])
    assert status == 201 and "its priority is 50" in done["message"], done
    assert stored(server, done["jobs"][0])["priority"] == 50
    body["steps"][0]["spec"] = {**spec, "forced": True}
    assert server.call("POST", "/v1/workflows", body, tokens["user"])[0] == 403


def test_only_operators_force_a_job_above_its_budget_or_give_it_more(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    status, said = submit(server, tokens["user"], forced=True)
    assert (status, said["error"]["code"]) == (403, "operators_force")
    status, done = submit(server, tokens["user"], budget_gpu_seconds=36_000)
    path = f"/v1/jobs/{done['jobs'][0]}/budget"
    for body in (
        {"gpu_hours": 11},
        {"gpu_hours": 0},  # none at all
        {"gpu_hours": 5, "forced": True},
    ):
        assert server.call("POST", path, body, tokens["user"])[0] == 403, body
    assert server.call("POST", path, {"gpu_hours": 5}, tokens["user"])[0] == 200
    assert server.call("POST", path, {"gpu_hours": 10}, tokens["user"])[0] == 403
    assert server.call("POST", path, {"gpu_hours": 100, "forced": True}, tokens["admin"])[0] == 200


def test_a_class_of_service_is_for_the_teams_that_it_names(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    assert submit(server, tokens["user"], qos="urgent")[0] == 201
    status, said = submit(server, tokens["other"], qos="urgent")
    assert (status, said["error"]["code"]) == (409, "qos_closed")


def test_nobody_acts_for_another_user_or_team(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    for fields, code in (
        ({"user": "root"}, "wrong_user"),
        ({"user": "bob"}, "wrong_user"),
        ({"team": "blue"}, "wrong_team"),
    ):
        status, said = submit(server, tokens["user"], **fields)
        assert (status, said["error"]["code"]) == (403, code)
    for bad in ({"user": "../root"}, {"user": "-x"}, {"team": "a b"}, {"user": "x" * 300}):
        assert submit(server, tokens["admin"], **bad)[0] == 400


def test_what_an_operator_holds_a_user_cannot_release(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    number = submit(server, tokens["user"])[1]["jobs"][0]
    path = f"/v1/jobs/{number}"
    assert server.call("POST", f"{path}/hold", None, tokens["user"])[0] == 200
    assert server.call("POST", f"{path}/release", None, tokens["user"])[0] == 200
    assert server.call("POST", f"{path}/hold", None, tokens["admin"])[0] == 200
    status, said = server.call("POST", f"{path}/release", None, tokens["user"])
    assert (status, said["error"]["code"]) == (409, "operator_holds")
    assert server.call("GET", f"{path}/why")[1]["why"]["code"] == "held"
    assert server.call("POST", f"{path}/release", None, tokens["admin"])[0] == 200


def test_nobody_waits_for_a_job_that_they_may_not_see(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    number = submit(server, tokens["user"])[1]["jobs"][0]
    after = [{"kind": "afterany", "job": number}]
    assert submit(server, tokens["mate"], after=after)[0] == 201
    status, said = submit(server, tokens["other"], after=after)
    never = submit(server, tokens["other"], after=[{"kind": "afterany", "job": 999_999}])
    assert status == never[0] == 409 and said["error"]["code"] == never[1]["error"]["code"]


def test_a_shell_in_a_job_is_for_its_own_user_and_operators(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    number = submit(server, tokens["user"])[1]["jobs"][0]
    url = f"{server.url.replace('http', 'ws', 1)}/v1/jobs/{number}/shell"

    def refusal(token: str) -> str:
        headers = {"Authorization": f"Bearer {token}"}
        with connect(url, additional_headers=headers) as socket:
            socket.send("{}")
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=20)
        return closed.value.rcvd.reason if closed.value.rcvd else ""

    assert "ann's" in refusal(tokens["mate"])
    assert "there is no job" in refusal(tokens["other"])
    for who in ("user", "admin"):
        assert "runs nowhere" in refusal(tokens[who]) or "not connected" in refusal(tokens[who])


@pytest.mark.parametrize(
    ("number", "first"),
    [
        ("\N{SUPERSCRIPT TWO}", {}),
        ("9" * 5_000, {}),
        ("1", {"rows": -1}),
        ("1", {"columns": 1 << 60}),
        ("1", {"argv": ["x"] * 5_000}),
        ("1", {"terminal": "x\0y"}),
    ],
)
def test_a_shell_that_makes_no_sense_is_refused_before_a_node_hears_of_it(
    server: ServerProcess, tokens: dict[str, str], number: str, first: dict[str, Any]
) -> None:
    submit(server, tokens["user"])
    url = f"{server.url.replace('http', 'ws', 1)}/v1/jobs/{quote(number)}/shell"
    headers = {"Authorization": f"Bearer {tokens['admin']}"}
    with connect(url, additional_headers=headers) as socket:
        socket.send(json.dumps(first))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=20)
    received = closed.value.rcvd
    assert received is not None and received.code == 4403
    assert ("there is no job" if not first else "cannot be read") in received.reason


@pytest.mark.parametrize(
    "part",
    [
        {"gang": {"slot_gpus": 1, "node": "n1"}},
        {"expected": {"generation": 3}},
        {"timeouts": {"forever": True}},
        {"array": {"count": 2, "width": 1, "x": 1}},
        {"after": [{"kind": "afterok", "job": 1, "x": 1}]},
        {"generation": 7},
        {"nodes": ["n1"]},
        {"state": "done"},
        {"operator_hold": None},
    ],
)
def test_fields_that_nobody_knows_are_refused_wherever_they_are(
    server: ServerProcess, tokens: dict[str, str], part: dict[str, Any]
) -> None:
    for token in (tokens["user"], tokens["admin"]):
        status, said = submit(server, token, **part)
        assert status == 400 and "unknown field" in said["error"]["message"], said


def test_only_operators_change_what_others_share(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    for method, path, body in (
        ("PUT", "/v1/quotas/red", {"gpus": 10**6}),
        ("PUT", "/v1/reservations/mine", {"start_ns": 1, "end_ns": 2, "gpus": 1}),
        ("POST", "/v1/nodes/node/drain", {}),
        ("POST", "/v1/nodes/node/readmit", {}),
        ("POST", "/v1/nodes/node/quarantine", None),
        ("POST", "/v1/questions/1", {"approve": True}),
        ("POST", "/v1/defragment", None),
        ("POST", "/v1/tokens", {"name": "root", "role": "admin"}),
        ("GET", "/v1/tokens", None),
        ("POST", "/v1/join", {"name": "n", "machine": "12345678"}),
    ):
        status, said = server.call(method, path, body, tokens["user"])
        assert (status, said["error"]["code"]) == (403, "wrong_role"), (path, said)


def test_a_view_that_is_kept_for_everybody_is_changed_by_operators_alone(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    fleet, jobs = {"address": "#/fleet"}, {"address": "#/jobs"}
    assert server.call("PUT", "/v1/views/shared", fleet, tokens["admin"])[0] == 200
    for method, body in (("PUT", jobs), ("DELETE", None)):
        status, said = server.call(method, "/v1/views/shared", body, tokens["user"])
        assert (status, said["error"]["code"]) == (403, "wrong_team")
    assert server.call("PUT", "/v1/views/ours", fleet, tokens["user"])[0] == 200
    assert server.call("PUT", "/v1/views/ours", jobs, tokens["mate"])[0] == 200
    status, said = server.call("PUT", "/v1/views/ours", jobs, tokens["other"])
    assert (status, said["error"]["code"]) == (409, "name_taken")
    assert server.call("DELETE", "/v1/views/ours", None, tokens["mate"])[0] == 200
    views = server.call("GET", "/v1/views", token=tokens["other"])[1]["views"]
    assert [(view["name"], view["address"]) for view in views] == [("shared", "#/fleet")]


def test_what_one_team_keeps_takes_no_room_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is forked from here, with smaller bounds."""
    monkeypatch.setattr("phalanx.control.server.api.saved_views.MOST_VIEWS", 2)
    monkeypatch.setattr("phalanx.control.server.api.alerts.MOST_RULES", 2)
    monkeypatch.setattr("phalanx.control.server.api.plan.MOST_RESULTS", 0)
    alert = {"kind": "goodput_below", "threshold": 0.5}
    with ServerProcess(tmp_path / "state") as server:
        greedy = server.token("user", "ann", team="red")
        other = server.token("user", "eve", team="blue")
        for kind, body in (("views", {"address": "#/fleet"}), ("alerts", alert)):
            made = [server.call("PUT", f"/v1/{kind}/a{n}", body, greedy) for n in range(3)]
            assert [status for status, _ in made] == [200, 200, 409]
            assert "your team keeps 2" in made[-1][1]["error"]["message"]
            assert server.call("PUT", f"/v1/{kind}/a0", body, greedy)[0] == 200
            status, said = server.call("PUT", f"/v1/{kind}/a0", body, other)
            assert (status, said["error"]["code"]) == (409, "name_taken")
            assert server.call("PUT", f"/v1/{kind}/b0", body, other)[0] == 200
        small = {"scenario": "chaos", "gpus": 8, "days": 0.01}
        status, said = server.call("POST", "/v1/simulations", small, other)
        assert (status, said["error"]["code"]) == (409, "too_many")
