"""Manifests to a cluster, by kubectl: all of them, or none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

TIMEOUT_SECONDS = 120.0
DELETE_SECONDS = 900.0  # pods have their time to save what they have
CLEAN_SECONDS = 10.0  # for a cluster that has not answered before
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
    except NoAnswerError as error:
        # Nothing of it was there a moment ago: what is there now is ours.
        words = ("--ignore-not-found", "--wait=false", f"--request-timeout={CLEAN_SECONDS:.0f}s")
        try:
            kubectl("delete", *words, "-f", "-", text=text, seconds=2 * CLEAN_SECONDS)
        except KubernetesError:
            left = "some of it may be there: `phalanx k8s delete JOB.toml` when the cluster answers"
            raise KubernetesError(f"{error}\n{left}") from None
        raise KubernetesError(f"{error}\nwhat was created is deleted again") from None


def delete(text: str, namespace: str, pods: str) -> str:
    """Everything that was created, and wait until it is gone; what kubectl prints.

    ``pods``: their labels, since there may be more of them than ``text`` says (other --spares).
    """
    command = ("delete", "--ignore-not-found", "--wait=true")
    said = kubectl(*command, "-f", "-", text=text, seconds=DELETE_SECONDS)
    some = ("--namespace", namespace, "--selector", pods)
    return said + kubectl(*command, "pods", *some, seconds=DELETE_SECONDS)


class NoAnswerError(KubernetesError):
    """kubectl did not end in time: nobody knows what was done."""


class PartlyMadeError(KubernetesError):
    """Something was made before the server refused; ``made``: kind/name of each."""

    def __init__(self, message: str, made: tuple[str, ...]) -> None:
        super().__init__(message)
        self.made = made

    def namespace(self, text: str) -> tuple[str, ...]:
        """Options that name the namespace of what was made."""
        items = json.loads(text).get("items", [])
        return ("--namespace", items[0]["metadata"]["namespace"]) if items else ()


def kubectl(*arguments: str, text: str = "", seconds: float = TIMEOUT_SECONDS) -> str:
    """What kubectl prints; KubernetesError with its own words and what to change."""
    if not shutil.which("kubectl"):
        raise KubernetesError(
            "kubectl not found: install it, or pipe `phalanx k8s manifests JOB.toml` to where it is"
        )
    try:
        done = subprocess.run(
            ["kubectl", *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"kubectl {arguments[0]} did not end within {seconds:.0f} s: does the cluster answer "
            "(`kubectl get --raw /readyz`)?"
        ) from None
    if done.returncode:
        stderr = "\n".join(
            line for line in done.stderr.splitlines() if not NOISE.match(line)
        ).strip()
        hint = next((what for arguments, what in HINTS if arguments in stderr.lower()), "")
        made = (line.split() for line in done.stdout.splitlines())
        names = tuple(line[0] for line in made if len(line) == 2 and line[1] == "created")
        message = stderr + (f"\n{hint}" if hint else "")
        raise PartlyMadeError(message, names) if names else KubernetesError(message)
    return done.stdout
