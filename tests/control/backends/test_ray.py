"""Ray: a real cluster of several nodes in a network namespace; refusals without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError, Ray
from phalanx.control.backends.ray import submit
from phalanx.control.backends.ray.submit import RayBackend, RayError, connect, runtime_env_of
from phalanx.control.server.http.submission import RequestedWork
from tests.control.jobs import assert_same, generations, undisturbed, write_job

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: phalanx[ray]"
)


SLURM_PLAY = "tests.control.backends.slurm_ray_play"


def namespaces() -> bool:
    """Whether we may have a network of our own: Ray binds to the machine's addresses."""
    command = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_namespace = pytest.mark.skipif(
    not namespaces(), reason="no right to make a network namespace"
)


def play(what: str, root: Path, *words: str, seconds: float = 500) -> dict[str, Any]:
    """A play on a Ray of its own, in a network of its own; what it prints."""
    inside = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "-")
    module = (sys.executable, "-m", "tests.control.backends.ray_play")
    done = subprocess.run(
        [*inside, *module, what, str(root), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found.get("code") == 0, f"{found} {done.stderr[-3000:]}"
    assert found["left"] == []
    return found


@pytest.mark.soak
@needs_ray
@needs_namespace
def test_worker_node_hang_and_controller_on_four_nodes_lose_nothing(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, 300)
    found = play("chaos", tmp_path, str(write_job(tmp_path, "disturbed", 300)))
    run = Path(found["run"])
    assert set(generations(run).values()) == {1, 2, 3, 4}
    assert_same(run, expected)
    assert set(found["leaves"].values()) == {"0", "1"}
    assert len(found["returned"]) == 1


@pytest.mark.soak
@needs_ray
@needs_namespace
def test_it_runs_as_a_job_of_ray(tmp_path: Path) -> None:
    found = play("job", tmp_path, str(write_job(tmp_path, "inside")))
    assert_same(Path(found["run"]), undisturbed(tmp_path))


@needs_ray
def test_without_a_cluster_it_says_how_to_start_one() -> None:
    with pytest.raises(RayError, match="ray start --head"):
        connect("127.0.0.1:1")


@needs_ray
def test_a_cluster_that_is_gone_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")  # as Ray leaves it
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(submit, "raylet_runs", lambda: False)  # whatever else this machine runs
    with pytest.raises(RayError, match=r"no Ray cluster at '127\.0\.0\.1:1'"):
        connect("auto")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayError, match=r"pip install 'phalanx\[ray\]'"):
        connect("auto")


class SmallRay:
    """What a cluster of two nodes says of itself."""

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": {"CPU": 4.0}} for _ in range(2)]


def test_a_cluster_that_is_too_small_is_refused_before_anything_is_placed() -> None:
    backend = RayBackend(RequestedWork(argv=("true",), ranks=4, slot_gpus=1, spares=1))
    with pytest.raises(RayError, match="has 2 nodes and the job needs 4 and 1 spares"):
        backend._bundle(SmallRay())


def test_an_agent_takes_all_cpus_of_a_node_unless_told() -> None:
    backend = RayBackend(RequestedWork(argv=("true",), ranks=2, slot_gpus=1))
    assert backend._bundle(SmallRay()) == {"CPU": 4.0}


@pytest.mark.soak
@needs_ray
@needs_namespace
def test_slurm_starts_a_ray_inside_an_allocation(tmp_path: Path) -> None:
    # Slurm wants another address than loopback's.
    card = "ip link add v0 type veth peer v1; ip addr add 10.9.9.9/24 dev v0; ip link set v0 up"
    inside = f"ip link set lo up; {card}; exec {sys.executable} -m {SLURM_PLAY}"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{inside} {tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["nodes"][0] == 2 and found["state"] == "CANCELLED"


def test_a_runtime_env_is_read_from_its_file_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    path.write_text('{"env_vars": {"A": "b"}}')
    assert runtime_env_of(Ray(runtime_env=str(path))) == {"env_vars": {"A": "b"}}
    for text in ("[1]", "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"backend\.ray\.runtime_env"):
            runtime_env_of(Ray(runtime_env=str(path)))
    with pytest.raises(ConfigError, match="cannot be read"):
        runtime_env_of(Ray(runtime_env=str(tmp_path / "none.json")))
