"""Pipelines over the API and on the page: who sees a run, who answers it, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_phalanx
from tests.control.servers import ServerProcess
from tests.observe.browser import browser, tab

ASKS = {
    "first": {"kind": "approval", "question": "<b>go on?</b>"},
    "second": {"kind": "approval", "question": "and now?", "after": ["first"]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        yield running


def asked(folder: str, steps: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"pipeline": {"name": "small", "steps": steps or ASKS}, "folder": folder}


def test_a_run_is_answered_listed_and_ended(server: ServerProcess) -> None:
    status, begun = server.call("POST", "/v1/pipelines", asked("/shared/a"))
    assert status == 201 and begun["message"] == f"pipeline run {begun['pipeline']} has begun"
    path = f"/v1/pipelines/{begun['pipeline']}"
    assert server.call("POST", "/v1/pipelines", asked("/shared/a"))[0] == 409
    assert server.call("POST", f"{path}/answer", {"task": "second", "approve": True})[0] == 409
    answer = {"task": "first", "approve": True, "why": "as agreed"}
    assert server.call("POST", f"{path}/answer", answer)[0] == 200
    detail = server.call("GET", path)[1]
    first, second = detail["tasks"]
    assert (first["state"], second["state"]) == ("done", "asking")
    assert first["reason"].startswith("approved by") and first["reason"].endswith(": as agreed")
    assert second["waits_for"] == ["first"]
    assert detail["events"][0]["type"] == "RunBegan"
    behind = server.call("GET", f"{path}?after={len(detail['events'])}")[1]
    assert behind["events"] == []
    assert server.call("POST", f"{path}/cancel", {"why": "x" * 301})[0] == 400
    assert server.call("POST", f"{path}/cancel")[0] == 200
    listed = server.call("GET", "/v1/pipelines")[1]["pipelines"]
    assert [(run["state"], run["states"]) for run in listed if run["folder"] == "/shared/a"] == [
        ("cancelled", {"done": 1, "cancelled": 1})
    ]
    assert server.call("GET", "/v1/pipelines/99")[0] == 404


def test_a_run_is_shown_on_the_command_line_with_its_cost_and_what_comes_next(
    server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "p.toml"
    file.write_text('name = "small"\n[steps.ok]\nkind = "approval"\nquestion = "go on?"\n')
    folder = str(tmp_path / "runs/pipelines/small")
    server.call("POST", "/v1/pipelines", asked(folder, {"ok": ASKS["first"]}))
    token = tmp_path / "token"
    token.write_text(server.admin())
    environment = {**os.environ, "PHALANX_TOKEN_FILE": str(token)}

    def call(order: str, *words: str, code: int = 0) -> str:
        command = ("pipeline", order, str(file), "--server", server.url, *words)
        done = run_phalanx(*command, environment=environment, folder=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stdout

    text = call("show")
    assert "ok" in text and "cost: 0 GPU-hours, 0.00 dollars" in text
    shown = json.loads(call("show", "--json"))
    assert (shown["gpu_hours"], shown["dollars"], shown["state"]) == (0, 0, "asking")
    text = call("resume", code=os.EX_TEMPFAIL)
    assert f"phalanx answer ok --pipeline {file} --server {server.url} --approve" in text


def test_runs_of_other_teams_are_not_there(server: ServerProcess) -> None:
    number = server.call("POST", "/v1/pipelines", asked("/shared/b"))[1]["pipeline"]
    wanted = {"name": "eve", "role": "user", "team": "other"}
    token = server.call("POST", "/v1/tokens", wanted)[1]["secret"]
    assert server.call("GET", "/v1/pipelines", token=token)[1]["pipelines"] == []
    for method, path, body in (
        ("GET", f"/v1/pipelines/{number}", None),
        ("POST", f"/v1/pipelines/{number}/cancel", None),
        ("POST", f"/v1/pipelines/{number}/answer", {"task": "first", "approve": True}),
    ):
        assert server.call(method, path, body, token=token)[0] == 404


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"folder": "relative"}, "absolute path"),
        (asked("/x", {"a": {"command": ["x"], "after": ["b"]}}), "there is no such step"),
        (asked("/x", {"a": {"command": ["{stdlib}"]}}), "must be filled in by the client"),
        (asked("/x", {"a": {"command": ["x"], "inputs": {"t": "t.txt"}}}), "the hash of t.txt"),
        (
            asked("/x", {"a": {"command": ["x"], "environment": {"API_TOKEN": "hush"}}}),
            "would stand in the server's log",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_rule(
    server: ServerProcess, fields: dict[str, Any], said: str
) -> None:
    status, answer = server.call("POST", "/v1/pipelines", {**asked("/x"), **fields})
    assert status == 409 and said in str(answer) and "hush" not in str(answer)


def test_the_page_shows_the_graph_and_takes_the_answer(server: ServerProcess) -> None:
    number = server.call("POST", "/v1/pipelines", asked("/shared/c"))[1]["pipeline"]
    with browser() as chrome, tab(chrome, server.url) as at:
        at.sign_in(server.admin(), "pipelines")
        assert f"{number} small" in at.text()
        at.show(f"pipeline/{number}")
        assert "<b>go on?</b>" in at.text() and at.page.locator(".graph .task").count() == 2
        at.page.click(".asks button:has-text('Approve')")
        command = "phalanx answer first --pipeline PIPELINE.toml --approve --server "
        assert at.page.inner_text("dialog.ask code") == command + server.url
        at.page.click("dialog.ask button:has-text('Approve')")
        at.page.click(".toast button:has-text('Now')")
        at.wait_for_text("and now?")
        assert at.page.locator(".graph .task.done").count() == 1
        at.page.locator(".acts button:has-text('Cancel the run')").wait_for()
        at.page.click(".asks button:has-text('Reject')")
        at.page.fill("dialog.ask input[name=why]", "too early")
        command = "phalanx answer second --pipeline PIPELINE.toml --reject --why 'too early'"
        assert at.page.inner_text("dialog.ask code").startswith(command)
        at.page.click("dialog.ask button:has-text('Reject')")
        at.page.locator(".toast").last.get_by_text("Now").click()
        at.page.locator("td", has_text=": too early").wait_for()
        at.page.locator(".acts button").wait_for(state="detached")
        assert at.problems == [] and at.elsewhere == []
