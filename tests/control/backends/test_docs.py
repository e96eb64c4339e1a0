"""The lines that a site engineer copies from the pages about backends."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.app import COMMANDS
from phalanx.config import Job, check, load_job, resolve
from phalanx.testing.slurm.files import find_program

ROOT = Path(__file__).parents[3]
NAMES = ("choose-a-backend", "run-on-slurm", "run-on-ray", "run-on-kubernetes", "add-nodes")
PAGE = "\n".join((ROOT / "docs" / "how-to" / f"{name}.md").read_text() for name in NAMES)
LAPTOP = PAGE.partition("## Try it on a laptop")[2]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_every_command_exists() -> None:
    lines = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
    named = {found[1] for line in lines if (found := re.search(r"phalanx ([a-z0-9]+) ", line))}
    assert {"submit", "slurm", "k8s", "fleet", "up", "why"} <= named <= set(COMMANDS)


@pytest.mark.parametrize("text", blocks(PAGE, "toml"))
def test_every_setting_is_known(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    whole = text.replace("sha256:…", "sha256:" + "0" * 64)
    path.write_text((ROOT / "examples" / "tiny.toml").read_text() + whole)
    job: Job = load_job(path)
    check(resolve(job, 4), 4)


@pytest.mark.soak
@pytest.mark.skipif(not find_program("slurmctld"), reason="slurm-wlm is not installed")
def test_the_way_from_nothing_to_a_job_on_a_laptop(tmp_path: Path) -> None:
    script = blocks(LAPTOP, "sh")[0]
    until = 'while squeue -h | grep -q .; do sleep 1; done; cat "$1"'
    script = re.sub(r"tail -f (\S+).*", lambda line: f"(set -- {line[1]}; {until})", script)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PATH": path, "USER": getpass.getuser(), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Slurm job 1 (tiny)" in done.stdout and "job 1 is done" in done.stdout
