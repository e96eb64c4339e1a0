"""Sites that do not fit: each is told in words, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.control.backends import lead as module
from phalanx.control.backends.lead import BatchLeader, LeadError, LeadOptions
from phalanx.control.backends.ray.submit import RayError, connect
from phalanx.control.server.http.submission import RequestedWork
from phalanx.testing.engine_job import wait
from phalanx.testing.slurm.sandbox import Sandbox
from tests.commands import run_phalanx
from tests.control.jobs import write_job
from tests.control.servers import ServerProcess


class Site:
    """An allocation of so many nodes."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def nodes(self) -> tuple[str, ...]:
        return self._names

    def unwanted(self) -> dict[str, str]:
        return {}

    def over(self) -> bool:
        return False


def leading(state: Path, url: str, site: Site, slots: int, spares: int = 0) -> BatchLeader:
    wanted = RequestedWork(argv=("true",), ranks=slots, spares=spares)
    options = LeadOptions(state=state, url=url, wanted=wanted, node_gpus=1, slots=slots)
    return BatchLeader(options, site)


def test_an_allocation_smaller_than_the_gang_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    lead = leading(tmp_path / "state", "http://127.0.0.1:1", Site("n1", "n2"), slots=4, spares=1)
    with pytest.raises(LeadError, match="has 2 nodes and the gang needs 4: ask for 4 and 1 spares"):
        lead.run()
    assert not (tmp_path / "state").exists()


def test_agents_that_call_themselves_otherwise_than_their_engine_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.0)
    with ServerProcess(tmp_path / "server") as server:
        command = [sys.executable, "-m", "phalanx", "agent", "--join", server.url, "--gpus", "1"]
        command += ["--name", "stranger", "--no-standby", "--state", str(tmp_path / "agent")]
        token = {"PHALANX_TOKEN_FILE": str(server.state / "join.token")}
        agent = subprocess.Popen(command, env={**os.environ, **token}, stderr=subprocess.DEVNULL)
        try:
            lead = leading(server.state, server.url, Site("n1"), slots=1)
            lead.client = lead._connect()
            wait(lambda: any(n.connected for n in lead._nodes().values()), "the agent to join")
            with pytest.raises(LeadError, match=r"n1: no agent joined .* but stranger did"):
                lead._wait_for_nodes()
        finally:
            agent.send_signal(signal.SIGINT)
            agent.wait(60)


def test_without_munge_it_says_what_to_check_and_nothing_is_queued(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=1, gpus_per_node=1)
    munged = int((sandbox.root / "run" / "munged.pid").read_text())
    os.kill(munged, signal.SIGTERM)
    job = str(write_job(tmp_path, "silent"))
    done = run_phalanx("submit", "--backend", "slurm", "--slot-gpus", "1", job, folder=tmp_path)
    assert done.returncode == 1
    assert "munge -n | unmunge" in done.stderr
    assert list((tmp_path / "runs" / "silent").iterdir()) == []


def test_an_address_that_ray_does_not_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ValueError("Malformed address: garbage")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init))  # type: ignore[arg-type]
    with pytest.raises(RayError, match=r"backend\.ray\.address = 'garbage' is no address"):
        connect("garbage")


def test_another_version_of_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with: Ray: 2.9.0")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init))  # type: ignore[arg-type]
    with pytest.raises(RayError, match=r"Ray: 2\.9\.0\ninstall the cluster's version of ray here"):
        connect("auto")
