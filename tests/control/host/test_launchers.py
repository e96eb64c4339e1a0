"""Launchers are started once a node, and told where their node stands."""

from __future__ import annotations

import pytest

from phalanx.config import ConfigError
from phalanx.control.host.launchers import (
    Launcher,
    LauncherPlace,
    hidden_from,
    launched,
    recognised,
    without_ranks,
)
from phalanx.control.server.http.submission import RequestedWork, submission

SECOND_OF_TWO = LauncherPlace(1, 2, 4, "10.0.0.1", 4000)
ALONE = LauncherPlace(0, 1, 4, "10.0.0.1", 4000)


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun train.py", Launcher.TORCHRUN),
        ("/opt/venv/bin/torchrun train.py", Launcher.TORCHRUN),
        ("python3.11 -m torch.distributed.run train.py", Launcher.TORCHRUN),
        ("accelerate launch train.py", Launcher.ACCELERATE),
        ("deepspeed train.py", Launcher.DEEPSPEED),
        ("mpirun ./solver", Launcher.MPIRUN),
        ("accelerate config", None),
        ("python train.py torchrun", None),
        ("python -m torch.distributed.run_me train.py", None),
        ("sh -c torchrun", None),
    ],
)
def test_a_launcher_is_recognised_by_its_command(command: str, launcher: Launcher | None) -> None:
    found = recognised(tuple(command.split()))
    assert (found[0] if found else None) == launcher


def test_torchrun_is_told_in_variables_which_its_options_override() -> None:
    argv = ("torchrun", "--nproc-per-node=2", "train.py")
    command, variables = launched(argv, SECOND_OF_TWO)
    assert command == argv
    assert variables["PET_NNODES"] == "2" and variables["PET_NODE_RANK"] == "1"
    assert variables["PET_NPROC_PER_NODE"] == "4"
    assert variables["PET_MASTER_ADDR"] == "10.0.0.1" and variables["PET_MASTER_PORT"] == "4000"


@pytest.mark.parametrize(
    ("command", "place", "started"),
    [
        (
            "accelerate launch train.py --num_processes 3",
            SECOND_OF_TWO,
            "accelerate launch --num_processes 8 --num_machines 2 --machine_rank 1"
            " --main_process_ip 10.0.0.1 --main_process_port 4000 train.py --num_processes 3",
        ),
        (
            "accelerate launch --num-processes=2 train.py",
            ALONE,
            "accelerate launch --main_process_port 0 --num-processes=2 train.py",
        ),
        ("deepspeed train.py", ALONE, "deepspeed --num_gpus 4 train.py"),
        ("deepspeed --include=0,1 train.py", ALONE, "deepspeed --include=0,1 train.py"),
        ("mpirun ./solver", ALONE, "mpirun -np 4 ./solver"),
        ("mpirun -n 2 ./solver", ALONE, "mpirun -n 2 ./solver"),
    ],
)
def test_others_are_told_in_options_that_their_user_did_not_give(
    command: str, place: LauncherPlace, started: str
) -> None:
    assert launched(tuple(command.split()), place)[0] == tuple(started.split())


def test_a_launcher_does_not_get_what_its_ranks_would_take_for_theirs() -> None:
    given = {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "PHALANX_JOB": "7"}
    assert without_ranks(given) == {"PHALANX_JOB": "7"}


@pytest.mark.parametrize("command", ["mpirun ./solver", "deepspeed train.py"])
def test_a_launcher_that_would_use_ssh_is_refused_for_several_nodes(command: str) -> None:
    wanted = RequestedWork(argv=tuple(command.split()), ranks=8)
    assert submission(wanted, 8).work.argv == wanted.argv
    with pytest.raises(ConfigError, match="by ssh, and 2 nodes"):
        submission(wanted, 4)


def test_an_mpi_is_not_told_of_the_allocation_whose_nodes_it_would_start_steps_on() -> None:
    assert "SLURM_JOBID" in hidden_from(("mpirun", "./solver"))
    assert "SLURM_JOB_ID" not in hidden_from(("mpirun", "./solver"))  # programs name things by it
    assert hidden_from(("torchrun", "train.py")) == hidden_from(("python", "train.py")) == ()
