"""A scaling curve: the best plan at each of several numbers of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.hardware import Cluster, parse_count
from phalanx.hardware.clusters import MOST_GPUS
from phalanx.plan.question.request import PlanQuestion
from phalanx.plan.search.proposal import PlanProposal, propose

HALVINGS = 6


class Sweep(Struct, frozen=True):
    """Plans by number of GPUs, and why there is none at some."""

    plans: tuple[PlanProposal, ...]
    failed: tuple[tuple[int, str], ...]


def counts_of(text: str, cluster: Cluster) -> tuple[int, ...]:
    """The numbers of GPUs that a text lists; without one, the cluster's and its halves."""
    node = cluster.gpus_per_node
    if not text:
        halves = (cluster.gpus >> shift for shift in range(HALVINGS))
        whole = {max(1, gpus // node) * node for gpus in halves}
        return tuple(sorted(whole))
    counts = []
    for word in text.split(","):
        gpus = parse_count(word.strip())
        if gpus is None or not 1 <= gpus <= MOST_GPUS:
            raise ConfigError("gpus", word, "must be numbers of GPUs", "e.g. 1k,4k,16k")
        if gpus > node and gpus % node:
            below = gpus // node * node
            rule = f"must fill whole nodes of {node}"
            raise ConfigError("gpus", gpus, rule, f"try {below} or {below + node}")
        counts.append(gpus)
    return tuple(counts)


def sweep(question: PlanQuestion, counts: Sequence[int]) -> Sweep:
    """The best plan at each count; batch and token budget stay the same."""
    plans, failed = [], []
    for gpus in counts:
        smaller = structs.replace(
            question.cluster,
            gpus=gpus,
            gpus_per_node=min(question.cluster.gpus_per_node, gpus),
            domain_gpus=min(question.cluster.domain_gpus, gpus),
        )
        try:
            plans.append(propose(structs.replace(question, cluster=smaller)))
        except ConfigError as error:
            failed.append((gpus, str(error)))
    return Sweep(tuple(plans), tuple(failed))
