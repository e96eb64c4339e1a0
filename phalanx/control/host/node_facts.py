"""What an engine tells a process about its node, in words that hold for every engine."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class NodeFacts(Struct, frozen=True, kw_only=True):
    """One node as its engine describes it; what is empty, the agent finds out by itself."""

    name: str = ""
    gpus: int | None = None
    leaf: str = ""
    pod: str = ""
    rack: str = ""
    first: bool = True  # of several processes on the node, the one that becomes its agent


ENGINES = ("slurm", "kubernetes", "mpi", "auto")


def node_facts(engine: str, environment: Mapping[str, str]) -> NodeFacts:
    """This node by the environment that an engine gave a process; "auto": whichever it was."""
    engine = engine_of(engine, environment)
    if engine == "slurm":
        return slurm_node(environment)
    if engine == "kubernetes":
        return kubernetes_node(environment)
    if engine == "mpi":
        return mpi_node(environment)
    return NodeFacts()


def engine_of(engine: str, environment: Mapping[str, str]) -> str:
    """The engine that is meant; "auto": whichever started this process."""
    return recognised(environment) if engine == "auto" else engine


def recognised(environment: Mapping[str, str]) -> str:
    """The engine that started this process, by the variables it left; "": none."""
    marks = {
        "slurm": ("SLURM_JOB_ID",),
        "kubernetes": ("PHALANX_POD_NODE",),
        "mpi": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_RANK", "PMIX_RANK"),
    }
    found = (name for name, names in marks.items() if any(each in environment for each in names))
    return next(found, "")


def slurm_node(environment: Mapping[str, str]) -> NodeFacts:
    """This node by the variables of its task: SLURM_TOPOLOGY_ADDR is spine.leaf.node."""
    name = environment.get("SLURMD_NODENAME", "")
    path = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    switches = [each for each, kind in zip(path, kinds, strict=False) if kind != "node"]
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return NodeFacts(
        name=name,
        gpus=int(gpus) if gpus.isdigit() else None,
        leaf=switches[-1] if switches else "",
        pod=switches[-2] if len(switches) > 1 else "",
        rack=name,  # Slurm does not say which nodes fail together
        first=environment.get("SLURM_LOCALID", "0") == "0",
    )


def mpi_node(environment: Mapping[str, str]) -> NodeFacts:
    """Under mpirun the first process of each node becomes its agent; the others leave."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"):
        if name in environment:
            return NodeFacts(first=environment[name] == "0")
    return NodeFacts()


def kubernetes_node(environment: Mapping[str, str]) -> NodeFacts:
    """A pod's node and its block, which the manifest passes on (downward API)."""
    return NodeFacts(
        name=environment.get("PHALANX_POD_NAME", ""),
        leaf=environment.get("PHALANX_POD_BLOCK", ""),
        rack=environment.get("PHALANX_POD_NODE", ""),
    )
