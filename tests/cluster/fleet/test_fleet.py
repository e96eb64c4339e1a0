from __future__ import annotations

import msgspec
import pytest

from phalanx.cluster.fleet.fleet import Fleet, FleetState
from phalanx.cluster.node import Held, Node, NodeState, lowest_bits
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.events import NodeJoined
from phalanx.cluster.protocol.messages import Inventory
from phalanx.cluster.reasons import reason
from phalanx.config import ConfigError
from tests.cluster.drive import Drive, fleet_of


def test_a_fleet_numbers_the_places_of_its_nodes():
    nodes = [
        Node(
            name=f"big-{i}", kind="h100", features=("nvlink",), leaf=f"l{i // 2}", pod=f"p{i // 4}"
        )
        for i in range(6)
    ]
    fleet = Fleet([*nodes, Node(name="cpu", gpus=0, leaf="annex", pod="annex")])
    assert fleet.columns.leaf.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert fleet.columns.pod.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert fleet.places["leaf"][3] == "annex"
    assert fleet.classes[fleet.columns.node_class[0]].features == ("h100", "nvlink")
    assert fleet.total_gpus == 48


def test_what_is_taken_is_not_free_until_it_is_released():
    fleet = fleet_of(2)
    fleet.take(1, 0, Held(0b11, 4, 100))
    assert fleet.free_mask(0) == 0b11111100
    assert fleet.columns.free_gpus.tolist() == [6, 8]
    assert fleet.idle_gpus[NodeState.HEALTHY] == 14
    with pytest.raises(AssertionError, match="not all free"):
        fleet.take(2, 0, Held(0b110, 1, 0))
    fleet.take(2, 0, Held(0b100, 1, 0))
    assert fleet.release(1, 0) == Held(0b11, 4, 100)
    assert fleet.free_mask(0) == 0b11111011


def test_idle_gpus_follow_the_state_of_their_node():
    fleet = fleet_of(2)
    fleet.take(1, 0, Held(0xFF, 0, 0))
    fleet.set_state(0, NodeState.SUSPECT, 5, reason("test"))
    fleet.set_state(1, NodeState.DEAD, 6, reason("test"))
    assert fleet.idle_gpus[NodeState.DEAD] == 8
    fleet.release(1, 0)
    assert fleet.idle_gpus[NodeState.SUSPECT] == 8
    assert sum(fleet.idle_gpus) == fleet.total_gpus
    assert [change.state for change in fleet.history[0]] == [NodeState.SUSPECT]


def test_a_fleet_survives_its_snapshot():
    fleet = fleet_of(7)
    fleet.take(7, 1, Held(0b1111, 8, 1 << 30))
    fleet.set_state(2, NodeState.SPARE, 5, reason("spare_of_job", job=7), spare_for=7)
    fleet.set_rails_down(1, 0b10)
    data = msgspec.msgpack.encode(fleet.dump())
    again = Fleet.load(msgspec.msgpack.decode(data, type=FleetState))
    assert msgspec.msgpack.encode(again.dump()) == data
    for name in fleet.columns.__struct_fields__:
        assert getattr(again.columns, name).tolist() == getattr(fleet.columns, name).tolist()
    assert again.idle_gpus == fleet.idle_gpus


def test_nodes_can_join_while_columns_were_looked_at():
    fleet = fleet_of(1)
    assert len(fleet.columns.state) == 1
    fleet.add(Node(name="late"), NodeState.DEAD)
    assert fleet.columns.state.tolist() == [NodeState.HEALTHY, NodeState.DEAD]


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (Node(name="n0"), "n0: is already the name of a node"),
        (Node(name=""), "a node must have a name"),
        (Node(name="x", gpus=64), "gpus = 64: must be 0 to 63"),
        (Node(name="x", gpus=-1), "gpus = -1"),
        (Node(name="x", memory_bytes=1 << 80), "memory_bytes"),
        (Node(name="x", rails=64), "rails = 64"),
    ],
)
def test_a_node_that_cannot_be_is_refused_and_never_breaks_the_core(node: Node, told: str):
    fleet = fleet_of(1)
    with pytest.raises(ConfigError, match=told):
        fleet.add(node, NodeState.DEAD)
    assert len(fleet) == 1
    if node.name != "n0":  # an agent of that name is the node itself
        drive = Drive(fleet=fleet)
        drive.tell(NodeJoined(node=node, inventory=Inventory(incarnation=1)))
        (notice,) = drive.bodies(Notify)
        assert told.split(":")[0] in str(notice.reason)
        assert notice.level == "warning" and len(fleet) == 1


def test_the_lowest_bits_of_a_mask():
    assert lowest_bits(0b10110, 2) == 0b110
