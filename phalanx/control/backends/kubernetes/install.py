"""What a namespace needs once: the controller's account with the least rights, and a quota."""

from __future__ import annotations

from phalanx.config import Kubernetes
from phalanx.control.backends.kubernetes.pods import Tree

RBAC = "rbac.authorization.k8s.io"


def install(site: Kubernetes, gpus: int = 0) -> list[Tree]:
    """Account and rights; ``gpus``: also a quota of so many GPUs for the namespace.

    The controller reads pods of its namespace and the state of nodes. It changes nothing.
    """
    name, namespace = site.service_account, site.namespace
    subject = [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
    made: list[Tree] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": name, "namespace": namespace},
        },
        *_rights("Role", name, namespace, "pods", subject),
        *_rights("ClusterRole", f"{namespace}-{name}-nodes", "", "nodes", subject),
    ]
    if gpus:
        made.append(
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": f"{name}-gpus", "namespace": namespace},
                "spec": {"hard": {f"requests.{site.gpu_resource}": str(gpus)}},
            }
        )
    return made


def _rights(
    role_kind: str, name: str, namespace: str, what: str, subject: list[Tree]
) -> list[Tree]:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    rule = {"apiGroups": [""], "resources": [what], "verbs": ["get", "list"]}
    role = {"apiVersion": f"{RBAC}/v1", "kind": role_kind, "metadata": metadata, "rules": [rule]}
    binding = {
        "apiVersion": f"{RBAC}/v1",
        "kind": f"{role_kind}Binding",
        "metadata": dict(metadata),
        "roleRef": {"apiGroup": RBAC, "kind": role_kind, "name": name},
        "subjects": subject,
    }
    return [role, binding]
