"""What is wrong with a site or a file is told in words, at once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.config import Backend, ConfigError, Job, Slurm, resolve
from phalanx.control.backends.kubernetes.pods import object_name
from phalanx.control.backends.slurm.accounting import turns_of
from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError
from phalanx.control.backends.slurm.queue import place_of, places
from phalanx.control.backends.slurm.submit import (
    SlurmBackend,
    memory_file,
    quarantined,
    remember_quarantined,
)
from phalanx.control.server.http.submission import RequestedWork


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH, for programs that stand for Slurm's."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def write(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_a_configuration_that_is_not_there_is_not_waited_for(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(program / "squeue", f"touch {program}/asked")
    monkeypatch.setenv("SLURM_CONF", str(program / "none.conf"))
    with pytest.raises(SlurmError, match=r"SLURM_CONF=.*none\.conf is no file"):
        SlurmCommands(program / "calls").run("squeue")
    assert not (program / "asked").exists()


def test_a_queue_that_could_not_be_asked_is_no_empty_one(program: Path) -> None:
    answer = {"jobs": [], "errors": [{"description": "Failed", "error": "Unspecified error"}]}
    json_alone = f"[ $1 = --json ] || exit 0\ncat <<'EOT'\n{json.dumps(answer)}\nEOT"
    write(program / "squeue", json_alone)
    with pytest.raises(SlurmError, match="squeue: Failed: Unspecified error"):
        place_of(SlurmCommands(program / "calls"), 7)
    plainly = "echo 'squeue: error: Munge encode failed' >&2; exit 1"
    write(program / "squeue", json_alone.replace("exit 0", f"{{ {plainly}; }}"))
    with pytest.raises(SlurmError, match=r"Munge encode failed\n.*munge -n"):
        place_of(SlurmCommands(program / "calls"), 7)


def test_a_slurm_without_accounting_is_named(program: Path) -> None:
    write(program / "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    with pytest.raises(SlurmError, match="keeps no accounting"):
        turns_of(SlurmCommands(program / "calls"), 7)


def test_a_job_that_runs_has_no_reason_and_an_output_that_is_a_path() -> None:
    job = {"job_id": 7, "job_state": "RUNNING", "partition": "p", "state_reason": "None"}
    (place,) = places({"jobs": [{**job, "standard_output": "/r/slurm-%j.out"}]})
    assert (place.reason, place.output) == ("", "/r/slurm-7.out")


@pytest.mark.parametrize("text", ["5", '{"a": 1}', "[1, null]", "{"])
def test_a_damaged_memory_of_bad_nodes_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    memory_file().parent.mkdir(parents=True)
    memory_file().write_text(text)
    assert quarantined() == ()
    remember_quarantined(["n3"])
    assert quarantined() == ("n3",)


def test_an_image_that_is_not_in_a_folder_seen_here_is_refused(tmp_path: Path) -> None:
    def options(folder: Path) -> None:
        image = f"{folder}/a.sif@sha256:{'0' * 64}"
        slurm = Slurm(container="apptainer", image_folder="/local")
        job = Job(name="a", backend=Backend(image=image, slurm=slurm))
        SlurmBackend().options(RequestedWork(job=resolve(job, 1), ranks=1, slot_gpus=1))

    with pytest.raises(ConfigError, match="has no such file"):
        options(tmp_path)
    options(tmp_path / "seen by nodes alone")


def test_names_of_objects_begin_with_a_letter_and_do_not_collide() -> None:
    assert object_name("tiny") == "tiny"
    titles = ["12", "é", "ü", "Tiny", "a" * 60, "a" * 61, "-x", "日本", "a_b", "a.b"]
    names = [object_name(title) for title in titles]
    assert len(set(names)) == len(titles)
    for name in names:
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name), name


def test_cancelling_a_job_of_slurm_names_what_does_it() -> None:
    done = CliRunner().invoke(app, ["cancel", "slurm:7"])
    assert done.exit_code == 2 and "scancel 7" in done.output
    assert CliRunner().invoke(app, ["cancel", "0"]).exit_code == 2


def test_a_sandbox_in_a_folder_with_a_blank_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["slurm", "sandbox", "up", "--dir", str(tmp_path / "a b")])
    assert done.exit_code == 1 and "blank" in done.output
