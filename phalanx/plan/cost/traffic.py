"""What one GPU sends in a step over each axis: the traffic that placement has to carry."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from phalanx.hardware import Cluster
from phalanx.plan.cost.collectives import pod_share
from phalanx.plan.machine import machine_of
from phalanx.plan.memory.model_counts import parameters
from phalanx.plan.workload import Mapping, Software, Workload


class AxisTraffic(Struct, frozen=True, forbid_unknown_fields=True):
    """One axis of the mesh. Tensor ranks are neighbours; context, data, pipeline stand around."""

    axis: str
    ranks: int  # that talk with each other
    span: int  # GPUs between the first and the last of them, both included
    sent_bytes: float  # by one GPU in a step
    inside_domain: bool  # the span fits into an NVLink domain

    def line_seconds(self, cluster: Cluster) -> float:
        """The least time that the links need for it."""
        if self.inside_domain:
            return self.sent_bytes / cluster.domain_bandwidth
        # Experts exchange with everybody; other axes with neighbours.
        stride = np.inf if self.axis == "expert" else self.span / self.ranks
        machine = machine_of(cluster, cluster.gpus)
        share = pod_share(np.array([float(self.span)]), np.array([stride]), machine)
        return float(self.sent_bytes / (cluster.network_bandwidth * share[0]))


def traffic(
    workload: Workload, mapping: Mapping, cluster: Cluster, software: Software | None = None
) -> tuple[AxisTraffic, ...]:
    """Every axis that communicates, nearest ranks first."""
    software = software or Software()
    t, c, d, p = mapping.tensor, mapping.context, mapping.data, mapping.pipeline
    rows = [
        ("tensor", t, t, _tensor(workload, mapping)),
        ("expert", mapping.expert, mapping.expert, _expert(workload, mapping)),
        ("context", c, t * c, _context(workload, mapping)),
        ("data", d * c, t * c * d, _data(workload, mapping, software)),
        ("pipeline", p, t * c * d * p, _pipeline(workload, mapping)),
    ]
    return tuple(
        AxisTraffic(axis, ranks, span, sent, _span_inside(axis, span, mapping, cluster))
        for axis, ranks, span, sent in rows
        if ranks > 1
    )


def _span_inside(axis: str, span: int, mapping: Mapping, cluster: Cluster) -> bool:
    if axis == "pipeline":  # a stage talks with the next one only
        span = 2 * span // mapping.pipeline
    return span <= cluster.domain_gpus


def _tokens(workload: Workload, mapping: Mapping) -> float:
    """Of a step, in one tensor group."""
    return workload.tokens / (mapping.data * mapping.context)


def _layers(workload: Workload, mapping: Mapping) -> float:
    return workload.model.layers / mapping.pipeline


def _tensor(workload: Workload, mapping: Mapping) -> float:
    """A gather and a scatter around attention and around a dense MLP, forward and backward."""
    model = workload.model
    dense = model.layers if model.moe is None else model.moe.first_dense_layers
    halves = (model.layers + dense) / mapping.pipeline
    moved = 2 * _tokens(workload, mapping) * model.dim * (mapping.tensor - 1) / mapping.tensor
    return 2 * 2 * halves * moved


def _expert(workload: Workload, mapping: Mapping) -> float:
    """To the experts and back, forward and backward."""
    model = workload.model
    if model.moe is None:
        return 0.0
    layers = (model.layers - model.moe.first_dense_layers) / mapping.pipeline
    routed = _tokens(workload, mapping) / mapping.tensor * model.moe.top_k
    away = (mapping.expert - 1) / mapping.expert
    return 4 * layers * 2 * routed * model.dim * away


def _context(workload: Workload, mapping: Mapping) -> float:
    """Keys and values go around in forward; they and their gradients in backward."""
    model = workload.model
    if model.latent is not None:
        width = model.heads * (model.head_dim + model.latent.value_head_dim) / mapping.tensor
    else:
        width = 2 * model.kv_heads * model.head_dim / min(mapping.tensor, model.kv_heads)
    moved = 2 * _tokens(workload, mapping) * width * (mapping.context - 1)
    return 3 * _layers(workload, mapping) * moved


def _data(workload: Workload, mapping: Mapping, software: Software) -> float:
    """Gradients are summed; divided weights are gathered, at ZeRO 3 for every micro-batch."""
    ranks = mapping.data * mapping.context
    held = parameters(workload.model).total / (mapping.tensor * mapping.pipeline)
    if workload.model.moe is not None:
        held = parameters(workload.model).total / (
            mapping.pipeline * max(mapping.tensor, mapping.expert)
        )
    share = (ranks - 1) / ranks
    gradients = software.reduce_bytes * held * share
    weights = 2 * held * share
    if mapping.zero == 0:
        return 2 * gradients
    if mapping.zero < 3:
        return gradients + weights
    return mapping.micro_batches(workload.global_batch) * (gradients + 2 * weights)


def _pipeline(workload: Workload, mapping: Mapping) -> float:
    """Activations forward and gradients back, cut over the tensor group."""
    moved = 2 * _tokens(workload, mapping) * workload.model.dim / mapping.tensor
    return 2 * mapping.virtual_stages * moved
