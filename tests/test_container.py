"""The container file names what there is; where a builder is available, its image plans a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASE = "PHALANX_BASE_IMAGE"  # another image with Python for whoever cannot reach the registry


def stages() -> dict[str, str]:
    """The instructions of each stage."""
    names = re.findall(r"^FROM \S+ AS (\w+)$", TEXT, re.MULTILINE)
    bodies = re.split(r"^FROM \S+ AS \w+$", TEXT, flags=re.MULTILINE)[1:]
    return dict(zip(names, bodies, strict=True))


def test_every_image_starts_phalanx_as_an_ordinary_user() -> None:
    assert list(stages()) == ["wheel", "plan", "cpu", "cuda"]
    assert 'ENTRYPOINT ["phalanx"]' in stages()["plan"]
    for name in ("plan", "cpu", "cuda"):
        assert re.findall(r"^USER (\w+)$", stages()[name], re.MULTILINE)[-1] == "phalanx"


def test_what_is_copied_is_there_and_reaches_the_builder() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert names and all((ROOT / name).exists() and f"!{name}" in ignored for name in names)
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(names)


def test_extras_and_the_release_of_torch_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    named = re.findall(r"whl\)\[([\w,]+)\]", TEXT)
    assert len(named) == 3
    assert {each for line in named for each in line.split(",")} <= set(extras)
    (torch,) = re.findall(r'"(torch[^"]+)"', TEXT)
    assert torch in extras["train"]


def builder() -> list[str]:
    """The call that builds an image here; skips where nothing can."""
    reasons = []
    for program, probe in (("podman", "info"), ("docker", "info"), ("buildah", "images")):
        if shutil.which(program) is None:
            reasons.append(f"{program} is not installed")
        elif subprocess.run([program, probe], capture_output=True, check=False).returncode:
            reasons.append(f"`{program} {probe}` fails")
        else:
            return [program, "bud" if program == "buildah" else "build"]
    pytest.skip(f"no image can be built here: {', '.join(reasons)}")


@pytest.mark.soak
def test_the_image_for_planning_is_built_and_plans() -> None:
    program, *build = builder()
    base = [f"--build-arg=BASE={os.environ[BASE]}"] if os.environ.get(BASE) else []
    tag = "localhost/phalanx-test:plan"
    words = [program, *build, *base, "--file", "Containerfile", "--target", "plan", "--tag", tag]
    built = subprocess.run([*words, "."], cwd=ROOT, capture_output=True, text=True, check=False)
    if "pinging container registry" in built.stderr:
        pytest.skip(f"the base image cannot be fetched; {BASE} names another")
    assert built.returncode == 0, built.stdout + built.stderr
    plan = ["plan", "--model", "llama3-8b", "--cluster", "h100-256"]
    if program == "buildah":
        return
    done = subprocess.run(
        [program, "run", "--rm", tag, *plan], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "mapping" in done.stdout, done.stderr
