"""A job in a container on a real Slurm: its image is copied to every node and verified.

No container engine is packaged for this system, so a program of the same name stands for it: it
wants the image that it is given to be whole, and runs the command outside.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.testing.slurm.job import SlurmJob
from phalanx.testing.slurm.sandbox import Sandbox
from tests.control.jobs import losses, write_job

APPTAINER = """#!/bin/bash
[ "$1 $2 $3" = "exec --nv --bind" ] && [ "$(cat "$5")" = "an image" ] || exit 9
echo "$SLURMD_NODENAME $5" >> {log}
exec "${{@:6}}"
"""


def submit(sandbox: Sandbox, root: Path, digest: str) -> SlurmJob:
    image = root / "phalanx.sif"
    image.write_text("an image")
    path = write_job(root, "contained", 8)
    words = ["--slot-gpus", "2", "--set", f"backend.image={image}@sha256:{digest}"]
    words += ["--set", "backend.slurm.container=apptainer", "--set", f'backend.mounts=["{root}"]']
    words += ["--set", f"backend.slurm.image_folder={root}/local"]
    return SlurmJob(sandbox, root, 4, str(path), *words)


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What it was called for."""
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    (folder / "apptainer").write_text(APPTAINER.format(log=log))
    (folder / "apptainer").chmod(0o755)
    python = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{python}", prepend=os.pathsep)
    return log


@pytest.mark.soak
def test_every_node_runs_its_verified_copy(
    make_sandbox: Callable[..., Sandbox], apptainer: Path, tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=2, gpus_per_node=2)
    digest = hashlib.sha256(b"an image").hexdigest()
    job = submit(sandbox, tmp_path, digest)
    assert job.wait_ended(180) == "COMPLETED", job.said()
    copy = tmp_path / "local" / f"{digest}.sif"
    assert set(apptainer.read_text().splitlines()) == {f"n1 {copy}", f"n2 {copy}"}
    assert len(losses(job.run)) == 8
    assert [path.name for path in copy.parent.iterdir() if ".sif." in path.name] == [
        f"{digest}.sif.lock"
    ]


def test_an_image_that_is_not_the_one_named_ends_the_job_with_words(
    make_sandbox: Callable[..., Sandbox], apptainer: Path, tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=2, gpus_per_node=2)
    job = submit(sandbox, tmp_path, "0" * 64)
    assert job.wait_ended(180) == "FAILED"
    assert f"no image {tmp_path}/phalanx.sif with digest {'0' * 64}" in job.said()
    assert not apptainer.exists() and not list((tmp_path / "local").glob("*.sif*[!k]"))
