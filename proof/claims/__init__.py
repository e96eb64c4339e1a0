"""The registry: everything that README and docs claim, in the order in which it is measured."""

from __future__ import annotations

from proof.claims.cluster import CLUSTER
from proof.claims.gpu import GPU
from proof.claims.people import PEOPLE
from proof.claims.recovery import RECOVERY
from proof.claims.training import TRAINING

CLAIMS = {
    claim.name: claim for claims in (TRAINING, RECOVERY, CLUSTER, PEOPLE, GPU) for claim in claims
}

__all__ = ["CLAIMS"]
