"""Slurm's words about nodes, translated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.control.backends.slurm import programs
from phalanx.control.backends.slurm.facts import (
    expand,
    leaves_needed,
    topology,
    unwanted_nodes,
)
from phalanx.control.backends.slurm.programs import (
    BURST,
    CALLS_PER_SECOND,
    SlurmCommands,
    SlurmError,
)
from phalanx.control.host.node_facts import node_facts, recognised, slurm_node
from phalanx.testing.slurm.sandbox import Sandbox
from tests.control.backends.conftest import opened_sandbox


@pytest.mark.parametrize(
    ("written", "nodes"),
    [
        ("n1", ("n1",)),
        ("n[1-3,7]", ("n1", "n2", "n3", "n7")),
        ("gpu[008-010],login", ("gpu008", "gpu009", "gpu010", "login")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("", ()),
    ],
)
def test_lists_of_nodes_are_expanded(written: str, nodes: tuple[str, ...]) -> None:
    assert expand(written) == nodes


def test_a_task_knows_its_leaf_and_spine() -> None:
    facts = slurm_node(
        {
            "SLURMD_NODENAME": "n7",
            "SLURM_TOPOLOGY_ADDR": "core.spine2.leaf5.n7",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.switch.node",
            "SLURM_GPUS_ON_NODE": "8",
        }
    )
    assert (facts.name, facts.leaf, facts.pod, facts.gpus) == ("n7", "leaf5", "spine2", 8)


def test_a_site_without_a_tree_has_no_leaf() -> None:
    flat = {"SLURM_TOPOLOGY_ADDR": "n7", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    facts = slurm_node({"SLURMD_NODENAME": "n7", **flat})
    assert (facts.leaf, facts.pod) == ("", "")


def test_drained_nodes_are_unwanted_and_busy_ones_are_not() -> None:
    text = (
        "NodeName=n1 Arch=x86_64 State=MIXED+DRAIN Cores=1 Reason=bad fan [root@2026-11-15]\n"
        "NodeName=n2 State=ALLOCATED ThreadsPerCore=1\n"
        "NodeName=n3 State=DOWN* Reason=Not responding [slurm@2026-11-15]\n"
    )
    assert unwanted_nodes(text) == {"n1": "bad fan"}


def test_engines_are_recognised_by_what_they_leave() -> None:
    assert recognised({"SLURM_JOB_ID": "1"}) == "slurm"
    assert recognised({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}) == "mpi"
    assert recognised({}) == ""


def test_under_mpirun_one_process_a_node_is_the_agent() -> None:
    places = [node_facts("auto", {"OMPI_COMM_WORLD_LOCAL_RANK": str(n)}) for n in range(3)]
    assert [place.first for place in places] == [True, False, False]


def test_the_tree_of_a_real_slurm_is_read(make_sandbox: Callable[..., Sandbox]) -> None:
    sandbox = make_sandbox(nodes=6, gpus_per_node=0, leaves=2)
    found = topology(sandbox.run("scontrol", "show", "topology"))
    assert [(each.name, each.nodes) for each in found] == [
        ("leaf1", ("n1", "n2", "n3")),
        ("leaf2", ("n4", "n5", "n6")),
        ("spine", ("n1", "n2", "n3", "n4", "n5", "n6")),
    ]
    assert [leaves_needed(found, nodes) for nodes in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 0]
    sandbox.run("scontrol", "update", "nodename=n2", "state=drain", "reason=bad fan")
    shown = sandbox.run("scontrol", "--oneliner", "show", "node", "n[1-6]")
    assert unwanted_nodes(shown) == {"n2": "bad fan"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """One for all tests that change nothing in it."""
    with opened_sandbox(tmp_path_factory.mktemp("site"), nodes=2, gpus_per_node=8) as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--partition=nosuch", "backend.slurm.partition"),
        ("--gpus-per-node=9", "backend.gpus_per_node"),
        ("--nodes=9", "backend.spares"),
        ("--constraint=nosuch", "backend.slurm.constraint"),
        ("--exclude=nosuch", "exclude"),
        ("--time=8-0", "backend.hours"),
    ],
)
def test_refusals_are_slurms_words_and_what_to_change(
    slurm: Sandbox, tmp_path: Path, option: str, hint: str
) -> None:
    with pytest.raises(SlurmError) as refused:
        SlurmCommands(tmp_path).run("sbatch", option, "--wrap=true")
    assert "sbatch: error" in str(refused.value) and hint in str(refused.value)
    assert slurm.run("squeue", "--noheader") == ""


def test_a_controller_that_is_away_is_named(
    slurm: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    text = slurm.options.conf.read_text()
    conf.write_text(text.replace(f"SlurmctldPort={slurm.options.port}", "SlurmctldPort=1"))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with pytest.raises(SlurmError, match="scontrol ping"):
        SlurmCommands(tmp_path).run("sbatch", "--wrap=true")


def test_calls_beyond_a_burst_wait_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(programs, "time", SimpleNamespace(time=lambda: 1e9))  # however long a call
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for _ in range(BURST + 5):
        SlurmCommands(tmp_path, slept.append).run("squeue")
    waits = [each for each in slept if each > 1e-3]  # the clock is not exact to the last bit
    assert waits == pytest.approx([n / CALLS_PER_SECOND for n in range(1, 5)], abs=1e-3)
