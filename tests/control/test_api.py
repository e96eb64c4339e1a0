"""The HTTP API as seen from outside: who is let in, what is refused, and how."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import subprocess
import time
from collections import deque
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from phalanx.observe import page
from tests.control.servers import WORK, PlayedAgent, ServerProcess

PUBLIC = {("get", "/healthz"), ("get", "/v1/openapi.json"), ("get", "/v1/authority")}
ROLES = ("admin", "user", "read", "join")


@pytest.fixture(scope="module")
def tokens(server: ServerProcess) -> dict[str, str]:
    """A token of every role; the agent's is for a node that is not there."""
    made = {role: server.token(role, team="red") for role in ("admin", "user", "read")}
    made["join"] = server.token("agent", "joiner")
    return made


def operations(server: ServerProcess) -> list[tuple[str, str, list[str]]]:
    """Every operation of the OpenAPI document, with the roles that it names."""
    document = server.call("GET", "/v1/openapi.json", token="")[1]
    return [
        (method, path, operation["x-roles"])
        for path, known in document["paths"].items()
        for method, operation in known.items()
    ]


def filled(path: str) -> str:
    return re.sub(r"\{\w+\}", "1", path)


def test_every_operation_refuses_strangers_and_wrong_tokens(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state", "--requests-per-second", "0") as patient:
        seen = operations(patient)
        assert len(seen) > 25
        for method, path, roles in seen:
            if (method, path) in PUBLIC:
                assert not roles
                continue
            for token, code in (("", "no_token"), ("phx_admin_guess", "wrong_token")):
                status, body = patient.call(method.upper(), filled(path), token=token)
                assert (status, body["error"]["code"]) == (401, code), (method, path)


def test_every_operation_refuses_tokens_of_other_roles(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    for method, path, roles in operations(server):
        for role in ROLES if roles else ():
            if role in roles:
                continue
            status, body = server.call(method.upper(), filled(path), token=tokens[role])
            assert (status, body["error"]["code"]) == (403, "wrong_role"), (method, path, role)


def test_jobs_of_one_team_are_neither_seen_nor_ended_by_another(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    blue = server.token("user", "bob", team="blue")
    blue_reader = server.token("read", "ben", team="blue")
    join = (server.state / "join.token").read_text().strip()

    async def scenario() -> int:
        agent = PlayedAgent([server.url], join, "team-node")
        running = asyncio.create_task(agent.run())
        async with asyncio.timeout(60):
            await agent.connected.wait()
        trial = {"sweep": "secret.1", "number": 4, "steps": 20, "settings": {"train.seed": "7"}}
        spec = {"name": "secret", "gang": {"slot_gpus": 1}, "trial": trial}
        body = {"spec": spec, "work": WORK}
        status, done = await asyncio.to_thread(
            server.call, "POST", "/v1/jobs", body, tokens["user"]
        )
        assert status == 201, done
        assert "team red's, as the token says" in done["message"]
        again = await asyncio.to_thread(server.call, "POST", "/v1/jobs", body, tokens["user"])
        assert again[1]["jobs"] == done["jobs"], "a trial is one job"
        running.cancel()
        return int(done["jobs"][0])

    job = asyncio.run(scenario())
    shown = server.call("GET", f"/v1/jobs/{job}", token=tokens["user"])[1]
    assert shown["job"]["team"] == "red" and shown["job"]["user"] == "user"
    (line,) = server.call("GET", "/v1/sweeps", token=tokens["user"])[1]["sweeps"]
    assert (line["sweep"], line["trials"], line["best"]) == ("secret.1", 1, None)
    (one,) = server.call("GET", "/v1/sweeps/secret.1", token=tokens["user"])[1]["trials"]
    assert (one["job"], one["trial"], one["settings"]) == (job, 4, {"train.seed": "7"})
    for token in (blue, blue_reader):
        hidden = (f"/v1/jobs/{job}", f"/v1/jobs/{job}/why", f"/v1/jobs/{job}/logs")
        for path in (*hidden, "/v1/sweeps/secret.1"):
            assert server.call("GET", path, token=token)[0] == 404
        assert server.call("GET", "/v1/sweeps", token=token)[1]["sweeps"] == []
        listed = server.call("GET", "/v1/jobs?state=all", token=token)[1]["jobs"]
        assert job not in [each["id"] for each in listed]
        text = json.dumps(server.call("GET", "/v1/events?limit=1000", token=token)[1])
        assert "secret" not in text
        assert "secret" not in json.dumps(server.call("GET", "/v1/status", token=token)[1])
    assert server.call("POST", f"/v1/jobs/{job}/cancel", token=blue)[0] == 404
    theirs = {"spec": {"name": "x", "team": "red"}, "work": WORK}
    status, body = server.call("POST", "/v1/jobs", theirs, token=blue)
    assert (status, body["error"]["code"]) == (403, "wrong_team")
    as_other = {"spec": {"name": "x", "user": "root"}, "work": WORK}
    assert server.call("POST", "/v1/jobs", as_other, token=blue)[0] == 403
    assert server.call("POST", f"/v1/jobs/{job}/cancel", token=tokens["user"])[0] in (200, 409)


@pytest.mark.parametrize("name", ["", "../../etc", "a/b", ".hidden", "a\x1b[2J", "x" * 500])
def test_names_that_no_folder_can_carry_are_refused_whoever_sends_them(
    server: ServerProcess, name: str
) -> None:
    for path, body in (
        ("/v1/jobs", {"spec": {"name": name}, "work": WORK}),
        ("/v1/workflows", {"steps": [{"name": "one", "spec": {"name": name}, "work": WORK}]}),
    ):
        status, said = server.call("POST", path, body)
        assert status == 409 and "name = " in said["error"]["message"], (status, said)


def test_paths_that_walk_out_of_the_server_lead_nowhere(server: ServerProcess) -> None:
    for path in (
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/page.js/../../server.py",
        "/%2e%2e/admin.token",
        "//etc/passwd",
        "/v1/nodes/..%2f..%2fadmin.token",
        "/v1/jobs/../../admin.token/logs",
        "/v1/reservations/%3B%20rm%20-rf%20%2F",
    ):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.putrequest("GET", path, skip_accept_encoding=True)
        connection.putheader("Authorization", f"Bearer {server.admin()}")
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status in (400, 404), path
        assert b"phx_" not in body and b"root:" not in body
        connection.close()


def test_bodies_that_are_too_large_are_refused_before_they_are_read(
    server: ServerProcess,
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", "/v1/jobs")
    connection.putheader("Authorization", f"Bearer {server.admin()}")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    connection.close()


def test_bodies_that_do_not_say_how_long_they_are_are_refused(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {
        "Authorization": f"Bearer {server.admin()}",
        "Content-Type": "application/json",
        "Transfer-Encoding": "chunked",
    }
    connection.request("POST", "/v1/jobs", iter([b"{}"]), headers, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 411 and b"Content-Length" in answer.read()
    connection.close()


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b'{"spec": 3}', {}, 400),
        (b'{"spec": {"name": "x", "colour": "red"}}', {}, 400),
        (b'{"spec": {"name": "x", "retries": 1e99}}', {}, 400),
        (b'{"spec": {"name": "x", "retries": 99999999999999999999999}}', {}, 400),
        (b"[" * 100_000, {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"spec": {"name": "x"}}', {"Content-Type": "text/plain"}, 415),
        (b'{"spec": {"name": "x"}}', {"Idempotency-Key": "a b"}, 400),
    ],
)
def test_garbage_is_refused_with_a_reason(
    server: ServerProcess, body: bytes, headers: dict[str, str], status: int
) -> None:
    found, answer = server.call("POST", "/v1/jobs", body, headers=headers)
    assert found == status and answer["error"]["message"]


def test_a_refusal_names_the_field_and_the_rule(server: ServerProcess) -> None:
    for body, words in (
        ({"name": "a b", "role": "user"}, "name: expected `str` of letters, digits and . _ @ -"),
        ({"name": "a", "role": "user", "hours": -1}, "hours: expected `float` >= 0.0"),
    ):
        assert server.call("POST", "/v1/tokens", body)[1]["error"]["message"] == words


def test_unknown_and_doubled_parameters_are_refused(server: ServerProcess) -> None:
    for query in ("limt=3", "limit=3&limit=4", "limit=0", "limit=x", "state=sleeping"):
        assert server.call("GET", f"/v1/jobs?{query}")[0] == 400, query


def test_the_same_key_is_done_once_for_one_caller_and_again_for_another(
    server: ServerProcess,
) -> None:
    other = server.token("admin", "second")
    key = {"Idempotency-Key": "once"}
    body = {"gpus": 3}
    first = server.call("PUT", "/v1/quotas/green", body, headers=key)[1]
    again = server.call("PUT", "/v1/quotas/green", body, headers=key)[1]
    theirs = server.call("PUT", "/v1/quotas/green", body, headers=key, token=other)[1]
    assert first == again and theirs["sequence"] > first["sequence"]
    for path, other in (("green", {"gpus": 4}), ("blue", body)):
        status, refusal = server.call("PUT", f"/v1/quotas/{path}", other, headers=key)
        assert (status, refusal["error"]["code"]) == (409, "key_reused")
    quotas = server.call("GET", "/v1/quotas")[1]["quotas"]
    assert [each["gpus"] for each in quotas if each["team"] in ("green", "blue")] == [3]


def test_a_caller_that_asks_too_often_is_told_to_wait(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "own", "--requests-per-second", "0.001") as own:
        reader = own.token("read", "eager")
        found = [own.call("GET", "/v1/whoami", token=reader)[0] for _ in range(450)]
        assert found[0] == 200 and found.count(429) > 10  # beyond the burst
        assert own.call("GET", "/v1/whoami")[0] == 200  # the others are not held up
        guesses = {own.call("GET", "/v1/whoami", token="phx_admin_guess")[0] for _ in range(200)}
        assert guesses == {401, 429}  # of what is guessed, fewer are answered
        assert own.call("GET", "/v1/whoami")[0] == 200


def test_times_beyond_what_can_be_stored_are_refused(server: ServerProcess) -> None:
    status, body = server.call("GET", "/v1/ledger/timeline?bins=3&from=1e10&to=1e11")
    assert status == 400, body
    late = server.call("GET", "/v1/ledger/timeline?bins=3&from=8.9e9&to=9e9")
    assert late[0] == 200 and len(late[1]["timeline"]) <= 3


def test_tokens_expire_are_revoked_and_are_never_shown_again(server: ServerProcess) -> None:
    short = server.token("read", "short", hours=1e-7)
    time.sleep(0.01)
    status, body = server.call("GET", "/v1/whoami", token=short)
    assert (status, body["error"]["code"]) == (401, "expired_token")
    assert "phalanx token create" in body["error"]["message"]
    kept = server.token("read", "kept")
    number = server.call("GET", "/v1/whoami", token=kept)[1]["token"]["id"]
    assert kept not in json.dumps(server.call("GET", "/v1/tokens")[1])
    assert server.call("DELETE", f"/v1/tokens/{number}")[0] == 200
    assert server.call("GET", "/v1/whoami", token=kept)[0] == 401


def test_secrets_are_in_no_log_and_no_process_list(server: ServerProcess) -> None:
    secret = server.token("user", "quiet")
    server.call("GET", "/v1/jobs", token=secret)
    server.call("POST", "/v1/defragment", token=secret)
    names = ("out.txt", "audit.jsonl", "server.json")
    kept = b"".join((server.state / name).read_bytes() for name in names)
    kept += (server.state / "log.sqlite").read_bytes()
    kept += (server.state / "log.sqlite-wal").read_bytes()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, check=True).stdout
    for each in (secret, server.admin(), (server.state / "join.token").read_text().strip()):
        assert each.encode() not in kept
        assert each.encode() not in listed
    for name in ("admin.token", "join.token", "audit.jsonl"):
        assert (server.state / name).stat().st_mode & 0o077 == 0


def test_the_audit_log_names_who_did_what(server: ServerProcess) -> None:
    secret = server.token("read", "nosy")
    server.call("POST", "/v1/nodes/x/drain", {}, token=secret)
    lines = (server.state / "audit.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines if "nosy" in line][-1]
    assert (last["action"], last["status"]) == ("POST /v1/nodes/x/drain", 403)
    assert last["role"] == "read" and last["client"] == "127.0.0.1"


def test_the_page_asks_nobody_else(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/")
    answer = connection.getresponse()
    text = answer.read().decode()
    policy = answer.getheader("Content-Security-Policy") or ""
    assert answer.status == 200 and "default-src 'none'" in policy
    assert not re.search(r"(src|href)=\"(https?:)?//", text)
    for name in re.findall(r'(?:src|href)="(/[^"]+)"', text):
        connection.request("GET", name)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200 and "immutable" in (answer.getheader("Cache-Control") or "")
    for name, asset in page.load().files.items():
        content = asset.data.decode(errors="replace").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|insertAdjacent|eval\(", content), name
    connection.close()


def test_a_live_view_shows_events_that_its_reader_may_see(
    server: ServerProcess, tokens: dict[str, str]
) -> None:
    url = server.url.replace("http", "ws") + "/v1/live"
    with connect(url) as socket:
        socket.send(tokens["read"])
        assert json.loads(socket.recv(60))["kind"] == "ready"
        server.call("PUT", "/v1/quotas/live", {"gpus": 1})
        assert json.loads(socket.recv(60))["kind"] == "SetQuota"
    with connect(url) as socket:
        socket.send("phx_read_wrong")
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
    with connect(url) as socket:
        socket.send(b"\xff\xff")  # no text at all
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
    assert "Traceback" not in server.output()


def test_whoever_listens_is_cut_off_when_the_token_ends(server: ServerProcess) -> None:
    secret = server.token("read", "listener")
    number = server.call("GET", "/v1/whoami", token=secret)[1]["token"]["id"]
    link = server.call("POST", "/v1/login-links", token=secret)[1]["code"]
    session = server.call("POST", "/v1/login", token=link)[1]["secret"]
    late = server.call("POST", "/v1/login-links", token=session)[1]["code"]
    url = server.url.replace("http", "ws") + "/v1/live"
    with connect(url) as socket:
        socket.send(session)
        assert json.loads(socket.recv(60))["kind"] == "ready"
        assert server.call("DELETE", f"/v1/tokens/{number}")[0] == 200
        with pytest.raises(ConnectionClosed) as closed:
            deque(socket, maxlen=0)  # what happens meanwhile is told before
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
    assert server.call("GET", "/v1/whoami", token=session)[0] == 401
    assert server.call("POST", "/v1/login", token=late)[0] == 401
