"""Manifests to a cluster, by kubectl: all of them, or none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

TIMEOUT_SECONDS = 120.0
NOISE = re.compile(r"[EWI]\d{4} \d\d:")  # kubectl's own log, beside what it says
# What the server says, and what helps. The first that matches is told: a quota that is used up and
# an account that is missing are "forbidden" too.
HINTS = (
    ("exceeded quota", "the namespace's quota is used up: see `kubectl describe quota`"),
    (
        "not found",
        "see what is missing; `phalanx k8s manifests --install JOB.toml | kubectl apply "
        "-f -` makes what a namespace needs",
    ),
    (
        "forbidden",
        "you lack the right to create this there: ask for it, or set "
        "backend.kubernetes.namespace to one of yours",
    ),
    (
        "already exists",
        "a job of this name is there: choose another --name, or `phalanx k8s delete JOB.toml`",
    ),
    (
        "no matches for kind",
        'the cluster does not know this kind: install it, or set backend.kubernetes.kind = "job"',
    ),
    ("refused", "no cluster answers: see `kubectl config current-context`"),
)


class KubernetesError(Exception):
    """Kubernetes refused, in its own words, and what to change."""


def apply(text: str) -> str:
    """Try all of it on the server first, then create it; what kubectl prints.

    Where the server takes only a part, that part is deleted again.
    """
    kubectl("create", "--dry-run=server", "-f", "-", text=text)
    try:
        return kubectl("create", "-f", "-", text=text)
    except PartlyMadeError as error:
        namespace = error.namespace(text)
        kubectl("delete", "--ignore-not-found", *namespace, *error.made)
        raise KubernetesError(str(error)) from None


def delete(text: str) -> str:
    """Everything that was created, and wait until it is gone; what kubectl prints."""
    return kubectl("delete", "--ignore-not-found", "--wait=true", "-f", "-", text=text)


class PartlyMadeError(KubernetesError):
    """Something was made before the server refused; ``made``: kind/name of each."""

    def __init__(self, message: str, made: tuple[str, ...]) -> None:
        super().__init__(message)
        self.made = made

    def namespace(self, text: str) -> tuple[str, ...]:
        """Options that name the namespace of what was made."""
        items = json.loads(text).get("items", [])
        return ("--namespace", items[0]["metadata"]["namespace"]) if items else ()


def kubectl(*words: str, text: str = "") -> str:
    """What kubectl prints; KubernetesError with its own words and what to change."""
    if not shutil.which("kubectl"):
        raise KubernetesError(
            "kubectl not found: install it, or pipe `phalanx k8s manifests JOB.toml` to where it is"
        )
    done = subprocess.run(
        ["kubectl", *words],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        said = "\n".join(line for line in done.stderr.splitlines() if not NOISE.match(line)).strip()
        hint = next((what for words, what in HINTS if words in said.lower()), "")
        made = (line.split() for line in done.stdout.splitlines())
        names = tuple(line[0] for line in made if len(line) == 2 and line[1] == "created")
        message = said + (f"\n{hint}" if hint else "")
        raise PartlyMadeError(message, names) if names else KubernetesError(message)
    return done.stdout
