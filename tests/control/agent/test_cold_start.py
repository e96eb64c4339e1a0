"""An agent without work costs little, and becomes the whole agent when there is some."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.control.agent import cold_start
from phalanx.control.agent.cold_start import waited_for_work
from phalanx.control.wire.server_file import ServerFile
from tests.ports import free_port

HEAVY = ("torch", "numpy", "pydantic", "typer", "phalanx.checkpoint", "phalanx.plan")


def test_it_loads_nothing_that_only_work_needs() -> None:
    program = (
        "import sys, phalanx.control.agent.cold_start; "
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "words",
    [
        ["--join", "http://a:1"],
        ["--no-standby"],
        ["--no-standby", "--join", "http://a:1", "--gpus", "many"],
        ["--no-standby", "--join", "http://a:1", "--nosuch", "1"],
    ],
    ids=["not-asked", "no-server", "bad-number", "unknown"],
)
def test_what_only_the_command_line_can_explain_is_left_to_it(words: list[str]) -> None:
    assert waited_for_work(words) == words


def test_a_missing_token_is_named() -> None:
    words = ["agent", "--no-standby", "--join", "http://127.0.0.1:9", "--gpus", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={
            "PHALANX_TOKEN_FILE": "/nowhere/token",
            "HOME": "/tmp",
            "PYTHONPATH": ":".join(sys.path),
        },
    )
    assert done.returncode == 1 and "error: no token: /nowhere/token" in done.stderr


def test_an_agent_beside_a_server_of_its_user_finds_the_join_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    monkeypatch.delenv("PHALANX_TOKEN_FILE", raising=False)
    monkeypatch.setenv("PHALANX_STATE", str(tmp_path))
    monkeypatch.setattr(cold_start, "TOKEN_SECONDS", 0.0)
    monkeypatch.setattr(cold_start, "POLL_SECONDS", 0.01)
    url = f"http://127.0.0.1:{free_port()}"
    assert cold_start.join_token((url,), 0.0) == ""  # nobody is there
    ServerFile(url, 1, "1").write(tmp_path)
    (tmp_path / "join.token").write_text("phx_join_words\n")
    assert cold_start.join_token((url,), 0.0) == "phx_join_words"
    # It is not handed to anybody else.
    assert cold_start.join_token(("http://10.0.0.1:7070",), 0.0) == ""
