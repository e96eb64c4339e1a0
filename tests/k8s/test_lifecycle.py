"""Bare pods and a service on a real Kubernetes API: made, watched, deleted; a node is lost.

Run by ``make test-k8s``, which builds the servers; skipped where they are not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.control.backends.kubernetes.site import KubernetesSite
from tests.control.jobs import JOB
from tests.k8s.servers import GUEST, Kubernetes, StandInNode, Tree, wait

PROGRAMS = Path(os.environ.get("PHALANX_K8S", "build/k8s"))
IMAGE = "registry.example/phalanx@sha256:" + "1" * 64
MISSING = "registry.example/phalanx@sha256:" + "2" * 64
SITE = """
[backend]
gpus_per_node = 1
spares = 1
image = "{image}"
[backend.kubernetes]
kind = "pods"
runs_claim = "runs"
memory_gb = 4
shm_gb = 1
cpus = 4
"""
PODS, ALL = "/api/v1/namespaces/default/pods", ("pods", "services", "configmaps", "secrets")

pytestmark = [
    pytest.mark.k8s,
    pytest.mark.skipif(
        not (PROGRAMS / "kube-apiserver").exists() or not shutil.which("etcd"),
        reason="no servers of Kubernetes: `make test-k8s` builds them",
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    """A Kubernetes with a bound claim for runs and what `k8s manifests --install` makes."""
    with Kubernetes(PROGRAMS, tmp_path_factory.mktemp("k8s")) as made:
        wait(
            lambda: made.admin.ask("GET", "/api/v1/namespaces/default/serviceaccounts/default"),
            "the namespace's account",
        )
        room = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = {**room, "capacity": {"storage": "1Gi"}, "hostPath": {"path": "/tmp"}}
        claim = {**room, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": "runs"}
        about = {"metadata": {"name": "runs"}}
        made.admin.ask("POST", "/api/v1/persistentvolumes", {**about, "spec": volume})
        path = "/api/v1/namespaces/default/persistentvolumeclaims"
        made.admin.ask("POST", path, {**about, "spec": claim})
        # A pod that finds it unbound is looked at again only when minutes have passed.
        phase = lambda: made.admin.ask("GET", f"{path}/runs")["status"].get("phase")  # noqa: E731
        wait(lambda: phase() == "Bound", "the claim to be bound")
        yield made


@pytest.fixture(scope="module")
def nodes(cluster: Kubernetes) -> Iterator[list[StandInNode]]:
    made = [StandInNode(cluster.admin, f"gpu-{number}", (IMAGE,)) for number in range(6)]
    yield made
    for node in made:
        node.die()


def job_file(folder: Path, name: str, image: str = IMAGE) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(JOB.format(name=name, steps=10) + SITE.format(image=image))
    return path


def phalanx(cluster: Kubernetes, *words: str, token: str = "") -> subprocess.CompletedProcess[str]:
    environment = cluster.environment(token) if token else cluster.environment()
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )


def install(cluster: Kubernetes, job: Path) -> None:
    made = phalanx(cluster, "k8s", "manifests", "--install", "--json", str(job))
    subprocess.run(
        ["kubectl", "apply", "-f", "-"],
        input=made.stdout,
        text=True,
        check=True,
        capture_output=True,
        env=cluster.environment(),
    )


def objects(cluster: Kubernetes, name: str) -> list[str]:
    """Everything in the namespace that belongs to a job."""
    chosen = f"?labelSelector=app.kubernetes.io/name={name}"
    found: list[Tree] = []
    for kind in ALL:
        found += cluster.admin.items(f"/api/v1/namespaces/default/{kind}{chosen}")
    return [each["metadata"]["name"] for each in found]


def test_without_the_account_it_says_what_to_install_and_leaves_nothing(
    cluster: Kubernetes, tmp_path: Path
) -> None:
    done = phalanx(cluster, "submit", "--backend", "kubernetes", str(job_file(tmp_path, "early")))
    assert done.returncode == 1
    assert "phalanx k8s manifests --install" in done.stderr
    assert objects(cluster, "early") == []


def test_a_job_is_made_watched_and_deleted_without_a_rest(
    cluster: Kubernetes, nodes: list[StandInNode], tmp_path: Path
) -> None:
    job = job_file(tmp_path, "whole")
    install(cluster, job)
    done = phalanx(cluster, "submit", "--backend", "kubernetes", str(job))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("running  gpu-") == 6  # four ranks, a spare, the controller
    state = phalanx(cluster, "k8s", "status", str(job), "--json")
    agents = [pod for pod in json.loads(state.stdout) if "-agent-" in pod["name"]]
    assert len({pod["node"] for pod in agents}) == 5  # one a node
    again = phalanx(cluster, "submit", "--backend", "kubernetes", str(job))
    assert again.returncode == 1 and "already exists" in again.stderr
    assert len(objects(cluster, "whole")) == 9  # what is there was not touched
    done = phalanx(cluster, "k8s", "delete", str(job))
    assert done.returncode == 0, done.stderr
    assert objects(cluster, "whole") == []


def test_an_image_that_is_missing_is_told_at_submit_and_nothing_stays(
    cluster: Kubernetes, nodes: list[StandInNode], tmp_path: Path
) -> None:
    job = job_file(tmp_path, "nowhere", MISSING)
    install(cluster, job)
    done = phalanx(cluster, "submit", "--backend", "kubernetes", str(job))
    assert done.returncode == 1
    assert "ErrImagePull" in done.stderr and "backend.image" in done.stderr
    assert objects(cluster, "nowhere") == []


def test_without_a_right_in_the_namespace_it_says_so_and_nothing_is_made(
    cluster: Kubernetes, nodes: list[StandInNode], tmp_path: Path
) -> None:
    job = job_file(tmp_path, "denied")
    done = phalanx(cluster, "submit", "--backend", "kubernetes", str(job), token=GUEST)
    assert done.returncode == 1
    assert "forbidden" in done.stderr and "backend.kubernetes.namespace" in done.stderr
    assert objects(cluster, "denied") == []


def test_a_part_that_was_made_before_a_refusal_is_deleted_again(
    cluster: Kubernetes, nodes: list[StandInNode], tmp_path: Path
) -> None:
    """A quota that lets two pods in: each passes a trial, all of them together do not."""
    job = job_file(tmp_path, "half")
    install(cluster, job)
    path = "/api/v1/namespaces/default/resourcequotas"
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    cluster.admin.ask("POST", path, quota)
    try:
        wait(
            lambda: "hard" in cluster.admin.ask("GET", f"{path}/few")["status"],
            "the quota to count",
        )
        done = phalanx(cluster, "submit", "--backend", "kubernetes", str(job))
        assert done.returncode == 1
        assert "exceeded quota" in done.stderr and "kubectl describe quota" in done.stderr
        wait(lambda: not objects(cluster, "half"), "the part to be gone")
    finally:
        cluster.admin.ask("DELETE", f"{path}/few")


def test_a_lost_and_a_cordoned_node_are_told_to_the_core_by_an_account_that_may_only_read(
    cluster: Kubernetes, nodes: list[StandInNode], tmp_path: Path
) -> None:
    job = job_file(tmp_path, "loses")
    install(cluster, job)
    done = phalanx(cluster, "submit", "--backend", "kubernetes", str(job))
    assert done.returncode == 0, done.stderr
    site = controllers_site(cluster, tmp_path, "loses")
    assert site.nodes() == tuple(f"agent-{number}" for number in range(5))
    assert site.unwanted() == {}
    placed = {
        pod["metadata"]["name"].removeprefix("loses-"): pod["spec"]["nodeName"]
        for pod in cluster.admin.items(f"{PODS}?labelSelector=app.kubernetes.io/name=loses")
    }
    cordoned = f"/api/v1/nodes/{placed['agent-1']}"
    cluster.admin.ask("PATCH", cordoned, {"spec": {"unschedulable": True}}, "merge")
    assert site.unwanted() == {"agent-1": "the node is cordoned"}
    next(node for node in nodes if node.name == placed["agent-2"]).die()
    wait(lambda: "agent-2" in site.unwanted(), "the lost node to be noticed")
    assert "not ready" in site.unwanted()["agent-2"] or "tainted" in site.unwanted()["agent-2"]
    cluster.admin.ask("DELETE", f"/api/v1/nodes/{placed['agent-2']}")  # nobody ends its pods now
    done = phalanx(cluster, "k8s", "delete", str(job))
    assert done.returncode == 0, done.stderr
    wait(lambda: not objects(cluster, "loses"), "pods of the lost node to be gone")


def controllers_site(cluster: Kubernetes, folder: Path, name: str) -> KubernetesSite:
    """What the controller's pod asks, with the account and the token that it would have."""
    accounts = "/api/v1/namespaces/default/serviceaccounts/phalanx"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.admin.ask("POST", f"{accounts}/token", request)["status"]["token"]
    (folder / "token").write_text(token)
    (folder / "namespace").write_text("default")
    shutil.copy(cluster.root / "certificates" / "apiserver.crt", folder / "ca.crt")
    return KubernetesSite(5, name, {"PHALANX_KUBERNETES": cluster.url}, folder)
