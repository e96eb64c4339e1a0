"""A fleet as a file describes it: groups of like nodes, laid out over leaves, racks and pods.

    [[nodes]]
    name = "h100-{}"
    count = 64
    kind = "h100"
    features = ["nvlink"]
    nodes_per_leaf = 32
    leaves_per_pod = 8

Reading the file is the caller's business; every mistake in it is reported together.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.fleet.node import MOST_NODE_GPUS, Node, NodeState, bad_words
from phalanx.config import ConfigError, Section
from phalanx.config.errors import ConfigProblem, problem
from phalanx.config.load import MOST_CHARACTERS
from phalanx.config.toml_text import parse_toml
from phalanx.config.tree import build, mistakes

MOST_NODES = 1_000_000
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


class NodeGroup(Section, frozen=True, kw_only=True):
    """Nodes that differ only in their number and place."""

    name: str
    """Name of a node; "{}" becomes its number within the group."""
    count: Annotated[int, Meta(ge=1, le=MOST_NODES)] = 1
    """Nodes in the group."""
    first: Natural = 0
    """Number of the first one."""
    gpus: Annotated[int, Meta(ge=0, le=MOST_NODE_GPUS)] = 8
    """GPUs of a node; 0: it only has CPUs."""
    cpus: Count = 64
    """CPU cores of a node."""
    memory_gib: Count = 1024
    """Memory of a node."""
    kind: str = ""
    """Kind of its GPUs, e.g. "h100"; constraints can name it."""
    features: tuple[str, ...] = ()
    """Words that constraints can name."""
    partition: str = "default"
    """Partition it belongs to."""
    rails: Count = 1
    """Network planes: GPU i talks on rail i % rails."""
    nodes_per_domain: Count = 1
    """Nodes that share NVLink."""
    nodes_per_rack: Natural = 0
    """Nodes in a rack; 0: as many as under a leaf."""
    nodes_per_leaf: Count = 32
    """Nodes under the same first switches."""
    leaves_per_pod: Count = 8
    """Leaves under one spine."""
    racks_per_power: Count = 1
    """Racks on one power feed."""
    place: str = ""
    """Name of the hall: groups with the same one share its leaves and racks."""


class FleetFile(Section, frozen=True, kw_only=True):
    """The whole file."""

    nodes: tuple[NodeGroup, ...]
    """Groups of nodes."""


def read_fleet(text: str, state: NodeState = NodeState.HEALTHY) -> Fleet:
    """The fleet that a TOML text describes; ConfigError lists everything that is wrong with it."""
    try:
        table = parse_toml(text, MOST_CHARACTERS)
    except tomllib.TOMLDecodeError as error:
        fix = "correct the line that is named"
        raise ConfigError("fleet", "", f"is not valid TOML: {error}", fix) from None
    found = mistakes(FleetFile, table)
    if found:
        raise ConfigError.of(found)
    groups = build(FleetFile, table).nodes
    problems = list(_problems(groups))
    if problems:
        raise ConfigError.of(problems)
    return Fleet((node for group in groups for node in nodes_of(group)), state)


def nodes_of(group: NodeGroup) -> Iterator[Node]:
    """The nodes of a group, in order."""
    hall = f"{group.place}-" if group.place else ""
    per_rack = group.nodes_per_rack or group.nodes_per_leaf
    for index in range(group.count):
        leaf, rack = index // group.nodes_per_leaf, index // per_rack
        name = group.name.replace("{}", str(group.first + index))
        yield Node(
            name=name,
            gpus=group.gpus,
            cpus=group.cpus,
            memory_bytes=group.memory_gib << 30,
            kind=group.kind,
            features=group.features,
            partition=group.partition,
            domain=_domain(group, index, hall),
            rails=group.rails,
            leaf=f"{hall}leaf-{leaf}",
            pod=f"{hall}pod-{leaf // group.leaves_per_pod}",
            rack=f"{hall}rack-{rack}",
            power=f"{hall}power-{rack // group.racks_per_power}",
        )


def _domain(group: NodeGroup, index: int, hall: str) -> str:
    if group.nodes_per_domain == 1:
        return ""
    return f"{hall}domain-{index // group.nodes_per_domain}"


def _problems(groups: tuple[NodeGroup, ...]) -> Iterator[ConfigProblem]:
    if not groups:
        yield problem("nodes", "", "a fleet needs at least one node", "add [[nodes]]")
    total = sum(group.count for group in groups)
    if total > MOST_NODES:
        yield problem("nodes", total, f"must be at most {MOST_NODES} nodes in all", "lower a count")
        return
    seen: dict[str, int] = {}
    for number, group in enumerate(groups):
        key = f"nodes[{number}].name"
        wrong = bad_words(group.kind, group.features, f"nodes[{number}].")
        if wrong is not None:
            yield wrong
        if not group.name:
            yield problem(key, '""', "must not be empty", 'e.g. "node-{}"')
        elif group.count > 1 and "{}" not in group.name:
            fix = f'write "{group.name}-{{}}"'
            yield problem(key, f'"{group.name}"', f"names {group.count} nodes alike", fix)
        else:
            yield from _twice(number, group, seen)


def _twice(number: int, group: NodeGroup, seen: dict[str, int]) -> Iterator[ConfigProblem]:
    for index in range(group.count):
        name = group.name.replace("{}", str(group.first + index))
        other = seen.setdefault(name, number)
        if other != number:
            rule = f"is already the name of a node of nodes[{other}]"
            fix = "choose another name, or another first number"
            yield problem(f"nodes[{number}].name", f'"{name}"', rule, fix)
            return
