"""Manifests: valid by the published schemas, safe by default, and the same job as elsewhere."""

from __future__ import annotations

import json
import math
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from msgspec import structs
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.config import (
    Backend,
    ConfigError,
    Job,
    Kubernetes,
    Model,
    Parallel,
    Train,
    resolve,
    to_toml,
)
from phalanx.control.agent.config import read_agent_config
from phalanx.control.backends.kubernetes.apply import KubernetesError, apply
from phalanx.control.backends.kubernetes.install import install
from phalanx.control.backends.kubernetes.manifests import manifests
from phalanx.control.backends.kubernetes.pods import ADMIN, AGENT, NOTICE, SECRETS
from phalanx.control.backends.kubernetes.site import KubernetesSite
from phalanx.control.backends.need import need_of
from phalanx.control.backends.requested import fitted
from phalanx.control.server.http.submission import JobSchedule, RequestedWork

IMAGE = "registry.example/phalanx@sha256:" + "0" * 64
VERSION = "1.33"
CORE = ("v1", "batch/v1", "rbac.authorization.k8s.io/v1")


def wanted(**settings: object) -> RequestedWork:
    site = Kubernetes(**{"runs_claim": "runs", **settings})  # type: ignore[arg-type]
    backend = Backend(image=IMAGE, spares=1, kubernetes=site)
    axes, train = Parallel(tensor=8, data=2), Train(steps=10, global_batch=16)
    job = Job(name="Big Run", model=Model(preset="llama3-8b"), parallel=axes, train=train)
    return RequestedWork(job=resolve(structs.replace(job, backend=backend), 16), ranks=16)


def everything() -> dict[str, object]:
    return {
        "queue": "research",
        "priority_class": "high",
        "pull_secrets": ("registry",),
        "gpu_product": "NVIDIA-H100-80GB-HBM3",
        "host_network": True,
        "rdma_resource": "rdma/hca",
        "data_claim": "corpus",
        "stage": "cp -r /data /local",
    }


