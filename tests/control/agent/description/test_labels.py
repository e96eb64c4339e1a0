"""Labels from the Kubernetes API, as an agent in a pod asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.control.agent.description.labels import ask_api, read_labels
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
