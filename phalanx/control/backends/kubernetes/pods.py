"""The pods of a job: what the controller and each agent run, with what, and under which rules."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

from msgspec import Struct

from phalanx.config import Backend, Kubernetes
from phalanx.control.backends.lead import ENDED_FILE
from phalanx.control.backends.need import Need
from phalanx.control.client.client import TLS_FILE

RUNS, DATA, JOB = "/runs", "/data", "/etc/phalanx"
ADMIN = "/etc/phalanx-admin"  # of the controller alone
SECRETS = "/etc/phalanx-secrets"  # of agents: the job's own
NOTICE = "/tmp/phalanx-notice"  # in an agent's pod: it is about to be taken away
PORT = 7070
AGENT = "agent"
MOST_NAME = 40
RANK_CPUS = 8  # for its loaders, its keeper's share and the rank itself
RANK_GB, LEAST_GB = 32.0, 64.0  # of memory, where nothing predicts it
RANK_SHM_GB, LEAST_SHM_GB = 2.0, 16.0
NAME_LABEL, ROLE_LABEL = "app.kubernetes.io/name", "phalanx.dev/role"
INDEX_LABELS = {  # with an agent's number, by what carries the pods
    "job": "batch.kubernetes.io/job-completion-index",
    "pytorchjob": "training.kubeflow.org/replica-index",
    "pods": "phalanx.dev/index",
}
Tree = dict[str, Any]


class PodOptions(Struct, frozen=True, kw_only=True):
    """What the pods of a job are made of."""

    name: str  # of the Kubernetes objects
    title: str  # of the job
    backend: Backend
    need: Need
    url: str  # of the controller
    lead: tuple[str, ...]  # words behind `phalanx lead`
    slot_cpus: int = 1  # that were asked for
    held: bool = False  # suspended until a person lets it go
    index: str = INDEX_LABELS["job"]  # label with an agent's number
    secrets: tuple[str, ...] = ()  # names of variables whose values are in a Secret

    @property
    def site(self) -> Kubernetes:
        return self.backend.kubernetes

    @property
    def state(self) -> str:
        """The controller's state, where every pod and every later one sees it."""
        return f"{RUNS}/{self.title}/k8s-{self.name}/control"


def object_name(title: str) -> str:
    """A name that Kubernetes takes, with room for what is appended to it.

    One that had to be changed ends in a hash, since others may be changed to the same.
    """
    plain = re.sub(r"[^a-z0-9-]+", "-", title.lower()).strip("-")
    if not plain[:1].isalpha():  # services must begin with a letter
        plain = f"job-{plain}".strip("-")
    short = plain[:MOST_NAME].strip("-")
    if short == title:
        return short
    return f"{short[: MOST_NAME - 7].strip('-')}-{hashlib.sha256(title.encode()).hexdigest()[:6]}"


def admin_secret(options: PodOptions) -> str:
    """The name of the Secret with the administrator's token, which only the controller mounts."""
    return f"{options.name}-admin"


def job_secret(options: PodOptions) -> str:
    """The name of the Secret with those variables of the job that are shown to nobody."""
    return f"{options.name}-secrets"


def controller_pod(options: PodOptions) -> Tree:
    """The template of the pod that leads the job."""
    command = ["python", "-m", "phalanx", "lead", "--engine", "kubernetes"]
    command += ["--state", options.state, "--url", options.url, *options.lead]
    container = {
        **_container(options, "controller", command),
        "ports": [{"name": "api", "containerPort": PORT}],
        "resources": _same({"cpu": "2", "memory": "4G"}),
        **_probes(),
    }
    spec = {
        **_pod(options, [container]),
        "serviceAccountName": options.site.service_account,
        "volumes": [
            *_volumes(options, shared_memory=False),
            {
                "name": "admin",
                "secret": {"secretName": admin_secret(options), "defaultMode": 0o440},
            },
        ],
    }
    return {"metadata": _metadata(options, "controller"), "spec": spec}


