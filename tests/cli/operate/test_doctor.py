"""``phalanx doctor node`` as a person meets it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.operate.finding_lines import show_finding
from phalanx.doctor.finding import Finding
from tests.commands import run_phalanx


def doctor(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_phalanx("doctor", "node", *arguments, folder=folder)


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


def test_settings_are_judged_without_torch_and_in_groups(tmp_path: Path) -> None:
    recorded = Path(__file__).parents[2] / "doctor/recorded/cpu-virtual"
    done = doctor("--hardware", str(recorded), "--group", "os", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    findings = {each["check"]: each for each in report["findings"]}
    assert report["depth"] == "settings" and all(name.startswith("os.") for name in findings)
    assert findings["os.thp"]["verdict"] == "pass"
    low = findings["os.nofile"]
    assert (low["verdict"], low["severity"]) == ("warn", "high")
    assert low["why"] and low["suggestion"]


def test_a_recorded_machine_is_not_measured_and_nothing_decided_is_not_fit(tmp_path: Path) -> None:
    recorded = str(Path(__file__).parents[2] / "doctor/recorded/cpu-virtual")
    for asked in (["--deep"], ["--quick"], ["--only", "gemm"], ["--need", "read=5"]):
        done = doctor("--hardware", recorded, *asked, folder=tmp_path)
        assert done.returncode == 2 and "cannot be measured" in " ".join(done.stderr.split())
    done = doctor("--hardware", recorded, "--only", "os.governor", folder=tmp_path)
    assert done.returncode == 0 and "fit for work" not in done.stdout
    assert "nothing could be decided" in done.stdout
    assert doctor("--fix-script", "--json", folder=tmp_path).returncode == 2


def test_a_script_is_printed_asked_about_applied_and_undone(tmp_path: Path) -> None:
    recorded = Path(__file__).parents[2] / "doctor/recorded/cpu-virtual"
    made = doctor("--hardware", str(recorded), "--fix-script", folder=tmp_path)
    assert made.returncode == 0 and "sysctl -w net.core.rmem_max=16777216" in made.stdout
    setting = tmp_path / "setting"
    setting.write_text("old\n")
    script = tmp_path / "fix.sh"
    lines = []
    for line in made.stdout.splitlines():
        if line.startswith("    step ") and "rmem_max" in line:
            value = "new" if "16777216" in line else "old"
            lines.append(f"    step 'echo {value} > {setting}'")
        elif not line.startswith("    step "):
            lines.append(line)
    recorded_script = "\n".join(lines) + "\n"
    script.write_text(recorded_script)

    def run(*words: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "phalanx", "doctor", *words, str(script)]
        return subprocess.run(command, input=answer, capture_output=True, text=True, check=False)

    assert run("apply", "--yes").returncode == 2  # settings of another machine
    script.write_text(recorded_script.replace("recorded cpu-virtual", socket.gethostname()))
    assert run("apply", answer="n\n").returncode != 0
    assert setting.read_text() == "old\n"
    done = run("apply", answer="y\n")
    assert done.returncode == 0 and f"echo new > {setting}" in done.stdout, done.stderr
    assert setting.read_text() == "new\n"
    assert run("undo", "--yes").returncode == 0
    assert setting.read_text() == "old\n"
    script.write_text(script.read_text().replace("# Node: ", "# Boot: another\n# Node: "))
    later = run("undo", "--yes")
    assert later.returncode == 0 and "has booted since" in later.stderr


def test_what_was_read_of_a_machine_does_not_steer_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    erased = "nfs\x1b[2K\x1b[1A\r\x9b2K[red]"
    finding = Finding(
        check=erased,
        verdict="warn",
        measured={erased: erased},
        expected=erased,
        why=erased,
        suggestion=erased,
    )
    show_finding(finding)
    shown = capsys.readouterr().out
    assert "[red]" in shown
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
