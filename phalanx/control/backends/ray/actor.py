"""The actor that holds a node of Ray for an agent: starts it, keeps it, ends it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from phalanx.control.client.client import TLS_FILE

END_SECONDS = 20.0


class AgentActor:
    """One a node. Ray starts it again on another node when its own is lost."""

    def __init__(
        self,
        url: str,
        token: str,
        gpus: int,
        leaf_prefix: str,
        key: str,
        standby: bool,
        trusted: str,  # certificate of the controller; "": it has none
    ) -> None:
        ray: Any = importlib.import_module("ray")  # typed in some releases only
        context = ray.get_runtime_context()
        self._name = f"ray-{context.get_node_id()[:12]}"
        self._address = ray.util.get_node_ip_address()
        self._url, self._token, self._gpus, self._standby = url, token, gpus, standby
        self._leaf = _leaf(ray.nodes(), context.get_node_id(), leaf_prefix)
        self._state = Path(tempfile.gettempdir()) / f"phalanx-ray-{os.getuid()}" / key / self._name
        self._trusted, self._ending = trusted, False
        self._start()
        threading.Thread(target=self._keep, daemon=True).start()

    def name(self) -> str:
        """What the agent calls itself."""
        return self._name

    def folder(self) -> str:
        """Where it keeps its state, on its node."""
        return str(self._state)

    def stop(self) -> int:
        """End the agent and all it started; its exit code."""
        self._ending = True
        self._agent.send_signal(signal.SIGINT)
        try:
            return self._agent.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            return self._agent.wait()

    def _start(self) -> None:
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "phalanx", "agent", "--join", self._url, "--as-agent"]
        command += ["--name", self._name, "--state", str(self._state), "--gpus", str(self._gpus)]
        command += ["--address", self._address, "--rack", self._name]
        command += ["--leaf", self._leaf] if self._leaf else []
        command += [] if self._standby else ["--no-standby"]
        command += ["--follow", str(os.getpid())]  # Ray kills actors: their agents end with them
        environment = {**os.environ, "PHALANX_TOKEN": self._token}
        if self._trusted:
            (self._state / TLS_FILE).write_text(self._trusted)
            environment["PHALANX_CA"] = str(self._state / TLS_FILE)
        with (self._state / "agent.log").open("ab") as log:
            self._agent = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def _keep(self) -> None:
        """An agent that was killed comes back and adopts what it left."""
        while True:
            code = self._agent.wait()
            if self._ending or code >= 0:
                return
            self._start()


def _leaf(nodes: list[dict[str, object]], node_id: str, prefix: str) -> str:
    """The leaf that a node's custom resource names."""
    for node in nodes:
        if node["NodeID"] == node_id:
            resources = node["Resources"]
            assert isinstance(resources, dict)
            return next((n.removeprefix(prefix) for n in resources if n.startswith(prefix)), "")
    return ""
