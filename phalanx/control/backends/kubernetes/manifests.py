"""The objects of a job: a JobSet, a PyTorchJob, Jobs in a Volcano group, plain Jobs, bare pods."""

from __future__ import annotations

import secrets
from typing import Any

from msgspec import structs

from phalanx.config import ConfigError, Kubernetes, to_toml
from phalanx.control.backends.kubernetes.pods import (
    AGENT,
    INDEX_LABELS,
    JOB,
    NAME_LABEL,
    NOTICE,
    SECRETS,
    PodOptions,
    Tree,
    admin_secret,
    agent_pod,
    controller_pod,
    job_secret,
    object_name,
)
from phalanx.control.backends.kubernetes.pods import PORT as API_PORT
from phalanx.control.backends.need import need_of
from phalanx.control.backends.requested import environment_file, lead_words
from phalanx.control.server.http.submission import RequestedWork
from phalanx.control.trust.secrets import REFERENCE, plain_secrets

MOST_INDEX_RESTARTS = 10  # of one agent
MOST_RESTARTS = 100  # of pods, by infrastructure that fails again and again
# A pod that is about to end says so itself, with its node's own rights (``preStop``).
AGENT_CONFIG = f'[faults]\nnotice_file = "{NOTICE}"\npoll_seconds = 2.0\n'
BAD_JOB = [1, 2]  # exit codes of a controller whose job is wrong: doing it again would not help


def manifests(wanted: RequestedWork) -> list[Tree]:
    """Everything that a job needs in its namespace, beside ``install`` once."""
    given = wanted.backend.environment
    hidden = {name: given[name] for name in plain_secrets(given)}
    wanted = _with_references(wanted, hidden)
    options = structs.replace(pod_options(wanted), secrets=tuple(hidden))
    kinds = {
        "jobset": _jobset,
        "pytorchjob": _pytorchjob,
        "volcano": _volcano,
        "job": _jobs,
        "pods": _bare_pods,
    }
    made = [_config_map(options, wanted), _admin_token(options)]
    made += [_job_secrets(options, hidden)] if hidden else []
    made += kinds[options.site.kind](options)
    for each in made:
        each["metadata"]["namespace"] = options.site.namespace
        each["metadata"].setdefault("labels", {})[NAME_LABEL] = options.name
    return made


def pod_options(wanted: RequestedWork) -> PodOptions:
    """What the pods are made of; ConfigError names what is missing."""
    backend = wanted.backend
    site = backend.kubernetes
    for key, value, why in (
        ("backend.image", backend.image, "pods need an image with phalanx in it"),
        ("backend.kubernetes.runs_claim", site.runs_claim, "every pod must see runs and state"),
    ):
        if not value:
            raise ConfigError(key, '""', why, "name one")
    if backend.image.startswith("/"):
        rule = "Kubernetes pulls images from a registry, and takes no file"
        fix = 'e.g. "registry.example/phalanx@sha256:…"'
        raise ConfigError("backend.image", f'"{backend.image}"', rule, fix)
    if wanted.schedule.held:
        _refuse_to_hold(site)
    need = need_of(wanted)
    name = object_name(wanted.title)
    host = {
        "jobset": f"{name}-controller-0-0.{name}",
        "pytorchjob": f"{name}-master-0",
        "volcano": f"{name}-controller-0.{name}",
        "job": f"{name}-controller-0.{name}",
        "pods": f"controller.{name}",
    }[site.kind]
    lead = ["--nodes", need.slots, "--spares", need.spares, "--gpus", need.gpus_per_node]
    lead += ["--world-size", need.ranks, *lead_words(wanted)]
    if wanted.job is not None:
        lead.append(f"{JOB}/job.toml")
    else:
        lead += ["--env-file", f"{JOB}/environment", "--", *wanted.argv]
    return PodOptions(
        name=name,
        title=wanted.title,
        backend=backend,
        slot_cpus=wanted.slot_cpus,
        held=wanted.schedule.held,
        need=need,
        url=f"{'https' if backend.tls else 'http'}://{host}:{API_PORT}",
        lead=tuple(map(str, lead)),
        index=INDEX_LABELS.get(site.kind, INDEX_LABELS["job"]),
    )