def agent_pod(options: PodOptions) -> Tree:
    """The template of the pod that holds a node for its agent."""
    argv = ["python", "-m", "phalanx", "agent", "--site", "kubernetes", "--join", options.url]
    argv += ["--gpus", str(options.need.gpus_per_node), "--as-agent"]
    argv += ["--state", f"{options.state}/nodes/$(PHALANX_POD_NAME)"]
    argv += ["--config", f"{JOB}/agent.toml"]
    argv += ["--until", f"{options.state}/{ENDED_FILE}"]
    argv += [] if options.backend.standby else ["--no-standby"]
    resources = _same(_amounts(options))
    container = {
        **_container(options, AGENT, argv),
        "resources": resources,
        "lifecycle": {"preStop": {"exec": {"command": _before_stop(options)}}},
    }
    site = options.site
    spec: Tree = {
        **_pod(options, [container]),
        "automountServiceAccountToken": False,  # an agent asks Kubernetes nothing
        "volumes": _volumes(options, shared_memory=True),
        "affinity": {"podAntiAffinity": _one_a_node(options)},
        "topologySpreadConstraints": _spread(options),
        "tolerations": [{"key": key, "operator": "Exists"} for key in site.tolerations],
    }
    if site.gpu_product and options.need.wants_gpus:
        spec["nodeSelector"] = {"nvidia.com/gpu.product": site.gpu_product}
    if site.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if site.stage:
        spec["initContainers"] = [_staging(options, resources)]
    metadata = _metadata(options, AGENT)
    if site.queue:
        wish = "required" if site.topology_required else "preferred"
        metadata["annotations"] = {f"kueue.x-k8s.io/podset-{wish}-topology": site.topology}
    return {"metadata": metadata, "spec": spec}


def _probes() -> Tree:
    """Of the controller. An agent that is silent is dealt with by the controller itself."""
    answers = {"tcpSocket": {"port": PORT}}
    return {
        "startupProbe": {**answers, "periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {**answers, "periodSeconds": 5},
        # It starts its server again by itself: only one that cannot is to be replaced.
        "livenessProbe": {**answers, "periodSeconds": 20, "failureThreshold": 15},
    }


def _metadata(options: PodOptions, role: str) -> Tree:
    return {"labels": {NAME_LABEL: options.name, ROLE_LABEL: role}}


def _pod(options: PodOptions, containers: list[Tree]) -> Tree:
    site = options.site
    spec: Tree = {
        "restartPolicy": "Never",  # a policy for failures needs it: a pod that fails is replaced
        "terminationGracePeriodSeconds": site.grace_seconds,
        "containers": containers,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": site.user,
            "runAsGroup": site.user,
            "fsGroup": site.user,
            "fsGroupChangePolicy": "OnRootMismatch",  # not every file of all runs at each start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if site.priority_class:
        spec["priorityClassName"] = site.priority_class
    if site.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in site.pull_secrets]
    return spec


def _container(options: PodOptions, name: str, command: list[str]) -> Tree:
    """A container without privileges; RDMA must lock memory and gets that one right."""
    rdma = ["IPC_LOCK"] if options.site.rdma_resource and name == AGENT else []
    capabilities: Tree = {"drop": ["ALL"]} | ({"add": rdma} if rdma else {})
    return {
        "name": name,
        "image": options.backend.image,
        "command": command,
        "workingDir": RUNS,
        "env": _environment(options, name),
        "volumeMounts": _mounts(options, name),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
    }


def _environment(options: PodOptions, name: str) -> list[Tree]:
    given = {"HOME": RUNS}
    if options.backend.tls:
        given["PHALANX_CA"] = f"{options.state}/{TLS_FILE}"
    if name == AGENT:
        given["PHALANX_TOKEN_FILE"] = f"{options.state}/join.token"
    elif name == "controller":
        given["PHALANX_TOKEN_FILE"] = given["PHALANX_ADMIN_TOKEN_FILE"] = f"{ADMIN}/token"
    given |= options.backend.environment
    variables: list[Tree] = [
        {"name": key, "value": value} for key, value in given.items() if key not in options.secrets
    ]
    for key in options.secrets:
        source = {"secretKeyRef": {"name": job_secret(options), "key": key}}
        variables.append({"name": key, "valueFrom": source})
    if name == AGENT:
        label = f"metadata.labels['{options.index}']"
        variables += [
            {"name": "PHALANX_POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": label}}},
            {"name": "PHALANX_POD_NAME", "value": f"{AGENT}-$(PHALANX_POD_INDEX)"},
            {"name": "PHALANX_POD_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ]
    return variables


def _mounts(options: PodOptions, name: str) -> list[Tree]:
    mounts: list[Tree] = [{"name": "runs", "mountPath": RUNS}]
    mounts.append({"name": "job", "mountPath": JOB, "readOnly": True})
    if options.site.data_claim:
        mounts.append({"name": "data", "mountPath": DATA, "readOnly": True})
    if name == "controller":
        mounts.append({"name": "admin", "mountPath": ADMIN, "readOnly": True})
    if name == AGENT and options.secrets:
        mounts.append({"name": "secrets", "mountPath": SECRETS, "readOnly": True})
    if name == AGENT:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        if options.site.stage:
            mounts.append({"name": "local", "mountPath": "/local"})
    return mounts


def _volumes(options: PodOptions, *, shared_memory: bool) -> list[Tree]:
    site = options.site
    volumes: list[Tree] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": site.runs_claim}},
        {"name": "job", "configMap": {"name": f"{options.name}-job"}},
    ]
    if site.data_claim:
        claim = {"claimName": site.data_claim, "readOnly": True}
        volumes.append({"name": "data", "persistentVolumeClaim": claim})
    if shared_memory and options.secrets:
        secret = {"secretName": job_secret(options), "defaultMode": 0o440}
        volumes.append({"name": "secrets", "secret": secret})
    if shared_memory:
        limit = {"medium": "Memory", "sizeLimit": _giga(shared_memory_gb(options))}
        volumes.append({"name": "shm", "emptyDir": limit})
        if site.stage:
            volumes.append({"name": "local", "emptyDir": {}})
    return volumes


