"""Puts the words of a gang's nodes together, step by step.

A step is whole when every node has told of it. One that some node never tells of (its ring
overflowed, it was cut off) is given out with what there is, once the others are far ahead; what
only few nodes claim to have done is no step of the gang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_records import PARTS, Floats, unpack
from phalanx.observe.node.printed_steps import PRINTED
from phalanx.train.report.records import RareRecord, StepRecord

LATE_STEPS = 64  # the gang is so far ahead of a step that somebody does not tell of
LATE_NS = 15_000_000_000
MOST_OPEN = 2048  # steps that wait for the rest of their nodes
MOST_RANKS = 1 << 20


class GangStep(Struct, kw_only=True):
    """One step of a gang. Columns are ranks; NaN where one did not tell."""

    job: int
    generation: int
    step: int
    time_ns: int
    first_ns: int  # when the server first heard of it
    step_seconds: Floats
    compute_seconds: Floats
    parts: Floats  # [parts, ranks]
    host_seconds: Floats  # of compute_seconds, at the host's pace
    launch_seconds: Floats  # that hosts took to give devices their work
    send_seconds: Floats  # of a GiB of the rank's own sends
    slots: set[int] = set()  # whose nodes have told
    memory_bytes: int = 0
    head: StepRecord | None = None  # rank 0's


class GangGeneration:
    """One generation of a job."""

    def __init__(
        self, job: int, generation: int, nodes: Sequence[int], slot_ranks: int, world: int
    ) -> None:
        self.job, self.generation = job, generation
        self.nodes = {node: slot for slot, node in enumerate(nodes)}
        self.slot_ranks = slot_ranks
        self.world = min(world, MOST_RANKS)
        self.newest = [0] * len(nodes)  # step, by slot
        self.open: dict[int, GangStep] = {}
        self.done = 0  # steps up to this one are given out
        self.told = False  # somebody has
        self._middle_step = self._heard = 0

    def hosts(self, message: NodeRecords) -> bool:
        """Whether a node speaks of its own ranks alone."""
        slot = self.nodes.get(message.node)
        if slot is None:
            return False
        first = slot * self.slot_ranks
        own = range(first, min(first + self.slot_ranks, self.world))
        return all(rank in own for rank in message.ranks)

    def take(self, message: NodeRecords, now_ns: int) -> int:
        """Takes in what a node says of its ranks; returns how many steps cannot be meant."""
        slot = self.nodes[message.node]
        matrices = unpack(message)
        self._heard += 1
        columns = np.asarray(message.ranks, np.int64)
        heads = {record.step: record for record in message.head} if 0 in message.ranks else {}
        middle, refused = self._middle(), 0
        # The first words of a gang may come at any step, as after a restart of the server.
        most = middle + MOST_OPEN if middle else 1 << 53
        for row, step in enumerate(message.steps):
            if step <= self.done:
                continue
            if step > most or (step not in self.open and len(self.open) >= MOST_OPEN):
                refused += 1
                continue
            self.told = True
            gang_step = self.open.get(step) or self._begin(step, now_ns)
            gang_step.step_seconds[columns] = matrices.step_seconds[row]
            gang_step.compute_seconds[columns] = matrices.compute_seconds[row]
            gang_step.parts[:, columns] = matrices.parts[row]
            gang_step.host_seconds[columns] = matrices.host_seconds[row]
            gang_step.launch_seconds[columns] = matrices.launch_seconds[row]
            gang_step.send_seconds[columns] = matrices.send_seconds[row]
            gang_step.time_ns = max(gang_step.time_ns, min(message.times_ns[row], now_ns))
            gang_step.slots.add(slot)
            if message.memory_bytes:
                gang_step.memory_bytes = max(gang_step.memory_bytes, message.memory_bytes[row])
            gang_step.head = heads.get(step, gang_step.head)
            if gang_step.head is not None and gang_step.head.mfu_basis == PRINTED:
                gang_step.slots.update(range(len(self.nodes)))  # only its first rank prints
            self.newest[slot] = max(self.newest[slot], step)
        return refused

    def whole(self, now_ns: int) -> Iterator[GangStep]:
        """Steps that are whole, or will not become so, in order."""
        for step in sorted(self.open):
            gang_step = self.open[step]
            if len(gang_step.slots) < len(self.nodes):
                late = self._middle() - step > LATE_STEPS or now_ns - gang_step.first_ns > LATE_NS
                if not late:
                    return
            del self.open[step]
            if 2 * len(gang_step.slots) > len(self.nodes):
                self.done = step
                yield gang_step

    def rest(self) -> Iterator[GangStep]:
        """What is left when the gang is over."""
        for step in sorted(self.open):
            unfinished = self.open.pop(step)
            if 2 * len(unfinished.slots) > len(self.nodes):
                self.done = step
                yield unfinished

    def _middle(self) -> int:
        """The step that half of the nodes have reached: a node's lie about its own moves it not.

        Looked up anew when an eighth of the nodes have spoken.
        """
        if self._heard >= len(self.newest) // 8:
            self._heard = 0
            self._middle_step = sorted(self.newest)[(len(self.newest) - 1) // 2]
        return self._middle_step

    def _begin(self, step: int, now_ns: int) -> GangStep:
        gang_step = self.open[step] = GangStep(
            job=self.job,
            generation=self.generation,
            step=step,
            time_ns=0,
            first_ns=now_ns,
            step_seconds=np.full(self.world, np.nan, np.float32),
            compute_seconds=np.full(self.world, np.nan, np.float32),
            parts=np.full((len(PARTS), self.world), np.nan, np.float32),
            host_seconds=np.full(self.world, np.nan, np.float32),
            launch_seconds=np.full(self.world, np.nan, np.float32),
            send_seconds=np.full(self.world, np.nan, np.float32),
        )
        return gang_step


class Merged(Struct):
    """What a message completed."""

    steps: list[GangStep]
    other: tuple[RareRecord, ...] = ()


class GangSteps:
    """All gangs. Not logged: a server that takes over begins with what it hears."""

    def __init__(self) -> None:
        self.gangs: dict[int, GangGeneration] = {}
        self.refused = 0  # steps and messages that cannot be meant
        self.lost_bytes = 0  # that agents could not read in time

    def begin(
        self, job: int, generation: int, nodes: Sequence[int], slot_ranks: int, world: int = 0
    ) -> None:
        """A gang runs from now on; the one before it is over.

        ``world``: its ranks; 0: all nodes have ``slot_ranks``, the last one too.
        """
        each = max(1, slot_ranks)
        self.gangs[job] = GangGeneration(job, generation, nodes, each, world or len(nodes) * each)

    def end(self, job: int) -> list[GangStep]:
        """A job is over and nobody will tell more of it."""
        gang = self.gangs.pop(job, None)
        return list(gang.rest()) if gang is not None else []

    def receive(self, message: NodeRecords, now_ns: int) -> Merged:
        """A node's words; returns the steps that they made whole."""
        self.lost_bytes += message.lost_bytes
        self.refused += message.refused
        gang = self.gangs.get(message.job)
        if gang is None or gang.generation != message.generation:
            return Merged([])
        if not gang.hosts(message):
            self.refused += max(1, len(message.steps))
            return Merged([])
        try:
            self.refused += gang.take(message, now_ns)
        except ValueError:
            self.refused += 1
            return Merged([])
        other = message.other if 0 in message.ranks else ()
        return Merged(list(gang.whole(now_ns)), other)
