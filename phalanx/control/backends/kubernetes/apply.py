"""Manifests to a cluster, by kubectl: all of them, or none."""

from __future__ import annotations

import shutil
import subprocess

TIMEOUT_SECONDS = 120.0
HINTS = (
    (
        "forbidden",
        "you lack the right to create this there: ask for it, or set "
        "backend.kubernetes.namespace to one of yours",
    ),
    (
        "no matches for kind",
        'the cluster does not know this kind: install it, or set backend.kubernetes.kind = "job"',
    ),
    (
        "not found",
        "see what is missing; `phalanx k8s manifests --install JOB.toml | kubectl apply "
        "-f -` makes what a namespace needs",
    ),
    ("refused", "no cluster answers: see `kubectl config current-context`"),
    ("exceeded quota", "the namespace's quota is used up: see `kubectl describe quota`"),
)


class KubernetesError(Exception):
    """Kubernetes refused, in its own words, and what to change."""


def apply(text: str) -> str:
    """Try all of it on the server first, then create it; what kubectl prints."""
    if not shutil.which("kubectl"):
        raise KubernetesError(
            "kubectl not found: install it, or pipe `phalanx k8s manifests JOB.toml` to where it is"
        )
    _run(text, "--dry-run=server")
    return _run(text)


def _run(text: str, *options: str) -> str:
    done = subprocess.run(
        ["kubectl", "create", *options, "-f", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        said = done.stderr.strip()
        hint = next((what for words, what in HINTS if words in said.lower()), "")
        raise KubernetesError(said + (f"\n{hint}" if hint else ""))
    return done.stdout
