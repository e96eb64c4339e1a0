"""What only the page asks for: login links, the fleet as columns, the queue, plans, simulations."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.control.servers import WORK, PlayedAgent, ServerProcess

EFFECTS = {
    "red": ("/v1/jobs/1", lambda answer: answer["job"]["state"] == "running"),
    "blue": ("/v1/queue", lambda answer: any(row["waits"] for row in answer["rows"])),
}


@pytest.fixture(scope="module")
def fleet(server: ServerProcess) -> ServerProcess:
    """A server with a red job on one of two nodes, and a blue one that waits."""
    join = (server.state / "join.token").read_text().strip()

    async def scenario() -> None:
        agents = [PlayedAgent([server.url], join, f"n{i}", gpus=2, kind="h100") for i in (0, 1)]
        for agent in agents:
            agent.steps_until, agent.step_seconds = 10_000, 0.2
        running = [asyncio.create_task(agent.run()) for agent in agents]
        async with asyncio.timeout(90):
            for agent in agents:
                await agent.connected.wait()
        for team, replicas in (("red", 1), ("blue", 2)):
            gang = {"slot_gpus": 2, "tensor": 2, "replicas": replicas}
            body = {"spec": {"name": f"of-{team}", "team": team, "gang": gang}, "work": WORK}
            status, done = await asyncio.to_thread(server.call, "POST", "/v1/jobs", body)
            assert status == 201, done
            await asyncio.to_thread(server.wait_for, *EFFECTS[team])
        for task in running:
            task.cancel()

    asyncio.run(scenario())
    server.wait_for("/v1/fleet", lambda answer: 1 in answer["job"])
    return server


def test_a_link_is_good_once_and_gives_the_rights_of_its_maker(server: ServerProcess) -> None:
    reader = server.token("read", "ron", team="red")
    status, link = server.call("POST", "/v1/login-links", token=reader)
    assert status == 201 and link["url"].endswith(f"/#/login/{link['code']}")
    assert server.call("GET", "/v1/status", token=link["code"])[0] == 403
    status, session = server.call("POST", "/v1/login", token=link["code"])
    assert status == 201
    shown = session["token"]
    assert (shown["role"], shown["team"], shown["name"]) == ("read", "red", "ron")
    assert shown["expires_ns"] > 0
    assert server.call("GET", "/v1/status", token=session["secret"])[0] == 200
    status, body = server.call("POST", "/v1/login", token=link["code"])
    assert (status, body["error"]["code"]) == (401, "wrong_token")
    assert server.call("POST", "/v1/quotas/red", {"gpus": 1}, token=session["secret"])[0] in (
        403,
        405,
    )


def test_a_link_that_two_use_at_once_opens_for_one(server: ServerProcess) -> None:
    async def both() -> list[int]:
        code = server.call("POST", "/v1/login-links")[1]["code"]
        tries = [asyncio.to_thread(server.call, "POST", "/v1/login", None, code) for _ in range(6)]
        return sorted(status for status, _ in await asyncio.gather(*tries))

    first, *others = asyncio.run(both())
    assert first == 201 and set(others) <= {401, 409}


def test_the_fleet_as_columns_hides_jobs_of_other_teams(fleet: ServerProcess) -> None:
    whole = fleet.call("GET", "/v1/fleet")[1]
    lengths = {len(whole[name]) for name in ("names", "state", "job", "gpus", "leaf", "pod")}
    assert lengths == {2} and sorted(whole["names"]) == ["n0", "n1"]
    assert sorted(whole["job"]) == [0, 1]
    blue = fleet.token("read", "bea", team="blue")
    seen = fleet.call("GET", "/v1/fleet", token=blue)[1]
    assert sorted(seen["job"]) == [-1, 0] and "of-red" not in json.dumps(seen)
    past = fleet.call("GET", f"/v1/fleet?at_ns={whole['first_ns'] + 1}", token=blue)[1]
    assert "of-red" not in json.dumps(past)


def test_the_queue_says_who_waits_for_what(fleet: ServerProcess) -> None:
    queue = fleet.call("GET", "/v1/queue")[1]
    assert queue["pending"] == 1
    row = queue["rows"][0]
    assert row["job"]["name"] == "of-blue" and row["waits"]["waits_for"]["text"]
    red = fleet.token("read", "rita", team="red")
    assert fleet.call("GET", "/v1/queue", token=red)[1]["rows"] == []


def test_a_plan_is_the_one_of_the_command_line(fleet: ServerProcess) -> None:
    from phalanx.plan import PlanRequest, propose, understand

    body = {"model": "llama3-8b", "gpu": "h100", "gpus": 64, "tokens": "1T"}
    status, found = fleet.call("POST", "/v1/plan", body)
    own = propose(understand(PlanRequest(model="llama3-8b", cluster="h100-64", tokens="1T")))
    assert status == 200 and found["problem"] == ""
    assert found["prediction"]["step_seconds"] == own.prediction.step_seconds
    assert found["dollars"]["mid"] == own.bill.dollars.mid


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "no-such-model"}, 200),
        ({"tensor": 3}, 200),
        ({"model": "examples/demo.toml"}, 400),
        ({"model": "demo.toml"}, 400),
        ({"gpus": 0}, 400),
        ({"tokens": "many"}, 400),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_words(
    fleet: ServerProcess, change: dict[str, object], status: int
) -> None:
    body = {"model": "llama3-8b", "gpu": "h100", "gpus": 64, **change}
    got, answer = fleet.call("POST", "/v1/plan", body)
    assert got == status
    assert answer["problem"] if status == 200 else answer["error"]["message"]


def test_a_job_that_is_a_program_has_no_plan_and_says_so(fleet: ServerProcess) -> None:
    assert fleet.call("GET", "/v1/jobs/1/plan")[1]["problem"]


def test_a_small_simulation_is_kept_and_files_beside_it_are_listed(fleet: ServerProcess) -> None:
    body = {"scenario": "llama3-54d", "gpus": 512, "days": 0.2}
    status, made = fleet.call("POST", "/v1/simulations", body)
    assert status == 201 and made["report"]["summary"]["seeds"] == 1, made
    folder = fleet.state / "simulations"
    (folder / "broken.json").write_text('{"seeds": [')
    listed = fleet.call("GET", "/v1/simulations")[1]
    lines = {each["name"]: each for each in listed["results"]}
    assert lines[made["name"]]["gpus"] and lines["broken"]["problem"]
    shown = fleet.call("GET", f"/v1/simulations/{made['name']}")[1]["report"]
    assert shown["summary"]["mean"] == made["report"]["summary"]["mean"]
    assert fleet.call("GET", "/v1/simulations/broken")[0] == 404
    assert fleet.call("GET", "/v1/simulations/..%2f..%2fadmin")[0] == 404
