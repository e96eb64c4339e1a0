"""A shell is offered jobs and nodes of the server, and nothing where there is none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.completion import job_numbers, node_names
from phalanx.control.recording.write import record
from phalanx.simulate.scenario.load import load_scenario

# What a person has each shell do, and how a line ($1) is completed in it without a keyboard.
BASH = """
eval "$(phalanx --show-completion)"
read -ra COMP_WORDS <<< "$1"; [[ $1 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_phalanx_completion phalanx
printf 'OFFER:%s\n' "${COMPREPLY[@]}"
"""
FISH = "phalanx --show-completion | source; complete -C $argv[1] | string replace -r ^ OFFER:"
SHELLS = {
    "bash": ("-c", BASH, "bash"),
    "fish": ("-c", FISH),
    "zsh": ("-f", str(Path(__file__).parent / "capture.zsh")),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of a recording: it has one job on nine nodes."""
    quiet = ["fleet.gpus=64", "fleet.spare_nodes=1", "days=0.01", "faults.per_1000_node_days=0"]
    state = tmp_path_factory.mktemp("recorded") / "state"
    record(load_scenario("llama3-54d", quiet), 0, state)
    return state


@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_offers_commands_jobs_and_nodes(
    shell: str, recorded: Path, tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")

    def offered(line: str) -> set[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {"PATH": path, "HOME": str(tmp_path), "PHALANX_STATE": str(recorded)}
        command = [shell, *SHELLS[shell], line]
        made = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
        return set(re.findall(r"OFFER:(\S+)", made.stdout))

    assert offered("phalanx canc") == {"cancel"}
    assert offered("phalanx cancel ") == {"1"}
    assert offered("phalanx drain n00003") == {"n00003"}


def test_jobs_and_nodes_are_completed(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_STATE", str(recorded))
    assert [number for number, _ in job_numbers("")] == ["1"] and job_numbers("2") == []
    assert [name for name, _ in node_names("n0000")] == [f"n0000{n}" for n in range(9)]
    assert node_names("n00003") == [("n00003", "healthy")]


def test_without_a_server_nothing_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_STATE", str(tmp_path))
    monkeypatch.delenv("PHALANX_SERVER", raising=False)
    assert job_numbers("") == [] and node_names("") == []
