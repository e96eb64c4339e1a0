"""Slurm's queue in words, and its accounting beside the ledger, as its programs really print."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.control.backends.slurm.accounting import (
    SlurmAllocation,
    read_turns,
    reconciled,
    turns_of,
)
from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError
from phalanx.control.backends.slurm.queue import in_words, place_of, places
from phalanx.testing.slurm.sandbox import Sandbox
from tests.commands import run_phalanx
from tests.examples import examples


def test_a_waiting_job_says_why_and_what_helps(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=2, gpus_per_node=0)
    common = ("--exclusive", "--output=/dev/null", "--time=10")
    sandbox.run("sbatch", *common, "--nodes=2", "--wrap=sleep 100")
    sandbox.run("sbatch", *common, "--nodes=1", "--wrap=true", "--job-name=waits")
    held = sandbox.run("sbatch", "--parsable", "--hold", *common, "--wrap=true").strip()
    place = place_of(SlurmCommands(tmp_path), 2)
    assert (place.name, place.state) == ("waits", "pending")
    assert place.reason in ("Resources", "Priority", "")
    place = place_of(SlurmCommands(tmp_path), int(held))
    assert place.text == "its owner holds it" and "scontrol release" in place.helps
    said = run_phalanx("why", f"slurm:{held}")
    assert "is pending" in said.stdout and "its owner holds it (JobHeldUser)" in said.stdout
    with pytest.raises(SlurmError, match="has no job 99"):
        place_of(SlurmCommands(tmp_path), 99)


def test_a_loop_of_submissions_asks_about_the_site_once(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=2, gpus_per_node=0)
    slept: list[float] = []
    programs = SlurmCommands(tmp_path / "calls", slept.append)
    ticket = tmp_path / "calls" / "slurm-calls"
    first = programs.remembered("scontrol", "show", "topology")
    assert "SwitchName=leaf1" in first
    taken = ticket.read_text()
    sandbox.down()
    assert programs.remembered("scontrol", "show", "topology") == first
    assert ticket.read_text() == taken  # nobody was asked


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxNodePerUserLimit", "a limit of its QoS"),
        ("AssocGrpGRES", "a limit of its account"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "down, drained or reserved"),
        ("DependencyNeverSatisfied", "can no longer come"),
        ("QOSMaxWallDurationPerJobLimit", "waits for ever"),
        ("AssocMaxNodePerJobLimit", "gives one job"),
        ("QOSNotAllowed", "does not take its QoS"),
        ("AccountNotAllowed", "does not take its account"),
        ("SomethingNew", "Slurm says SomethingNew"),
    ],
)
def test_reasons_are_told_in_words(reason: str, words: str) -> None:
    assert words in in_words(reason)[0]


def test_newer_releases_write_numbers_and_states_differently() -> None:
    job: dict[str, Any] = {
        "job_id": 7,
        "job_state": ["PENDING"],
        "state_reason": "Priority",
        "partition": "gpu",
        "priority": {"set": True, "infinite": False, "number": 10},
        "start_time": {"set": False, "number": 0},
    }
    ahead = {**job, "job_id": 8, "priority": {"set": True, "number": 20}}
    (place, _) = places({"jobs": [job, ahead]})
    assert (place.state, place.priority, place.estimated_start) == ("pending", 10, 0)
    assert place.ahead == 1


@examples(60)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.booleans()), max_size=12))
def test_jobs_ahead_wait_in_the_same_partition_with_a_higher_priority(
    drawn: list[tuple[str, int, bool]],
) -> None:
    jobs = [
        {
            "job_id": number,
            "partition": partition,
            "priority": priority,
            "job_state": "PENDING" if waits else "RUNNING",
        }
        for number, (partition, priority, waits) in enumerate(drawn)
    ]
    for place, (partition, priority, waits) in zip(places({"jobs": jobs}), drawn, strict=True):
        before = [each for each in drawn if each[0] == partition and each[2] and each[1] > priority]
        assert place.ahead == (len(before) if waits else 0)


def recorded(state: str, start: int, elapsed: int) -> dict[str, Any]:
    """A job as sacct 22.05 writes it."""
    return {
        "job_id": 1,
        "state": {"current": state, "reason": "None"},
        "time": {"elapsed": elapsed, "start": start, "end": start + elapsed},
        "tres": {
            "allocated": [
                {"type": "cpu", "name": None, "id": 1, "count": 2},
                {"type": "node", "name": None, "id": 4, "count": 2},
                {"type": "gres", "name": "gpu", "id": 1001, "count": 8},
            ]
        },
    }


def test_all_turns_of_a_requeued_job_are_charged() -> None:
    answer = {"jobs": [recorded("COMPLETED", 200, 30), recorded("REQUEUED", 100, 60)]}
    turns = read_turns(answer, 1)
    assert turns == (
        SlurmAllocation(state="REQUEUED", start=100, elapsed=60, nodes=2, gpus=8),
        SlurmAllocation(state="COMPLETED", start=200, elapsed=30, nodes=2, gpus=8),
    )
    found = reconciled(1, turns, {"productive": 600 * 10**9, "restart": 40 * 10**9, "bubble": 0})
    assert found.slurm_gpu_seconds == 8 * 90
    assert found.buckets == {"productive": 600.0, "restart": 40.0}
    assert found.outside == pytest.approx(720 - 640)


def test_a_job_that_accounting_does_not_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sacct"
    program.write_text("#!/bin/sh\necho '{\"jobs\": []}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SlurmError, match="accounting has no job 7"):
        turns_of(SlurmCommands(tmp_path), 7)