def templates(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The pod templates in any kind of object."""
    for found in objects:
        stack: list[Any] = [found]
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                if "containers" in value.get("spec", {}):
                    yield value
                stack += value.values()
            elif isinstance(value, list):
                stack += value


def agent_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [
        each
        for each in templates(objects)
        if each["metadata"]["labels"]["phalanx.dev/role"] == "agent"
    ]
    return found


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "volcano", "job", "pods"])
@pytest.mark.parametrize("full", [False, True])
def test_every_kind_is_valid_by_the_published_schemas(kind: str, full: bool) -> None:
    made = manifests(wanted(kind=kind, **(everything() if full else {})))
    for found in made:
        if found["apiVersion"] in CORE:
            kubernetes_validate.validate(found, VERSION, strict=True)
    for template in templates(made):
        spec = {"restartPolicy": "Never", **template["spec"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize("full", [False, True])
def test_a_jobset_has_no_field_that_its_model_does_not_know(full: bool) -> None:
    (made,) = [
        m for m in manifests(wanted(**(everything() if full else {}))) if m["kind"] == "JobSet"
    ]
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet  # all of its models: seconds

    understood = JobsetV1alpha2JobSet.from_dict(made).to_dict()
    assert unknown(made["spec"], understood["spec"]) == []
    for each in made["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
        kubernetes_validate.validate(job | each["template"], VERSION, strict=True)


def unknown(given: Any, understood: Any, where: str = "") -> list[str]:
    """Keys that were lost on the way through the model."""
    if isinstance(given, dict) and isinstance(understood, dict):
        lost = [f"{where}.{key}" for key in given if key not in understood]
        both = [key for key in given if key in understood]
        return lost + [
            each for k in both for each in unknown(given[k], understood[k], f"{where}.{k}")
        ]
    if isinstance(given, list) and isinstance(understood, list):
        pairs = zip(given, understood, strict=True)
        return [each for a, b in pairs for each in unknown(a, b, f"{where}[]")]
    return []


def test_what_is_installed_is_valid_and_may_only_read() -> None:
    made = install(Kubernetes(), gpus=64)
    for found in made:
        kubernetes_validate.validate(found, VERSION, strict=True)
    rules = [rule for found in made for rule in found.get("rules", [])]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list"}
    assert {what for rule in rules for what in rule["resources"]} == {"pods", "nodes"}


def test_containers_have_no_privilege_and_requests_are_limits() -> None:
    for template in templates(manifests(wanted(**everything()))):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert set(rights["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert "@sha256:" in container["image"]


def test_an_agent_has_its_node_alone_with_gpus_rdma_and_shared_memory() -> None:
    spec = agent_of(manifests(wanted(**everything())))["spec"]
    limits = spec["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca"]) == ("8", "1")
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    anti = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert anti[0]["topologyKey"] == "kubernetes.io/hostname"
    shm = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    data = next(m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "data")
    assert data["readOnly"] is True
    stop = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert f"> {NOTICE}" in stop


def test_memory_is_what_slurm_would_be_asked_for() -> None:
    asked = wanted()
    assert asked.job is not None
    planned = asked.with_backend(structs.replace(asked.backend, cluster="h100-512"))
    limits = agent_of(manifests(planned))["spec"]["containers"][0]["resources"]["limits"]
    need = need_of(planned)
    assert limits["memory"] == f"{math.ceil(need.memory_bytes / 1e9)}G" and limits["cpu"] == "64"
    unplanned = agent_of(manifests(asked))["spec"]["containers"][0]["resources"]["limits"]
    assert unplanned["memory"] == "256G"
    own = wanted(memory_gb=100, cpus=12, shm_gb=8)
    spec = agent_of(manifests(own))["spec"]
    limits = spec["containers"][0]["resources"]["limits"]
    assert (limits["memory"], limits["cpu"]) == ("100G", "12")
    shm = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["sizeLimit"] == "8G"


@pytest.mark.parametrize("kind", ["jobset", "job", "pytorchjob", "volcano", "pods"])
def test_a_program_is_led_with_its_variables(kind: str) -> None:
    site = Kubernetes(runs_claim="runs", kind=kind)  # type: ignore[arg-type]
    backend = Backend(image=IMAGE, kubernetes=site)
    program = RequestedWork(
        argv=("python", "train.py", "--lr", "1"),
        ranks=4,
        retries=7,
        program_backend=backend,
        environment={"A": "b c"},
    )
    made = manifests(fitted("kubernetes", program))
    (config,) = [each for each in made if each["kind"] == "ConfigMap"]
    assert config["data"]["environment"] == 'A="b c"\n'
    commands = [
        container["command"]
        for template in templates(made)
        for container in template["spec"]["containers"]
    ]
    (lead,) = [words for words in commands if "lead" in words]
    assert lead[lead.index("--") + 1 :] == ["python", "train.py", "--lr", "1"]
    assert lead[lead.index("--retries") + 1] == "7" and "/etc/phalanx/environment" in lead


def test_pods_fit_the_restricted_profile_unless_rdma_or_the_nodes_network_is_asked_for() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    for template in templates(manifests(wanted(data_claim="corpus", stage="true"))):
        spec = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        kinds = {next(key for key in volume if key != "name") for volume in spec["volumes"]}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
        pod = spec["securityContext"]
        assert pod["runAsUser"] > 0 and pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_what_is_over_goes_away_and_one_bad_node_does_not_use_up_the_others_restarts() -> None:
    made = manifests(wanted(kind="job", keep_hours=2))
    jobs = {
        each["metadata"]["name"].rpartition("-")[2]: each for each in made if each["kind"] == "Job"
    }
    assert all(job["spec"]["ttlSecondsAfterFinished"] == 7200 for job in jobs.values())
    assert jobs["agents"]["spec"]["backoffLimitPerIndex"] == 10
    assert "backoffLimitPerIndex" not in jobs["controller"]["spec"]
    pod = jobs["controller"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    probes = {name for name in pod["containers"][0] if name.endswith("Probe")}
    assert probes == {"startupProbe", "readinessProbe", "livenessProbe"}


def test_a_bad_job_fails_and_a_lost_node_does_not_count() -> None:
    (jobset,) = [m for m in manifests(wanted()) if m["kind"] == "JobSet"]
    controller, agents = (each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"])
    by_action = {rule["action"]: rule for rule in controller["podFailurePolicy"]["rules"]}
    assert 1 in by_action["FailJob"]["onExitCodes"]["values"]
    disrupted = agents["podFailurePolicy"]["rules"][0]
    assert disrupted["action"] == "Ignore"
    assert disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert agents["completions"] == 3  # two nodes of eight ranks, and a spare


@pytest.mark.parametrize(
    ("site", "where"),
    [
        ({"kind": "jobset"}, "spec"),
        ({"kind": "pytorchjob"}, "runPolicy"),
        ({"kind": "job"}, "spec"),
        ({"kind": "pods"}, ""),
        ({"kind": "jobset", "queue": "research"}, ""),
    ],
)
def test_a_held_job_is_suspended_where_kubernetes_can(site: dict[str, str], where: str) -> None:
    held = structs.replace(wanted(**site), schedule=JobSchedule(held=True))
    if not where:
        with pytest.raises(ConfigError, match="--hold"):
            manifests(held)
        return
    kinds = ("JobSet", "PyTorchJob", "Job")
    specs = [made["spec"] for made in manifests(held) if made["kind"] in kinds]
    assert specs and all(spec.get(where, spec)["suspend"] is True for spec in specs)


def test_kueue_gets_the_queue_the_topology_and_a_suspended_job() -> None:
    made = manifests(wanted(queue="research", topology_required=True))
    (jobset,) = [each for each in made if each["kind"] == "JobSet"]
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert jobset["spec"]["suspend"] is True
    notes = agent_of(made)["metadata"]["annotations"]
    assert "kueue.x-k8s.io/podset-required-topology" in notes


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"image": ""}, "backend.image"),
        ({"image": f"/images/phalanx.sif@sha256:{'0' * 64}"}, "takes no file"),
        ({}, "backend.kubernetes.runs_claim"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_made(change: dict[str, str], key: str) -> None:
    job = wanted(runs_claim="runs" if "file" in key else "").job
    assert job is not None
    backend = structs.replace(job.backend, **change)
    with pytest.raises(ConfigError, match=key):
        manifests(RequestedWork(job=structs.replace(job, backend=backend), ranks=16))


PODS = {
    "items": [
        {
            "metadata": {"labels": {"batch.kubernetes.io/job-completion-index": str(number)}},
            "spec": {"nodeName": node},
            "status": {"phase": "Running"},
        }
        for number, node in enumerate(["good", "cordoned", "silent", "full"])
    ]
}


def condition(kind: str, status: str) -> dict[str, object]:
    return {"conditions": [{"type": kind, "status": status, "reason": "Said"}]}


NODES = {
    "items": [
        {"metadata": {"name": "good"}, "status": condition("Ready", "True")},
        {"metadata": {"name": "cordoned"}, "spec": {"unschedulable": True}, "status": {}},
        {"metadata": {"name": "silent"}, "status": condition("Ready", "Unknown")},
        {
            "metadata": {"name": "full"},
            "status": condition("DiskPressure", "True"),
        },
    ]
}


def test_conditions_of_nodes_are_told_to_the_core(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            body = json.dumps(PODS if "/pods" in self.path else NODES).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("research")
    environment = {"PHALANX_KUBERNETES": f"http://127.0.0.1:{server.server_port}"}
    try:
        site = KubernetesSite(4, "big-run", environment, tmp_path)
        assert site.unwanted() == {
            "agent-1": "the node is cordoned",
            "agent-2": "the node is not ready (Said)",
            "agent-3": "the node has DiskPressure",
        }
    finally:
        server.shutdown()
        server.server_close()
    assert all(token == "Bearer secret" for _, token in asked)
    assert asked[0][0].startswith("/api/v1/namespaces/research/pods?labelSelector=")
    assert site.nodes() == ("agent-0", "agent-1", "agent-2", "agent-3")


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ('jobsets is forbidden: User "u" cannot create', "backend.kubernetes.namespace"),
        ('no matches for kind "JobSet" in version', 'backend.kubernetes.kind = "job"'),
        ("The connection to the server was refused", "current-context"),
    ],
)
def test_refusals_are_kubectls_words_and_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, hint: str
) -> None:
    program = tmp_path / "kubectl"
    noise = "E1115 15:34:53.351827   32643 memcache.go:265] Unhandled"
    program.write_text(f"#!/bin/sh\necho '{noise}' >&2\necho '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(KubernetesError) as refused:
        apply("{}")
    assert str(refused.value).startswith(said) and hint in str(refused.value)


def test_without_kubectl_it_says_what_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KubernetesError, match="phalanx k8s manifests"):
        apply("{}")


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A kubectl that writes down its words; the file of them."""
    program, words = folder / "kubectl", folder / "words"
    program.write_text(f'#!/bin/sh\necho "$*" >> {words}\n{body}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return words


def test_a_cluster_that_does_not_answer_is_told_and_what_was_made_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = 'case "$*" in "create -f -") exec sleep 600 ;; esac'
    words = stand_in(tmp_path, monkeypatch, hangs)
    real = subprocess.run

    def run(command: list[str], timeout: float, **more: Any) -> Any:
        assert timeout > 1  # the limit itself is not waited for
        hanging = command[1:] == ["create", "-f", "-"]
        return real(command, timeout=3 if hanging else timeout, **more)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KubernetesError, match=r"did not end within [^$]*deleted again"):
        apply("{}")
    assert words.read_text().splitlines()[-1].startswith("delete --ignore-not-found")


def test_every_pod_of_a_job_is_deleted_whatever_its_spares_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = stand_in(tmp_path, monkeypatch, "cat > $0.text.$1; :")
    job = wanted(kind="pods").job
    assert job is not None
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job))
    done = CliRunner().invoke(app, ["k8s", "delete", str(path), "--name", "two", "--spares", "2"])
    assert done.exit_code == 0, done.output
    first, second = words.read_text().splitlines()
    assert first.endswith("-f -")
    assert "app.kubernetes.io/name=two,phalanx.dev/role" in second and " pods " in second


