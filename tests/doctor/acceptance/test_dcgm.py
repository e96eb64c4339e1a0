"""What is made of ``dcgmi diag``, whose outputs are played (see played/README.md)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.doctor.acceptance.dcgm import DcgmError, parse_diagnostic, run_diagnostic

PLAYED = Path(__file__).parent / "played"


def test_each_test_of_dcgm_3_is_a_finding() -> None:
    found = {f.check: f for f in parse_diagnostic((PLAYED / "dcgm3-level1.json").read_text())}
    verdicts = {check: finding.verdict for check, finding in found.items()}
    assert verdicts == {
        "dcgm Denylist": "pass",
        "dcgm Persistence Mode": "warn",
        "dcgm GPU Memory": "fail",
        "dcgm Pulse Test": "skip",
    }
    assert found["dcgm GPU Memory"].measured["said"] == "GPU 1: Detected 2 dbe errors."
    assert found["dcgm GPU Memory"].cause


def test_dcgm_4_names_entities() -> None:
    found = parse_diagnostic((PLAYED / "dcgm4-level2.json").read_text())
    assert [f.verdict for f in found] == ["pass", "fail"]
    assert "GPU 1: Bandwidth of GPU 1" in str(found[1].measured["said"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("{}", "no diagnostic"),
        ('{"DCGM Diagnostic": {"test_categories": []}}', "no test"),
        ('{"DCGM Diagnostic": {"runtime_error": "no GPU"}}', "no GPU"),
        ('{"DCGM Diagnostic": {"test_categories": [{"category": 1}]}}', "cannot be read"),
    ],
)
def test_other_output_is_no_outcome(text: str, why: str) -> None:
    with pytest.raises(DcgmError, match=why):
        parse_diagnostic(text)


def test_a_status_that_nobody_knows_is_no_pass() -> None:
    text = '{"DCGM Diagnostic": {"test_categories": [{"category": "x", "tests": [{"name": "new", '
    text += '"results": [{"entity_group": "GPU", "entity_id": 0, "status": "Strange"}]}]}]}}'
    assert parse_diagnostic(text)[0].verdict == "fail"


def test_the_program_is_run_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_diagnostic(1)[0].verdict == "skip"
    program = tmp_path / "dcgmi"
    program.write_text(
        f'#!/bin/sh\n[ "$*" = "diag -r 2 --json" ] && /bin/cat {PLAYED}/dcgm4-level2.json\nexit 1\n'
    )
    program.chmod(0o700)
    assert [f.verdict for f in run_diagnostic(2)] == ["pass", "fail"]
    program.write_text("#!/bin/sh\necho no host engine >&2\nexit 1\n")
    (found,) = run_diagnostic(2)
    assert found.verdict == "unknown" and "no host engine" in str(found.measured["problem"])
    assert os.environ["PATH"] == str(tmp_path)