def _amounts(options: PodOptions) -> dict[str, str]:
    site, need = options.site, options.need
    cpus = site.cpus or max(RANK_CPUS * need.gpus_per_node, options.slot_cpus)
    amounts = {"cpu": str(cpus), "memory": _giga(memory_gb(options))}
    if need.wants_gpus:
        amounts[site.gpu_resource] = str(need.gpus_per_node)
    if site.rdma_resource:
        amounts[site.rdma_resource] = str(site.rdma_devices)
    return amounts


def memory_gb(options: PodOptions) -> float:
    """Of an agent's pod: as given, as predicted, or by its ranks."""
    need = options.need
    if options.site.memory_gb:
        return options.site.memory_gb
    if need.memory_bytes:
        return math.ceil(need.memory_bytes / 1e9)
    return max(LEAST_GB, RANK_GB * need.gpus_per_node)


def shared_memory_gb(options: PodOptions) -> float:
    """Of /dev/shm, which loaders and NCCL use; snapshots are in memory beside it."""
    by_ranks = max(LEAST_SHM_GB, RANK_SHM_GB * options.need.gpus_per_node)
    return options.site.shm_gb or min(by_ranks, memory_gb(options))


def _same(amounts: dict[str, str]) -> Tree:
    """Requests equal limits: the pod is Guaranteed, and last to be evicted."""
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _giga(amount: float) -> str:
    return f"{amount:g}G"


def _before_stop(options: PodOptions) -> list[str]:
    """Somebody ends the pod: the job leaves it at a step boundary while there is time."""
    return ["sh", "-c", f"echo {options.site.grace_seconds} > {NOTICE}; sleep 12"]


def _one_a_node(options: PodOptions) -> Tree:
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": _agents(options), "topologyKey": "kubernetes.io/hostname"}
        ]
    }


def _spread(options: PodOptions) -> list[Tree]:
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": _agents(options),
        }
    ]


def _agents(options: PodOptions) -> Tree:
    return {"matchLabels": _metadata(options, AGENT)["labels"]}


def _staging(options: PodOptions, resources: Tree) -> Tree:
    """Copies data to node-local disk before the agent starts."""
    container = _container(options, "stage", ["sh", "-c", options.site.stage])
    container["volumeMounts"] = [
        *(mount for mount in container["volumeMounts"] if mount["name"] != "job"),
        {"name": "local", "mountPath": "/local"},
    ]
    small = {"cpu": resources["limits"]["cpu"], "memory": resources["limits"]["memory"]}
    return container | {"resources": _same(small)}
