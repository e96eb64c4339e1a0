"""Prolog and epilog: run with what they need to know, bounded, and believed when they fail."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from phalanx.control.agent.hooks import Hook, run_hook, told


def run(hook: Hook, folder: Path) -> str:
    facts = told(7, 2, "node-3", "alice", folder, [4, 5])
    return asyncio.run(run_hook(hook, folder / "hooks.log", facts))


def script(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "hook"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return (str(path),)


def test_a_hook_is_told_of_its_job_and_of_nothing_secret(tmp_path: Path) -> None:
    os.environ["PHALANX_TOKEN"] = "secret"
    try:
        assert run(Hook("prolog", script(tmp_path, "env"), 10), tmp_path) == ""
    finally:
        del os.environ["PHALANX_TOKEN"]
    lines = (tmp_path / "hooks.log").read_text().splitlines()
    assert "PHALANX_JOB=7" in lines and "PHALANX_USER=alice" in lines
    assert "PHALANX_RANKS=4,5" in lines and "PHALANX_HOOK=prolog" in lines
    assert not [line for line in lines if "secret" in line]


def test_a_hook_that_fails_says_why(tmp_path: Path) -> None:
    hook = Hook("prolog", script(tmp_path, "echo scratch is not mounted; exit 3"), 10)
    problem = run(hook, tmp_path)
    assert "ended with 3" in problem and "scratch is not mounted" in problem


def test_what_a_hook_printed_steers_no_terminal_and_is_one_line(tmp_path: Path) -> None:
    words = r"\000\033[31mno\tscratch\033[0m\033]0;title\007\r\nsecond line"
    problem = run(Hook("prolog", script(tmp_path, f"printf '{words}'; exit 3"), 10), tmp_path)
    assert problem.isprintable()
    assert problem.endswith("\N{REPLACEMENT CHARACTER}no scratch second line")


def test_a_hook_that_does_not_end_is_ended_with_all_it_started(tmp_path: Path) -> None:
    hook = Hook("epilog", script(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait"), 3)
    assert "did not end within 3 s" in run(hook, tmp_path)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_a_hook_that_is_not_there_is_a_problem_and_none_at_all_is_not(tmp_path: Path) -> None:
    assert "cannot be started" in run(Hook("prolog", ("/no/such/hook",), 1), tmp_path)
    assert run(Hook("prolog", (), 1), tmp_path) == ""
