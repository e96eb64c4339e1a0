"""Containers inside an allocation: Pyxis (Enroot) by flags of srun, Apptainer by a command.

With ``backend.slurm.image_folder`` every node gets its own verified copy of the image first, so
that a thousand nodes neither pull from a registry nor read one file at the same moment.
"""

from __future__ import annotations

import shlex

from phalanx.config import Backend

SUFFIX = {"apptainer": "sif", "pyxis": "sqsh"}
PYTHON = "python"  # inside of an image; the batch script's own is the host's


def container_words(backend: Backend) -> tuple[list[str], list[str]]:
    """Words for srun, and words before the program, that start it in backend.image."""
    runtime = backend.slurm.container
    image = staged(backend) or _address(backend)
    mounts = ",".join(each if ":" in each else f"{each}:{each}" for each in backend.mounts)
    if runtime == "pyxis":
        options = [f"--container-image={shlex.quote(image)}", "--container-writable"]
        if mounts:
            options.append(f"--container-mounts={shlex.quote(mounts)}")
        return options, []
    if runtime == "apptainer":
        bind = ["--bind", shlex.quote(mounts)] if mounts else []
        return [], ["apptainer", "exec", "--nv", *bind, shlex.quote(image)]
    return [], []


def staged(backend: Backend) -> str:
    """Where each node's own copy lies; "": images are not staged."""
    folder, runtime = backend.slurm.image_folder, backend.slurm.container
    if not folder or runtime == "none":
        return ""
    digest = backend.image.rpartition("@sha256:")[2]
    return f"{folder.rstrip('/')}/{digest}.{SUFFIX[runtime]}"


def staging(backend: Backend) -> str:
    """Shell that makes a node's copy, once: under a lock, verified, and whole or not there."""
    copy = staged(backend)
    name, _, digest = backend.image.rpartition("@sha256:")
    if name.startswith("/"):
        fetch = (
            f'cp -- {shlex.quote(name)} "$part" && echo "{digest}  $part" | sha256sum -c --quiet'
        )
    elif backend.slurm.container == "apptainer":
        # Registries are addressed by content: what does not have this digest is refused.
        fetch = f'apptainer pull --force "$part" {shlex.quote(_address(backend))}'
    else:
        fetch = f'enroot import --output "$part" {shlex.quote("docker://" + _address(backend))}'
    return (
        f"copy={shlex.quote(copy)}; part=$copy.$$\n"
        'mkdir -p "${copy%/*}" && exec 9>"$copy.lock" && flock 9\n'
        'if [ ! -s "$copy" ]; then\n'
        f'  {fetch} && mv "$part" "$copy" || {{\n'
        f'    rm -f "$part"; echo "$SLURMD_NODENAME: no image {name} with digest {digest}" >&2\n'
        "    exit 1; }\n"
        "fi"
    )


def _address(backend: Backend) -> str:
    """The image as the container's engine writes it."""
    image = backend.image
    if image.startswith("/"):
        return image.rpartition("@sha256:")[0]
    if backend.slurm.container == "apptainer":
        return f"docker://{image}"
    registry, slash, name = image.partition("/")  # Enroot writes registry#name
    return f"{registry}#{name}" if slash and "." in registry else image
