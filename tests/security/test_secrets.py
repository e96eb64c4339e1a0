"""Secrets of a job: shown to nobody, and where they are references, not even sent."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest

from phalanx.control.trust.secrets import (
    HIDDEN,
    SecretError,
    plain_secrets,
    resolved,
    secrets_note,
    shown_body,
    shown_payload,
)
from tests.control.servers import ServerProcess
from tests.security.agents import RootAgent, wait_for

TOKEN = "hf_0123456789"


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("db_password", True),
        ("MYSECRET", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("KEYBOARD", False),
        ("NCCL_DEBUG", False),
    ],
)
def test_names_of_secrets_are_known(name: str, hidden: bool) -> None:
    assert plain_secrets({name: "x"}) == ([name] if hidden else [])
    assert plain_secrets({name: "secret-file:/run/x"}) == []


def test_a_value_is_hidden_wherever_it_stands_in_what_a_job_runs() -> None:
    work = {
        "kind": "Train",
        "toml": f'[backend.environment]\nHF_TOKEN = "{TOKEN}"\n',
        "world_size": 1,
        "environment": {"HF_TOKEN": TOKEN, "LANG": "C"},
    }
    shown = json.loads(shown_payload(json.dumps(work)))
    assert shown["environment"] == {"HF_TOKEN": HIDDEN, "LANG": "C"}
    assert TOKEN not in json.dumps(shown) and shown["world_size"] == 1
    body = {"steps": [{"spec": {"payload": json.dumps(work), "name": "j"}}]}
    assert TOKEN not in json.dumps(shown_body(body))
    assert "HF_TOKEN" in secrets_note(work["environment"])  # type: ignore[arg-type]
    assert secrets_note({"LANG": "C"}) == ""


@pytest.mark.parametrize("text", ["", "3", "[]", "no JSON", '{"environment": 3}', '{"a": 1}'])
def test_what_nobody_can_run_is_shown_as_it_is(text: str) -> None:
    assert shown_payload(text) == text


def test_of_a_webhook_only_the_host_is_shown() -> None:
    event = {"spec": {"name": "job", "webhook": "https://hooks.example/T0/hush?key=hush"}}
    assert shown_body(event)["spec"]["webhook"] == "https://hooks.example/(secret)"
    assert shown_body({"spec": {"webhook": ""}})["spec"]["webhook"] == ""


def test_references_are_read_and_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "good").write_text(f"{TOKEN}\n")
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    os.mkfifo(tmp_path / "pipe")
    assert resolved({"A": f"secret-file:{tmp_path}/good", "B": "b"}) == {"A": TOKEN, "B": "b"}
    for name in ("large", "binary", "pipe", "absent"):
        with pytest.raises(SecretError, match="the secret A"):
            resolved({"A": f"secret-file:{tmp_path}/{name}"})


def test_a_node_reads_a_secret_as_its_user_and_the_server_shows_none(
    users: tuple[str, str], open_folder: Path
) -> None:
    mine, roots = open_folder / "mine", open_folder / "roots"
    for path in (mine, roots):
        path.write_text("kept-in-a-file")
        path.chmod(0o600)
    os.chown(mine, pwd.getpwnam(users[0]).pw_uid, -1)
    with (
        ServerProcess(open_folder / "server") as server,
        RootAgent(server, open_folder, "real", zygote_ready=True) as agent,
    ):
        assert wait_for(lambda: server.call("GET", "/v1/nodes")[1]["nodes"])
        job = submitted(server, users[0], mine)
        log = agent.state / "jobs" / str(job) / "worker-0.log"
        assert wait_for(lambda: log.exists() and "said" in log.read_text()), agent.log()
        assert f"{TOKEN} kept-in-a-file" in log.read_text()
        for path in (f"/v1/jobs/{job}", "/v1/events?limit=500", f"/v1/runs/{job}"):
            shown = json.dumps(server.call("GET", path)[1])
            assert TOKEN not in shown and "kept-in-a-file" not in shown, path
        assert HIDDEN in json.dumps(server.call("GET", f"/v1/jobs/{job}")[1])
        stolen = submitted(server, users[0], roots)
        show = lambda: server.call("GET", f"/v1/jobs/{stolen}")[1]["job"]  # noqa: E731
        assert wait_for(lambda: show()["state"] == "failed"), show()
        assert "the secret MODEL_KEY cannot be read" in show()["why"]["text"]


def submitted(server: ServerProcess, user: str, secret: Path) -> int:
    work = {
        "kind": "Script",
        "argv": ["/bin/sh", "-c", "echo $HF_TOKEN $MODEL_KEY; echo said"],
        "folder": "/",
        "environment": {"HF_TOKEN": TOKEN, "MODEL_KEY": f"secret-file:{secret}"},
    }
    spec = {"name": "j", "user": user}
    status, answer = server.call("POST", "/v1/jobs", {"spec": spec, "work": work})
    assert status == 201, answer
    return int(answer["jobs"][0])
