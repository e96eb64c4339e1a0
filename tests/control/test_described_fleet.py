"""A live cluster of recorded machines is placed on exactly as the core places on its fleet file."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.policy import Policy
from phalanx.control.server.replay import recover
from phalanx.control.server.store.interface import open_store
from phalanx.testing.local_cluster import TrialCluster
from tests.cluster.drive import Drive
from tests.hardware.probe.test_parsers import RECORDED

CLIQUE = "b1c5a40e-6f2d-4d2c-8a57-3f0e9d1c7a22"
OTHER = "11111111-2222-3333-4444-555555555555"
THIRD = "99999999-2222-3333-4444-555555555555"
# Machines in an order in which neighbours by number share neither domain nor leaf.
MACHINES = (
    *(("h100-4-rails", {}), ("gb200-nvl72-tray", {})),
    *(("h100-4-rails", {"su3-": "su4-"}), ("gb200-nvl72-tray", {CLIQUE: OTHER})),
    *(("h100-4-rails", {}), ("gb200-nvl72-tray", {})),
    *(("a100-pcie", {}), ("gb200-nvl72-tray", {CLIQUE: OTHER}), ("cpu-only", {})),
)
H100 = {"gpus": 8, "kind": "h100", "rails": 4, "cpus": 224, "memory_bytes": 2113503876 << 10}
TRAY = {"gpus": 4, "kind": "gb200", "rails": 4, "cpus": 144, "memory_bytes": 1003321344 << 10}
A100 = {"gpus": 8, "kind": "a100-pcie", "cpus": 128, "memory_bytes": 1056513752 << 10}
FLEET = f"""
node-0 = {{ like = "h100", leaf = "su3-rail1" }}
node-1 = {{ like = "tray", leaf = "a03-rail1", domain = "{CLIQUE}.32766" }}
node-2 = {{ like = "h100", leaf = "su4-rail1" }}
node-3 = {{ like = "tray", leaf = "a03-rail1", domain = "{OTHER}.32766" }}
node-4 = {{ like = "h100", leaf = "su3-rail1" }}
node-5 = {{ like = "tray", leaf = "a03-rail1", domain = "{CLIQUE}.32766" }}
node-6 = {{ like = "a100", leaf = "tor-b2" }}
node-7 = {{ like = "tray", leaf = "a03-rail1", domain = "{OTHER}.32766" }}
node-8 = {{ gpus = 0, cpus = 16, memory_bytes = {263770116 << 10}, leaf = "tor-c1" }}
"""
JOBS = (
    {"name": "part", "constraint": "h100", "gang": {"replicas": 1, "slot_gpus": 2}},
    {"name": "data", "constraint": "h100", "gang": {"replicas": 2, "tensor": 4, "slot_gpus": 4}},
    {"name": "tensor", "constraint": "gb200", "gang": {"replicas": 2, "tensor": 8, "slot_gpus": 4}},
)
SHOWN = ("gpus", "kind", "rails", "cpus", "memory_bytes", "domain", "leaf", "pod", "partition")
WORK = {"kind": "Script", "argv": ["sleep", "600"]}
AGENT = '[binding]\npolicy = "none"\n[describe]\npoll_seconds = 0.3\n'


def fleet_file() -> dict[str, Node]:
    like = {"h100": H100, "tray": TRAY, "a100": A100}
    entries = tomllib.loads(FLEET)
    return {
        name: msgspec.convert({"name": name, **like.get(entry.pop("like", ""), {}), **entry}, Node)
        for name, entry in entries.items()
    }


def make_tree(folder: Path, recorded: str, changes: dict[str, str]) -> Path:
    shutil.copytree(RECORDED / recorded, folder)
    for file in (folder / "commands").iterdir():
        text = file.read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        file.write_text(text)
    return folder


def make_trees(root: Path) -> list[Path]:
    trees = []
    for number, (recorded, changes) in enumerate(MACHINES):
        state = root / "local" / "nodes" / f"node-{number}"
        state.mkdir(parents=True, mode=0o700)
        (state / "agent.toml").write_text(AGENT)
        trees.append(make_tree(root / "trees" / str(number), recorded, changes))
    return trees


def placed(cluster: TrialCluster, spec: dict[str, Any]) -> int:
    body = {"spec": spec, "work": WORK}
    job = int(cluster.client.post("/v1/jobs", body, dict)["jobs"][0])
    cluster.wait(lambda: cluster.job(job)["nodes"], f"a place for {spec['name']}")
    return job


def moved(cluster: TrialCluster, job: int) -> None:
    """A tray is put into another domain while its job runs: known at once, and nothing ends."""
    cluster.wait(lambda: cluster.job(job)["state"] == "running", "the job to run")
    before = cluster.job(job)
    tray = cluster.root / "trees" / "1" / "commands" / "nvidia-smi_-q_-x"
    tray.write_text(tray.read_text().replace(CLIQUE, THIRD))
    domain = f"{THIRD}.32766"
    cluster.wait(lambda: cluster.get("/v1/nodes/node-1")["node"]["domain"] == domain, "its word")
    after = cluster.job(job)
    assert (after["state"], after["generation"]) == ("running", before["generation"])
    assert after["nodes"] == before["nodes"]
    shown = cluster.get("/v1/nodes/node-1")
    assert shown["node"]["state"] == "healthy"
    facts = shown["description"]["facts"]
    assert {"key": "domain", "value": domain, "source": "nvidia-smi"} in facts
    events = cluster.get("/v1/events?limit=1000")["events"]
    assert any(event["kind"] == "NodeDescribed" for event in events)


def core_of(state: Path) -> Core:
    """The core of a server that is gone, as its log has it."""
    store = open_store("", state)
    try:
        return recover(store, Policy()).core
    finally:
        store.close()


def simulated(nodes: list[Node], specs: list[JobSpec]) -> list[ClusterJob]:
    """The same jobs on the fleet file, in the core that the simulator drives."""
    drive = Drive(fleet=Fleet(nodes))
    fields = [{name: getattr(spec, name) for name in spec.__struct_fields__} for spec in specs]
    return [drive.submit(**each) for each in fields]


@pytest.mark.timeout(240)
def test_recorded_machines_are_placed_on_as_their_fleet_file(tmp_path: Path) -> None:
    trees, file = make_trees(tmp_path), fleet_file()
    with TrialCluster(tmp_path, nodes=len(trees), hardware=trees) as cluster:
        jobs = [placed(cluster, spec) for spec in JOBS]
        known = {node["name"]: node for node in cluster.get("/v1/nodes")["nodes"]}
        for name, node in file.items():
            assert {key: known[name][key] for key in SHOWN} == {
                key: getattr(node, key) for key in SHOWN
            }
        moved(cluster, jobs[-1])
        cluster.kill_server()
        core = core_of(cluster.state)
    live = [core.view.jobs[job] for job in jobs]
    fleet = [node.name for node in core.view.fleet.nodes]
    made = simulated([file[name] for name in fleet], [job.spec for job in live])
    for one, other in zip(live, made, strict=True):
        assert one.placement is not None and other.placement is not None
        assert one.placement.nodes == other.placement.nodes, one.spec.name
        assert one.placement.gpus == other.placement.gpus, one.spec.name
    # What that is: data-parallel ranks on the same rails of one leaf, tensor groups in domains.
    part, data, tensor = (job.placement for job in made)
    names = [[fleet[node] for node in placement.nodes] for placement in (part, data, tensor)]
    assert {file[name].leaf for name in names[1]} == {"su3-rail1"}
    assert len(set(data.gpus)) == 1
    if names[0][0] in names[1]:  # by the order in which nodes joined
        assert data.gpus[0] & part.gpus[0] == 0
    domains = [file[name].domain for name in names[2]]
    assert domains[0] == domains[1] != domains[2] == domains[3]