@pytest.mark.parametrize("command", ["manifests", "status", "delete"])
def test_names_that_no_folder_has_are_refused(tmp_path: Path, command: str) -> None:
    job = wanted().job
    assert job is not None
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job))
    done = CliRunner().invoke(app, ["k8s", command, str(path), "--name", "../x", "--json"])
    assert done.exit_code == 2 and "--name" in done.output


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "volcano", "job", "pods"])
def test_only_the_controller_has_the_administrators_token(kind: str) -> None:
    made = manifests(wanted(kind=kind, stage="cp -r /data /local"))
    (secret,) = [each for each in made if each["kind"] == "Secret"]
    assert len(secret["stringData"]["token"]) >= 32
    for template in templates(made):
        leads = template["metadata"]["labels"]["phalanx.dev/role"] == "controller"
        spec = template["spec"]
        named = [each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each]
        assert named == ([secret["metadata"]["name"]] if leads else [])
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            variables = {each["name"]: each.get("value", "") for each in container["env"]}
            assert variables.get("PHALANX_ADMIN_TOKEN_FILE") == (
                f"{ADMIN}/token" if leads else None
            )
            assert "admin" not in variables.get("PHALANX_TOKEN_FILE", "") or leads


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "volcano", "job", "pods"])
@pytest.mark.parametrize("program", [False, True], ids=["job file", "program"])
def test_values_of_a_jobs_secrets_are_in_a_secret_alone(kind: str, program: bool) -> None:
    work = wanted(kind=kind, stage="aws s3 cp s3://data /local")
    if program:
        backend = work.backend
        work = RequestedWork(program_backend=backend, argv=("x",), ranks=16, slot_gpus=8)
    environment = {"HF_TOKEN": "hush-hush", "A": "b", "B_KEY": "secret-file:/k"}
    made = manifests(work.with_backend(structs.replace(work.backend, environment=environment)))
    (secret,) = [each for each in made if "HF_TOKEN" in each.get("stringData", {})]
    assert secret["stringData"] == {"HF_TOKEN": "hush-hush"}
    assert "hush-hush" not in json.dumps([each for each in made if each is not secret])
    (config,) = [each["data"] for each in made if each["kind"] == "ConfigMap"]
    text = config["environment" if program else "job.toml"]
    assert '"secret-file:/etc/phalanx-secrets/HF_TOKEN"' in text and '"secret-file:/k"' in text
    for template in templates(made):
        agent = template["metadata"]["labels"]["phalanx.dev/role"] == AGENT
        named = [each.get("secret", {}).get("secretName") for each in template["spec"]["volumes"]]
        assert (secret["metadata"]["name"] in named) is agent
        for container in template["spec"]["containers"]:
            mounted = [each["mountPath"] for each in container["volumeMounts"]]
            assert (SECRETS in mounted) is agent
            (token,) = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
            assert token["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]


def test_a_pod_that_ends_says_so_by_the_file_that_its_agent_watches(tmp_path: Path) -> None:
    (config,) = [each for each in manifests(wanted()) if each["kind"] == "ConfigMap"]
    file = tmp_path / "agent.toml"
    file.write_text(config["data"]["agent.toml"])
    assert read_agent_config(file).faults.notice_file == NOTICE
    argv = agent_of(manifests(wanted()))["spec"]["containers"][0]["command"]
    assert argv[argv.index("--config") + 1] == "/etc/phalanx/agent.toml"
