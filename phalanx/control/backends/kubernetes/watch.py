"""How the pods of a job are, and what keeps one from starting, in words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from phalanx.control.backends.kubernetes.apply import KubernetesError, kubectl
from phalanx.control.backends.kubernetes.pods import NAME_LABEL, ROLE_LABEL

WATCH_SECONDS = 30.0  # for what is wrong to show itself after a submission
POLL_SECONDS = 0.5

# Reasons of a container that will not start by waiting, and what helps.
HOPELESS = {
    "ErrImagePull": "is backend.image there, and may the cluster pull it (pull_secrets)?",
    "ImagePullBackOff": "is backend.image there, and may the cluster pull it (pull_secrets)?",
    "InvalidImageName": "backend.image is no name of an image",
    "ErrImageNeverPull": "the image is not on the node, and the cluster may not pull it",
    "CreateContainerConfigError": "something that the pod names is missing: see its events",
    "CreateContainerError": "the runtime refused: see the pod's events",
}


class PodState(Struct, frozen=True, kw_only=True):
    """One pod as Kubernetes sees it."""

    name: str
    phase: str  # Pending, Running, Succeeded, Failed
    node: str
    why: str  # why it does not run
    hopeless: str  # what helps, where waiting does not


def labels_of(name: str) -> str:
    """What selects the pods of a job, and those of nobody else that calls itself so."""
    return f"{NAME_LABEL}={name},{ROLE_LABEL}"


def pods_of(name: str, namespace: str) -> list[PodState]:
    """The pods of a job, by one question."""
    words = ("--namespace", namespace, "--selector", labels_of(name), "--output", "json")
    return read_pods(json.loads(kubectl("get", "pods", *words)))


def read_pods(answer: dict[str, Any]) -> list[PodState]:
    """What ``kubectl get pods -o json`` says."""
    pods = []
    for pod in answer.get("items", []):
        status = pod.get("status", {})
        why, hopeless = _why(status)
        state = PodState(
            name=pod["metadata"]["name"],
            phase=status.get("phase", "Pending"),
            node=pod.get("spec", {}).get("nodeName", ""),
            why=why,
            hopeless=hopeless,
        )
        pods.append(state)
    return sorted(pods, key=lambda state: state.name)


def _why(status: dict[str, Any]) -> tuple[str, str]:
    for part in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(part, []):
            waiting = container.get("state", {}).get("waiting")
            if waiting:
                reason = waiting.get("reason", "")
                said = f"{reason}: {waiting.get('message', '')}".rstrip(": ")
                return said, HOPELESS.get(reason, "")
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}", ""
    return status.get("reason", ""), ""


def watch(
    name: str,
    namespace: str,
    seconds: float = WATCH_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> list[PodState]:
    """Until all pods run, or a while has passed: a gang may wait in a queue for hours.

    KubernetesError where one of them never will.
    """
    deadline = time.monotonic() + seconds
    while True:
        pods = pods_of(name, namespace)
        bad = next((pod for pod in pods if pod.hopeless), None)
        if bad is not None:
            raise KubernetesError(f"{bad.name}: {bad.why}\n{bad.hopeless}")
        done = pods and all(pod.phase in ("Running", "Succeeded") for pod in pods)
        if done or time.monotonic() > deadline:
            return pods
        sleep(POLL_SECONDS)
