"""A controller elsewhere: missed at the submission, not in the allocation; nobody leads on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.control.backends.slurm.script import END_LEAD
from tests.control.jobs import write_job


def submitted(folder: Path) -> tuple[int, str]:
    words = ["submit", "--backend", "slurm", "--server", "http://127.0.0.1:1", "--json"]
    words += ["--set", "backend.controller=server", str(write_job(folder, "apart"))]
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


def test_a_job_for_a_server_needs_its_tokens_and_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.control.client.client.RETRY_SECONDS", 0.1)
    for name in ("PHALANX_JOIN_TOKEN_FILE", "PHALANX_TOKEN_FILE", "PHALANX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    code, said = submitted(tmp_path)
    assert code == 2 and "PHALANX_JOIN_TOKEN_FILE" in said
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("PHALANX_JOIN_TOKEN_FILE", str(tmp_path / "token"))
    code, said = submitted(tmp_path)
    assert code == 2 and '"PHALANX_TOKEN_FILE"' in said
    monkeypatch.setenv("PHALANX_TOKEN_FILE", str(tmp_path / "token"))
    code, said = submitted(tmp_path)
    assert code == 2 and '"--server"' in said


def test_the_script_refuses_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["submit", "--backend", "slurm", "--server", "http://127.0.0.1:1", "--dry-run"]
    words += ["--set", "backend.controller=server", str(write_job(tmp_path, "apart"))]
    script = CliRunner().invoke(app, words).output
    script = "phalanx() { :; }\n" + script.replace(" lead --engine", " --version; touch led #")
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "PHALANX_JOIN_TOKEN_FILE" in done.stderr
    assert not (tmp_path / "led").exists()


@pytest.mark.parametrize(
    ("lead", "end", "code"),
    [
        ("sleep 600", "exit 0", 0),
        ("sleep 600", "exit 3", 3),
        ("sleep 600", 'set -u; echo "$nobody_has_set_this"', 127),
        ("true", 'wait "$lead"; exit 0', 0),
        ("true", 'wait "$lead"; exit 3', 3),
    ],
)
def test_nobody_leads_on_when_the_script_ends(lead: str, end: str, code: int) -> None:
    script = f"{lead} & lead=$!; echo $lead; trap '{END_LEAD}' EXIT; {end}"
    done = subprocess.run(
        ["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert done.returncode == code
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
