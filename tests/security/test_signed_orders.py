"""An agent runs what the server that it joined has signed, and nothing else."""

from __future__ import annotations

import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from websockets.asyncio.client import ClientConnection

from phalanx.cluster.node import Node
from phalanx.cluster.protocol.commands import Command, Form, Stop
from phalanx.cluster.protocol.messages import Inventory
from phalanx.cluster.reasons import Reason
from phalanx.control.agent.uplink import Uplink
from phalanx.control.trust.node_key import AGREEMENT_HEADER, NONCE_HEADER, SERVER_HEADER
from phalanx.control.trust.server_key import ServerKey
from phalanx.control.wire import agent_messages as wire
from phalanx.control.wire.shell_messages import OpenShell

KEY, OTHER = ServerKey(secrets.token_bytes(32)), ServerKey(secrets.token_bytes(32))
WHY = Reason("test")
FORM = Form(reason=WHY, job=1, generation=1, nodes=(3,), gpus=(), payload="{}", user="root")
ORDER = wire.Deliver(command=Command(1, 0, 1, (3,), FORM), store="h:1")
SHELL = OpenShell(request=1, job=1, argv=("/bin/sh",))
BURN_IN = wire.StartAcceptance(request=1, seconds=60.0, loads=("gemm",))
Order = wire.Deliver | OpenShell | wire.StartAcceptance


class Heard:
    """An uplink that pinned a key, and what came through it."""

    def __init__(self, state: Path) -> None:
        join = wire.JoinRequest(name="n", machine="m" * 16, key="")
        self.uplink = Uplink(("http://127.0.0.1:1",), state, join, "", "")
        self.uplink._server_key = KEY.public
        self.uplink._connected = True

    def hears(self, message: wire.Down) -> wire.Down | None:
        return self.uplink._ordered(message, 3)

    def refusals(self) -> list[wire.OrderRefused]:
        queue = self.uplink._outgoing
        found = [wire.decode_up(queue.get_nowait()) for _ in range(queue.qsize())]
        return [each for each in found if isinstance(each, wire.OrderRefused)]


@pytest.fixture
def heard(tmp_path: Path) -> Heard:
    return Heard(tmp_path)


def signed(order: Order, key: ServerKey = KEY) -> wire.Signed:
    data = wire.encode(order)
    return wire.Signed(order=data, signature=key.sign_order(data))


@pytest.mark.parametrize("order", [ORDER, SHELL, BURN_IN])
def test_what_the_server_signed_is_taken(heard: Heard, order: Order) -> None:
    assert heard.hears(signed(order)) == order
    assert heard.refusals() == []


@pytest.mark.parametrize("order", [ORDER, SHELL, BURN_IN])
def test_what_nobody_or_somebody_else_signed_is_refused_and_reported(
    heard: Heard, order: Order
) -> None:
    data = wire.encode(order)
    for message in (
        order,
        signed(order, OTHER),
        wire.Signed(order=data, signature=b""),
        wire.Signed(order=data, signature=KEY.sign(data)),  # signed, but not as an order
        wire.Signed(order=data + b"\0", signature=KEY.sign_order(data)),
        wire.Signed(order=b"", signature=b"x" * 64),
    ):
        assert heard.hears(message) is None
    refused = heard.refusals()
    assert len(refused) == 6 and all(each.node == 3 for each in refused)


def test_another_user_or_payload_breaks_the_signature(heard: Heard) -> None:
    message = signed(ORDER)
    forged = message.order.replace(b"\xa4root", b"\xa4eve1")
    assert forged != message.order
    assert heard.hears(wire.Signed(order=forged, signature=message.signature)) is None


def test_signed_garbage_is_left_out_and_the_agent_goes_on(heard: Heard) -> None:
    for data in (b"", b"\xc1", b"\x93\x01\x02", secrets.token_bytes(100)):
        assert heard.hears(wire.Signed(order=data, signature=KEY.sign_order(data))) is None


def test_orders_that_start_nothing_need_no_signature(heard: Heard) -> None:
    stop = wire.Deliver(command=Command(1, 0, 1, (3,), Stop(reason=WHY, job=1, generation=1)))
    assert heard.hears(stop) == stop


@pytest.mark.parametrize("agreement", ["", "zz", "00" * 32])
def test_a_server_without_usable_keys_is_left_and_tried_again(heard: Heard, agreement: str) -> None:
    headers = {NONCE_HEADER: "00", SERVER_HEADER: KEY.public.hex(), AGREEMENT_HEADER: agreement}
    answer = SimpleNamespace(headers=headers)
    connection = cast(
        ClientConnection, SimpleNamespace(response=answer, remote_address=("127.0.0.1", 1))
    )
    node = Node(name="n", gpus=1)
    register = wire.Register(
        node=node, machine="m" * 16, inventory=Inventory(), version="1", clock_ns=0
    )
    with pytest.raises(ConnectionError, match="no usable keys"):
        heard.uplink._proved(connection, register)
