"""How far a gang is: the reports of its nodes, gathered into one a few seconds."""

from __future__ import annotations

from phalanx.cluster.protocol.events import Progress
from phalanx.cluster.protocol.messages import Steps


class GangProgress:
    """What the nodes of one generation said of their steps, and what of it was reported."""

    def __init__(self, generation: int, reported_ns: int = 0) -> None:
        self._generation = generation
        self._newest: dict[int, tuple[int, int]] = {}  # by node: its last step and checkpoint
        self._unreported: dict[int, Steps] = {}  # by node: what it said since the last report
        self._reported, self._reported_ns = -1, reported_ns
        self._durable = 0  # newest checkpoint that was reported

    def begin(self, step: int, now_ns: int) -> None:
        """The gang runs from a step on."""
        self._reported, self._reported_ns = step, now_ns

    def receive(
        self, message: Steps, nodes: int, now_ns: int, report_ns: int | None
    ) -> list[Progress]:
        """Takes in what one of so many nodes says; ``report_ns`` after a report the next is due.

        None: all that is new is reported.
        """
        step, durable = self._newest.get(message.node, (-1, -1))
        if step >= message.step and durable >= message.durable:
            return []  # said twice, or overtaken by a later one
        self._newest[message.node] = max(step, message.step), max(durable, message.durable)
        before = self._unreported.get(message.node)
        self._unreported[message.node] = message.added_to(before)
        # One rank that knows a checkpoint to be complete is enough: it is so for all.
        if message.durable > self._durable and len(self._unreported) < nodes:
            return [self._checkpointed(message)]
        durable = max(each.durable for each in self._unreported.values())
        late = report_ns is None or now_ns - self._reported_ns >= report_ns
        if not late and durable <= self._durable:
            return []
        return self.report(message.job, nodes, now_ns)

    def _checkpointed(self, message: Steps) -> Progress:
        """A new checkpoint is said at once: whoever has yet to report may never do so again."""
        self._durable, self._reported = message.durable, max(self._reported, message.durable)
        return Progress(
            job=message.job,
            generation=self._generation,
            step=self._reported,
            committed=0,  # not known of all
            durable=message.durable,
            at_ns=message.at_ns,
            flush_ns=message.flush_ns,
        )

    def report(self, job: int, nodes: int, now_ns: int) -> list[Progress]:
        """Progress of the whole gang: the least over its nodes; waits are the longest of any."""
        if len(self._unreported) < nodes:
            return []
        said = list(self._unreported.values())
        least, durable = min(each.step for each in said), max(each.durable for each in said)
        step = max(least, durable)  # a checkpoint is complete when all have made its step
        if step <= self._reported and durable <= self._durable:
            return []
        self._reported, self._reported_ns = max(step, self._reported), now_ns
        self._unreported = {}
        self._durable = max(durable, self._durable)
        return [
            Progress(
                job=job,
                generation=self._generation,
                step=step,
                # A program that reports steps need not make snapshots.
                committed=max(0, min(each.committed for each in said)),
                durable=durable,
                at_ns=max(each.at_ns for each in said if each.step == least),
                data_wait_ns=max(each.data_wait_ns for each in said),
                checkpoint_ns=max(each.checkpoint_ns for each in said),
                flush_ns=max(each.flush_ns for each in said),
            )
        ]
