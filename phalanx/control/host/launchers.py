"""Programs that start the ranks of a node themselves: torchrun, accelerate, deepspeed, mpirun.

Such a launcher is started once a node and is told where its node stands in the gang, in its own
words; whatever its user says on its command line goes before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import PurePath

from msgspec import Struct

PYTHON = re.compile(r"python[0-9.]*")
# What a rank gets and a launcher does not: its ranks would take it for theirs.
OF_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
)


class Launcher(StrEnum):
    """One that is recognised."""

    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    MPIRUN = "mpirun"


# These open a store of their own where their nodes meet.
OWN_STORE = (Launcher.TORCHRUN, Launcher.ACCELERATE)
# These reach other nodes by ssh, which is not theirs to do here.
ONE_NODE = (Launcher.DEEPSPEED, Launcher.MPIRUN)
# By these an MPI finds Slurm, and would start its ranks with an srun of its own on all nodes of the
# allocation; that one waits for the cores that the agents have.
OF_SLURM = ("SLURM_JOBID", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
MODULES = {
    "torch.distributed.run": Launcher.TORCHRUN,
    "torch.distributed.launch": Launcher.TORCHRUN,
    "accelerate.commands.launch": Launcher.ACCELERATE,
    "deepspeed.launcher.runner": Launcher.DEEPSPEED,
}
COMMANDS = {
    "torchrun": Launcher.TORCHRUN,
    "deepspeed": Launcher.DEEPSPEED,
    "mpirun": Launcher.MPIRUN,
    "mpiexec": Launcher.MPIRUN,
}


class LauncherPlace(Struct, frozen=True):
    """Where a node stands in a gang."""

    node: int  # by rank
    nodes: int
    node_ranks: int
    host: str  # where the nodes meet
    port: int


def recognised(argv: tuple[str, ...]) -> tuple[Launcher, int] | None:
    """The launcher that a command starts, and how many of its words name it; None: it is none."""
    if not argv:
        return None
    program = PurePath(argv[0]).name
    if program in COMMANDS:
        return COMMANDS[program], 1
    if program == "accelerate" and argv[1:2] == ("launch",):
        return Launcher.ACCELERATE, 2
    if PYTHON.fullmatch(program) and argv[1:2] == ("-m",) and len(argv) > 2:
        known = MODULES.get(argv[2])
        return (known, 3) if known is not None else None
    return None


def launched(
    argv: tuple[str, ...], node_place: LauncherPlace
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command of a launcher on one node, and what its environment says beside the usual."""
    found = recognised(argv)
    assert found is not None
    launcher, length = found
    head, rest = argv[:length], argv[length:]
    if launcher is Launcher.TORCHRUN:
        return argv, _torchrun(node_place)
    variables = {"MASTER_ADDR": node_place.host, "MASTER_PORT": str(node_place.port)}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it is there already
    given = _options(launcher, node_place, rest)
    return (*head, *given, *rest), variables if launcher is Launcher.MPIRUN else {}


def hidden_from(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Variables that a launcher must not see: it starts the ranks of its own node alone."""
    found = recognised(argv)
    return OF_SLURM if found is not None and found[0] is Launcher.MPIRUN else ()


def _torchrun(node_place: LauncherPlace) -> dict[str, str]:
    """torchrun reads the defaults of its options from variables; given ones go before.

    The static rendezvous keeps the order of nodes, which others draw by chance.
    """
    return {
        "PET_NNODES": str(node_place.nodes),
        "PET_NPROC_PER_NODE": str(node_place.node_ranks),
        "PET_NODE_RANK": str(node_place.node),
        "PET_RDZV_BACKEND": "static",
        "PET_MASTER_ADDR": node_place.host,
        "PET_MASTER_PORT": str(node_place.port),
        "PET_MAX_RESTARTS": "0",  # a rank that fails is the gang's to restart
    }


def _options(
    launcher: Launcher, node_place: LauncherPlace, given: tuple[str, ...]
) -> tuple[str, ...]:
    """Options of a launcher that its user has not given."""
    ranks = node_place.nodes * node_place.node_ranks
    wanted: dict[tuple[str, ...], str] = {}
    match launcher:
        case Launcher.ACCELERATE if node_place.nodes > 1:
            wanted = {
                ("--num_processes",): str(ranks),
                ("--num_machines",): str(node_place.nodes),
                ("--machine_rank",): str(node_place.node),
                ("--main_process_ip",): node_place.host,
                ("--main_process_port",): str(node_place.port),
            }
        case Launcher.ACCELERATE:
            wanted = {("--num_processes",): str(ranks), ("--main_process_port",): "0"}
        case Launcher.DEEPSPEED:
            wanted = {("--num_gpus", "--include", "--exclude"): str(ranks)}
        case Launcher.MPIRUN:
            wanted = {("-np", "-n", "-c", "--np", "--n"): str(ranks)}
    said = _names(given)
    return tuple(
        word
        for names, value in wanted.items()
        if not any(name in said for name in names)
        for word in (names[0], value)
    )


def _names(words: tuple[str, ...]) -> list[str]:
    """Options before the program's own name, with dashes as underscores where they are long."""
    names = []
    for word in words:
        name = word.partition("=")[0]
        if word.endswith(".py"):
            break
        if word.startswith("--"):
            names.append("--" + name[2:].replace("-", "_"))
        elif word.startswith("-"):
            names.append(name)
    return names


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a rank, without those that only a rank may have."""
    return {name: value for name, value in environment.items() if name not in OF_RANKS}
