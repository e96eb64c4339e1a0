"""A burn-in of this machine, for seconds: its loads, its certificate, and an early end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from phalanx.control.trust.acceptance_signature import verify_certificate
from phalanx.doctor.acceptance import burn_in
from phalanx.doctor.acceptance.burn_in import LoadProcess
from phalanx.doctor.acceptance.certificate import InvalidCertificateError
from phalanx.doctor.acceptance.loads import LoadOrder, LoadSample
from phalanx.doctor.acceptance.program import find_measured
from phalanx.doctor.acceptance.report import AcceptanceRequest
from phalanx.doctor.finding import Finding
from phalanx.doctor.setup import settings_of
from tests.commands import run_phalanx as run


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this machine, by the command."""
    folder = tmp_path_factory.mktemp("accept")
    command = ["doctor", "accept", "--minutes", "0.04", "--folder", str(folder)]
    done = run(*command, "--out", str(folder), "--agent-state", str(folder / "state"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted after 2 of 2 s" in done.stdout
    assert "no NVML here" in done.stdout or "soak gpu 0" in done.stdout
    (path,) = folder.glob("acceptance-*.json")
    return path


def test_all_loads_are_measured_together(certificate: Path) -> None:
    made = verify_certificate(certificate.read_bytes())
    loads = {each.load: each for each in made.report.loads}
    assert set(loads) == {"gemm", "memory", "collective", "disk"}
    for each in loads.values():
        assert each.samples and 0 < each.worst <= each.median <= each.best and not each.wrong
    assert made.outcome == "accepted" and made.report.seconds == pytest.approx(2.4)
    assert made.setup.versions["phalanx"] and made.description.fact("cpus") is not None
    assert not list(certificate.parent.glob(".doctor-*"))


def test_a_field_that_comes_twice_or_is_not_signed_is_noticed(certificate: Path) -> None:
    text = certificate.read_text()
    inner = json.dumps({**json.loads(text)["certificate"], "node": "other"})
    for forged in (
        text.replace('"certificate":', f'"certificate": {inner}, "certificate":', 1),
        text.replace('"outcome":', '"outcome": "rejected", "outcome":', 1),
        text.replace('"signature":', '"node": "other", "signature":', 1),
    ):
        assert forged != text
        with pytest.raises(InvalidCertificateError):
            verify_certificate(forged.encode())


def test_a_certificate_may_be_formatted_and_not_changed(certificate: Path, tmp_path: Path) -> None:
    signed = json.loads(certificate.read_text())
    assert verify_certificate(json.dumps(signed).encode()).outcome == "accepted"
    signed["certificate"]["report"]["loads"][0]["median"] *= 2
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(signed))
    with pytest.raises(InvalidCertificateError, match="changed after it was signed"):
        verify_certificate(forged.read_bytes())
    done = run("doctor", "accept", "--verify", str(forged))
    assert done.returncode == 1 and "changed after it was signed" in done.stderr


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("key", "00", "no certificate"),
        ("signature", "x", "no certificate"),
        ("key", "11" * 32, "changed"),
        ("certificate", {"node": "other"}, "no certificate"),
    ],
)
def test_other_damage_is_told(certificate: Path, field: str, value: object, why: str) -> None:
    signed = json.loads(certificate.read_text()) | {field: value}
    with pytest.raises(InvalidCertificateError, match=why):
        verify_certificate(json.dumps(signed).encode())


def test_the_command_says_what_a_certificate_covers(certificate: Path) -> None:
    done = run("doctor", "accept", "--verify", str(certificate))
    assert done.returncode == 0 and "accepted after 2 of 2 s; 4 loads" in done.stdout
    signer = done.stdout.partition("signed by ")[2].split()[0]
    assert run("doctor", "accept", "--verify", str(certificate), "--key", signer).returncode == 0
    other = run("doctor", "accept", "--verify", str(certificate), "--key", "sha256:0")
    assert other.returncode == 1 and f"signed by {signer}, not by sha256:0" in other.stderr


def test_an_early_end_keeps_what_was_measured(tmp_path: Path) -> None:
    request = AcceptanceRequest(node="n", folder=str(tmp_path), seconds=600, loads=("disk",))
    text = msgspec.json.encode(request).decode()
    command = [sys.executable, "-m", "phalanx.doctor.acceptance.program", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"work together" in process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.send_signal(signal.SIGTERM)
        measured = find_measured(process.stdout.read())
    assert measured is not None and measured.report.outcome == "incomplete"
    assert 1 < measured.report.seconds < 600 and measured.report.loads[0].samples >= 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--load", "heat"], "one of gemm, memory, collective, disk"),
        (["--key", "sha256:0"], "--key is for --verify"),
        (["--node", "a", "--folder", "/tmp"], "not of --node"),
        (["--out", "/nowhere"], "/nowhere is no folder"),
    ],
)
def test_what_cannot_be_used_is_refused(words: list[str], why: str) -> None:
    done = run("doctor", "accept", *words)
    assert done.returncode == 2 and why in done.stderr


def test_settings_are_what_somebody_set() -> None:
    found = settings_of(
        [
            Finding(check="os.thp", verdict="pass", measured={"enabled": "always", "gib": 1.5}),
            Finding(check="network.retransmits", verdict="warn", measured={"segments": 12}),
            Finding(check="gpu.ecc", verdict="skip"),
        ]
    )
    assert found == {"os.thp": "pass: enabled always", "network.retransmits": "warn"}


def test_a_load_that_breaks_without_a_word_is_told_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Iterator[float]:
        raise MemoryError
        yield

    monkeypatch.setattr(burn_in, "samples_of", broken)
    reads, writes = os.pipe()
    burn_in._work(LoadOrder(load="gemm", device="cpu"), tmp_path, tmp_path, 1.0, writes)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        assert "MemoryError" in msgspec.json.decode(told.read(), type=LoadSample).problem


def test_a_load_that_hangs_in_the_kernel_is_left_behind_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process in an uninterruptible call ends by no signal."""
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    monkeypatch.setattr(burn_in, "KILLED_SECONDS", 0.05)
    order = LoadOrder(load="gemm", device="cuda:0")
    reads, writes = os.pipe()
    with monkeypatch.context() as played:
        played.setattr(os, "kill", lambda *_: None)
        left = burn_in.end_all([LoadProcess(order, pid, reads)])
    os.close(writes)
    assert left == [order]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
