"""Kubernetes' facts about nodes, asked from the controller's pod with its own account."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from phalanx.control.backends.kubernetes.pods import AGENT, INDEX_LABELS, NAME_LABEL, ROLE_LABEL

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Conditions that are bad when true; Ready is bad when it is not.
BAD = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
TAINTS = ("node.kubernetes.io/unschedulable", "node.kubernetes.io/out-of-service")


class KubernetesSite:
    """The agents of a job, and the nodes under them."""

    def __init__(
        self, count: int, job: str, environment: Mapping[str, str], account: Path = ACCOUNT
    ) -> None:
        self._count, self._job, self._account = count, job, account
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        self.address = environment.get("PHALANX_KUBERNETES", f"https://{host}:{port}")

    def nodes(self) -> tuple[str, ...]:
        """Agents are named by their index: a pod that replaces another has its name."""
        return tuple(f"{AGENT}-{number}" for number in range(self._count))

    def unwanted(self) -> dict[str, str]:
        """Agents whose node is cordoned, tainted or not well."""
        namespace = (self._account / "namespace").read_text().strip()
        chosen = quote(f"{NAME_LABEL}={self._job},{ROLE_LABEL}={AGENT}")
        pods = self._get(f"/api/v1/namespaces/{namespace}/pods?labelSelector={chosen}")
        bad = unwell(self._get("/api/v1/nodes"))
        return {name: bad[node] for name, node in agents_on(pods).items() if node in bad}

    def over(self) -> bool:
        """A pod that is deleted is asked to end in time."""
        return False

    def _get(self, path: str) -> dict[str, Any]:
        token = (self._account / "token").read_text().strip()
        request = urllib.request.Request(
            self.address + path, headers={"Authorization": f"Bearer {token}"}
        )
        context = None
        if self.address.startswith("https:"):
            context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def agents_on(pods: dict[str, Any]) -> dict[str, str]:
    """The node of each agent that has one."""
    agents = {}
    for pod in pods.get("items", []):
        labels = pod["metadata"].get("labels", {})
        index = next((labels[key] for key in INDEX_LABELS.values() if key in labels), None)
        node = pod.get("spec", {}).get("nodeName")
        if index is not None and node and pod.get("status", {}).get("phase") == "Running":
            agents[f"{AGENT}-{index}"] = node
    return agents


def unwell(nodes: dict[str, Any]) -> dict[str, str]:
    """Nodes that should be left, and why."""
    problems = {}
    for node in nodes.get("items", []):
        name, spec = node["metadata"]["name"], node.get("spec", {})
        conditions = {each["type"]: each for each in node["status"].get("conditions", [])}
        ready = conditions.get("Ready", {"status": "True"})
        bad = [kind for kind in BAD if conditions.get(kind, {}).get("status") == "True"]
        taints = [t["key"] for t in spec.get("taints", []) if t["key"] in TAINTS]
        if spec.get("unschedulable"):
            problems[name] = "the node is cordoned"
        elif taints:
            problems[name] = f"the node is tainted ({taints[0]})"
        elif ready["status"] != "True":
            problems[name] = f"the node is not ready ({ready.get('reason', 'unknown')})"
        elif bad:
            problems[name] = f"the node has {bad[0]}"
    return problems
