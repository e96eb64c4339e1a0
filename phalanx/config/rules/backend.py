"""Refuses settings of engines that no batch script or manifest can carry."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.config.backend import Backend, Kubernetes, Slurm
from phalanx.config.errors import ConfigProblem, problem, written

WORD = re.compile(r"[A-Za-z0-9_.,:|&!*+/@\[\]()=~?-]*")  # what stands in a line of #SBATCH
DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # of a Kubernetes object
SLURM_WORDS = (
    "account",
    "partition",
    "qos",
    "reservation",
    "constraint",
    "nodelist",
    "exclude",
    "gpu_type",
    "dependency",
)


def backend_problems(backend: Backend) -> Iterator[ConfigProblem]:
    """Rules for backend.*."""
    yield from _shared(backend)
    yield from _slurm(backend.slurm)
    yield from _kubernetes(backend.kubernetes)
    if backend.slurm.container != "none" and not backend.image:
        rule = f"backend.slurm.container = {backend.slurm.container} needs one"
        yield problem("backend.image", '""', rule, "name it by its digest")


def _shared(backend: Backend) -> Iterator[ConfigProblem]:
    image = backend.image
    if image and not DIGEST.fullmatch(image):
        fix = "`skopeo inspect docker://NAME` prints the digest of a tag"
        rule = "must end in @sha256: and 64 hexadecimal digits, since a tag may change"
        yield problem("backend.image", written(image), rule, fix)
    folder = backend.slurm.image_folder
    if folder and (not folder.startswith("/") or not WORD.fullmatch(folder)):
        rule = "must be a folder's full path without blanks"
        yield problem("backend.slurm.image_folder", written(folder), rule, 'e.g. "/local/images"')
    if image.startswith("/") and backend.slurm.container != "none" and not folder:
        rule = "an image in a file is verified when it is copied to nodes"
        fix = 'set backend.slurm.image_folder, e.g. "/local/images"'
        yield problem("backend.image", written(image), rule, fix)
    if backend.slurm.ray and backend.controller == "here":
        rule = "is started by a batch script"
        yield problem("backend.slurm.ray", "true", rule, 'set backend.controller = "job"')
    for name in backend.environment:
        if not VARIABLE.fullmatch(name):
            rule = "is no name of a variable"
            yield problem("backend.environment", written(name), rule, "letters, digits, _")
    for key, texts in (("backend.mounts", backend.mounts),):
        for text in texts:
            if not text.startswith("/") or any(char in text for char in "\n,'\" "):
                rule = "must be /path or /path:/inside"
                yield problem(key, written(text), rule, 'e.g. "/scratch:/scratch"')


def _slurm(slurm: Slurm) -> Iterator[ConfigProblem]:
    for name in SLURM_WORDS:
        text = getattr(slurm, name)
        if not WORD.fullmatch(text):
            plain = re.sub(r"[^A-Za-z0-9_.,:-]", "", text)
            rule = "must be one word that Slurm reads"
            yield problem(f"backend.slurm.{name}", written(text), rule, f'nearest: "{plain}"')
    for option in slurm.options:
        if not option.startswith("-") or "\n" in option:
            rule = "must be one option of sbatch"
            yield problem("backend.slurm.options", written(option), rule, 'e.g. "--licenses=a"')
    for setup_line in slurm.setup:
        if "\n" in setup_line:
            rule = "must be one line of shell"
            yield problem("backend.slurm.setup", written(setup_line), rule, "write several strings")
    if slurm.array_width and slurm.array_width > max(1, slurm.array):
        rule = f"must be at most backend.slurm.array ({slurm.array})"
        yield problem(
            "backend.slurm.array_width", slurm.array_width, rule, f"nearest: {slurm.array}"
        )


def _kubernetes(kubernetes: Kubernetes) -> Iterator[ConfigProblem]:
    for name in ("namespace", "queue", "service_account"):
        text = getattr(kubernetes, name)
        if text and not NAME.fullmatch(text):
            plain = re.sub(r"[^a-z0-9-]", "-", text.lower()).strip("-") or "phalanx"
            rule = "must be lower-case letters, digits and dashes"
            yield problem(f"backend.kubernetes.{name}", written(text), rule, f'nearest: "{plain}"')
    if kubernetes.memory_gb and kubernetes.shm_gb > kubernetes.memory_gb:
        rule = f"is part of backend.kubernetes.memory_gb ({kubernetes.memory_gb})"
        yield problem(
            "backend.kubernetes.shm_gb", kubernetes.shm_gb, rule, f"nearest: {kubernetes.memory_gb}"
        )
