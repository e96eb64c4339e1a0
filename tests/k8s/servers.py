"""A real Kubernetes without machines: etcd, API server, controllers, scheduler, nodes of ours.

The servers are those that ``build.sh`` makes. A stand-in node registers itself, sends heartbeats
and says of pods that are bound to it what a kubelet would say; it runs nothing.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.ports import free_port

ADMIN, GUEST = "admin-token", "guest-token"
NODE_GRACE = 4  # seconds of silence before a node is not ready
START_SECONDS = 90.0
Tree = dict[str, Any]


class ApiError(Exception):
    """The server's refusal."""


class Api:
    """Objects by their paths, as somebody with a token."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self._token = url, token
        self._context = ssl.create_default_context()
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    def ask(self, method: str, path: str, body: Tree | None = None, kind: str = "json") -> Tree:
        headers = {"Authorization": f"Bearer {self._token}"}
        headers["Content-Type"] = {
            "json": "application/json",
            "merge": "application/merge-patch+json",
        }[kind]
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10, context=self._context) as answer:
                found: Tree = json.load(answer)
        except urllib.error.HTTPError as error:
            raise ApiError(f"{error.code} {error.read().decode()}") from None
        return found

    def items(self, path: str) -> list[Tree]:
        found: list[Tree] = self.ask("GET", path)["items"]
        return found


class Kubernetes:
    """The servers, for as long as a block runs."""

    def __init__(self, programs: Path, root: Path) -> None:
        self._programs, self.root = programs, root
        self._running: list[subprocess.Popen[bytes]] = []
        self.kubeconfig = root / "admin.json"

    def __enter__(self) -> Kubernetes:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in reversed(self._running):
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()

    def _start(self) -> None:
        store, peer, port = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{port}"
        key = self.root / "account.key"
        subprocess.run(
            ["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True
        )
        users = f'{ADMIN},admin,1,"system:masters"\n{GUEST},guest,2\n'
        (self.root / "users.csv").write_text(users)
        self._run(
            "etcd",
            f"--data-dir={self.root}/etcd",
            f"--listen-client-urls=http://127.0.0.1:{store}",
            f"--advertise-client-urls=http://127.0.0.1:{store}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
        )
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{store}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.root}/certificates",
            f"--token-auth-file={self.root}/users.csv",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.99.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
        )
        self.admin = Api(self.url, ADMIN)
        wait(lambda: self.admin.ask("GET", "/api/v1/nodes"), "the API server", START_SECONDS)
        self.kubeconfig.write_text(json.dumps(self.config_of(ADMIN)))
        self._run(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={key}",
            "--leader-elect=false",
            f"--node-monitor-grace-period={NODE_GRACE}s",
            "--node-monitor-period=1s",
            "--pod-eviction-timeout=2s",
            "--secure-port=0",
            "--port=0",
        )
        self._run(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--secure-port=0",
            "--port=0",
        )

    def _run(self, program: str, *words: str) -> None:
        path = self._programs / program
        with (self.root / f"{program}.log").open("wb") as output:
            self._running.append(
                subprocess.Popen(
                    [str(path) if path.exists() else program, *words], stdout=output, stderr=output
                )
            )

    def config_of(self, token: str, namespace: str = "default") -> Tree:
        """A kubeconfig, for kubectl."""
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        context = {"cluster": "here", "user": "me", "namespace": namespace}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": context}],
            "current-context": "here",
        }

    def environment(self, token: str = ADMIN) -> dict[str, str]:
        """For programs that use kubectl."""
        path = self.root / f"{token}.json"
        path.write_text(json.dumps(self.config_of(token)))
        return {**os.environ, "KUBECONFIG": str(path)}


class StandInNode:
    """A node with eight GPUs; ``images``: what its registry has."""

    def __init__(self, api: Api, name: str, images: tuple[str, ...]) -> None:
        self._api, self.name, self._images = api, name, images
        self._alive = threading.Event()
        self._alive.set()
        api.ask("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": self._labels()}})
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _labels(self) -> dict[str, str]:
        return {"kubernetes.io/hostname": self.name, "topology": "block-0"}

    def die(self) -> None:
        """No more heartbeats, as if its power failed."""
        self._alive.clear()
        self._thread.join()

    def _live(self) -> None:
        while self._alive.is_set():
            with suppress(ApiError, OSError):
                self._beat()
                for pod in self._api.items(f"/api/v1/pods?fieldSelector=spec.nodeName={self.name}"):
                    self._serve(pod)
            time.sleep(0.3)

    def _beat(self) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        room = {"cpu": "64", "memory": "512G", "pods": "20", "nvidia.com/gpu": "8"}
        ready = {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": now}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        self._api.ask("PATCH", f"/api/v1/nodes/{self.name}/status", {"status": status}, "merge")

    def _serve(self, pod: Tree) -> None:
        """What a kubelet does with a pod: end it when asked, else say how it is."""
        about = pod["metadata"]
        path = f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}"
        if "deletionTimestamp" in about:
            self._api.ask("DELETE", path, {"gracePeriodSeconds": 0})
        elif pod["status"]["phase"] == "Pending":
            self._api.ask("PATCH", f"{path}/status", {"status": self._status(pod)}, "merge")

    def _status(self, pod: Tree) -> Tree:
        container = pod["spec"]["containers"][0]
        if container["image"] not in self._images:
            waiting = {"reason": "ErrImagePull", "message": f"{container['image']}: not found"}
            phase, state = "Pending", {"waiting": waiting}
        else:
            phase, state = "Running", {"running": {}}
        about = {"name": container["name"], "image": container["image"], "imageID": ""}
        about |= {"ready": phase == "Running", "restartCount": 0, "state": state}
        return {"phase": phase, "containerStatuses": [about]}


def wait(ready: Callable[[], Any], what: str, seconds: float = 180.0) -> Any:
    """Until something is true and no server refuses it."""
    deadline = time.monotonic() + seconds
    said = ""
    while time.monotonic() < deadline:
        try:
            if found := ready():
                return found
        except (ApiError, OSError) as error:
            said = str(error)
        time.sleep(0.1)
    raise TimeoutError(f"waited {seconds:.0f} s for {what} {said}")
