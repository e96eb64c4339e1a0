"""A wrong decision of the controller's machine is found by chaos seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from phalanx.cluster.protocol.absence import AbsentNodes
from phalanx.cluster.protocol.controller_machine import ControllerMachine
from phalanx.cluster.protocol.events import NodeSilent
from phalanx.cluster.protocol.liveness import Liveness
from phalanx.cluster.protocol.outbox import Outbox
from phalanx.simulate.runner import run_seed
from phalanx.simulate.scenario.load import load_scenario

SEEDS = range(8)
KINDS = '["node_crash", "agent_restart", "flapping_link", "controller_stall", "controller_crash"]'
FEW = [f"chaos.kinds={KINDS}", "chaos.faults=15", "chaos.busy=0"]

Change = Callable[[pytest.MonkeyPatch], None]


def rules_broken() -> set[str]:
    """Rules that some of the seeds saw broken."""
    results = [run_seed(load_scenario("chaos", FEW), seed) for seed in SEEDS]
    return {found.split()[0] for result in results for found in result.found}


def no_grace(patch: pytest.MonkeyPatch) -> None:
    """Who is away is lost at once."""
    wait = AbsentNodes.wait
    patch.setattr(AbsentNodes, "wait", lambda self, node, until: wait(self, node, 0))


def another_lost(patch: pytest.MonkeyPatch) -> None:
    """The neighbour of a node that stayed away is lost."""
    lost = ControllerMachine._lost

    def wrong(self: ControllerMachine[int], node: int) -> list[NodeSilent]:
        nodes = len(self._view.fleet)
        return [structs.replace(each, node=(node + 1) % nodes) for each in lost(self, node)]

    patch.setattr(ControllerMachine, "_lost", wrong)


def another_silent(patch: pytest.MonkeyPatch) -> None:
    """The neighbour of a silent node is given up."""
    silent = Liveness.silent

    def wrong(self: Liveness, now_ns: int) -> list[NodeSilent]:
        late = silent(self, now_ns)
        return [structs.replace(each, node=(each.node + 1) % len(self._last)) for each in late]

    patch.setattr(Liveness, "silent", wrong)


def not_watched(patch: pytest.MonkeyPatch) -> None:
    """A controller that takes over waits for nobody."""
    patch.setattr(ControllerMachine, "take_over", lambda self, now_ns: None)


def not_sent_again(patch: pytest.MonkeyPatch) -> None:
    """Orders are sent once."""
    due = Outbox.due
    patch.setattr(Outbox, "due", lambda self, now_ns: due(self, now_ns)[:0])


def not_forgiven(patch: pytest.MonkeyPatch) -> None:
    """A controller that stood still blames its nodes."""
    patch.setattr(ControllerMachine, "forgive", lambda self, deaf_ns: None)


def test_the_machine_as_it_is_breaks_no_rule() -> None:
    assert rules_broken() == set()


WRONG_DECISIONS = [
    (no_grace, "given_up"),
    (another_lost, "given_up"),
    (another_silent, "given_up"),
    (not_watched, "overlooked"),
    (not_sent_again, "delivery"),
    (not_forgiven, "given_up"),
]


@pytest.mark.parametrize(("change", "rule"), WRONG_DECISIONS)
def test_a_wrong_decision_is_found(
    monkeypatch: pytest.MonkeyPatch, change: Change, rule: str
) -> None:
    change(monkeypatch)
    assert rule in rules_broken()
