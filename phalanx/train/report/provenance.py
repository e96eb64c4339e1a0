"""Where a run came from: code, packages, machine, seeds, and the checkpoint it continues."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from phalanx import __version__
from phalanx.config import Job
from phalanx.config.own_code import code_versions
from phalanx.data.durable_files import write_synced
from phalanx.train.exits import now
from phalanx.train.report.run_folder import RunFolder

GIT_SECONDS = 10  # a repository slower than this is reported as unknown


class Git(msgspec.Struct, frozen=True, kw_only=True):
    """State of a working tree."""

    folder: str
    commit: str
    dirty: bool
    diff_sha256: str  # of the changes to tracked files; "" when there are none


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """The build of torch and what it sees."""

    version: str
    commit: str
    cuda: str
    cudnn: str
    nccl: str
    devices: list[str]  # by rank


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Everything beside the configuration that one needs to run it again."""

    version: int = 1
    phalanx: str
    started: str
    command: list[str]
    folder: str
    host: str
    user: str
    platform: str
    python: str
    packages: dict[str, str]
    code: Git | None  # the repository Phalanx runs from
    project: Git | None  # the repository the command was given in
    seeds: dict[str, int]
    world_size: int
    environment: dict[str, str]
    torch: Torch
    parent_checkpoint: str  # "": a fresh start
    data: dict[str, str] = {}  # fingerprint of the samples' order and content; of the tokenizer
    driver: str = ""  # of the GPUs
    image: str = ""  # of the container, as PHALANX_IMAGE names it
    generation: int = 0
    own_code: dict[str, str] = {}  # SHA-256 of every Python file that the job brings along


ENVIRONMENT_PREFIXES = (
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "CUBLAS_",
    "OMP_",
    "GLOO_",
    "PHALANX_",
)


DIFF_NAME = "changes.diff"
MOST_DIFF_BYTES = 256 << 10  # of changes to tracked files; of more, the beginning


def write_provenance(
    job: Job,
    run_folder: RunFolder,
    devices: list[str],
    parent_checkpoint: str,
    generation: int = 0,
) -> Provenance:
    """Write ``provenance/provenance.json``; called by one rank once the group stands."""
    project = Path.cwd()
    provenance = Provenance(
        data=data_facts(job),
        driver=_driver(),
        image=os.environ.get("PHALANX_IMAGE", ""),
        generation=generation,
        own_code=code_versions(job.code),
        phalanx=__version__,
        started=now(),
        command=sys.argv,
        folder=str(project),
        host=socket.gethostname(),
        user=_user(),
        platform=platform.platform(),
        python=sys.version.split()[0],
        packages=installed_packages(),
        code=git_state(Path(__file__).parent),
        project=git_state(project),
        seeds={"train": job.train.seed, "data": job.data.seed},
        world_size=len(devices),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT_PREFIXES)
        },
        torch=_torch_build(devices),
        parent_checkpoint=parent_checkpoint,
    )
    text = msgspec.json.format(msgspec.json.encode(provenance), indent=2) + b"\n"
    write_synced(run_folder.provenance / "provenance.json", text)
    if provenance.project is not None and provenance.project.dirty:
        changes = _git(project, "diff", "HEAD") or b""
        write_synced(run_folder.provenance / DIFF_NAME, changes[:MOST_DIFF_BYTES])
    return provenance


def _driver() -> str:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""
    return next((word for word in first.split() if word[:1].isdigit()), "")


def data_facts(job: Job) -> dict[str, str]:
    """What identifies the corpora of a run and their tokenizer, as far as files here tell it."""
    if job.data.source == "synthetic":
        return {"source": "synthetic"}
    paths = {name: source.path for name, source in job.data.blend.items()}
    facts: dict[str, str] = {}
    for name, path in (paths or {"corpus": job.data.path}).items():
        try:
            text = (Path(path) / "manifest.json").read_bytes()
            manifest = msgspec.json.decode(text, type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            continue  # in an object store, or gone: the reader says so
        facts[f"{name}.fingerprint"] = hashlib.sha256(text).hexdigest()
        facts[f"{name}.tokenizer"] = str(manifest.get("tokenizer", ""))
    return facts


def installed_packages() -> dict[str, str]:
    """Name and version of every installed distribution."""
    pairs = ((found.metadata["Name"], found.version) for found in metadata.distributions())
    return dict(sorted(pairs, key=lambda pair: pair[0].lower()))


def git_state(folder: Path) -> Git | None:
    """Commit and changes of the repository around a folder; None where there is none."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "HEAD")
    if top is None or commit is None:
        return None
    diff = _git(folder, "diff", "HEAD") or b""
    return Git(
        folder=top.decode().strip(),
        commit=commit.decode().strip(),
        dirty=bool(diff),
        diff_sha256=hashlib.sha256(diff).hexdigest() if diff else "",
    )


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return str(os.getuid())


def _torch_build(devices: list[str]) -> Torch:
    import torch

    nccl = cudnn = ""
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        cudnn = str(torch.backends.cudnn.version())
    return Torch(
        version=str(torch.__version__),
        commit=torch.version.git_version,
        cuda=torch.version.cuda or "",
        cudnn=cudnn,
        nccl=nccl,
        devices=devices,
    )
