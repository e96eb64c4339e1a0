"""Containers inside an allocation: Pyxis (Enroot) by flags of srun, Apptainer by a command."""

from __future__ import annotations

import shlex

from phalanx.config import Backend


def container_words(backend: Backend) -> tuple[list[str], list[str]]:
    """Words for srun, and words before the program, that start it in backend.image."""
    kind, image = backend.slurm.container, backend.image
    mounts = ",".join(each if ":" in each else f"{each}:{each}" for each in backend.mounts)
    if kind == "pyxis":
        # Enroot writes registry#name, and names a digest as Docker does.
        registry, slash, name = image.partition("/")
        address = f"{registry}#{name}" if slash and "." in registry else image
        words = [f"--container-image={shlex.quote(address)}", "--container-writable"]
        if mounts:
            words.append(f"--container-mounts={shlex.quote(mounts)}")
        return words, []
    if kind == "apptainer":
        bind = ["--bind", shlex.quote(mounts)] if mounts else []
        local = image if image.startswith("/") else f"docker://{image}"
        return [], ["apptainer", "exec", "--nv", *bind, shlex.quote(local)]
    return [], []
