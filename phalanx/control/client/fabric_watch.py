"""Has the fabric measured when nodes join, come back or were doubted: a ``FabricWatch`` decides."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import quote

from msgspec import Struct

from phalanx.control.client.client import Client, ClientError
from phalanx.control.client.fabric_job import (
    FabricError,
    FabricJob,
    is_free,
    list_nodes,
    measure_fabric,
)
from phalanx.control.client.followed_log import AWAY
from phalanx.control.wire.api_types import Done, DrainIn, NodeOut
from phalanx.doctor.fabric.report import FabricProblem, FabricReport, all_clear, problems_of
from phalanx.doctor.fabric.watch import FabricWatch, SeenNode

LOOK_SECONDS = 5.0
HEALTHY = ("healthy", "spare")


class WatchedFabric(Struct, frozen=True, kw_only=True):
    """One measurement of a watch."""

    new: tuple[str, ...]  # nodes that it was made for
    report: FabricReport
    problems: list[FabricProblem]
    drained: tuple[str, ...]


class FabricWatcher:
    """Looks at the nodes again and again; ``say`` hears what happens."""

    def __init__(
        self,
        client: Client,
        wanted: FabricJob,
        say: Callable[[str], None],
        *,
        card: str = "",
        drain: bool = False,
    ) -> None:
        self._client, self._wanted, self._say = client, wanted, say
        self._card, self._drain = card, drain
        self._watch, self._away = FabricWatch(), False

    def look(self) -> WatchedFabric | None:
        """Measure if it is time; what came of it."""
        try:
            due = self._watch.due(time.monotonic(), [_seen(node) for node in self._nodes()])
            self._away = False
            return self._measure(due) if due else None
        except ClientError as error:
            if error.status not in AWAY:
                raise
            if not self._away:
                self._say(f"the server is away, trying again: {error}")
            self._away = True
            return None

    def run(self) -> None:
        """Until it is interrupted."""
        while True:
            self.look()
            time.sleep(LOOK_SECONDS)

    def _nodes(self) -> list[NodeOut]:
        return list_nodes(self._client, self._wanted.constraint)

    def _measure(self, due: tuple[str, ...]) -> WatchedFabric | None:
        self._say(f"measuring for {', '.join(due)}")
        try:
            report = measure_fabric(self._client, self._wanted)
        except FabricError as error:
            self._watch.not_measured(time.monotonic())
            self._say(f"not measured: {error}")
            return None
        self._watch.measured(report.nodes)
        problems = problems_of(report, self._card)
        drained = self._drained(problems) if self._drain else ()
        for each in problems:
            self._say(f"SLOW  {each.text}")
        if not problems:
            self._say(f"{len(report.nodes)} nodes measured: {all_clear(report)}")
        return WatchedFabric(new=due, report=report, problems=problems, drained=drained)

    def _drained(self, problems: list[FabricProblem]) -> tuple[str, ...]:
        names = self._watch.to_drain(time.monotonic(), problems)
        for name in names:
            why = next(each.text for each in problems if each.nodes == (name,))
            body = DrainIn(why=f"phalanx doctor fabric: {why}")
            self._client.post(f"/v1/nodes/{quote(name, safe='')}/drain", body, Done)
            self._say(f"drained {name}; `phalanx resume {name}` when it is mended")
        if not names and any(len(each.nodes) == 1 for each in problems):
            self._say("too many nodes at once: none is drained; look at the fabric as a whole")
        return names


def _seen(node: NodeOut) -> SeenNode:
    healthy = node.connected and node.state in HEALTHY
    return SeenNode(node.name, healthy, node.since_ns, is_free(node))