def _refuse_to_hold(site: Kubernetes) -> None:
    """ConfigError where nothing would keep the pods from starting, or somebody lets them go."""
    if site.kind not in ("jobset", "pytorchjob", "job"):
        rule = f'a "{site.kind}" (backend.kubernetes.kind) cannot be suspended'
        raise ConfigError("--hold", "", rule, 'set it to "jobset", "pytorchjob" or "job"')
    if site.queue:
        rule = "Kueue lets go what is suspended (backend.kubernetes.queue)"
        raise ConfigError("--hold", "", rule, "hold its LocalQueue, or leave one of them out")


def _config_map(options: PodOptions, wanted: RequestedWork) -> Tree:
    if wanted.job is None:
        data = {"environment": environment_file(wanted.backend)}
    else:
        data = {"job.toml": to_toml(structs.replace(wanted.job, runs="/runs"))}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{options.name}-job"},
        "data": data | {"agent.toml": AGENT_CONFIG},
    }


def _with_references(wanted: RequestedWork, hidden: dict[str, str]) -> RequestedWork:
    """The same work, whose secrets are files that agents' pods mount: nobody else reads them."""
    references = {name: f"{REFERENCE}{SECRETS}/{name}" for name in hidden}
    environment = wanted.backend.environment | references
    return wanted.with_backend(structs.replace(wanted.backend, environment=environment))


def _job_secrets(options: PodOptions, values: dict[str, str]) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": job_secret(options)},
        "stringData": values,
    }


def _admin_token(options: PodOptions) -> Tree:
    """The administrator's token of the job's controller: nothing on the shared claim has it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": admin_secret(options)},
        "stringData": {"token": secrets.token_urlsafe(32)},
    }


def _failure_policy(container: str) -> Tree:
    """Infrastructure that fails is nobody's fault; a job that is wrong fails at once."""
    rules: list[Tree] = [
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
    ]
    if container == "controller":
        codes = {"containerName": container, "operator": "In"}
        rules.append({"action": "FailJob", "onExitCodes": {**codes, "values": BAD_JOB}})
        rules.append({"action": "Ignore", "onExitCodes": {**codes, "values": [75]}})
    return {"rules": rules}


def _job_spec(options: PodOptions, role: str) -> Tree:
    """A Job of one controller, or of all agents with an index each."""
    agents = role == AGENT
    count = options.need.nodes if agents else 1
    limit = {"backoffLimitPerIndex": MOST_INDEX_RESTARTS} if agents else {}
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": MOST_RESTARTS,
        **limit,  # one bad node does not use up what the others may need
        "podFailurePolicy": _failure_policy(role),
        "podReplacementPolicy": "Failed",  # never two pods with one index
        "template": agent_pod(options) if agents else controller_pod(options),
    }


def _kept_seconds(options: PodOptions) -> int:
    return round(options.site.keep_hours * 3600)


def _jobset(options: PodOptions) -> list[Tree]:
    metadata: Tree = {"name": options.name}
    spec: Tree = {
        "ttlSecondsAfterFinished": _kept_seconds(options),
        "network": {"enableDNSHostnames": True, "subdomain": options.name},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["controller"]},
        "failurePolicy": {
            "maxRestarts": 0,  # pods are replaced one by one; the whole is not started again
            "rules": [
                {
                    "name": "bad-job",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": "controller",
                "replicas": 1,
                "template": {"spec": _job_spec(options, "controller")},
            },
            {"name": "agents", "replicas": 1, "template": {"spec": _job_spec(options, AGENT)}},
        ],
    }
    if options.site.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.site.queue}
    if options.site.queue or options.held:
        spec["suspend"] = True  # until Kueue admits all of it, or a person lets it go
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": spec,
        }
    ]


