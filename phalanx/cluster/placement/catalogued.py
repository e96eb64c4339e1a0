"""The fleet as the planner sees it: the catalogue's devices, joined as nodes say they are."""

from __future__ import annotations

import numpy as np

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.node import NodeClass, NodeState
from phalanx.cluster.placement.constraints import matches, parse
from phalanx.config import ConfigError
from phalanx.hardware import Cluster, ClusterFile, Gpu, gpus_by_key, lookup, make_cluster

CPU = "cpu"  # its key in the catalogue: a rank is a core


def planned_cluster(fleet: Fleet, spec: JobSpec, ranks: int, *, cpu: bool) -> Cluster:
    """A cluster that a job fills, of the nodes that most of its ranks would stand on.

    ConfigError where these name no device that the catalogue has: no other is taken in its place.
    """
    if cpu:
        # Nodes do not say which of them share a machine: small jobs on CPUs mostly do.
        described = ClusterFile(gpu=CPU, gpus=ranks, gpus_per_node=1, domain_gpus=ranks)
        return make_cluster(f"{CPU}-{ranks}", described)
    number, typical = _most_common(fleet, spec)
    device = _device(typical.kind)
    slot = spec.gang.slot_gpus if spec.gang.slot_gpus and not ranks % spec.gang.slot_gpus else 1
    columns = fleet.columns
    own = columns.node_class == number
    domain_nodes = int(np.bincount(columns.domain[own]).max())
    pods = np.bincount(columns.pod[own])
    several = int((pods > 0).sum()) > 1
    described = ClusterFile(
        gpu=device.key,
        gpus=ranks,
        gpus_per_node=slot,
        domain_gpus=domain_nodes * slot,
        nics_per_gpu=typical.rails / typical.gpus if typical.rails > 1 else 0.0,
        pod_gpus=int(pods.max()) * typical.gpus if several else 0,
    )
    return make_cluster(f"{device.key}-{ranks}", described)


def likely_nodes(fleet: Fleet, spec: JobSpec) -> tuple[int, ...]:
    """The nodes that a job is likely to get some of; (): none has what it asks for."""
    try:
        number, _ = _most_common(fleet, spec)
    except ConfigError:
        return ()
    columns = fleet.columns
    own = columns.node_class == number
    usable = own & ((columns.state == NodeState.HEALTHY) | (columns.state == NodeState.SPARE))
    return tuple(np.flatnonzero(usable if usable.any() else own).tolist())


def _most_common(fleet: Fleet, spec: JobSpec) -> tuple[int, NodeClass]:
    """The class of nodes with most GPUs among those that a job can use."""
    constraint = parse(spec.constraint)
    counts = np.bincount(fleet.columns.node_class, minlength=len(fleet.classes))
    usable = [
        (int(counts[number]) * each.gpus, number)
        for number, each in enumerate(fleet.classes)
        if counts[number]
        and each.gpus >= max(1, spec.gang.slot_gpus)
        and matches(constraint, each.features)
        and spec.partition in ("", each.partition)
    ]
    if not usable:
        rule, fix = "no node of the fleet has what the job asks for", "`phalanx nodes` lists them"
        raise ConfigError("nodes", spec.constraint or spec.partition or "any", rule, fix)
    _, number = max(usable)
    return number, fleet.classes[number]


def _device(gpu_kind: str) -> Gpu:
    gpu = lookup(gpu_kind) or gpus_by_key().get(gpu_kind.casefold())
    if gpu is None:
        rule = "is no GPU of the catalogue" if gpu_kind else "the nodes name no kind of GPU"
        fix = "known: " + ", ".join(gpus_by_key())
        raise ConfigError("kind", gpu_kind or '""', rule, fix)
    return gpu
