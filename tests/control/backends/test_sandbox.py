"""The private Slurm: it starts, says why it cannot, and leaves nothing behind."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.testing.slurm import sandbox as module
from phalanx.testing.slurm.files import SandboxOptions, find_program
from phalanx.testing.slurm.sandbox import Sandbox, SandboxError
from tests.commands import run_phalanx
from tests.ports import free_port

needs_slurm = pytest.mark.skipif(
    not all(map(find_program, module.PROGRAMS)), reason="slurm-wlm or munge is not installed"
)


def test_it_gives_gpus_switches_and_partitions_and_refuses_a_second_one_in_its_folder(
    make_sandbox: Callable[..., Sandbox],
) -> None:
    sandbox = make_sandbox(nodes=4, gpus_per_node=2)
    shown = sandbox.run("sinfo", "--noheader", "--format=%P %D %G")
    assert set(shown.split("\n")) >= {"batch* 4 gpu:h100:2", "prod 4 gpu:h100:2"}
    told = sandbox.run("srun", "--nodes=2", "--gpus-per-node=2", "printenv", "SLURM_TOPOLOGY_ADDR")
    assert sorted(told.split()) == ["spine.leaf1.n1", "spine.leaf1.n2"]
    done = run_phalanx("slurm", "sandbox", "up", "--dir", str(sandbox.root))
    assert done.returncode == 1
    assert "runs in" in done.stderr and "sandbox down" in done.stderr
    assert sandbox.running()


def test_down_ends_jobs_and_all_daemons(make_sandbox: Callable[..., Sandbox]) -> None:
    sandbox = make_sandbox(nodes=2, gpus_per_node=0)
    sandbox.run("sbatch", "--nodes=2", "--output=/dev/null", "--wrap=srun sleep 1000")
    deadline = time.monotonic() + 100
    while len(sandbox.job_processes()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sandbox.down()
    assert sandbox.job_processes() == [] and not sandbox.running()
    with pytest.raises(SandboxError, match="holds no sandbox"):
        Sandbox.at(sandbox.root)
    sandbox.up()  # again, and it knows no old jobs
    assert sandbox.run("sbatch", "--parsable", "--hold", "--wrap=true").strip() == "1"


def test_a_dead_node_takes_only_its_own_processes(make_sandbox: Callable[..., Sandbox]) -> None:
    sandbox = make_sandbox(nodes=2, gpus_per_node=0)
    wrap = "srun --no-kill sleep 1000"
    sandbox.run("sbatch", "--nodes=2", "--no-kill", "--output=/dev/null", f"--wrap={wrap}")
    deadline = time.monotonic() + 100
    while not (sandbox.job_processes("n1") and sandbox.job_processes("n2")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sandbox.kill_node("n2")
    assert sandbox.job_processes("n2") == [] and sandbox.step_daemons("n2") == []
    assert sandbox.job_processes("n1")


OWNER = """
import sys, time
from pathlib import Path
from phalanx.testing.slurm.sandbox import Sandbox
from phalanx.testing.slurm.files import SandboxOptions
root, port = Path(sys.argv[1]), int(sys.argv[2])
with Sandbox(SandboxOptions(root=root, nodes=1, gpus_per_node=0, port=port)):
    print("up", flush=True)
    time.sleep(600)
"""


@needs_slurm
def test_it_ends_with_its_owner_even_one_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "slurm"), str(free_port(1, 2, 3))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "up\n"
        sandbox = Sandbox.at(tmp_path / "slurm")
        owner.kill()
    deadline = time.monotonic() + 100
    while sandbox.running() or (sandbox.root / "sandbox.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_taken_port_is_named_and_nothing_stays(tmp_path: Path) -> None:
    with socket.socket() as taken:
        port = free_port(1)
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        sandbox = Sandbox(SandboxOptions(root=tmp_path / "slurm", nodes=2, port=port))
        with pytest.raises(SandboxError, match=rf"port {port + 1} is taken: choose another --port"):
            sandbox.up()
    assert not (tmp_path / "slurm").exists()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_program", lambda name: "" if name == "munged" else name)
    with pytest.raises(SandboxError, match="munged not found: install Debian's packages munge"):
        Sandbox(SandboxOptions(root=tmp_path)).up()
