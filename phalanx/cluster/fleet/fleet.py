"""The nodes: what each one is, where it stands, its state, and what of it is free.

Columns are integers in arrays, one entry a node, so that one node costs nanoseconds and the whole
fleet is one numpy expression (``fleet.columns``). Nodes are only ever appended: an index is a
node's identity for the life of the log.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from phalanx.cluster.fleet.columns import Columns
from phalanx.cluster.node import (
    Change,
    Held,
    Node,
    NodeClass,
    NodeState,
    bad_node,
    features_of,
    places_of,
)
from phalanx.cluster.reasons import Reason
from phalanx.config.errors import ConfigError, ConfigProblem, problem

HISTORY_KEPT = 32  # changes of state remembered of each node


class FleetState(Struct, kw_only=True):
    """A fleet as a snapshot keeps it."""

    nodes: list[Node]
    state: list[int]
    spare_for: list[int]
    rails_down: list[int]
    held: list[dict[int, Held]]
    history: dict[int, list[Change]]


class FleetIndex(Protocol):
    """What follows the fleet's changes."""

    def refresh(self) -> None:
        """Takes over what changed in the fleet."""


PLACES = ("domain", "leaf", "pod", "rack", "power", "switch")


class Fleet:
    """All nodes. Reading is free for all; only the core and the scheduler change it."""

    def __init__(self, nodes: Iterable[Node] = (), state: NodeState = NodeState.HEALTHY) -> None:
        self.nodes: list[Node] = []
        self.index: dict[str, int] = {}  # by name
        self._classes: list[NodeClass] = []
        self._class_index: dict[NodeClass, int] = {}
        self._places: dict[str, list[str]] = {place: [] for place in PLACES}
        self._place_index: dict[str, dict[str, int]] = {place: {} for place in PLACES}
        self._unnumbered: dict[str, None] = {}  # columns of nodes that were described anew
        self._columns = {name: array("q") for name in Columns.__struct_fields__}
        self.held: list[dict[int, Held]] = []  # by node, then by job
        self.history: dict[int, list[Change]] = {}
        # GPUs that no job holds, by the state of their node: what the ledger counts as idle.
        self.idle_gpus = [0] * len(NodeState)
        self.total_gpus = 0
        self._views: Columns | None = None
        # Nodes and jobs that changed since the queue's and placement's indices were renewed.
        self.changed: dict[int, None] = {}
        self.changed_jobs: dict[int, None] = {}
        self.job_gpus: dict[int, int] = {}  # GPUs that each job holds, its spares left out
        self.free_index: FleetIndex | None = None  # made and renewed by ``room_of``
        for node in nodes:
            self.add(node, state)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def columns(self) -> Columns:
        """The columns as numpy arrays over the same memory."""
        self._number_anew()
        if self._views is None:
            views = (np.frombuffer(column, np.int64) for column in self._columns.values())
            self._views = Columns(*views)
        return self._views

    @property
    def classes(self) -> list[NodeClass]:
        """Classes of nodes by number."""
        self._number_anew()
        return self._classes

    @property
    def places(self) -> dict[str, list[str]]:
        """Names of places by number, of each sort of place."""
        self._number_anew()
        return self._places

    def add(self, node: Node, state: NodeState) -> int:
        """Appends a node; ConfigError where it cannot be, or its name is taken."""
        found = self.problem_of(node)
        if found is not None:
            raise ConfigError.of([found])
        self._number_anew()
        self._views = None  # an array with a view cannot grow
        number = len(self.nodes)
        self.nodes.append(node)
        self.index[node.name] = number
        self.held.append({})
        row = {
            "state": int(state),
            "node_class": self._class_of(node),
            **{place: self._place(place, name) for place, name in places_of(node).items()},
            **_free_row(node),
            "spare_for": 0,
            "rails_down": 0,
        }
        for name, column in self._columns.items():
            column.append(row[name])
        self.idle_gpus[state] += node.gpus
        self.total_gpus += node.gpus
        self.changed[number] = None
        return number

    def renew(self, node: int, new: Node) -> None:
        """Describes a node anew. While it holds work, what jobs hold parts of stays as it was."""
        columns, old = self._columns, self.nodes[node]
        assert new.name == old.name
        if _free_row(new) != _free_row(old):
            assert not self.held[node]
            self.idle_gpus[columns["state"][node]] += new.gpus - old.gpus
            self.total_gpus += new.gpus - old.gpus
            for name, value in _free_row(new).items():
                columns[name][node] = value
        self.nodes[node] = new
        columns["rails_down"][node] &= (1 << new.rails) - 1
        self.changed[node] = None
        before = places_of(old)
        for place, name in places_of(new).items():
            if before[place] != name:
                self._unnumbered[place] = None
        if class_of(old) != class_of(new):
            self._unnumbered["node_class"] = None
            self.free_index = None

    def _number_anew(self) -> None:
        """Numbers classes and places as if all nodes had always been as they are.

        A whole fleet may describe itself anew at once: it is numbered when somebody looks.
        """
        if not self._unnumbered:
            return
        stale, self._unnumbered = self._unnumbered, {}
        if "node_class" in stale:
            self._classes, self._class_index = [], {}
            column = self._columns["node_class"]
            for number, node in enumerate(self.nodes):
                column[number] = self._class_of(node)
        for place_key in PLACES:
            if place_key in stale:
                self._places[place_key], self._place_index[place_key] = [], {}
                column = self._columns[place_key]
                for number, node in enumerate(self.nodes):
                    column[number] = self._place(place_key, places_of(node)[place_key])

    def problem_of(self, node: Node) -> ConfigProblem | None:
        """Why a node cannot be part of the fleet; None: it can."""
        if node.name in self.index:
            rule = "is already the name of a node of the fleet"
            return problem("name", node.name, rule, "choose another one")
        return bad_node(node)

    def state(self, node: int) -> NodeState:
        """A node's state."""
        return NodeState(self._columns["state"][node])

    def class_of(self, node: int) -> int:
        """The number of a node's class."""
        self._number_anew()
        return self._columns["node_class"][node]

    def set_state(
        self, node: int, state: NodeState, now_ns: int, why: Reason, spare_for: int = 0
    ) -> None:
        """Moves a node to a state and remembers when and why."""
        column = self._columns["state"]
        free = self._columns["free_gpus"][node]
        self.idle_gpus[column[node]] -= free
        self.idle_gpus[state] += free
        column[node] = int(state)
        self.changed[node] = None
        for owner in (self._columns["spare_for"][node], spare_for):
            if owner:
                self.changed_jobs[owner] = None
        self._columns["spare_for"][node] = spare_for
        changes = self.history.setdefault(node, [])
        changes.append(Change(now_ns, state, why))
        del changes[:-HISTORY_KEPT]

    def since_ns(self, node: int) -> int:
        """When a node came to its state."""
        changes = self.history.get(node)
        return changes[-1].time_ns if changes else 0

    def set_rails_down(self, node: int, mask: int) -> None:
        """Marks rails of a node as dead (bit r: rail r)."""
        self._columns["rails_down"][node] = mask
        self.changed[node] = None

    def names(self, nodes: Sequence[int], most: int = 3) -> str:
        """Nodes for a person: the first few by name, and how many more."""
        shown = ", ".join(self.nodes[node].name for node in nodes[:most])
        return shown + (f" and {len(nodes) - most} more" if len(nodes) > most else "")

    def free_mask(self, node: int) -> int:
        """The GPUs of a node that no job holds."""
        return self._columns["free_mask"][node]

    def free_cpus(self, node: int) -> int:
        """CPUs of a node that no job holds."""
        return self._columns["free_cpus"][node]

    def free_memory(self, node: int) -> int:
        """Bytes of a node's memory that no job holds."""
        return self._columns["free_memory"][node]

    def spare_for(self, node: int) -> int:
        """The job whose spare a node is; 0: the fleet's, or no spare."""
        return self._columns["spare_for"][node]

    def rails_down(self, node: int) -> int:
        """Mask of a node's dead rails."""
        return self._columns["rails_down"][node]

    def take(self, job: int, node: int, share: Held) -> None:
        """Gives a job part of a node: all of it must be free."""
        columns = self._columns
        mask = columns["free_mask"][node]
        assert job not in self.held[node], f"job {job} already holds node {node}"
        assert share.gpus & ~mask == 0, f"GPUs {share.gpus:b} of node {node} are not all free"
        assert share.cpus <= columns["free_cpus"][node]
        assert share.memory_bytes <= columns["free_memory"][node]
        self.held[node][job] = share
        self._move(job, node, share, 1)

    def release(self, job: int, node: int) -> Held:
        """Takes back what a job held of a node."""
        held = self.held[node].pop(job)
        self._move(job, node, held, -1)
        return held

    def _move(self, job: int, node: int, share: Held, sign: int) -> None:
        columns = self._columns
        self.changed[node] = None
        self.changed_jobs[job] = None
        count = share.gpus.bit_count()
        columns["free_mask"][node] ^= share.gpus
        columns["free_gpus"][node] -= sign * count
        columns["free_cpus"][node] -= sign * share.cpus
        columns["free_memory"][node] -= sign * share.memory_bytes
        self.idle_gpus[columns["state"][node]] -= sign * count
        self.job_gpus[job] = self.job_gpus.get(job, 0) + sign * count
        if not self.job_gpus[job]:
            del self.job_gpus[job]

    def dump(self) -> FleetState:
        """Everything that a snapshot must keep."""
        return FleetState(
            nodes=self.nodes,
            state=self._columns["state"].tolist(),
            spare_for=self._columns["spare_for"].tolist(),
            rails_down=self._columns["rails_down"].tolist(),
            held=self.held,
            history=self.history,
        )

    @classmethod
    def load(cls, kept: FleetState) -> Fleet:
        """The fleet that ``dump`` kept."""
        fleet = cls()
        for node, state in zip(kept.nodes, kept.state, strict=True):
            fleet.add(node, NodeState(state))
        fleet._columns["spare_for"] = array("q", kept.spare_for)
        fleet._columns["rails_down"] = array("q", kept.rails_down)
        for number, jobs in enumerate(kept.held):
            for job, held in jobs.items():
                fleet.take(job, number, held)
        fleet.history = kept.history
        return fleet

    def _class_of(self, node: Node) -> int:
        its_class = class_of(node)
        if its_class not in self._class_index:
            self._class_index[its_class] = len(self._classes)
            self._classes.append(its_class)
        return self._class_index[its_class]

    def _place(self, level: str, name: str) -> int:
        numbers = self._place_index[level]
        if name not in numbers:
            numbers[name] = len(numbers)
            self._places[level].append(name)
        return numbers[name]


def class_of(node: Node) -> NodeClass:
    """What constraints can tell of a node."""
    return NodeClass(
        node.kind,
        features_of(node),
        node.partition,
        node.gpus,
        node.cpus,
        node.memory_bytes,
        node.rails,
    )


def _free_row(node: Node) -> dict[str, int]:
    """The columns of an empty node."""
    return {
        "gpus": node.gpus,
        "free_mask": (1 << node.gpus) - 1,
        "free_gpus": node.gpus,
        "free_cpus": node.cpus,
        "free_memory": node.memory_bytes,
    }
