"""The batch script: what the site and the plan say stands in it, and Slurm itself accepts it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs

from phalanx.config import Backend, ConfigError, Job, Model, Parallel, Slurm, Train, resolve
from phalanx.control.backends.need import need_of
from phalanx.control.backends.slurm.directives import ScriptOptions, refuse_short
from phalanx.control.backends.slurm.script import render
from phalanx.control.server.http.submission import RequestedWork
from phalanx.testing.slurm.sandbox import Sandbox

IMAGE = "nvcr.io/nvidia/pytorch@sha256:" + "0" * 64


def made(backend: Backend, comments: bool = False, ranks: int = 16, **more: object) -> str:
    axes = Parallel(tensor=8, data=ranks // 8)
    train = Train(steps=100_000, global_batch=16)
    job = Job(name="big", model=Model(preset="llama3-8b"), parallel=axes, train=train)
    job = resolve(structs.replace(job, backend=backend), ranks)
    options = ScriptOptions(
        name="big",
        backend=backend,
        need=need_of(RequestedWork(job=job, ranks=ranks)),
        python="/venv/bin/python",
        folder="/work",
        runs=Path("/work/runs/big"),
        job_toml='name = "big"\n',
        **more,  # type: ignore[arg-type]
    )
    return render(options, comments)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]


def test_the_gang_and_its_spares_are_one_allocation() -> None:
    lines = directives(made(Backend(spares=2)))
    assert "--nodes=4" in lines  # sixteen ranks on two nodes, and two that stand by
    assert {"--ntasks-per-node=1", "--gpus-per-node=8", "--no-kill", "--requeue"} <= set(lines)


@pytest.mark.parametrize(
    ("slurm", "line"),
    [
        (Slurm(account="a"), "--account=a"),
        (Slurm(partition="p,q"), "--partition=p,q"),
        (Slurm(qos="high"), "--qos=high"),
        (Slurm(gres=True, gpu_type="h100"), "--gres=gpu:h100:8"),
        (Slurm(array=10, array_width=3), "--array=0-9%3"),
        (Slurm(dependency="afterok:7"), "--kill-on-invalid-dep=yes"),
        (Slurm(signal_seconds=300), "--signal=B:USR1@300"),
        (Slurm(requeue=False), "--no-requeue"),
        (Slurm(segment=16), "--segment=16"),
        (Slurm(options=("--licenses=x",)), "--licenses=x"),
    ],
)
def test_what_the_site_wants_stands_in_it(slurm: Slurm, line: str) -> None:
    assert line in directives(made(Backend(slurm=slurm)))


def test_a_slurm_without_segments_is_not_asked_for_them() -> None:
    script = made(Backend(slurm=Slurm(segment=16)), segment=False)
    assert "--segment" not in script


def test_time_and_memory_come_from_the_plan() -> None:
    job_hours = need_of(RequestedWork(job=_planned(), ranks=16))
    lines = directives(made(Backend(cluster="h100-512")))
    (time,) = [line for line in lines if line.startswith("--time=")]
    (least,) = [line for line in lines if line.startswith("--time-min=")]
    assert least != time
    assert any(line.startswith("--mem=") and line != "--mem=0" for line in lines)
    margin = job_hours.hours / (need_seconds(_planned()) / 3600)
    assert 1.1 <= margin <= 1.2


def test_a_short_job_is_not_warned_as_soon_as_it_starts() -> None:
    job = structs.replace(_planned(), train=Train(steps=10, global_batch=16))
    need = need_of(RequestedWork(job=job, ranks=16))
    assert need.hours * 3600 < 120
    slurm = Slurm(signal_seconds=120)
    options = ScriptOptions(
        name="short",
        backend=Backend(cluster="h100-512", slurm=slurm),
        need=need,
        python="python",
        folder="/work",
        runs=Path("/work/runs/short"),
        job_toml='name = "short"\n',
    )
    (line,) = [x for x in directives(render(options, False)) if x.startswith("--time=")]
    hours, minutes, _ = map(int, line.removeprefix("--time=0-").split(":"))
    assert 60 * hours + minutes > 120 / 60 + 1  # Slurm may warn a minute early


def test_a_time_that_leaves_none_before_the_warning_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"backend\.hours = 0\.02: is too short for a warning 120 s"
    ):
        refuse_short(Backend(hours=0.02))
    refuse_short(Backend(hours=0.05))
    refuse_short(Backend())


def _planned() -> Job:
    axes = Parallel(tensor=8, data=2)
    train = Train(steps=100_000, global_batch=16)
    job = Job(name="big", model=Model(preset="llama3-8b"), parallel=axes, train=train)
    return resolve(structs.replace(job, backend=Backend(cluster="h100-512")), 16)


def need_seconds(job: Job) -> float:
    from phalanx.hardware import cluster
    from phalanx.plan import mapping_of, predict, workload_of

    found = predict(workload_of(job), mapping_of(job), cluster("h100-512"))
    return found.step_seconds * job.train.steps


def test_quarantined_nodes_are_excluded() -> None:
    script = made(Backend(), exclude=("n3", "n7"), quarantined=1, comments=True)
    assert "#SBATCH --exclude=n3,n7" in script and "1 of which Phalanx quarantined" in script


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("pyxis", "--container-image='nvcr.io#nvidia/pytorch@sha256:"),
        ("apptainer", "apptainer exec --nv --bind /data:/data docker://nvcr.io/nvidia/pytorch@"),
    ],
)
def test_containers_are_started_by_digest(container: str, words: str) -> None:
    slurm = Slurm(container=container)  # type: ignore[arg-type]
    script = made(Backend(image=IMAGE, mounts=("/data",), slurm=slurm))
    assert words in script and "python -m phalanx agent" in script  # the image's own


@pytest.mark.parametrize(
    ("container", "fetch"),
    [
        ("pyxis", 'enroot import --output "$part"'),
        ("apptainer", 'apptainer pull --force "$part"'),
    ],
)
def test_every_node_pulls_its_own_copy_by_digest(container: str, fetch: str) -> None:
    slurm = Slurm(container=container, image_folder="/local/images")  # type: ignore[arg-type]
    script = made(Backend(image=IMAGE, slurm=slurm))
    assert fetch in script and f"/local/images/{'0' * 64}." in script


def test_network_hints_only_when_asked() -> None:
    assert "NCCL_" not in made(Backend())
    assert "NCCL_" in made(Backend(network_hints=True))


def test_a_reason_stands_above_every_directive_that_needs_one() -> None:
    lines = made(Backend(spares=1, cluster="h100-512"), comments=True).splitlines()
    for before, line in pairwise(lines):
        if line.startswith("#SBATCH") and "--job-name" not in line:
            assert before.startswith("# "), line


def test_it_is_shell_that_bash_reads(tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(made(Backend(image=IMAGE, slurm=Slurm(container="pyxis")), comments=True))
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_itself_accepts_it(make_sandbox: Callable[..., Sandbox], tmp_path: Path) -> None:
    sandbox = make_sandbox(nodes=4, gpus_per_node=8)
    backend = Backend(spares=1, slurm=Slurm(partition="prod", array=2, array_width=1))
    path = tmp_path / "script"
    path.write_text(made(backend, switches=2))
    said = subprocess.run(
        ["sbatch", "--test-only", path], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert sandbox.run("squeue", "--noheader") == ""