def _pytorchjob(options: PodOptions) -> list[Tree]:
    metadata: Tree = {"name": options.name}
    policy: Tree = {"cleanPodPolicy": "All", "backoffLimit": MOST_RESTARTS}
    policy["ttlSecondsAfterFinished"] = _kept_seconds(options)
    if options.site.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.site.queue}
    if options.site.queue or options.held:
        policy["suspend"] = True
    master, worker = controller_pod(options), agent_pod(options)
    for template, name in ((master, "controller"), (worker, AGENT)):
        # The operator finds its container by this name.
        next(c for c in template["spec"]["containers"] if c["name"] == name)["name"] = "pytorch"
        del template["spec"]["restartPolicy"]
    replicas: Tree = {
        "Master": {"replicas": 1, "restartPolicy": "ExitCode", "template": master},
        "Worker": {
            "replicas": options.need.nodes,
            "restartPolicy": "ExitCode",
            "template": worker,
        },
    }
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": metadata,
            "spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas},
        }
    ]


def _jobs(options: PodOptions) -> list[Tree]:
    """Nothing needs to be installed: Indexed Jobs, and a service that names their pods."""
    made: list[Tree] = [_service(options)]
    for role, plural in (("controller", "controller"), (AGENT, "agents")):
        spec = _job_spec(options, role) | {"ttlSecondsAfterFinished": _kept_seconds(options)}
        spec["template"]["spec"]["subdomain"] = options.name
        if options.held:
            spec["suspend"] = True
        made.append(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": f"{options.name}-{plural}"},
                "spec": spec,
            }
        )
    return made


def _bare_pods(options: PodOptions) -> list[Tree]:
    """For clusters without Indexed Jobs. Nobody replaces a pod that is lost with its node; an
    agent that dies is started again in its place."""
    controller = controller_pod(options)
    controller["metadata"]["name"] = f"{options.name}-controller"
    controller["spec"] |= {"hostname": "controller", "subdomain": options.name}
    pods = [controller]
    for number in range(options.need.nodes):
        agent = agent_pod(options)
        agent["metadata"]["name"] = f"{options.name}-{AGENT}-{number}"
        agent["metadata"]["labels"][options.index] = str(number)
        agent["spec"] |= {"hostname": f"{AGENT}-{number}", "subdomain": options.name}
        agent["spec"]["restartPolicy"] = "OnFailure"
        pods.append(agent)
    return [_service(options), *({"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods)]


def _volcano(options: PodOptions) -> list[Tree]:
    """The same Jobs, started together or not at all by Volcano's scheduler."""
    count = options.need.slots + 1
    least = agent_pod(options)["spec"]["containers"][0]["resources"]["requests"]
    group: Tree = {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": options.name},
        "spec": {"minMember": count, "minResources": _times(least, options.need.slots)},
    }
    if options.site.queue:
        group["spec"]["queue"] = options.site.queue
    if options.site.priority_class:
        group["spec"]["priorityClassName"] = options.site.priority_class
    jobs = _jobs(options)
    for job in jobs:
        if job["kind"] == "Job":
            template = job["spec"]["template"]
            template["spec"]["schedulerName"] = "volcano"
            notes = template["metadata"].setdefault("annotations", {})
            notes["scheduling.k8s.io/group-name"] = options.name
    return [group, *jobs]


def _times(amounts: dict[str, Any], count: int) -> Tree:
    """Amounts of several pods: a number, and its unit as it was."""
    times = {}
    for name, amount in amounts.items():
        digits = amount.rstrip("G")
        times[name] = f"{float(digits) * count:g}{amount[len(digits) :]}"
    return times


def _service(options: PodOptions) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": options.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # agents look for the controller while it starts
            "selector": {NAME_LABEL: options.name},
            "ports": [{"name": "api", "port": API_PORT}],
        },
    }
