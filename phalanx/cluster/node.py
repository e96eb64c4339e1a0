"""One node: what it is, where it stands, its state, and what a job holds of it."""

from __future__ import annotations

import re
from enum import IntEnum

from msgspec import Struct

from phalanx.cluster.reasons import Reason
from phalanx.config.errors import ConfigProblem, problem

MOST_NODE_GPUS = MOST_RAILS = 63  # free GPUs and dead rails are bits of one signed integer
MOST = 1 << 62
WORD = re.compile(r"[\w.:+-]+")  # what a constraint can name


class NodeState(IntEnum):
    """What the core thinks of a node. Only HEALTHY nodes are given new work."""

    HEALTHY = 0
    SUSPECT = 1  # keeps what it runs, gets nothing new, is being tested
    DRAINING = 2  # a person or a notice wants it empty
    QUARANTINED = 3  # failed its test, or did harm: holds no work until it passes
    DEAD = 4  # silent, lost, or not yet joined
    SPARE = 5  # healthy and kept free (by the fleet or for one job) to replace another


class Node(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One server as the fleet file or its agent describes it."""

    name: str
    gpus: int = 8
    cpus: int = 64
    memory_bytes: int = 1 << 40
    kind: str = ""  # of its GPUs, e.g. "h100"; a feature as well
    features: tuple[str, ...] = ()
    partition: str = "default"
    # The topology path, nearest first. Nodes of one domain share NVLink; of one leaf, the first
    # switches (one a rail, where the fabric has rails); of one pod, the spine.
    domain: str = ""  # "": the node itself
    rails: int = 1  # network planes: GPU i talks on rail i % rails
    leaf: str = "leaf-0"
    pod: str = "pod-0"
    # Failure domains.
    rack: str = ""  # "": its leaf
    power: str = ""  # "": its rack
    switch: str = ""  # "": its leaf


class NodeClass(Struct, frozen=True):
    """Nodes that a constraint cannot tell apart."""

    kind: str
    features: tuple[str, ...]  # sorted; the kind is among them
    partition: str
    gpus: int
    cpus: int
    memory_bytes: int
    rails: int


class Change(Struct, frozen=True):
    """One change of a node's state."""

    time_ns: int
    state: NodeState  # the new one
    reason: Reason


class Held(Struct, frozen=True):
    """What a job holds of one node."""

    gpus: int  # mask
    cpus: int
    memory_bytes: int


def places_of(node: Node) -> dict[str, str]:
    """Names of every place a node stands in, with what was left out filled in."""
    rack = node.rack or node.leaf
    return {
        "domain": node.domain or node.name,
        "leaf": node.leaf,
        "pod": node.pod,
        "rack": rack,
        "power": node.power or rack,
        "switch": node.switch or node.leaf,
    }


def features_of(node: Node) -> tuple[str, ...]:
    """The words that constraints can name of a node, its kind among them."""
    return tuple(sorted({*node.features, *((node.kind,) if node.kind else ())}))


def bad_node(node: Node) -> ConfigProblem | None:
    """Why there can be no such node; None: there can."""
    if not node.name:
        return problem("name", '""', "a node must have a name", "give it one")
    bounds = {"gpus": MOST_NODE_GPUS, "cpus": MOST, "memory_bytes": MOST, "rails": MOST_RAILS}
    for key, most in bounds.items():
        if not 0 <= getattr(node, key) <= most:
            rule = f"must be 0 to {most} ({node.name})"
            return problem(key, getattr(node, key), rule, "correct it")
    words = [("features", word) for word in node.features] + [("kind", node.kind)] * bool(node.kind)
    for key, word in words:
        if not WORD.fullmatch(word):
            rule = "cannot be named in a constraint"
            fix = "use letters, digits and . : + - _"
            return problem(key, f'"{word}"', rule, fix)
    return None


def lowest_bits(mask: int, count: int) -> int:
    """The ``count`` lowest set bits of a mask."""
    taken = 0
    for _ in range(count):
        bit = mask & -mask
        taken |= bit
        mask ^= bit
    return taken
