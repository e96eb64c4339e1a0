"""Labels from the Kubernetes API, as an agent in a pod asks for them."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from phalanx.control.agent.description.labels import ask_api, read_labels
from phalanx.control.trust.certificates import Authority
from phalanx.hardware.probe.reader import ReadError


def test_outside_a_pod_nobody_is_asked(tmp_path: Path) -> None:
    assert read_labels("", {}) == {}
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PHALANX_POD_NODE": "n1"}
    assert read_labels("", inside, tmp_path) == {}  # no service account


def test_an_api_that_does_not_answer_is_told(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    inside = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": "9",
        "PHALANX_POD_NODE": "n1",
    }
    with pytest.raises(ReadError, match="Kubernetes API"):
        read_labels("", inside, tmp_path)  # its authority is missing, too
    with pytest.raises(ReadError, match="Kubernetes API"):
        ask_api("https://127.0.0.1:9", "n1", tmp_path)


class Api(BaseHTTPRequestHandler):
    """The one answer that an agent asks for."""

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer secret"
        known = self.path == "/api/v1/nodes/gpu%2F7"
        self.send_response(200 if allowed and known else 403 if not allowed else 404)
        self.end_headers()
        if allowed and known:
            labels = {"topology.kubernetes.io/rack": "r7"}
            self.wfile.write(json.dumps({"metadata": {"labels": labels}}).encode())

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture
def account(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A service account, and the variables of a pod whose API server trusts it."""
    authority = Authority(b"cluster")
    chain, key = authority.issue(("127.0.0.1",))
    (tmp_path / "server.crt").write_text(chain)
    (tmp_path / "server.key").write_text(key)
    (tmp_path / "ca.crt").write_text(authority.pem)
    (tmp_path / "token").write_text("secret\n")
    server = HTTPServer(("127.0.0.1", 0), Api)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pod = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.server_port),
        "PHALANX_POD_NODE": "gpu/7",
    }
    yield tmp_path, pod
    server.shutdown()
    server.server_close()


def test_the_api_names_the_labels_of_the_node(account: tuple[Path, dict[str, str]]) -> None:
    folder, pod = account
    assert read_labels("", pod, folder) == {"topology.kubernetes.io/rack": "r7"}
    with pytest.raises(ReadError, match="404 for node other"):
        read_labels("", {**pod, "PHALANX_POD_NODE": "other"}, folder)
    (folder / "token").write_text("wrong")
    with pytest.raises(ReadError, match="403 for node gpu/7: let the service account get nodes"):
        read_labels("", pod, folder)


def test_a_stranger_in_the_place_of_the_api_is_not_believed(
    account: tuple[Path, dict[str, str]],
) -> None:
    folder, pod = account
    (folder / "ca.crt").write_text(Authority(b"another").pem)
    with pytest.raises(ReadError, match="CERTIFICATE_VERIFY_FAILED"):
        read_labels("", pod, folder)
