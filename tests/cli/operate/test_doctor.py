"""``phalanx doctor node`` as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def doctor(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "doctor", "node", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_report_is_json_with_evidence_and_an_exit_code(tmp_path: Path) -> None:
    done = doctor("--quick", "--json", "--inject", "matmul", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["matmul cpu"]["verdict"] == "fail"
    assert findings["matmul cpu"]["suggestion"] and findings["matmul cpu"]["expected"]
    assert {"limits", "clock", f"disk {tmp_path}"} <= findings.keys()


def test_a_check_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    done = doctor("--only", "spleen", folder=tmp_path)
    assert done.returncode == 2
    assert "matmul" in done.stderr.replace("\n", " ")
